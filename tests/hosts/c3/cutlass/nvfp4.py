"""``trtllm.cutlass.grouped_gemm.nvfp4``."""

from __future__ import annotations

from typing import Any

import torch

from .._generation import cutlass_rejection
from ..impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERunContext
from ..impl_identity import register_moe_impl
from ..quantization import NVFP4CutlassFusedMoEMethod
from .base import CutlassFusedMoEBase
from .eligibility import HP_DTYPES_WITH_FP8, SmSupport, check_cutlass_leaf
from .grouped_gemm import run_grouped_gemm
from .identity import cutlass_descriptor
from .input_quant import quantize_nvfp4


@register_moe_impl
class TrtllmCutlassNvfp4Impl(CutlassFusedMoEBase):
    descriptor = cutlass_descriptor("nvfp4", "CUTLASS grouped GEMM over NVFP4 weights and activations, Blackwell.")
    scheduler_kind = descriptor.scheduler_kind
    capabilities = descriptor.capabilities
    input_requirement = descriptor.input_requirement
    sm_support = SmSupport(allowed=frozenset({100, 103, 120, 121}))
    supported_dtypes = HP_DTYPES_WITH_FP8
    supports_gptoss_style = True
    rejects_gptoss_expert_bias = True

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        return check_cutlass_leaf(cls, p, d, cutlass_rejection)

    def _get_quant_method(self) -> Any:
        return NVFP4CutlassFusedMoEMethod()

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        return quantize_nvfp4(self, x, post_quant_comm)

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        return run_grouped_gemm(self, ctx)
