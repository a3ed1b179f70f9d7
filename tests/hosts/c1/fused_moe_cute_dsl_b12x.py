"""The host's own b12x class (PR 13773): decode on FlashInfer's wrapper, prefill on CUTLASS.  Here CUTLASS computes both."""

from dataclasses import replace

import torch
from tensorrt_llm.models.modeling_utils import QuantAlgo

from .fused_moe_cutlass import CutlassFusedMoE
from .impl_contract import MoEStaticCapability


class CuteDslB12xFusedMoE(CutlassFusedMoE):
    capabilities = MoEStaticCapability()
    _PREFILL_VIA_CUTLASS_THRESHOLD = 64

    @classmethod
    def rejection(cls, p, d):
        quantized = p.quant_algo in (QuantAlgo.NVFP4, QuantAlgo.W4A16_NVFP4)
        if d.sm not in (120, 121) or not quantized or p.swiglu_gptoss_style or d.ep_size != 1:
            return f"CuteDslB12xFusedMoE has no {p} on {d}"
        return None

    def _route_to_cutlass(self, x):
        return isinstance(x, torch.Tensor) and x.shape[0] >= self._PREFILL_VIA_CUTLASS_THRESHOLD

    def quantize_input(self, x, post_quant_comm=True, **kwargs):
        return super().quantize_input(x, post_quant_comm, **kwargs) if self._route_to_cutlass(x) else (x, None)

    def run_moe(self, ctx, *, workspace=None):
        if not self._route_to_cutlass(ctx.x):
            x, x_sf = super().quantize_input(ctx.x, post_quant_comm=False)
            ctx = replace(ctx, x=x, x_sf=x_sf)
        return super().run_moe(ctx, workspace=workspace)
