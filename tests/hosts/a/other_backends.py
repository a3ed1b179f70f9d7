# SPDX-License-Identifier: Apache-2.0
"""Every other backend by name, those of generation B last: what is compared, and what a named backend would get."""

from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE


class _Other(MoE):
    def __init__(self, apply_router_weight_on_input=False, without_comm=False, **arguments):
        super().__init__(**arguments)

    def create_weights(self):
        self._weights_created = True


_NAMES = (
    "CuteDslFusedMoE",
    "DeepGemmFusedMoE",
    "TRTLLMGenFusedMoE",
    "TritonFusedMoE",
    "VanillaMoE",
    "WideEPMoE",
    "DenseGEMMFusedMoE",
    "MegaMoEDeepGemm",
    "MegaMoECuteDsl",
    "CuteDslB12xFusedMoE",
)
globals().update({name: type(name, (_Other,), {}) for name in _NAMES})
_PLAIN = {"VANILLA": "VanillaMoE", "DEEPGEMM": "DeepGemmFusedMoE", "WIDEEP": "WideEPMoE", "TRITON": "TritonFusedMoE"}
PLAIN = {"CUTLASS": CutlassFusedMoE} | {backend: globals()[name] for backend, name in _PLAIN.items()}
"""Backends that are chosen by name alone."""
