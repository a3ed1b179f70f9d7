"""Which class serves a layer: tables that are read at call time, every candidate asked, every refusal kept.

C1 gives ``activation_type``, C2 ``activation`` and ``allow_degradation``; ``impl_id`` (C2) is not doubled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantConfig

from ...model_config import ModelConfig
from ...utils import ActivationType
from .fused_moe_cute_dsl_b12x import CuteDslB12xFusedMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .impl_contract import (
    MoEDeployment,
    MoEEnvironment,
    MoEProblem,
    MoERejection,
    MoERejectReason,
    MoEResolutionReport,
    canonical_activation,
    canonical_quant,
    canonical_routing,
)
from .impl_environment import collect_moe_environment
from .moe_load_balancer import get_moe_load_balancer
from .moe_lora import has_moe_lora_targets
from .other_backends import (
    CuteDslFusedMoE,
    DeepGemmFusedMoE,
    DenseGEMMFusedMoE,
    MarlinFusedMoE,
    MegaMoECuteDsl,
    MegaMoEDeepGemm,
    TritonFusedMoE,
    TRTLLMGenFusedMoE,
    VanillaMoE,
)
from .routing import BaseMoeRoutingMethod

WIDEEP_DEPRECATION_MESSAGE = "The WIDEEP MoE backend is deprecated and can no longer be selected."

IMPL_PRIORITY: tuple[Any, ...] = (
    CuteDslB12xFusedMoE,
    MegaMoEDeepGemm,
    MegaMoECuteDsl,
    CuteDslFusedMoE,
    TRTLLMGenFusedMoE,
    DeepGemmFusedMoE,
    DenseGEMMFusedMoE,
    MarlinFusedMoE,
    TritonFusedMoE,
    CutlassFusedMoE,
    VanillaMoE,
)
BACKEND_FAMILY: dict[str, frozenset[Any]] = {
    "CUTLASS": frozenset({CutlassFusedMoE}),
    "VANILLA": frozenset({VanillaMoE}),
    "MARLIN": frozenset({MarlinFusedMoE}),
    "CUTEDSL": frozenset({CuteDslB12xFusedMoE, CuteDslFusedMoE}),
    "DEEPGEMM": frozenset({DeepGemmFusedMoE}),
    "DENSEGEMM": frozenset({DenseGEMMFusedMoE}),
    "TRTLLM": frozenset({TRTLLMGenFusedMoE}),
    "TRITON": frozenset({TritonFusedMoE}),
    "MEGAMOE_DEEPGEMM": frozenset({MegaMoEDeepGemm}),
    "MEGAMOE_CUTEDSL": frozenset({MegaMoECuteDsl}),
}
FALLBACK_IMPL: Any = CutlassFusedMoE
NO_FALLBACK_BACKENDS = frozenset({"VANILLA"})


@dataclass(frozen=True)
class MoELayerShapes:
    num_experts: int | None
    hidden_size: int | None
    intermediate_size: int | None
    dtype: torch.dtype | None
    top_k: int | None


def derive_moe_layer_shapes(
    model_config: ModelConfig,
    *,
    num_experts: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    dtype: torch.dtype | None = None,
    top_k: int | None = None,
    routing: Any = None,
) -> MoELayerShapes:
    """What is given, else what the pretrained config says."""

    def known(given: Any, *names: str) -> Any:
        found = (getattr(model_config.pretrained_config, name, None) for name in names)
        return given if given is not None else next((value for value in found if value is not None), None)

    if top_k is None and isinstance(routing, BaseMoeRoutingMethod):
        top_k = routing.experts_per_token
    return MoELayerShapes(
        num_experts=known(num_experts, "num_experts", "n_routed_experts", "num_local_experts"),
        hidden_size=known(hidden_size, "hidden_size"),
        intermediate_size=known(intermediate_size, "moe_intermediate_size", "intermediate_size"),
        dtype=known(dtype, "torch_dtype"),
        top_k=known(top_k, "num_experts_per_tok", "experts_per_token"),
    )


def derive_shapes(facts: Any) -> None:
    """Complete the arguments of a layer or a backend."""
    names = ("num_experts", "hidden_size", "intermediate_size", "dtype")
    shapes = derive_moe_layer_shapes(
        facts.model_config, routing=facts.routing_method, **{name: getattr(facts, name) for name in names}
    )
    assert None not in (shapes.num_experts, shapes.hidden_size, shapes.intermediate_size)
    vars(facts).update({name: getattr(shapes, name) for name in names})


def infer_swiglu_gptoss_style(
    *,
    bias: bool = False,
    swiglu_alpha: torch.Tensor | None = None,
    swiglu_beta: torch.Tensor | None = None,
    activation_type: ActivationType | None = None,
) -> bool:
    return activation_type == ActivationType.SwigluBias or bool(bias or swiglu_alpha is not None or swiglu_beta is not None)


def build_moe_problem(
    model_config: ModelConfig,
    *,
    override_quant_config: QuantConfig | None = None,
    swiglu_gptoss_style: bool | None = None,
    bias: bool | None = None,
    activation_type: ActivationType | None = None,
    activation: Any = None,
    routing: Any = None,
    **shape: Any,
) -> MoEProblem:
    shapes = derive_moe_layer_shapes(model_config, routing=routing, **shape)
    quant_config = override_quant_config or model_config.quant_config
    constants = () if activation is None else vars(activation.constants()).items()
    names = {"limit": "clamp"}
    return MoEProblem(
        quant=canonical_quant(None if quant_config is None else quant_config.quant_algo),
        dtype_act=shapes.dtype if shapes.dtype is not None else torch.bfloat16,
        hidden_size=shapes.hidden_size,
        intermediate_size=shapes.intermediate_size,
        num_experts=shapes.num_experts,
        top_k=shapes.top_k,
        swiglu_gptoss_style=swiglu_gptoss_style,
        bias=bias,
        activation=canonical_activation(activation_type if activation is None else activation.kind),
        activation_constants=frozenset(names.get(name, name) for name, value in constants if value is not None),
        routing=canonical_routing(routing),
    )


def build_moe_deployment(
    model_config: ModelConfig, *, num_experts: int | None = None, environment: MoEEnvironment | None = None
) -> MoEDeployment:
    mapping = model_config.mapping
    eplb_enabled = get_moe_load_balancer() is not None
    num_slots = getattr(model_config.moe_load_balancer, "num_slots", None) if eplb_enabled else None
    return MoEDeployment(
        ep_size=mapping.moe_ep_size,
        tp_size=mapping.moe_tp_size,
        parallel_size=mapping.tp_size,
        cluster_size=mapping.moe_cluster_size,
        use_dp=mapping.enable_attention_dp,
        num_slots=num_slots or num_experts or 0,
        env=environment if environment is not None else collect_moe_environment(),
        eplb_enabled=eplb_enabled,
        moe_lora_enabled=has_moe_lora_targets(model_config.lora_config),
    )


def _candidates_for(backend: str) -> list[Any]:
    normalized = backend.upper()
    if normalized == "WIDEEP":
        raise ValueError(WIDEEP_DEPRECATION_MESSAGE)
    family = BACKEND_FAMILY.get(normalized)
    if family is None:
        raise ValueError(f"Unsupported moe backend: {backend}")
    candidates = [cls for cls in IMPL_PRIORITY if cls in family]
    if FALLBACK_IMPL not in family and normalized not in NO_FALLBACK_BACKENDS:
        candidates.append(FALLBACK_IMPL)
    return candidates


def _rejection(candidate: Any, problem: MoEProblem, deployment: MoEDeployment) -> MoERejection | None:
    """LoRA, then the candidate's own word, then (C2) what activations it declares."""
    name = candidate.__name__
    if deployment.moe_lora_enabled and not candidate.capabilities.supports_moe_lora:
        return MoERejection(name, MoERejectReason.LORA_UNSUPPORTED, f"{name} does not fuse routed-expert LoRA")
    eligibility = candidate.can_implement(problem, deployment)
    if not eligibility.eligible:
        return MoERejection(name, eligibility.reject_reason, eligibility.detail)
    support = getattr(candidate, "activation_support", None)
    lacking = () if support is None else support.lacking(problem.activation_type, problem.activation_constants)
    if lacking:
        return MoERejection(name, MoERejectReason.ACTIVATION_UNSUPPORTED, f"{name} has no activation {', '.join(lacking)}")
    return None


def resolve_moe_impl(
    model_config: ModelConfig,
    *,
    problem: MoEProblem | None = None,
    deployment: MoEDeployment | None = None,
    layer_idx: int | None = None,
    allow_degradation: bool = True,
    **layer: Any,
) -> MoEResolutionReport:
    if problem is None:
        problem = build_moe_problem(model_config, **layer)
    if deployment is None:
        deployment = build_moe_deployment(model_config, num_experts=problem.num_experts)
    requested = model_config.moe_backend
    rejected: list[MoERejection] = []
    eligible: list[Any] = []
    for candidate in _candidates_for(requested):
        rejection = _rejection(candidate, problem, deployment)
        if rejection is None:
            eligible.append(candidate)
        else:
            rejected.append(rejection)
    pinned = bool(eligible) and eligible[0] in BACKEND_FAMILY[requested.upper()]
    report = MoEResolutionReport(
        problem=problem,
        deployment=deployment,
        winner=eligible[0].__name__ if eligible else None,
        rejected=tuple(rejected),
        eligible=tuple(cls.__name__ for cls in eligible),
        selected_by="failed" if not eligible else "pinned" if pinned else "heuristic",
        requested=requested,
        env_fingerprint=deployment.env.fingerprint(),
    )
    if report.degraded:
        if not allow_degradation:
            raise ValueError(f"MoE backend {requested} was requested with degradation disallowed: {report.describe()}")
        logger.warning("MoE backend %s cannot serve this layer: %s", requested, report.describe())
    return report


def impl_class_for(report: MoEResolutionReport) -> Any:
    if report.winner is None:
        raise ValueError(f"no MoE implementation can serve this layer. {report.describe()}")
    for candidate in IMPL_PRIORITY:
        if candidate.__name__ == report.winner:
            return candidate
    raise ValueError(f"resolution report names legacy backend {report.winner!r}, which no candidate class claims")


def resolve_moe_cls(model_config: ModelConfig, **kwargs: Any) -> Any:
    return impl_class_for(resolve_moe_impl(model_config, **kwargs))
