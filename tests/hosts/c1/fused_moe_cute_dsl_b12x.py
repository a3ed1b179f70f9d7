"""The host's own b12x class (PR 13773): decode on FlashInfer's wrapper, prefill on CUTLASS.  Here CUTLASS computes both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensorrt_llm._torch.utils import ActivationType, Fp4QuantizedTensor
from tensorrt_llm.models.modeling_utils import QuantAlgo

from ._generation import B12X_IS_CUTEDSL
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERejectReason, MoERunContext, MoEStaticCapability
from .interface import _reject
from .other_backends import CuteDslFusedMoE

_Base: Any = CuteDslFusedMoE if B12X_IS_CUTEDSL else CutlassFusedMoE


class CuteDslB12xFusedMoE(_Base):
    capabilities = MoEStaticCapability(supports_dwdp=True)
    _SUPPORTED_SM_VERSIONS = frozenset({120, 121})
    _PREFILL_VIA_CUTLASS_THRESHOLD = 64

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        reasons = MoERejectReason
        if d.env.sm not in cls._SUPPORTED_SM_VERSIONS:
            return _reject(reasons.SM_UNSUPPORTED, f"CuteDslB12xFusedMoE requires SM120 or SM121, got SM{d.env.sm}")
        if p.quant_algo not in (QuantAlgo.NVFP4, QuantAlgo.W4A16_NVFP4):
            return _reject(reasons.QUANT_UNSUPPORTED, f"CuteDslB12xFusedMoE only supports NVFP4 or W4A16_NVFP4, not {p.quant}")
        if p.dtype_act not in (torch.float16, torch.bfloat16):
            return _reject(reasons.DTYPE_UNSUPPORTED, f"CuteDslB12xFusedMoE does not support {p.dtype_act}")
        if p.swiglu_gptoss_style or p.activation_type not in (ActivationType.Relu2, ActivationType.Swiglu):
            return _reject(reasons.ACTIVATION_UNSUPPORTED, f"CuteDslB12xFusedMoE does not support {p.activation}")
        if not d.env.has_dep("flashinfer"):
            return _reject(reasons.DEP_MISSING, "CuteDslB12xFusedMoE requires the flashinfer package")
        if d.eplb_enabled:
            return _reject(reasons.EPLB_UNSUPPORTED, "CuteDslB12xFusedMoE does not support the MoE load balancer")
        if d.ep_size != 1 or (d.use_dp and d.parallel_size > 1):
            return _reject(reasons.TOPOLOGY_UNSUPPORTED, "CuteDslB12xFusedMoE requires ep_size == 1 and no attention-DP")
        return MoEEligibility.ok()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._b12x_use_cuda_graph = bool(getattr(kwargs.get("model_config"), "use_cuda_graph", False))
        super().__init__(*args, **kwargs)

    def _route_to_cutlass(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.shape[0] >= self._PREFILL_VIA_CUTLASS_THRESHOLD

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        if self._route_to_cutlass(x):
            return CutlassFusedMoE.quantize_input(self, x, post_quant_comm=post_quant_comm, **kwargs)
        if isinstance(x, Fp4QuantizedTensor):
            raise ValueError("CuteDslB12xFusedMoE does not accept Fp4QuantizedTensor input")
        return x, None

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        if not self._route_to_cutlass(ctx.x):
            x, x_sf = CutlassFusedMoE.quantize_input(self, ctx.x, post_quant_comm=False)
            ctx = replace(ctx, x=x, x_sf=x_sf)
        return CutlassFusedMoE.run_moe(self, ctx, workspace=workspace)
