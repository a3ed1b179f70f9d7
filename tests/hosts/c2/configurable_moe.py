"""``ConfigurableMoE`` of C2 binds late: the backend is resolved, built and filled in ``create_weights``, and again if need be."""

from __future__ import annotations

import copy
from typing import Any

from tensorrt_llm._wrapping import adopt, set_chunking, temporarily_skip_weight_creation
from tensorrt_llm.models.modeling_utils import QuantConfig

from ...model_config import ModelConfig
from .activation import install_activation_params
from .impl_base import MoEImplBase
from .impl_contract import canonical_quant
from .moe_resolution import infer_swiglu_gptoss_style
from .moe_scheduler import create_moe_scheduler
from .wrapper import Wrapper


def _canonical_quant_key(quant_config: QuantConfig | None) -> str:
    return canonical_quant(None if quant_config is None else quant_config.quant_algo) or "none"


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
        allow_backend_degradation: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(model_config=model_config, **kwargs)
        if override_quant_config is not None:
            self.quant_config = override_quant_config
        self.model_config, self.aux_stream_dict = model_config, aux_stream_dict
        self.communication_method = communication_method
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self._pinned_moe_cls = moe_cls
        self._allow_backend_degradation = allow_backend_degradation
        self._backend_bound = False
        self._bound_quant_key: str | None = None
        self.comm: Any = None
        set_chunking(self, model_config, aux_stream_dict)
        self.validate_config()
        self._weights_removed = True  # the model loader skips the wrapper and finds the backend as a submodule
        if not model_config.skip_create_weights_in_init and model_config.quant_config_dict is None:
            self.create_weights()

    @property
    def _sizes(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "num_experts": self.num_experts,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
        }

    def _resolve_backend_cls(self, quant_config: QuantConfig | None) -> Any:
        from tensorrt_llm._torch.moe.fused_moe.create_moe import resolve_moe_cls

        if self._pinned_moe_cls is not None:
            return self._pinned_moe_cls
        moe_cls = resolve_moe_cls(
            self.model_config,
            override_quant_config=quant_config,
            **self._sizes,
            swiglu_gptoss_style=infer_swiglu_gptoss_style(bias=self.bias, activation_type=self.activation_type),
            bias=self.bias,
            activation=self.activation,
            routing=self.routing_method,
            layer_idx=self.layer_idx,
            allow_degradation=self._allow_backend_degradation,
        )
        if not issubclass(moe_cls, MoEImplBase):
            raise ValueError(f"Layer {self.layer_idx} resolves to {moe_cls.__name__}, a complete MoE layer")
        return moe_cls

    def _create_backend(self, quant_config: QuantConfig | None, moe_cls: Any) -> None:
        from tensorrt_llm._torch.moe.fused_moe.create_moe import create_moe_backend

        model_config = self.model_config
        if quant_config is not model_config.quant_config:
            model_config = copy.copy(model_config)
            model_config.quant_config = quant_config  # type: ignore[assignment]
        with temporarily_skip_weight_creation(model_config):
            backend = create_moe_backend(
                moe_cls=moe_cls,
                routing_method=self.routing_method,
                **self._sizes,
                reduce_results=self.reduce_results,
                model_config=model_config,
                aux_stream_dict=self.aux_stream_dict,
                weight_loading_mode=self.weight_loading_mode,
                bias=self.bias,
                apply_router_weight_on_input=self.apply_router_weight_on_input,
                layer_idx=None,
                init_load_balancer=False,
                activation=self.activation,
            )
        adopt(self, backend)
        install_activation_params(backend)
        self._bound_quant_key = _canonical_quant_key(quant_config)

    def _install_backend_dependents(self) -> None:
        self.comm = self._create_comm_strategy_auto()
        self.validate_backend(self.backend)
        self.scheduler = create_moe_scheduler(self)

    def create_weights(self) -> None:
        """Another quantization by now may mean another class; the same one keeps the backend."""
        quant_config = self.quant_config
        if not self._backend_bound:
            self._create_backend(quant_config, self._resolve_backend_cls(quant_config))
            self.backend.quant_config = quant_config
            self.backend.create_weights()
            self._install_backend_dependents()
            self._backend_bound = True
            return
        swapped = _canonical_quant_key(quant_config) != self._bound_quant_key and self._rebind_backend_to(quant_config)
        self.backend.quant_config = quant_config
        if not self.backend._weights_created:
            install_activation_params(self.backend)
        self.backend.create_weights()
        if swapped:
            self._install_backend_dependents()

    def _rebind_backend_to(self, quant_config: QuantConfig | None) -> bool:
        moe_cls = self._resolve_backend_cls(quant_config)
        if moe_cls is type(self.backend):
            self._bound_quant_key = _canonical_quant_key(quant_config)
            return False
        if self.comm is not None:
            self.comm.destroy()
            self.comm = None
        self._create_backend(quant_config, moe_cls)
        return True

    def forward_impl(self, *args: Any, **kwargs: Any) -> Any:
        if not self._backend_bound:
            raise RuntimeError(f"MoE layer {self.layer_idx} has no backend yet: create_weights() binds it")
        return super().forward_impl(*args, **kwargs)

    @property
    def _weights_created(self) -> bool:  # type: ignore[override]
        return self._backend_bound and bool(self.backend._weights_created)

    @_weights_created.setter
    def _weights_created(self, value: bool) -> None:
        if self._backend_bound:
            self.backend._weights_created = value
