# SPDX-License-Identifier: Apache-2.0
"""``get_moe_cls``, ``create_moe_backend`` and ``create_moe`` of generation A, with its comparisons word by word."""

import os

from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantAlgo

from .configurable_moe import ConfigurableMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .moe_load_balancer import get_moe_load_balancer
from .other_backends import *


def get_moe_cls(model_config, override_quant_config=None):
    moe_backend = model_config.moe_backend.upper()
    quant_config = override_quant_config if override_quant_config is not None else model_config.quant_config
    nvfp4 = quant_config is not None and quant_config.quant_algo is QuantAlgo.NVFP4
    if moe_backend in PLAIN:
        return PLAIN[moe_backend]
    if moe_backend in ("CUTEDSL", "TRTLLM"):
        if nvfp4:
            return CuteDslFusedMoE if moe_backend == "CUTEDSL" else TRTLLMGenFusedMoE
        logger.warning("%s does not support %s, using CutlassFusedMoE", moe_backend, quant_config)
        return CutlassFusedMoE
    raise ValueError(f"Unsupported moe backend: {moe_backend}")


def create_moe_backend(facts):
    moe_cls = facts.pop("moe_cls")
    if get_moe_load_balancer() is not None:
        supported = moe_cls in [WideEPMoE, CutlassFusedMoE, TRTLLMGenFusedMoE, CuteDslFusedMoE, DeepGemmFusedMoE]
        assert supported, "MoE Load Balance is only supported in ..."
    swiglu = [facts[f"swiglu_{name}"] for name in ("alpha", "beta", "limit")]
    if facts["bias"] or any(value is not None for value in swiglu):
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE]
        assert supported, f"bias and swiglu_* are not supported in {moe_cls.__name__}."
    if moe_cls == CutlassFusedMoE:
        del facts["without_comm"]
        return moe_cls(**facts)
    if moe_cls in (TRTLLMGenFusedMoE, WideEPMoE, VanillaMoE, CuteDslFusedMoE, DeepGemmFusedMoE, TritonFusedMoE):
        return moe_cls(**facts)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(facts):
    moe_cls = get_moe_cls(facts["model_config"], facts["override_quant_config"])
    if os.environ.get("ENABLE_CONFIGURABLE_MOE", "1") == "1" or moe_cls == CuteDslFusedMoE:
        if moe_cls in (DeepGemmFusedMoE, TRTLLMGenFusedMoE, CuteDslFusedMoE, CutlassFusedMoE):
            return ConfigurableMoE(**facts)
        logger.warning("%s is not supported by ConfigurableMoE", moe_cls.__name__)
    del facts["override_quant_config"]
    return create_moe_backend(moe_cls=moe_cls, **facts)
