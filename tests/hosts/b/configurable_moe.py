"""``ConfigurableMoE`` of generation B: resolves the class by itself and leaves the calls to a scheduler."""

from __future__ import annotations

import copy
from typing import Any

import torch

from .interface import MoE
from .moe_scheduler import ExternalCommMoEScheduler
from .wrapper import Wrapper


class ConfigurableMoE(Wrapper):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.backend.validate_configurable_moe(self)
        self.scheduler = ExternalCommMoEScheduler(self)

    def _resolve(self, model_config: Any, override_quant_config: Any) -> tuple[type[MoE], Any]:
        from tensorrt_llm._torch.modules.fused_moe.create_moe import resolve_moe_cls

        moe_cls = resolve_moe_cls(model_config, self.routing_method, self.dtype, override_quant_config=override_quant_config)
        if override_quant_config is not None:  # the backend then holds another object
            model_config = copy.deepcopy(model_config)
            model_config.quant_config = override_quant_config
        return moe_cls, model_config

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        self.backend.load_weights(weights, allow_partial_loading)

    def forward_impl(self, x: Any, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.scheduler.forward(x, router_logits, **kwargs)
