"""``ConfigurableMoE`` of C1: the backend is built, without weights, in ``__init__``."""

from __future__ import annotations

import copy
from typing import Any

from tensorrt_llm._wrapping import adopt, set_chunking, temporarily_skip_weight_creation
from tensorrt_llm.models.modeling_utils import QuantConfig

from ...model_config import ModelConfig
from .moe_resolution import infer_swiglu_gptoss_style
from .moe_scheduler import create_moe_scheduler
from .wrapper import Wrapper

_BACKEND_LOCAL = (
    "activation",
    "situ_beta",
    "situ_linear_beta",
    "trtllm_gen_activation_type",
    "trtllm_gen_activation_alpha",
    "trtllm_gen_activation_beta",
)
_ACTIVATION = ("swiglu_alpha", "swiglu_beta", "swiglu_limit", "swiglu_limit_scalar")


class ConfigurableMoE(Wrapper):
    def __init__(
        self,
        *,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        aux_stream_dict: Any = None,
        apply_router_weight_on_input: bool = False,
        override_quant_config: QuantConfig | None = None,
        moe_cls: type | None = None,
        communication_method: str | None = None,
        **kwargs: Any,
    ) -> None:
        local = {name: kwargs.pop(name, None) for name in _BACKEND_LOCAL}
        super().__init__(model_config=model_config, **kwargs)
        self._override_quant_config = override_quant_config
        if override_quant_config is not None:
            self.quant_config = override_quant_config
        self.model_config, self.aux_stream_dict = model_config, aux_stream_dict
        self.communication_method = communication_method
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self._create_and_sync_backend(moe_cls, {name: kwargs.get(name) for name in _ACTIVATION} | local)
        self.comm = self._create_comm_strategy_auto()
        set_chunking(self, model_config, aux_stream_dict)
        self.validate_config()
        self.validate_backend(self.backend)
        self._weights_removed = True  # the model loader skips the wrapper and finds the backend as a submodule
        self.scheduler = create_moe_scheduler(self)

    def _create_and_sync_backend(self, moe_cls: Any, options: dict[str, Any]) -> None:
        from tensorrt_llm._torch.modules.fused_moe.create_moe import create_moe_backend, resolve_moe_cls

        sizes: dict[str, Any] = {
            "dtype": self.dtype,
            "num_experts": self.num_experts,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
        }
        if moe_cls is None:
            moe_cls = resolve_moe_cls(
                self.model_config,
                override_quant_config=self._override_quant_config,
                **sizes,
                swiglu_gptoss_style=infer_swiglu_gptoss_style(
                    bias=self.bias,
                    swiglu_alpha=options["swiglu_alpha"],
                    swiglu_beta=options["swiglu_beta"],
                    activation_type=self.activation_type,
                ),
                activation_type=self.activation_type,
                routing=self.routing_method,
                layer_idx=self.layer_idx,
            )
        model_config = self.model_config
        if self._override_quant_config is not None:
            model_config = copy.deepcopy(model_config)
            model_config.quant_config = self._override_quant_config
        with temporarily_skip_weight_creation(model_config):
            backend = create_moe_backend(
                moe_cls=moe_cls,
                routing_method=self.routing_method,
                **sizes,
                reduce_results=self.reduce_results,
                model_config=model_config,
                aux_stream_dict=self.aux_stream_dict,
                weight_loading_mode=self.weight_loading_mode,
                bias=self.bias,
                apply_router_weight_on_input=self.apply_router_weight_on_input,
                layer_idx=None,
                init_load_balancer=False,
                activation_type=self.activation_type,
                **options,
            )
        adopt(self, backend)
        if not model_config.skip_create_weights_in_init and self.model_config.quant_config_dict is None:
            self.create_weights()

    def create_weights(self) -> None:
        """With the quantization that the layer has by now, which may not be the one it was selected for."""
        override = self._override_quant_config
        self.backend.quant_config = override if override is not None else self.quant_config
        self.backend.create_weights()

    @property
    def _weights_created(self) -> bool:  # type: ignore[override]
        return bool(self.backend._weights_created)

    @_weights_created.setter
    def _weights_created(self, value: bool) -> None:
        self.backend._weights_created = value
