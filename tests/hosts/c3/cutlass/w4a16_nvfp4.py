"""``trtllm.cutlass.grouped_gemm.w4a16_nvfp4``."""

from __future__ import annotations

from typing import Any

import torch

from ..impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERunContext
from ..impl_identity import register_moe_impl
from .base import CutlassFusedMoEBase
from .eligibility import HP_DTYPES, SmSupport, check_cutlass_leaf
from .grouped_gemm import run_grouped_gemm
from .identity import CUTLASS_CAPABILITIES, cutlass_descriptor


@register_moe_impl
class TrtllmCutlassW4a16Nvfp4Impl(CutlassFusedMoEBase):
    descriptor = cutlass_descriptor("w4a16_nvfp4", "CUTLASS grouped GEMM.", capabilities=CUTLASS_CAPABILITIES)
    scheduler_kind = descriptor.scheduler_kind
    capabilities = descriptor.capabilities
    input_requirement = descriptor.input_requirement
    sm_support = SmSupport(minimum=80)
    supported_dtypes = HP_DTYPES
    supports_gptoss_style = True

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        return check_cutlass_leaf(cls, p, d)

    def _get_quant_method(self) -> Any:
        raise ValueError("Unsupported quantization mode: W4A16_NVFP4")  # of which the doubles have no method

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        return x, None

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        return run_grouped_gemm(self, ctx)
