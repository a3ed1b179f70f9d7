"""The records by which a backend is chosen and called, with C2's fields: C1 lacks capabilities and the end of ``MoECommPlan``."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from tensorrt_llm._torch.utils import ActivationType
from tensorrt_llm.models.modeling_utils import QuantAlgo

from .routing import RoutingMethodType


@dataclass(frozen=True)
class MoEStaticCapability:
    supports_moe_lora: bool = False
    supports_graph_padding_trim: bool = False
    supports_dwdp: bool = False
    supports_eplb: bool = False
    supports_expert_bias: bool = False
    supports_apply_router_weight_on_input: bool = False
    supports_deep_ep_direct_metadata: bool = False


@dataclass(frozen=True)
class MoEInputRequirement:
    routing_scales_dtype: torch.dtype | None = None
    requires_run_moe_workspace: bool = False
    requires_sanitized_expert_ids: bool = False
    onesided_workspace_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class MoEProblem:
    quant: str | None
    dtype_act: torch.dtype
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_experts: int | None = None
    top_k: int | None = None
    swiglu_gptoss_style: bool | None = None
    bias: bool | None = None
    activation: str = "Swiglu"
    activation_constants: frozenset[str] = frozenset()
    routing: str | None = None

    @property
    def activation_type(self) -> ActivationType:
        return ActivationType[self.activation]

    @property
    def quant_algo(self) -> QuantAlgo | None:
        return None if self.quant is None else QuantAlgo(self.quant)


def canonical_quant(quant_algo: QuantAlgo | None) -> str | None:
    """Mixed precision counts as none: what a layer has is not known yet."""
    if quant_algo is None or quant_algo is QuantAlgo.MIXED_PRECISION:
        return None
    return str((QuantAlgo.NVFP4 if quant_algo is QuantAlgo.NVFP4_AWQ else quant_algo).value)


def canonical_activation(activation_type: ActivationType | None) -> str:
    return ActivationType(ActivationType.Swiglu if activation_type is None else activation_type).name


def canonical_routing(routing: Any) -> str | None:
    if routing is None:
        return None
    return RoutingMethodType(getattr(routing, "routing_method_type", routing)).name


@dataclass(frozen=True)
class MoEEnvironment:
    sm: int
    available_deps: tuple[str, ...] = ()
    env_flags: tuple[tuple[str, str], ...] = ()

    def has_dep(self, name: str) -> bool:
        return name in self.available_deps

    def fingerprint(self) -> str:
        return hashlib.sha256(repr((self.sm, sorted(self.available_deps), self.env_flags)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class MoEDeployment:
    ep_size: int
    tp_size: int
    use_dp: bool
    num_slots: int
    env: MoEEnvironment
    parallel_size: int
    cluster_size: int = 1
    eplb_enabled: bool = False
    moe_lora_enabled: bool = False


class MoERejectReason(str, Enum):
    QUANT_UNSUPPORTED = "quant_unsupported"
    DTYPE_UNSUPPORTED = "dtype_unsupported"
    SM_UNSUPPORTED = "sm_unsupported"
    DEP_MISSING = "dep_missing"
    SHAPE_UNALIGNED = "shape_unaligned"
    TOPOLOGY_UNSUPPORTED = "topology_unsupported"
    LORA_UNSUPPORTED = "lora_unsupported"
    ACTIVATION_UNSUPPORTED = "activation_unsupported"
    EPLB_UNSUPPORTED = "eplb_unsupported"
    PATH_NOT_ENABLED = "path_not_enabled"


@dataclass(frozen=True)
class MoEEligibility:
    eligible: bool
    reject_reason: MoERejectReason | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if self.eligible == (self.reject_reason is not None):
            raise ValueError("a rejection must name a MoERejectReason, and nothing else may")

    def __bool__(self) -> bool:
        return self.eligible

    @classmethod
    def ok(cls) -> MoEEligibility:
        return cls(eligible=True)

    @classmethod
    def no(cls, reason: MoERejectReason, detail: str) -> MoEEligibility:
        return cls(eligible=False, reject_reason=reason, detail=detail)


@dataclass(frozen=True)
class MoERejection:
    legacy_backend: str
    reason: MoERejectReason
    detail: str = ""


@dataclass(frozen=True)
class MoEResolutionReport:
    problem: MoEProblem
    deployment: MoEDeployment
    winner: str | None
    selected_by: str
    rejected: tuple[MoERejection, ...] = ()
    eligible: tuple[str, ...] = ()
    requested: str | None = None
    env_fingerprint: str = ""

    @property
    def degraded(self) -> bool:
        return self.selected_by == "heuristic"

    @property
    def degraded_from(self) -> MoERejection | None:
        return self.rejected[-1] if self.degraded and self.rejected else None

    def describe(self) -> str:
        reasons = "; ".join(f"{r.legacy_backend}: {r.reason.value} ({r.detail})" for r in self.rejected)
        return f"{self.requested} -> {self.winner} ({self.selected_by}); rejected: {reasons or 'none'}"


@dataclass(frozen=True)
class MoECommPlan:
    input_sf_swizzled: bool
    enable_alltoall: bool
    moe_output: torch.Tensor | None
    payload_in_workspace: bool
    recv_expert_count: torch.Tensor | None = None
    deep_ep_expert_capacity: int | None = None
    use_deep_ep_direct_metadata: bool = False


@dataclass(frozen=True)
class MoERunContext:
    token_selected_experts: torch.Tensor | None
    token_final_scales: torch.Tensor | None
    x: Any
    x_sf: torch.Tensor | None
    output_dtype: torch.dtype | None = None
    do_finalize: bool = True
    lora_params: dict[str, Any] | None = None
    router_logits: torch.Tensor | None = None
    all_rank_num_tokens: list[int] | None = None
    comm_plan: MoECommPlan | None = None


def require_comm_plan(impl: object, ctx: MoERunContext) -> MoECommPlan:
    assert ctx.comm_plan is not None, f"{type(impl).__name__}.run_moe needs ctx.comm_plan"
    return ctx.comm_plan
