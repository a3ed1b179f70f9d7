# SPDX-License-Identifier: Apache-2.0
"""``get_moe_cls``, ``create_moe_backend`` and ``create_moe`` of generation B (late), where one comparison is of identity."""

import importlib.util
import os

from tensorrt_llm._utils import get_sm_version
from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantAlgo

from .configurable_moe import ConfigurableMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .moe_load_balancer import get_moe_load_balancer
from .other_backends import *


def get_moe_cls(model_config, override_quant_config=None, layer_idx=None):
    moe_backend, sm = model_config.moe_backend.upper(), get_sm_version()
    quant_config = override_quant_config if override_quant_config is not None else model_config.quant_config
    nvfp4 = quant_config is not None and quant_config.quant_algo is QuantAlgo.NVFP4
    if moe_backend in PLAIN:
        return PLAIN[moe_backend]
    if moe_backend == "CUTEDSL" and nvfp4:
        has_b12x = sm in (120, 121) and importlib.util.find_spec("flashinfer") is not None
        return CuteDslB12xFusedMoE if has_b12x else CuteDslFusedMoE
    if moe_backend == "DENSEGEMM" and nvfp4 and sm in (100, 103):
        return DenseGEMMFusedMoE
    if moe_backend == "TRTLLM" and nvfp4:
        return TRTLLMGenFusedMoE
    if moe_backend in ("CUTEDSL", "DENSEGEMM", "TRTLLM"):
        logger.warning("%s does not support %s, using CutlassFusedMoE", moe_backend, quant_config)
        return CutlassFusedMoE
    raise ValueError(f"Unsupported moe backend: {moe_backend}")


def resolve_moe_cls(model_config, routing_method, dtype, override_quant_config=None, layer_idx=None):
    moe_cls = get_moe_cls(model_config, override_quant_config, layer_idx)
    backend = "CUTLASS" if moe_cls is CutlassFusedMoE else model_config.moe_backend
    if model_config.lora_config is not None and backend != "CUTLASS":
        raise ValueError(f"LoRA on experts is not supported by {backend}")
    return moe_cls


def create_moe_backend(facts):
    moe_cls = facts.pop("moe_cls")
    if get_moe_load_balancer() is not None:
        supported_load_balancer_backends = (CutlassFusedMoE, TRTLLMGenFusedMoE, CuteDslFusedMoE, DeepGemmFusedMoE)
        assert moe_cls in supported_load_balancer_backends, "MoE Load Balance is only supported in ..."
    if facts["bias"] or facts["swiglu_alpha"] is not None or facts["swiglu_beta"] is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE]
        assert supported, f"bias, swiglu_alpha and swiglu_beta are not supported in {moe_cls.__name__}."
    if facts["swiglu_limit"] is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE, MegaMoECuteDsl]
        assert supported, f"swiglu_limit is not supported in {moe_cls.__name__}."
    if moe_cls is CutlassFusedMoE:
        return moe_cls(**facts)
    others = (TRTLLMGenFusedMoE, WideEPMoE, VanillaMoE, CuteDslFusedMoE, CuteDslB12xFusedMoE, DeepGemmFusedMoE, TritonFusedMoE)
    if moe_cls in others:
        return moe_cls(**facts)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(facts):
    override_quant_config, arguments = facts["override_quant_config"], ("model_config", "routing_method", "dtype")
    moe_cls = resolve_moe_cls(*(facts[name] for name in arguments), override_quant_config, facts["layer_idx"])
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
            return ConfigurableMoE(**facts)
        logger.warning("%s is not supported by ConfigurableMoE", moe_cls.__name__)
    if facts["model_config"].moe_backend.upper() in ("TRTLLM", "CUTEDSL") and moe_cls == CutlassFusedMoE:
        logger.warning("falling back to CutlassFusedMoE")
    del facts["override_quant_config"]
    return create_moe_backend(moe_cls=moe_cls, **facts)
