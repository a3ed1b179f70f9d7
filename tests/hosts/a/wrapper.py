"""What ``ConfigurableMoE`` of generations A and B owns: it asks for the class again and builds the backend without weights."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import AuxStreamType, EventType

from ...model_config import ModelConfig
from .communication import AllGatherReduceScatter, CommunicationFactory
from .interface import MoE
from .routing import BaseMoeRoutingMethod

_SYNCHRONIZED = (
    "layer_idx",
    "layer_idx_str",
    "num_slots",
    "layer_load_balancer",
    "repeat_count",
    "repeat_idx",
    "initial_local_expert_ids",
    "initial_global_assignments",
    "slot_start",
    "slot_end",
    "expert_size_per_partition",
)


class Wrapper(MoE):
    def __init__(
        self,
        *,
        routing_method: BaseMoeRoutingMethod,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        aux_stream_dict: Any = None,
        weight_loading_mode: Any = None,
        apply_router_weight_on_input: bool = False,
        layer_idx: int | None = None,
        override_quant_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            routing_method=routing_method,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=dtype,
            reduce_results=reduce_results,
            model_config=model_config,
            weight_loading_mode=weight_loading_mode,
            layer_idx=layer_idx,
            **kwargs,
        )
        self.model_config = model_config
        self.aux_stream_dict = aux_stream_dict
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.backend: Any = self._build(model_config, override_quant_config, kwargs)
        for name in _SYNCHRONIZED:
            setattr(self.backend, name, getattr(self, name))
        if not model_config.skip_create_weights_in_init:
            self.backend.create_weights()
        self.comm = CommunicationFactory.create_strategy(model_config)
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self.aux_stream, self.event_dict = None, None
        if self.moe_max_num_tokens < model_config.max_num_tokens * model_config.mapping.dp_size and torch.cuda.is_available():
            self.aux_stream = (aux_stream_dict or {}).get(AuxStreamType.MoeChunkingOverlap) or torch.cuda.Stream()
            self.event_dict = {key: torch.cuda.Event() for key in (EventType.Main, EventType.MoeChunkingOverlap)}
        self._weights_removed = True

    def _resolve(self, model_config: Any, override_quant_config: Any) -> tuple[type[MoE], Any]:
        """The backend's class and the configuration it is built with."""
        raise NotImplementedError

    def _build(self, model_config: Any, override_quant_config: Any, kwargs: dict[str, Any]) -> MoE:
        from tensorrt_llm._torch.modules.fused_moe.create_moe import create_moe_backend

        moe_cls, model_config = self._resolve(model_config, override_quant_config)
        skip = model_config.skip_create_weights_in_init
        model_config._frozen = False
        model_config.skip_create_weights_in_init = True
        model_config._frozen = True
        backend = create_moe_backend(
            moe_cls=moe_cls,
            routing_method=self.routing_method,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            dtype=self.dtype,
            reduce_results=self.reduce_results,
            model_config=model_config,
            aux_stream_dict=self.aux_stream_dict,
            weight_loading_mode=self.weight_loading_mode,
            bias=kwargs.get("bias", False),
            apply_router_weight_on_input=self.apply_router_weight_on_input,
            layer_idx=None,
            swiglu_alpha=kwargs.get("swiglu_alpha"),
            swiglu_beta=kwargs.get("swiglu_beta"),
            swiglu_limit=kwargs.get("swiglu_limit"),
            init_load_balancer=False,
            without_comm=True,
            activation_type=self.activation_type,  # type: ignore[arg-type]
        )
        model_config._frozen = False
        model_config.skip_create_weights_in_init = skip
        model_config._frozen = True
        return backend

    def _supports_load_balancer(self) -> bool:
        return bool(self.backend._supports_load_balancer()) if hasattr(self, "backend") else self.use_dp

    def create_weights(self) -> None:
        self.backend.create_weights()

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        self.backend.load_weights(weights)

    def post_load_weights(self) -> None:
        self.backend.post_load_weights()

    def process_weights_after_loading(self) -> None:
        self.backend.process_weights_after_loading()

    @property
    def enable_alltoall(self) -> bool:
        return self.comm is not None and not isinstance(self.comm, AllGatherReduceScatter)
