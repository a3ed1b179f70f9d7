# SPDX-License-Identifier: Apache-2.0
"""``create_moe_backend`` and ``create_moe`` of C2: capabilities are asked, classes are still compared to dispatch."""

from .configurable_moe import ConfigurableMoE
from .fused_moe_cute_dsl_b12x import CuteDslB12xFusedMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_base import MoEImplBase
from .moe_load_balancer import get_moe_load_balancer
from .moe_resolution import resolve_moe_cls
from .other_backends import *


def create_moe_backend(facts):
    moe_cls = facts.pop("moe_cls")
    asked = {
        "supports_eplb": get_moe_load_balancer() is not None,
        "supports_expert_bias": facts["bias"],
        "supports_apply_router_weight_on_input": facts["apply_router_weight_on_input"],
    }
    lacking = [name for name, wanted in asked.items() if wanted and not getattr(moe_cls.capabilities, name)]
    if lacking:
        raise ValueError(f"{moe_cls.__name__} lacks {', '.join(lacking)}")
    if moe_cls in (CutlassFusedMoE, MarlinFusedMoE):
        return moe_cls(**facts)
    if moe_cls in (TRTLLMGenFusedMoE, VanillaMoE, CuteDslFusedMoE, CuteDslB12xFusedMoE):
        return moe_cls(**facts)
    if moe_cls in (DeepGemmFusedMoE, TritonFusedMoE, DenseGEMMFusedMoE, MegaMoEDeepGemm, MegaMoECuteDsl):
        return moe_cls(**facts)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(facts):
    override_quant_config, method = facts.pop("override_quant_config"), facts.pop("communication_method")
    kind = facts["activation"].kind
    moe_cls = resolve_moe_cls(
        facts["model_config"],
        override_quant_config=override_quant_config,
        swiglu_gptoss_style=facts["bias"] or kind == ActivationType.SwigluBias,
        routing=facts["routing_method"],
        allow_degradation=facts.pop("allow_backend_degradation"),
        **{name: facts[name] for name in ("dtype", "bias", "layer_idx")},
    )
    if issubclass(moe_cls, MoEImplBase):
        return ConfigurableMoE(moe_cls=moe_cls, override_quant_config=override_quant_config, **facts)
    assert method is None, "communication_method requires ConfigurableMoE."
    return create_moe_backend(moe_cls=moe_cls, **facts)
