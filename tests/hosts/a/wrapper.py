"""What ``ConfigurableMoE`` of generations A and B owns: it asks for the class again and builds the backend without weights."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._wrapping import adopt, set_chunking, temporarily_skip_weight_creation

from ...model_config import ModelConfig
from .communication import AllGatherReduceScatter, CommunicationFactory
from .interface import MoE


class Wrapper(MoE):
    def __init__(
        self,
        *,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        aux_stream_dict: Any = None,
        apply_router_weight_on_input: bool = False,
        override_quant_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(model_config=model_config, **kwargs)
        self.model_config = model_config
        self.aux_stream_dict = aux_stream_dict
        self.apply_router_weight_on_input = apply_router_weight_on_input
        adopt(self, self._build(model_config, override_quant_config, kwargs))
        if not model_config.skip_create_weights_in_init:
            self.backend.create_weights()
        self.comm = CommunicationFactory.create_strategy(model_config)
        set_chunking(self, model_config, aux_stream_dict)
        self._weights_removed = True

    def _resolve(self, model_config: Any, override_quant_config: Any) -> tuple[type[MoE], Any]:
        """The backend's class and the configuration it is built with."""
        raise NotImplementedError

    def _build(self, model_config: Any, override_quant_config: Any, kwargs: dict[str, Any]) -> MoE:
        from tensorrt_llm._torch.modules.fused_moe.create_moe import create_moe_backend

        moe_cls, model_config = self._resolve(model_config, override_quant_config)
        with temporarily_skip_weight_creation(model_config):
            return create_moe_backend(
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
                apply_router_weight_on_input=self.apply_router_weight_on_input,
                init_load_balancer=False,
                without_comm=True,
                activation_type=self.activation_type,
                **{name: kwargs[name] for name in ("bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit") if name in kwargs},
            )

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
