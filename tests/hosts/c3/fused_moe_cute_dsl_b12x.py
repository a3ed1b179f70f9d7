"""The host's own b12x: a class per quantization, that of NVFP4 on CUTLASS's leaf.  Here CUTLASS computes both paths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tensorrt_llm._torch.utils import ActivationType, Fp4QuantizedTensor
from tensorrt_llm.models.modeling_utils import QuantAlgo

from .cutlass import TrtllmCutlassNvfp4Impl
from .impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERejectReason, MoERunContext, MoEStaticCapability
from .interface import _reject


class CuteDslB12xFusedMoEBase:
    capabilities = MoEStaticCapability(supports_dwdp=True)
    _SUPPORTED_SM_VERSIONS = frozenset({120, 121})

    @classmethod
    def _check_b12x_common(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility | None:
        reasons = MoERejectReason
        if d.env.sm not in cls._SUPPORTED_SM_VERSIONS:
            return _reject(reasons.SM_UNSUPPORTED, f"{cls.__name__} requires SM120 or SM121, got SM{d.env.sm}")
        if p.dtype_act not in (torch.float16, torch.bfloat16):
            return _reject(reasons.DTYPE_UNSUPPORTED, f"{cls.__name__} does not support {p.dtype_act}")
        if p.swiglu_gptoss_style or p.activation_type not in (ActivationType.Relu2, ActivationType.Swiglu):
            return _reject(reasons.ACTIVATION_UNSUPPORTED, f"{cls.__name__} does not support {p.activation}")
        if not d.env.has_dep("flashinfer"):
            return _reject(reasons.DEP_MISSING, f"{cls.__name__} requires the flashinfer package")
        if d.eplb_enabled:
            return _reject(reasons.EPLB_UNSUPPORTED, f"{cls.__name__} does not support the MoE load balancer")
        if d.ep_size != 1 or (d.use_dp and d.parallel_size > 1):
            return _reject(reasons.TOPOLOGY_UNSUPPORTED, f"{cls.__name__} requires ep_size == 1 and no attention-DP")
        return None


CuteDslB12xFusedMoE = CuteDslB12xFusedMoEBase


class CuteDslB12xNvfp4FusedMoE(CuteDslB12xFusedMoEBase, TrtllmCutlassNvfp4Impl):
    _PREFILL_VIA_CUTLASS_THRESHOLD = 64

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        if p.quant_algo != QuantAlgo.NVFP4:
            return _reject(MoERejectReason.QUANT_UNSUPPORTED, f"{cls.__name__} only supports NVFP4, not {p.quant}")
        return cls._check_b12x_common(p, d) or MoEEligibility.ok()

    def _route_to_cutlass(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.shape[0] >= self._PREFILL_VIA_CUTLASS_THRESHOLD

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        if self._route_to_cutlass(x):
            return super().quantize_input(x, post_quant_comm=post_quant_comm, **kwargs)
        if isinstance(x, Fp4QuantizedTensor):
            raise ValueError(f"{type(self).__name__} does not accept Fp4QuantizedTensor input")
        return x, None

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        if not self._route_to_cutlass(ctx.x):
            x, x_sf = super().quantize_input(ctx.x, post_quant_comm=False)
            ctx = replace(ctx, x=x, x_sf=x_sf)
        return super().run_moe(ctx, workspace=workspace)
