"""What C1 and C2 do differently where their doubles share a file.  C2: one ``activation``."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._torch.utils import ActivationType, is_gated_activation
from tensorrt_llm.models.modeling_utils import QuantAlgo

from .activation import DEFAULT_MOE_ACTIVATION, ActivationParamShape, MoEActivationSupport, install_activation_params
from .impl_contract import MoEEligibility, MoERejectReason

INIT_LOAD_BALANCER = False
B12X_IS_CUTEDSL = False
ACTIVATIONS: Any = MoEActivationSupport(
    kinds=frozenset(
        {
            ActivationType.Swiglu,
            ActivationType.SwigluBias,
            ActivationType.Geglu,
            ActivationType.Relu2,
            ActivationType.Silu,
        }
    ),
    alpha_beta=ActivationParamShape.PER_EXPERT_TENSOR,
    limit=ActivationParamShape.PER_EXPERT_TENSOR,
)


def set_activation(module: Any, activation: Any = DEFAULT_MOE_ACTIVATION) -> None:
    module.activation, module.activation_type = activation, ActivationType(activation.kind)
    module.is_gated_activation = is_gated_activation(activation.kind)


def install_activation(module: Any) -> None:
    install_activation_params(module)


def operator_constants(module: Any) -> dict[str, Any]:
    return {"swiglu_alpha": module.act_alpha, "swiglu_beta": module.act_beta, "swiglu_limit": module.act_clamp}


def cutlass_rejection(problem: Any, deployment: Any) -> MoEEligibility | None:
    """``nvfp4_fc1_row_alignment_rejection``: gated FC1 of 128 rows each, uneven tensor parallelism abstains."""
    size, parts = problem.intermediate_size, max(deployment.tp_size, 1)
    if problem.quant_algo is not QuantAlgo.NVFP4 or size is None or not is_gated_activation(problem.activation_type):
        return None
    if size % parts or (size * 2 // parts) % 128 == 0:
        return None
    detail = f"NVFP4 MoE requires gated FC1 rows to be a multiple of 128, but they are {size * 2 // parts}"
    return MoEEligibility.no(MoERejectReason.SHAPE_UNALIGNED, detail)
