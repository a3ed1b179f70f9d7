"""``trtllm.cutlass.grouped_gemm.none``."""

from __future__ import annotations

from typing import Any

import torch

from ..impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERunContext
from ..impl_identity import register_moe_impl
from ..quantization import UnquantizedFusedMoEMethod
from .base import CutlassFusedMoEBase
from .eligibility import HP_DTYPES, SmSupport, check_cutlass_leaf
from .grouped_gemm import run_grouped_gemm
from .identity import CUTLASS_LORA_CAPABILITIES, cutlass_descriptor


@register_moe_impl
class TrtllmCutlassUnquantizedImpl(CutlassFusedMoEBase):
    descriptor = cutlass_descriptor("none", "CUTLASS grouped GEMM.", capabilities=CUTLASS_LORA_CAPABILITIES)
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
        return UnquantizedFusedMoEMethod()

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        return x, None

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        return run_grouped_gemm(self, ctx)

    def _moe_lora_active(self, lora_params: dict[str, Any] | None) -> bool:
        return False
