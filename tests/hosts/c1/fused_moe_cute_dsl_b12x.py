# SPDX-License-Identifier: Apache-2.0
"""The host's own b12x class (PR 13773), which doubles choose or refuse and never call."""

from tensorrt_llm.models.modeling_utils import QuantAlgo

from .fused_moe_cutlass import CutlassFusedMoE
from .impl_contract import MoEStaticCapability


class CuteDslB12xFusedMoE(CutlassFusedMoE):
    capabilities = MoEStaticCapability()

    @classmethod
    def rejection(cls, p, d):
        quantized = p.quant_algo in (QuantAlgo.NVFP4, QuantAlgo.W4A16_NVFP4)
        if d.sm not in (120, 121) or not quantized or p.swiglu_gptoss_style or d.ep_size != 1:
            return f"CuteDslB12xFusedMoE has no {p} on {d}"
        return None
