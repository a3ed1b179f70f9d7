"""``trtllm.cutlass.grouped_gemm.mxfp8``: SM100 and SM103; no other leaf serves the format."""

from __future__ import annotations

from typing import Any

import torch

from ..impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERunContext
from ..impl_identity import register_moe_impl
from ..quantization import MXFP8CutlassFusedMoEMethod
from .base import CutlassFusedMoEBase
from .eligibility import HP_DTYPES, SmSupport, check_cutlass_leaf
from .identity import cutlass_descriptor


@register_moe_impl
class TrtllmCutlassMxfp8Impl(CutlassFusedMoEBase):
    descriptor = cutlass_descriptor("mxfp8", "CUTLASS grouped GEMM over MXFP8 weights and activations.")
    scheduler_kind = descriptor.scheduler_kind
    capabilities = descriptor.capabilities
    input_requirement = descriptor.input_requirement
    sm_support = SmSupport(allowed=frozenset({100, 103}))
    supported_dtypes = HP_DTYPES
    supports_gptoss_style = True

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        return check_cutlass_leaf(cls, p, d)

    def _get_quant_method(self) -> Any:
        return MXFP8CutlassFusedMoEMethod()

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        raise NotImplementedError("of SM100 alone")

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        raise NotImplementedError("of SM100 alone")
