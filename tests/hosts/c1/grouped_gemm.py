"""The one call of ``torch.ops.trtllm.fused_moe``, with or without leaves."""

from __future__ import annotations

from typing import Any

import torch

from ._generation import operator_constants
from .impl_contract import MoERunContext, require_comm_plan


def run_grouped_gemm(impl: Any, ctx: MoERunContext) -> torch.Tensor:
    plan = require_comm_plan(impl, ctx)
    tuner_num_tokens = tuner_top_k = None
    if plan.enable_alltoall:
        rows = ctx.all_rank_num_tokens
        tuner_num_tokens = sum(rows) if rows is not None else ctx.x.shape[0] * impl.mapping.tp_size
        tuner_top_k = impl.routing_method.top_k
    results = torch.ops.trtllm.fused_moe(
        ctx.x,
        ctx.token_selected_experts,
        ctx.token_final_scales,
        impl.w3_w1_weight,
        impl.w3_w1_bias,
        impl.w2_weight,
        impl.w2_bias,
        ctx.output_dtype,
        quant_scales=list(impl.quant_scales),
        input_sf=ctx.x_sf,
        swizzled_input_sf=plan.input_sf_swizzled,
        **operator_constants(impl),
        tp_size=impl.tp_size,
        tp_rank=impl.tp_rank,
        ep_size=impl.ep_size,
        ep_rank=impl.ep_rank,
        cluster_size=impl.cluster_size,
        cluster_rank=impl.cluster_rank,
        enable_alltoall=plan.enable_alltoall,
        tuner_num_tokens=tuner_num_tokens,
        tuner_top_k=tuner_top_k,
        activation_type=int(impl.activation_type),
        out_tensor=plan.moe_output,
    )
    return plan.moe_output if plan.moe_output is not None else results[0]
