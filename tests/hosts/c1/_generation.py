"""What C1 and C2 do differently where their doubles share a file.  C1: ``activation_type`` and ``swiglu_*``, one by one."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import ActivationType, is_gated_activation

INIT_LOAD_BALANCER = True
"""Default of ``init_load_balancer``, which no execution unit may be built with."""
B12X_IS_CUTEDSL = True
"""The host's b12x class is a ``CuteDslFusedMoE``."""
ACTIVATIONS: Any = None
"""``activation_support`` of the backends; None abstains."""


def set_activation(
    module: Any,
    activation_type: ActivationType = ActivationType.Swiglu,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    swiglu_limit: torch.Tensor | None = None,
    swiglu_limit_scalar: float | None = None,
) -> None:
    module.activation_type = int(activation_type)
    module.is_gated_activation = is_gated_activation(activation_type)
    module.swiglu_alpha, module.swiglu_beta = swiglu_alpha, swiglu_beta
    module.swiglu_limit, module.swiglu_limit_scalar = swiglu_limit, swiglu_limit_scalar


def install_activation(module: Any) -> None:
    pass


def operator_constants(module: Any) -> dict[str, Any]:
    """Arguments of ``torch.ops.trtllm.fused_moe``."""
    return {name: getattr(module, name) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")}


def cutlass_rejection(problem: Any, deployment: Any) -> Any:
    """What ``CutlassFusedMoE.can_implement`` of this generation alone refuses."""
    return None
