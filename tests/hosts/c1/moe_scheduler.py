"""The order of a call from C1 on: routing, quantization before or after communication, ``run_moe(ctx, workspace=)``, sum."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from tensorrt_llm._torch.utils import EventType

from .impl_contract import MoECommPlan, MoERunContext
from .interface import FORCE_SEPARATED_ROUTING, MoESchedulerKind


class MoEScheduler(ABC):
    def __init__(self, moe: Any) -> None:
        self.moe = moe

    @abstractmethod
    def forward(self, x: Any, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor: ...


class ExternalCommMoEScheduler(MoEScheduler):
    def forward(
        self,
        x: Any,
        router_logits: torch.Tensor,
        *,
        do_finalize: bool,
        output_dtype: torch.dtype | None,
        all_rank_num_tokens: list[int] | None,
        use_dp_padding: bool | None,
        input_ids: torch.Tensor | None = None,
        lora_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        moe = self.moe
        counts = all_rank_num_tokens if all_rank_num_tokens is not None else [x.shape[0]]
        padded = [max(counts)] * len(counts) if use_dp_padding else counts
        num_chunks = moe.calculate_num_chunks(padded)
        if num_chunks > 1 and moe.backend.capabilities.supports_moe_lora and moe.backend._moe_lora_active(lora_params):
            raise NotImplementedError("Routed-expert MoE LoRA does not support multi-chunk execution")
        rest = (output_dtype, do_finalize, use_dp_padding, lora_params)
        if num_chunks == 1:
            outputs = self._forward_chunk_impl(x, router_logits, input_ids, padded, *rest)
        else:
            outputs = self._forward_multiple_chunks(x, router_logits, input_ids, padded, num_chunks, *rest)
        if moe.use_dp and moe.parallel_size > 1:
            outputs = outputs[: counts[moe.mapping.tp_rank]]
        return outputs

    def _forward_multiple_chunks(
        self, x: Any, router_logits: torch.Tensor, input_ids: Any, counts: list[int], num_chunks: int, *rest: Any
    ) -> torch.Tensor:
        """Even chunks on the auxiliary stream, odd ones on the current one, where there are two."""
        moe = self.moe
        of_chunk: list[list[int] | None] = [None] * num_chunks
        sizes = moe.split_chunk(x.shape[0], num_chunks)
        if moe.use_dp:
            of_rank = [moe.split_chunk(count, num_chunks) for count in counts]
            of_chunk = [[rank[index] for rank in of_rank] for index in range(num_chunks)]
            sizes = of_rank[moe.mapping.tp_rank]
        two_streams = not moe.enable_alltoall and moe.aux_stream is not None
        if two_streams:
            moe.event_dict[EventType.Main].record()
            with torch.cuda.stream(moe.aux_stream):
                moe.event_dict[EventType.Main].wait()
        tokens = input_ids.split(sizes) if input_ids is not None else [None] * num_chunks
        outputs = []
        for index, chunk in enumerate(zip(x.split(sizes), router_logits.split(sizes), tokens, of_chunk, strict=True)):
            with torch.cuda.stream(moe.aux_stream) if two_streams and index % 2 == 0 else nullcontext():
                outputs.append(self._forward_chunk_impl(*chunk, *rest))
        if two_streams:
            with torch.cuda.stream(moe.aux_stream):
                moe.event_dict[EventType.MoeChunkingOverlap].record()
            moe.event_dict[EventType.MoeChunkingOverlap].wait()
        return torch.cat(outputs)

    def _forward_chunk_impl(
        self,
        x: Any,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None,
        all_rank_num_tokens: list[int] | None,
        output_dtype: torch.dtype | None,
        do_finalize: bool,
        use_dp_padding: bool | None,
        lora_params: dict[str, Any] | None,
    ) -> torch.Tensor:
        moe = self.moe
        rows = x.shape[0]
        if moe.comm is not None and all_rank_num_tokens and 0 in all_rank_num_tokens and max(all_rank_num_tokens):
            # A rank without tokens sends one of zeros, whose result it drops.
            all_rank_num_tokens = [max(count, 1) for count in all_rank_num_tokens]
            if not rows:
                x, router_logits = x.new_zeros(1, x.shape[1]), router_logits.new_zeros(1, router_logits.shape[1])
        backend, requirement = moe.backend, moe.backend.input_requirement
        ids = scales = None
        if (
            backend._supports_load_balancer()
            or moe.routing_method.requires_separated_routing
            or moe.comm is not None
            or FORCE_SEPARATED_ROUTING
        ):
            ids, scales = moe.routing_method.apply(router_logits, input_ids)
            ids = ids.to(torch.int32)
            assert ids.shape[1] == moe.routing_method.experts_per_token
            assert ids.shape == scales.shape
            if requirement.routing_scales_dtype is torch.float32:
                assert scales.dtype == torch.float32, f"{type(backend).__name__} requires float32 routing scales"
            if moe.apply_router_weight_on_input:
                x, scales = x * scales.to(x.dtype), None
        post_quant = moe.comm is not None and moe.comm.supports_post_quant_dispatch()
        x_sf = None
        if post_quant:
            x, x_sf = backend.quantize_input(x)
        if moe.comm is not None:
            x, x_sf, ids, scales = moe.comm.dispatch(
                hidden_states=x,
                hidden_states_sf=x_sf,
                token_selected_slots=ids,
                token_final_scales=scales,
                all_rank_num_tokens=all_rank_num_tokens,
                use_dp_padding=use_dp_padding,
            )
        if not post_quant:
            x, x_sf = backend.quantize_input(x, post_quant_comm=False)
        plan = MoECommPlan(
            input_sf_swizzled=not post_quant,
            enable_alltoall=moe.enable_alltoall,
            moe_output=None,
            payload_in_workspace=False,
        )
        context = MoERunContext(
            token_selected_experts=ids,
            token_final_scales=scales,
            x=x,
            x_sf=x_sf,
            output_dtype=output_dtype,
            do_finalize=do_finalize,
            lora_params=lora_params if backend.capabilities.supports_moe_lora else None,
            router_logits=router_logits,
            all_rank_num_tokens=all_rank_num_tokens,
            comm_plan=plan,
        )
        result: torch.Tensor = backend.run_moe(context, workspace=None)
        if moe.comm is not None:
            assert all_rank_num_tokens is not None
            result = moe.comm.combine(result, all_rank_max_num_tokens=max(all_rank_num_tokens))
        elif moe.parallel_size > 1 and moe.reduce_results:
            result = moe.all_reduce(result)
        return result[:rows]


def create_moe_scheduler(moe: Any) -> MoEScheduler:
    kind = moe.backend.scheduler_kind
    if kind is MoESchedulerKind.EXTERNAL_COMM:
        return ExternalCommMoEScheduler(moe)
    raise ValueError(f"the double has no scheduler of kind {kind!r}, as {type(moe.backend).__name__} needs")
