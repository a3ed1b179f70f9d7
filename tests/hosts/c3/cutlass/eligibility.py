"""The checks that each leaf's ``can_implement`` runs in turn; the leaf declares what they read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..impl_contract import MoEDeployment, MoEEligibility, MoEProblem, MoERejectReason
from ..interface import _reject

HP_DTYPES = frozenset({torch.float16, torch.bfloat16})
HP_DTYPES_WITH_FP8 = HP_DTYPES | {torch.float8_e4m3fn}


@dataclass(frozen=True)
class SmSupport:
    minimum: int | None = None
    allowed: frozenset[int] | None = None

    def accepts(self, sm: int) -> bool:
        return sm >= self.minimum if self.minimum is not None else sm in (self.allowed or ())


def identity_quant(problem_or_algo: str | None) -> str:
    return "none" if problem_or_algo is None else problem_or_algo.lower()


def check_cutlass_leaf(cls: Any, p: MoEProblem, d: MoEDeployment, *extra_gates: Any) -> MoEEligibility:
    reasons = MoERejectReason
    expected, actual = cls.descriptor.identity.quant, identity_quant(p.quant)
    if actual != expected:
        return _reject(reasons.QUANT_UNSUPPORTED, f"{cls.__name__} implements quant={expected}, got {actual}")
    if d.env.sm < 80 or not cls.sm_support.accepts(d.env.sm):
        return _reject(reasons.SM_UNSUPPORTED, f"{cls.__name__} does not run on SM{d.env.sm}")
    if p.dtype_act not in cls.supported_dtypes:
        return _reject(reasons.DTYPE_UNSUPPORTED, f"{cls.__name__} does not support {p.dtype_act}")
    if p.swiglu_gptoss_style and (not cls.supports_gptoss_style or (cls.rejects_gptoss_expert_bias and p.bias is True)):
        return _reject(reasons.ACTIVATION_UNSUPPORTED, f"{cls.__name__} cannot load a gpt-oss bias")
    if d.moe_lora_enabled and not cls.capabilities.supports_moe_lora:
        return _reject(reasons.LORA_UNSUPPORTED, f"{cls.__name__} does not fuse routed-expert MoE LoRA")
    for gate in extra_gates:
        rejection: MoEEligibility | None = gate(p, d)
        if rejection is not None:
            return rejection
    return MoEEligibility.ok()
