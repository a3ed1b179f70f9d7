# SPDX-License-Identifier: Apache-2.0
"""A call from C1 on: ``run_moe(ctx, workspace=)``, and a rank without tokens sends one of zeros."""

import torch
from tensorrt_llm._scheduling import Scheduler
from tensorrt_llm._torch.route_capture import get_active_route_capture

from .impl_contract import MoECommPlan, MoERunContext


class ExternalCommMoEScheduler(Scheduler):
    def rows(self, counts):
        """With attention-DP every rank counts as the fullest one."""
        if self.moe.use_dp and self.moe.comm is not None:
            return len(counts) * max(counts)
        (rows,) = counts
        return rows

    def forward_chunk(self, x, router_logits, input_ids, counts, **call):
        rows = x.shape[0]
        if self.moe.comm is not None and counts and 0 in counts and max(counts):
            counts = [max(count, 1) for count in counts]
            if not rows:
                x, router_logits = x.new_zeros(1, x.shape[1]), router_logits.new_zeros(1, router_logits.shape[1])
        return super().forward_chunk(x, router_logits, input_ids, counts, **call)[:rows]

    def separates(self):
        moe = self.moe
        return super().separates() or moe.routing_method.requires_separated_routing or moe.comm is not None

    def route(self, router_logits, input_ids):
        ids, scales = self.moe.routing_method.apply(router_logits, input_ids)
        if (capture := get_active_route_capture()) is not None:
            capture(self.moe.layer_idx, ids)
        assert ids.shape == scales.shape
        assert ids.shape[1] == self.moe.routing_method.experts_per_token
        return ids, scales

    def check(self, scales):
        if self.backend.input_requirement.routing_scales_dtype is torch.float32:
            assert scales.dtype == torch.float32, f"{type(self.backend).__name__} requires float32 routing scales"

    def run(self, arguments, counts, *, swizzled, lora_params=None, **call):
        moe, backend = self.moe, self.backend
        plan = MoECommPlan(
            input_sf_swizzled=swizzled, enable_alltoall=moe.enable_alltoall, moe_output=None, payload_in_workspace=False
        )
        context = MoERunContext(
            **arguments,
            **call,
            lora_params=lora_params if backend.capabilities.supports_moe_lora else None,
            all_rank_num_tokens=counts,
            comm_plan=plan,
        )
        return backend.run_moe(context, workspace=None)


def create_moe_scheduler(moe):
    return ExternalCommMoEScheduler(moe, moe.backend)
