"""``get_moe_cls``, ``create_moe_backend`` and ``create_moe`` of generation B (late), where one comparison is of identity."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch
from tensorrt_llm._torch.utils import ActivationType
from tensorrt_llm._utils import get_sm_version
from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantConfig

from ...model_config import ModelConfig
from .configurable_moe import ConfigurableMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE, MoEWeightLoadingMode
from .moe_load_balancer import get_moe_load_balancer
from .other_backends import (
    CuteDslB12xFusedMoE,
    CuteDslFusedMoE,
    DeepGemmFusedMoE,
    DenseGEMMFusedMoE,
    MegaMoECuteDsl,
    MegaMoEDeepGemm,
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


def get_moe_cls(
    model_config: ModelConfig, override_quant_config: QuantConfig | None = None, layer_idx: int | None = None
) -> type[MoE]:
    moe_backend = model_config.moe_backend.upper()
    quant_config = override_quant_config if override_quant_config is not None else model_config.quant_config
    nvfp4 = quant_config is not None and quant_config.quant_mode.has_nvfp4()
    if moe_backend in _PLAIN:
        return _PLAIN[moe_backend]
    if moe_backend == "CUTEDSL" and nvfp4:
        if get_sm_version() in CuteDslB12xFusedMoE._SUPPORTED_SM_VERSIONS and importlib.util.find_spec("flashinfer") is not None:
            return CuteDslB12xFusedMoE
        return CuteDslFusedMoE
    if moe_backend == "DENSEGEMM" and nvfp4 and get_sm_version() in DenseGEMMFusedMoE._SUPPORTED_SM_VERSIONS:
        return DenseGEMMFusedMoE
    if moe_backend == "TRTLLM" and nvfp4:
        return TRTLLMGenFusedMoE
    if moe_backend in ("CUTEDSL", "DENSEGEMM", "TRTLLM"):
        logger.warning("%s does not support %s, using CutlassFusedMoE", moe_backend, quant_config)
        return CutlassFusedMoE
    raise ValueError(f"Unsupported moe backend: {moe_backend}")


def resolve_moe_cls(
    model_config: ModelConfig,
    routing_method: BaseMoeRoutingMethod,
    dtype: torch.dtype | None,
    override_quant_config: QuantConfig | None = None,
    layer_idx: int | None = None,
) -> type[MoE]:
    moe_cls = get_moe_cls(model_config, override_quant_config, layer_idx)
    backend = "CUTLASS" if moe_cls is CutlassFusedMoE else model_config.moe_backend
    if model_config.lora_config is not None and backend != "CUTLASS":
        raise ValueError(f"LoRA on experts is not supported by {backend}")
    return moe_cls


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
        supported_load_balancer_backends = (CutlassFusedMoE, TRTLLMGenFusedMoE, CuteDslFusedMoE, DeepGemmFusedMoE)
        assert moe_cls in supported_load_balancer_backends, "MoE Load Balance is only supported in ..."
    if bias:
        assert moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE], f"bias not supported in {moe_cls.__name__}."
    if swiglu_alpha is not None or swiglu_beta is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE]
        assert supported, f"swiglu_alpha and swiglu_beta are not supported in {moe_cls.__name__}."
    if swiglu_limit is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE, MegaMoECuteDsl]
        assert supported, f"swiglu_limit is not supported in {moe_cls.__name__}."
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
    if moe_cls is CutlassFusedMoE:
        return moe_cls(
            **arguments,
            aux_stream_dict=aux_stream_dict,
            bias=bias,
            apply_router_weight_on_input=apply_router_weight_on_input,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            swiglu_limit=swiglu_limit,
            init_load_balancer=init_load_balancer,
            without_comm=without_comm,
            activation_type=activation_type,
        )
    if moe_cls in (CuteDslFusedMoE, CuteDslB12xFusedMoE):
        return moe_cls(**arguments)
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
    moe_cls = resolve_moe_cls(model_config, routing_method, dtype, override_quant_config, layer_idx)
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
    if os.environ.get("ENABLE_CONFIGURABLE_MOE", "1") == "1" or moe_cls in (CuteDslFusedMoE, CuteDslB12xFusedMoE):
        if moe_cls in (
            DeepGemmFusedMoE,
            TRTLLMGenFusedMoE,
            CuteDslFusedMoE,
            CuteDslB12xFusedMoE,
            CutlassFusedMoE,
            DenseGEMMFusedMoE,
            MegaMoEDeepGemm,
            MegaMoECuteDsl,
        ):
            return ConfigurableMoE(**arguments, override_quant_config=override_quant_config)
        logger.warning("%s is not supported by ConfigurableMoE", moe_cls.__name__)
    if model_config.moe_backend.upper() in ("TRTLLM", "CUTEDSL") and moe_cls == CutlassFusedMoE:
        logger.warning("falling back to CutlassFusedMoE")
    return create_moe_backend(moe_cls=moe_cls, **arguments)
