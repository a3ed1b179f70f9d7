# SPDX-License-Identifier: Apache-2.0
"""``create_moe_backend`` and ``create_moe`` of C1, with their comparisons word by word.  There is no ``get_moe_cls``."""

from .configurable_moe import ConfigurableMoE
from .fused_moe_cute_dsl_b12x import CuteDslB12xFusedMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_base import MoEImplBase
from .moe_load_balancer import get_moe_load_balancer
from .moe_resolution import resolve_moe_cls
from .other_backends import *


def create_moe_backend(facts):
    moe_cls = facts.pop("moe_cls")
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
    if facts["bias"] or facts["swiglu_alpha"] is not None or facts["swiglu_beta"] is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE]
        assert supported, f"bias, swiglu_alpha and swiglu_beta are not supported in {moe_cls.__name__}."
    if facts["swiglu_limit"] is not None:
        supported = moe_cls in [CutlassFusedMoE, TritonFusedMoE, TRTLLMGenFusedMoE, DeepGemmFusedMoE, MegaMoECuteDsl]
        assert supported, f"swiglu_limit is not supported in {moe_cls.__name__}."
    if facts["swiglu_limit_scalar"] is not None:
        supported = moe_cls in [
            CutlassFusedMoE,
            TRTLLMGenFusedMoE,
            DeepGemmFusedMoE,
            MegaMoEDeepGemm,
            CuteDslFusedMoE,
            MegaMoECuteDsl,
        ]
        assert supported, f"swiglu_limit_scalar is not supported in {moe_cls.__name__}."
    of_others = ("situ_", "trtllm_gen_")
    arguments = {name: value for name, value in facts.items() if name != "activation" and not name.startswith(of_others)}
    if moe_cls in (CutlassFusedMoE, MarlinFusedMoE):
        return moe_cls(**arguments)
    if moe_cls in (TRTLLMGenFusedMoE, VanillaMoE, CuteDslFusedMoE, CuteDslB12xFusedMoE):
        return moe_cls(**arguments)
    if moe_cls in (DeepGemmFusedMoE, TritonFusedMoE, DenseGEMMFusedMoE, MegaMoEDeepGemm, MegaMoECuteDsl):
        return moe_cls(**arguments)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(facts):
    override_quant_config, method = facts.pop("override_quant_config"), facts.pop("communication_method")
    gptoss_style = facts["bias"] or facts["swiglu_alpha"] is not None or facts["swiglu_beta"] is not None
    moe_cls = resolve_moe_cls(
        facts["model_config"],
        override_quant_config=override_quant_config,
        swiglu_gptoss_style=gptoss_style or facts["activation_type"] == ActivationType.SwigluBias,
        routing=facts["routing_method"],
        **{name: facts[name] for name in ("dtype", "bias", "layer_idx")},
    )
    if issubclass(moe_cls, MoEImplBase):
        return ConfigurableMoE(moe_cls=moe_cls, override_quant_config=override_quant_config, **facts)
    assert method is None, "communication_method requires ConfigurableMoE."
    return create_moe_backend(moe_cls=moe_cls, **facts)
