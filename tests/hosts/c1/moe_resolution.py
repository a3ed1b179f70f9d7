# SPDX-License-Identifier: Apache-2.0
"""Which class serves a layer: tables that are read at call time, every candidate asked, every refusal kept.

C2 gives ``allow_degradation`` too; its ``impl_id`` and the refusal of odd sizes are not doubled.
"""

from tensorrt_llm._utils import get_sm_version
from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantAlgo

from .fused_moe_cute_dsl_b12x import CuteDslB12xFusedMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_contract import MoEDeployment, MoEProblem
from .moe_lora import has_moe_lora_targets
from .other_backends import *

IMPL_PRIORITY = (
    CuteDslB12xFusedMoE,
    MegaMoEDeepGemm,
    MegaMoECuteDsl,
    CuteDslFusedMoE,
    TRTLLMGenFusedMoE,
    DeepGemmFusedMoE,
    DenseGEMMFusedMoE,
    MarlinFusedMoE,
    TritonFusedMoE,
    CutlassFusedMoE,
    VanillaMoE,
)
BACKEND_FAMILY = {
    "CUTLASS": frozenset({CutlassFusedMoE}),
    "VANILLA": frozenset({VanillaMoE}),
    "MARLIN": frozenset({MarlinFusedMoE}),
    "CUTEDSL": frozenset({CuteDslB12xFusedMoE, CuteDslFusedMoE}),
    "DEEPGEMM": frozenset({DeepGemmFusedMoE}),
    "DENSEGEMM": frozenset({DenseGEMMFusedMoE}),
    "TRTLLM": frozenset({TRTLLMGenFusedMoE}),
    "TRITON": frozenset({TritonFusedMoE}),
    "MEGAMOE_DEEPGEMM": frozenset({MegaMoEDeepGemm}),
    "MEGAMOE_CUTEDSL": frozenset({MegaMoECuteDsl}),
}
FALLBACK_IMPL = CutlassFusedMoE
NO_FALLBACK_BACKENDS = frozenset({"VANILLA"})


def _problem(model_config, override_quant_config, dtype, **layer):
    quant_config = override_quant_config or model_config.quant_config
    algo = None if quant_config is None else quant_config.quant_algo
    if algo is QuantAlgo.MIXED_PRECISION:  # what the layer has is not known yet
        algo = None
    return MoEProblem(quant_algo=QuantAlgo.NVFP4 if algo is QuantAlgo.NVFP4_AWQ else algo, **layer)


def _candidates_for(backend):
    normalized = backend.upper()
    family = BACKEND_FAMILY.get(normalized)
    if family is None:
        raise ValueError(f"Unsupported moe backend: {backend}")
    candidates = [cls for cls in IMPL_PRIORITY if cls in family]
    if FALLBACK_IMPL not in family and normalized not in NO_FALLBACK_BACKENDS:
        candidates.append(FALLBACK_IMPL)
    return candidates


def resolve_moe_cls(model_config, *, allow_degradation=True, layer_idx=None, routing=None, **layer):
    problem, mapping = _problem(model_config, **layer), model_config.mapping
    lora = has_moe_lora_targets(model_config.lora_config)
    deployment = MoEDeployment(get_sm_version(), mapping.moe_ep_size, lora)
    rejected = {}
    for candidate in _candidates_for(model_config.moe_backend):
        rejection = candidate.rejection(problem, deployment)
        if rejection is None:
            if candidate not in BACKEND_FAMILY[model_config.moe_backend.upper()]:
                logger.warning("MoE backend %s cannot serve this layer: %s", model_config.moe_backend, rejected)
                if not allow_degradation:
                    raise ValueError(f"degradation is disallowed: {rejected}")
            return candidate
        rejected[candidate.__name__] = rejection
    raise ValueError(f"no MoE implementation can serve this layer. {rejected}")
