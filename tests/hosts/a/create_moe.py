"""``get_moe_cls``, ``create_moe_backend`` and ``create_moe`` of generation A, with its comparisons word by word."""

from __future__ import annotations

import os
from types import SimpleNamespace

from tensorrt_llm._torch.utils import ActivationType  # noqa: F401 - in signatures
from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantConfig

from ...model_config import ModelConfig
from .configurable_moe import ConfigurableMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE, MoEWeightLoadingMode  # noqa: F401
from .moe_load_balancer import get_moe_load_balancer
from .other_backends import (
    CuteDslFusedMoE,
    DeepGemmFusedMoE,
    TritonFusedMoE,
    TRTLLMGenFusedMoE,
    VanillaMoE,
    WideEPMoE,
)

_SHARED = (
    "routing_method",
    "num_experts",
    "hidden_size",
    "intermediate_size",
    "dtype",
    "reduce_results",
    "model_config",
    "weight_loading_mode",
    "layer_idx",
)
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


def create_moe_backend(facts: SimpleNamespace) -> MoE:
    moe_cls = facts.moe_cls
    if get_moe_load_balancer() is not None:
        supported = moe_cls in [WideEPMoE, CutlassFusedMoE, TRTLLMGenFusedMoE, CuteDslFusedMoE, DeepGemmFusedMoE]
        assert supported, "MoE Load Balance is only supported in ..."
    if facts.bias:
        assert moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE], f"bias not supported in {moe_cls.__name__}."
    if facts.swiglu_alpha is not None or facts.swiglu_beta is not None or facts.swiglu_limit is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE]
        assert supported, f"swiglu_alpha, swiglu_beta and swiglu_limit are not supported in {moe_cls.__name__}."
    arguments = {name: value for name, value in vars(facts).items() if name != "moe_cls"}
    shared = {name: arguments[name] for name in _SHARED}
    if moe_cls == CutlassFusedMoE:
        del arguments["without_comm"]
        return moe_cls(**arguments)
    if moe_cls in (TRTLLMGenFusedMoE, WideEPMoE, VanillaMoE, CuteDslFusedMoE, DeepGemmFusedMoE, TritonFusedMoE):
        return moe_cls(**shared)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(facts: SimpleNamespace) -> MoE:
    moe_cls = get_moe_cls(facts.model_config, facts.override_quant_config)
    if os.environ.get("ENABLE_CONFIGURABLE_MOE", "1") == "1" or moe_cls == CuteDslFusedMoE:
        if moe_cls in (DeepGemmFusedMoE, TRTLLMGenFusedMoE, CuteDslFusedMoE, CutlassFusedMoE):
            return ConfigurableMoE(**vars(facts))
        logger.warning("%s is not supported by ConfigurableMoE", moe_cls.__name__)
    del facts.override_quant_config
    return create_moe_backend(moe_cls=moe_cls, **vars(facts))
