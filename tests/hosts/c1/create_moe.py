"""``create_moe_backend`` and ``create_moe`` of C1, with their comparisons word by word.  There is no ``get_moe_cls``."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import ActivationType
from tensorrt_llm.models.modeling_utils import QuantConfig

from ...model_config import ModelConfig
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
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    swiglu_limit_scalar: float | None = None,
    init_load_balancer: bool = True,
    activation_type: ActivationType = ActivationType.Swiglu,
    activation: str | None = None,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    trtllm_gen_activation_type: Any = None,
    trtllm_gen_activation_alpha: float | None = None,
    trtllm_gen_activation_beta: float | None = None,
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
    if get_moe_load_balancer() is not None:
        supported_load_balancer_backends = (
            CutlassFusedMoE,
            TRTLLMGenFusedMoE,
            CuteDslFusedMoE,
            DeepGemmFusedMoE,
            DenseGEMMFusedMoE,
            MegaMoEDeepGemm,
            MegaMoECuteDsl,
        )
        assert moe_cls in supported_load_balancer_backends, "MoE Load Balance is only supported in ..."
    if bias:
        assert moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE], f"bias not supported in {moe_cls.__name__}."
    if swiglu_alpha is not None or swiglu_beta is not None:
        assert moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE], "swiglu_alpha and swiglu_beta are not supported"
        assert swiglu_alpha is not None, "Both swiglu_alpha and swiglu_beta must be provided."
        assert swiglu_beta is not None, "Both swiglu_alpha and swiglu_beta must be provided."
    if swiglu_limit is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE, DeepGemmFusedMoE, MegaMoECuteDsl]
        assert supported, f"swiglu_limit is not supported in {moe_cls.__name__}."
    if swiglu_limit_scalar is not None:
        supported = moe_cls in [
            CutlassFusedMoE,
            TRTLLMGenFusedMoE,
            DeepGemmFusedMoE,
            MegaMoEDeepGemm,
            CuteDslFusedMoE,
            MegaMoECuteDsl,
        ]
        assert supported, f"swiglu_limit_scalar is not supported in {moe_cls.__name__}."
    arguments: dict[str, Any] = {
        "routing_method": routing_method,
        "num_experts": shapes.num_experts,
        "hidden_size": shapes.hidden_size,
        "intermediate_size": shapes.intermediate_size,
        "dtype": shapes.dtype,
        "reduce_results": reduce_results,
        "model_config": model_config,
        "weight_loading_mode": weight_loading_mode,
        "layer_idx": layer_idx,
        "init_load_balancer": init_load_balancer,
        "activation_type": activation_type,
    }
    constants = {"swiglu_alpha": swiglu_alpha, "swiglu_beta": swiglu_beta, "swiglu_limit": swiglu_limit}
    if moe_cls == TRTLLMGenFusedMoE:
        return moe_cls(**arguments, aux_stream_dict=aux_stream_dict, bias=bias, **constants)
    if any(value is not None for value in (activation, situ_beta, situ_linear_beta)) and moe_cls is not MegaMoEDeepGemm:
        raise ValueError(f"MegaMoE DeepGEMM activation options require MegaMoEDeepGemm, got {moe_cls.__name__}")
    generated = (trtllm_gen_activation_type, trtllm_gen_activation_alpha, trtllm_gen_activation_beta)
    if any(value is not None for value in generated):
        raise ValueError(f"TRTLLM-Gen activation options are only supported by TRTLLMGenFusedMoE, got {moe_cls.__name__}")
    if moe_cls in (CutlassFusedMoE, MarlinFusedMoE):
        return moe_cls(
            **arguments,
            aux_stream_dict=aux_stream_dict,
            bias=bias,
            apply_router_weight_on_input=apply_router_weight_on_input,
            **constants,
            swiglu_limit_scalar=swiglu_limit_scalar,
        )
    if moe_cls == VanillaMoE:
        return moe_cls(**arguments)
    if moe_cls in (CuteDslFusedMoE, CuteDslB12xFusedMoE):
        return moe_cls(
            **arguments,
            aux_stream_dict=aux_stream_dict,
            apply_router_weight_on_input=apply_router_weight_on_input,
            swiglu_limit_scalar=swiglu_limit_scalar,
        )
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
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    swiglu_limit_scalar: float | None = None,
    activation_type: ActivationType = ActivationType.Swiglu,
    activation: str | None = None,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    trtllm_gen_activation_type: Any = None,
    trtllm_gen_activation_alpha: float | None = None,
    trtllm_gen_activation_beta: float | None = None,
    communication_method: str | None = None,
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
    gptoss = infer_swiglu_gptoss_style(
        bias=bias, swiglu_alpha=swiglu_alpha, swiglu_beta=swiglu_beta, activation_type=activation_type
    )
    moe_cls = resolve_moe_cls(
        model_config,
        override_quant_config=override_quant_config,
        **sizes,
        swiglu_gptoss_style=gptoss,
        bias=bias,
        activation_type=activation_type,
        routing=routing_method,
        layer_idx=layer_idx,
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
        "swiglu_alpha": swiglu_alpha,
        "swiglu_beta": swiglu_beta,
        "swiglu_limit": swiglu_limit,
        "swiglu_limit_scalar": swiglu_limit_scalar,
        "activation_type": activation_type,
        "activation": activation,
        "situ_beta": situ_beta,
        "situ_linear_beta": situ_linear_beta,
        "trtllm_gen_activation_type": trtllm_gen_activation_type,
        "trtllm_gen_activation_alpha": trtllm_gen_activation_alpha,
        "trtllm_gen_activation_beta": trtllm_gen_activation_beta,
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
