# SPDX-License-Identifier: Apache-2.0
"""Every other backend by name: what is compared, what refuses SM120, and what a named backend would get."""

from tensorrt_llm.models.modeling_utils import QuantAlgo
from torch import nn

from .impl_base import MoEImplBase, apply_moe_impl_construction_state
from .impl_contract import MoEStaticCapability


class _Other(MoEImplBase):
    sm_versions = (100, 103)
    quant_algos = (QuantAlgo.NVFP4,)

    @classmethod
    def rejection(cls, p, d):
        served = d.sm in cls.sm_versions and p.quant_algo in cls.quant_algos
        return None if served else f"{cls.__name__} has no {p.quant_algo} on SM{d.sm}"

    def __init__(self, apply_router_weight_on_input=False, **arguments):
        super().__init__()
        apply_moe_impl_construction_state(self, **arguments)
        self._weights_created = False

    def create_weights(self):
        self._weights_created = True

    _get_quant_method = quantize_input = run_moe = None
    """Never called."""


_ATTRIBUTES = {
    "CuteDslFusedMoE": {"capabilities": MoEStaticCapability(supports_eplb=True, supports_apply_router_weight_on_input=True)},
    "TRTLLMGenFusedMoE": {
        "capabilities": MoEStaticCapability(supports_eplb=True, supports_expert_bias=True),
        "quant_algos": (QuantAlgo.NVFP4, None),
    },
    "DeepGemmFusedMoE": {"quant_algos": ()},
    "DenseGEMMFusedMoE": {},
    "MarlinFusedMoE": {"sm_versions": (80, 86, 89, 90)},
    "TritonFusedMoE": {"sm_versions": (90,), "quant_algos": (None, QuantAlgo.FP8)},
    "MegaMoEDeepGemm": {},
    "MegaMoECuteDsl": {},
}
globals().update({name: type(name, (_Other,), attributes) for name, attributes in _ATTRIBUTES.items()})


class VanillaMoE(nn.ModuleList):
    """A complete layer, hence never wrapped."""

    capabilities = MoEStaticCapability()

    @classmethod
    def rejection(cls, p, d):
        return None

    def __init__(self, **arguments):
        super().__init__()
