"""``create_moe_backend`` and ``create_moe`` of C2: capabilities are asked, classes are still compared to dispatch."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm.models.modeling_utils import QuantConfig

from ...model_config import ModelConfig
from .activation import DEFAULT_MOE_ACTIVATION
from .configurable_moe import ConfigurableMoE
from .fused_moe_cute_dsl_b12x import CuteDslB12xFusedMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_base import MoEImplBase
from .interface import MoEWeightLoadingMode
from .moe_load_balancer import get_moe_load_balancer
from .moe_resolution import derive_moe_layer_shapes, infer_swiglu_gptoss_style, resolve_moe_cls, resolve_moe_impl
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
from .routing import BaseMoeRoutingMethod

__all__ = ["create_moe", "create_moe_backend", "infer_swiglu_gptoss_style", "resolve_moe_cls", "resolve_moe_impl"]


def create_moe_backend(
    moe_cls: Any,
    routing_method: BaseMoeRoutingMethod,
    num_experts: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    dtype: torch.dtype | None = None,
    reduce_results: bool = False,
    model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
    aux_stream_dict: Any = None,
    weight_loading_mode: MoEWeightLoadingMode = MoEWeightLoadingMode.VANILLA,
    bias: bool = False,
    apply_router_weight_on_input: bool = False,
    layer_idx: int | None = None,
    init_load_balancer: bool = False,
    activation: Any = DEFAULT_MOE_ACTIVATION,
) -> Any:
    shapes = derive_moe_layer_shapes(
        model_config,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype,
        routing=routing_method,
    )
    assert None not in (shapes.num_experts, shapes.hidden_size, shapes.intermediate_size)
    if get_moe_load_balancer() is not None and not moe_cls.capabilities.supports_eplb:
        raise ValueError(f"{moe_cls.__name__} does not support the MoE load balancer.")
    if bias and not moe_cls.capabilities.supports_expert_bias:
        raise ValueError(f"bias not supported in {moe_cls.__name__}.")
    if apply_router_weight_on_input and not moe_cls.capabilities.supports_apply_router_weight_on_input:
        raise ValueError(f"apply_router_weight_on_input not supported in {moe_cls.__name__}.")
    arguments: dict[str, Any] = {
        "routing_method": routing_method,
        "num_experts": shapes.num_experts,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
        "dtype": shapes.dtype,
        "reduce_results": reduce_results,
        "model_config": model_config,
        "aux_stream_dict": aux_stream_dict,
        "weight_loading_mode": weight_loading_mode,
        "layer_idx": layer_idx,
        "init_load_balancer": init_load_balancer,
        "activation": activation,
    }
    if moe_cls == TRTLLMGenFusedMoE:
        return moe_cls(**arguments, bias=bias)
    if moe_cls in (CutlassFusedMoE, MarlinFusedMoE):
        return moe_cls(**arguments, bias=bias, apply_router_weight_on_input=apply_router_weight_on_input)
    if moe_cls == VanillaMoE:
        return moe_cls(**arguments)
    if moe_cls in (CuteDslFusedMoE, CuteDslB12xFusedMoE):
        return moe_cls(**arguments, apply_router_weight_on_input=apply_router_weight_on_input)
    if moe_cls in (DeepGemmFusedMoE, TritonFusedMoE, DenseGEMMFusedMoE, MegaMoEDeepGemm, MegaMoECuteDsl):
        return moe_cls(**arguments)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(
    routing_method: BaseMoeRoutingMethod,
    num_experts: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    dtype: torch.dtype | None = None,
    reduce_results: bool = False,
    model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
    override_quant_config: QuantConfig | None = None,
    aux_stream_dict: Any = None,
    weight_loading_mode: MoEWeightLoadingMode = MoEWeightLoadingMode.VANILLA,
    bias: bool = False,
    apply_router_weight_on_input: bool = False,
    layer_idx: int | None = None,
    activation: Any = DEFAULT_MOE_ACTIVATION,
    communication_method: str | None = None,
    allow_backend_degradation: bool = True,
) -> Any:
    shapes = derive_moe_layer_shapes(
        model_config,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype,
        routing=routing_method,
    )
    assert None not in (shapes.num_experts, shapes.hidden_size, shapes.intermediate_size)
    sizes: dict[str, Any] = {
        "dtype": shapes.dtype,
        "num_experts": shapes.num_experts,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
    }
    moe_cls = resolve_moe_cls(
        model_config,
        override_quant_config=override_quant_config,
        **sizes,
        swiglu_gptoss_style=infer_swiglu_gptoss_style(bias=bias, activation_type=activation.kind),
        bias=bias,
        activation=activation,
        routing=routing_method,
        layer_idx=layer_idx,
        allow_degradation=allow_backend_degradation,
    )
    arguments: dict[str, Any] = {
        **sizes,
        "routing_method": routing_method,
        "reduce_results": reduce_results,
        "model_config": model_config,
        "aux_stream_dict": aux_stream_dict,
        "weight_loading_mode": weight_loading_mode,
        "apply_router_weight_on_input": apply_router_weight_on_input,
        "layer_idx": layer_idx,
        "bias": bias,
        "activation": activation,
    }
    if issubclass(moe_cls, MoEImplBase):
        return ConfigurableMoE(
            moe_cls=moe_cls,
            **arguments,
            override_quant_config=override_quant_config,
            communication_method=communication_method,
        )
    if communication_method is not None:
        raise ValueError("communication_method requires ConfigurableMoE.")
    return create_moe_backend(moe_cls=moe_cls, **arguments)
