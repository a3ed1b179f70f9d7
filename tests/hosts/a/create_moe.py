"""``get_moe_cls``, ``create_moe_backend`` and ``create_moe`` of generation A, with its comparisons word by word."""

from __future__ import annotations

import os
from typing import Any

import torch
from tensorrt_llm._torch.utils import ActivationType
from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantConfig

from ...model_config import ModelConfig
from .configurable_moe import ConfigurableMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE, MoEWeightLoadingMode
from .moe_load_balancer import get_moe_load_balancer
from .other_backends import (
    CuteDslFusedMoE,
    DeepGemmFusedMoE,
    TritonFusedMoE,
    TRTLLMGenFusedMoE,
    VanillaMoE,
    WideEPMoE,
)
from .routing import BaseMoeRoutingMethod

_PLAIN = {
    "CUTLASS": CutlassFusedMoE,
    "VANILLA": VanillaMoE,
    "DEEPGEMM": DeepGemmFusedMoE,
    "WIDEEP": WideEPMoE,
    "TRITON": TritonFusedMoE,
}


def get_moe_cls(model_config: ModelConfig, override_quant_config: QuantConfig | None = None) -> type[MoE]:
    moe_backend = model_config.moe_backend.upper()
    quant_config = override_quant_config if override_quant_config is not None else model_config.quant_config
    nvfp4 = quant_config is not None and quant_config.quant_mode.has_nvfp4()
    if moe_backend in _PLAIN:
        return _PLAIN[moe_backend]
    if moe_backend in ("CUTEDSL", "TRTLLM"):
        if nvfp4:
            return CuteDslFusedMoE if moe_backend == "CUTEDSL" else TRTLLMGenFusedMoE
        logger.warning("%s does not support %s, using CutlassFusedMoE", moe_backend, quant_config)
        return CutlassFusedMoE
    raise ValueError(f"Unsupported moe backend: {moe_backend}")


def create_moe_backend(
    moe_cls: type[MoE],
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
    init_load_balancer: bool = True,
    without_comm: bool = False,
    activation_type: ActivationType = ActivationType.Swiglu,
) -> MoE:
    if get_moe_load_balancer() is not None:
        supported = moe_cls in [WideEPMoE, CutlassFusedMoE, TRTLLMGenFusedMoE, CuteDslFusedMoE, DeepGemmFusedMoE]
        assert supported, "MoE Load Balance is only supported in ..."
    if bias:
        assert moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE], f"bias not supported in {moe_cls.__name__}."
    if swiglu_alpha is not None or swiglu_beta is not None or swiglu_limit is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE]
        assert supported, f"swiglu_alpha, swiglu_beta and swiglu_limit are not supported in {moe_cls.__name__}."
    arguments: dict[str, Any] = {
        "routing_method": routing_method,
        "num_experts": num_experts,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "dtype": dtype,
        "reduce_results": reduce_results,
        "model_config": model_config,
        "weight_loading_mode": weight_loading_mode,
        "layer_idx": layer_idx,
    }
    if moe_cls == CutlassFusedMoE:
        return moe_cls(
            **arguments,
            aux_stream_dict=aux_stream_dict,
            bias=bias,
            apply_router_weight_on_input=apply_router_weight_on_input,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            swiglu_limit=swiglu_limit,
            init_load_balancer=init_load_balancer,
            activation_type=activation_type,
        )
    if moe_cls in (TRTLLMGenFusedMoE, WideEPMoE, VanillaMoE, CuteDslFusedMoE, DeepGemmFusedMoE, TritonFusedMoE):
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
    activation_type: ActivationType = ActivationType.Swiglu,
) -> MoE:
    moe_cls = get_moe_cls(model_config, override_quant_config)
    arguments: dict[str, Any] = {
        "routing_method": routing_method,
        "num_experts": num_experts,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "dtype": dtype,
        "reduce_results": reduce_results,
        "model_config": model_config,
        "aux_stream_dict": aux_stream_dict,
        "weight_loading_mode": weight_loading_mode,
        "bias": bias,
        "apply_router_weight_on_input": apply_router_weight_on_input,
        "layer_idx": layer_idx,
        "swiglu_alpha": swiglu_alpha,
        "swiglu_beta": swiglu_beta,
        "swiglu_limit": swiglu_limit,
        "activation_type": activation_type,
    }
    if os.environ.get("ENABLE_CONFIGURABLE_MOE", "1") == "1" or moe_cls == CuteDslFusedMoE:
        if moe_cls in (DeepGemmFusedMoE, TRTLLMGenFusedMoE, CuteDslFusedMoE, CutlassFusedMoE):
            return ConfigurableMoE(**arguments, override_quant_config=override_quant_config)
        logger.warning("%s is not supported by ConfigurableMoE", moe_cls.__name__)
    return create_moe_backend(moe_cls=moe_cls, **arguments)
