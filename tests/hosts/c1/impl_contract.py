# SPDX-License-Identifier: Apache-2.0
"""The records by which a backend is chosen and called, with C2's fields: C1 lacks capabilities and the end of ``MoECommPlan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensorrt_llm.models.modeling_utils import QuantAlgo


@dataclass(frozen=True)
class MoEStaticCapability:
    supports_moe_lora: bool = False
    supports_eplb: bool = False
    supports_expert_bias: bool = False
    supports_apply_router_weight_on_input: bool = False


@dataclass(frozen=True)
class MoEInputRequirement:
    routing_scales_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class MoEProblem:
    quant_algo: QuantAlgo | None
    swiglu_gptoss_style: bool
    bias: bool


@dataclass(frozen=True)
class MoEDeployment:
    sm: int
    ep_size: int
    moe_lora_enabled: bool


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


def require_comm_plan(impl, ctx):
    assert ctx.comm_plan is not None, f"{type(impl).__name__}.run_moe needs ctx.comm_plan"
    return ctx.comm_plan
