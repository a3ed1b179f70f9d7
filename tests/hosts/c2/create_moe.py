"""``create_moe_backend`` and ``create_moe`` of C2: capabilities are asked, classes are still compared to dispatch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...model_config import ModelConfig  # noqa: F401 - in signatures
from .activation import DEFAULT_MOE_ACTIVATION  # noqa: F401 - in signatures
from .configurable_moe import ConfigurableMoE
from .fused_moe_cute_dsl_b12x import CuteDslB12xFusedMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_base import MoEImplBase
from .interface import MoEWeightLoadingMode  # noqa: F401 - in signatures
from .moe_load_balancer import get_moe_load_balancer
from .moe_resolution import derive_shapes, infer_swiglu_gptoss_style, resolve_moe_cls, resolve_moe_impl
from .other_backends import (
    CuteDslFusedMoE,
    DeepGemmFusedMoE,
    DenseGEMMFusedMoE,
    MarlinFusedMoE,
    MegaMoECuteDsl,
    MegaMoEDeepGemm,
    TritonFusedMoE,
    TRTLLMGenFusedMoE,
    VanillaMoE,
)

__all__ = ["create_moe", "create_moe_backend", "infer_swiglu_gptoss_style", "resolve_moe_cls", "resolve_moe_impl"]
_SHARED = (
    "routing_method",
    "num_experts",
    "hidden_size",
    "intermediate_size",
    "dtype",
    "reduce_results",
    "model_config",
    "aux_stream_dict",
    "weight_loading_mode",
    "layer_idx",
    "init_load_balancer",
    "activation",
)


def create_moe_backend(facts: SimpleNamespace) -> Any:
    derive_shapes(facts)
    moe_cls = facts.moe_cls
    if get_moe_load_balancer() is not None and not moe_cls.capabilities.supports_eplb:
        raise ValueError(f"{moe_cls.__name__} does not support the MoE load balancer.")
    if facts.bias and not moe_cls.capabilities.supports_expert_bias:
        raise ValueError(f"bias not supported in {moe_cls.__name__}.")
    if facts.apply_router_weight_on_input and not moe_cls.capabilities.supports_apply_router_weight_on_input:
        raise ValueError(f"apply_router_weight_on_input not supported in {moe_cls.__name__}.")
    arguments = {name: getattr(facts, name) for name in _SHARED}
    if moe_cls == TRTLLMGenFusedMoE:
        return moe_cls(**arguments, bias=facts.bias)
    if moe_cls in (CutlassFusedMoE, MarlinFusedMoE):
        return moe_cls(**arguments, bias=facts.bias, apply_router_weight_on_input=facts.apply_router_weight_on_input)
    if moe_cls == VanillaMoE:
        return moe_cls(**arguments)
    if moe_cls in (CuteDslFusedMoE, CuteDslB12xFusedMoE):
        return moe_cls(**arguments, apply_router_weight_on_input=facts.apply_router_weight_on_input)
    if moe_cls in (DeepGemmFusedMoE, TritonFusedMoE, DenseGEMMFusedMoE, MegaMoEDeepGemm, MegaMoECuteDsl):
        return moe_cls(**arguments)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(facts: SimpleNamespace) -> Any:
    derive_shapes(facts)
    arguments = vars(facts)
    override_quant_config, method = arguments.pop("override_quant_config"), arguments.pop("communication_method")
    allow_degradation = arguments.pop("allow_backend_degradation")
    names = ("dtype", "num_experts", "hidden_size", "intermediate_size", "bias", "activation", "layer_idx")
    moe_cls = resolve_moe_cls(
        facts.model_config,
        override_quant_config=override_quant_config,
        swiglu_gptoss_style=infer_swiglu_gptoss_style(bias=facts.bias, activation_type=facts.activation.kind),
        routing=facts.routing_method,
        allow_degradation=allow_degradation,
        **{name: arguments[name] for name in names},
    )
    if issubclass(moe_cls, MoEImplBase):
        return ConfigurableMoE(
            moe_cls=moe_cls,
            **arguments,
            override_quant_config=override_quant_config,
            communication_method=method,
        )
    if method is not None:
        raise ValueError("communication_method requires ConfigurableMoE.")
    return create_moe_backend(moe_cls=moe_cls, **arguments)
