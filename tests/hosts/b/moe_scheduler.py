"""The calls into a backend in generation B; keywords go to ``CutlassFusedMoE`` alone, by its exact class."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from tensorrt_llm._torch.utils import EventType, Fp4QuantizedTensor

from .fused_moe_cutlass import CutlassFusedMoE
from .other_backends import DenseGEMMFusedMoE, TRTLLMGenFusedMoE


def split_chunk(tokens: int, chunks: int) -> list[int]:
    quotient, remainder = divmod(tokens, chunks)
    return [quotient + 1] * remainder + [quotient] * (chunks - remainder)


class ExternalCommMoEScheduler:
    def __init__(self, moe: Any) -> None:
        self.moe = moe

    def forward(
        self,
        x: Any,
        router_logits: torch.Tensor,
        *,
        do_finalize: bool = True,
        output_dtype: torch.dtype | None = None,
        all_rank_num_tokens: list[int] | None = None,
        use_dp_padding: bool | None = None,
        lora_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        moe = self.moe
        if not isinstance(x, Fp4QuantizedTensor):
            output_dtype = x.dtype
        assert output_dtype is not None
        counts = all_rank_num_tokens if all_rank_num_tokens is not None else [x.shape[0]]
        padded = [max(counts)] * len(counts) if use_dp_padding else counts
        num_chunks = -(-sum(padded) // moe.moe_max_num_tokens)
        rest = (output_dtype, use_dp_padding, do_finalize, lora_params)
        if num_chunks == 1:
            outputs = self._forward_chunk_impl(x, router_logits, padded, *rest)
        else:
            outputs = self._forward_multiple_chunks(x, router_logits, num_chunks, padded, *rest)
        if moe.use_dp and moe.parallel_size > 1:
            outputs = outputs[: counts[moe.mapping.tp_rank]]
        return outputs

    def _forward_multiple_chunks(
        self, x: Any, router_logits: torch.Tensor, num_chunks: int, counts: list[int], *rest: Any
    ) -> torch.Tensor:
        """Even chunks on the auxiliary stream, where there is one; the first stands in for one that is empty (attention-DP)."""
        moe, rank = self.moe, self.moe.mapping.tp_rank
        of_chunk: list[Any] = [None] * num_chunks
        sizes = split_chunk(x.shape[0], num_chunks)
        if moe.use_dp:
            of_rank = [split_chunk(count, num_chunks) for count in counts]
            of_chunk = [[sizes[index] for sizes in of_rank] for index in range(num_chunks)]
            sizes = of_rank[rank]
            if moe.enable_alltoall:
                of_chunk = [[count or 1 for count in chunk] for chunk in of_chunk]
        chunks = list(zip(x.split(sizes), router_logits.split(sizes), of_chunk, strict=True))
        assert sizes[0] or not moe.use_dp, "chunk 0 shouldn't be empty"
        two_streams = not moe.enable_alltoall and moe.aux_stream is not None
        if two_streams:
            moe.event_dict[EventType.Main].record()
            with torch.cuda.stream(moe.aux_stream):
                moe.event_dict[EventType.Main].wait()
        outputs = []
        for index, (size, chunk) in enumerate(zip(sizes, chunks, strict=True)):
            if moe.use_dp and not size:
                chunk[2][rank] = chunks[0][2][rank]
                chunk = (*chunks[0][:2], chunk[2])
            with torch.cuda.stream(moe.aux_stream) if two_streams and index % 2 == 0 else nullcontext():
                output = self._forward_chunk_impl(*chunk, *rest)
            if size or not moe.use_dp:
                outputs.append(output)
        if two_streams:
            with torch.cuda.stream(moe.aux_stream):
                moe.event_dict[EventType.MoeChunkingOverlap].record()
            moe.event_dict[EventType.MoeChunkingOverlap].wait()
        return torch.cat(outputs)

    def _forward_chunk_impl(
        self,
        x: Any,
        router_logits: torch.Tensor,
        all_rank_num_tokens: list[int] | None,
        output_dtype: torch.dtype,
        use_dp_padding: bool | None,
        do_finalize: bool,
        lora_params: dict[str, Any] | None,
    ) -> torch.Tensor:
        moe = self.moe
        if moe.backend._supports_load_balancer():
            token_selected_experts, token_final_scales = moe.routing_method.apply(router_logits)
            token_selected_experts = token_selected_experts.to(torch.int32)
            if isinstance(moe.backend, (CutlassFusedMoE, DenseGEMMFusedMoE)):
                assert token_final_scales.dtype == torch.float32
            if moe.apply_router_weight_on_input:
                x, token_final_scales = x * token_final_scales.to(x.dtype), None
        else:
            token_selected_experts = token_final_scales = None
        post_quant = moe.comm is not None and moe.comm.supports_post_quant_dispatch()
        x_sf = None
        if post_quant:
            x, x_sf = moe.backend.quantize_input(x)
        if moe.comm is not None:
            x, x_sf, token_selected_experts, token_final_scales = moe.comm.dispatch(
                hidden_states=x,
                hidden_states_sf=x_sf,
                token_selected_slots=token_selected_experts,
                token_final_scales=token_final_scales,
                all_rank_num_tokens=all_rank_num_tokens,
                use_dp_padding=use_dp_padding,
            )
        if not post_quant:
            x, x_sf = moe.backend.quantize_input(x, post_quant_comm=False)
        result: torch.Tensor = moe.backend.run_moe(
            x=x,
            token_selected_experts=token_selected_experts,
            token_final_scales=token_final_scales,
            x_sf=x_sf,
            **self._get_backend_kwargs(output_dtype, all_rank_num_tokens, do_finalize, lora_params),
        )
        if moe.comm is not None:
            assert all_rank_num_tokens is not None
            return moe.comm.combine(result, all_rank_max_num_tokens=max(all_rank_num_tokens))
        if moe.parallel_size > 1 and moe.reduce_results:
            assert moe.all_reduce is not None
            return moe.all_reduce(result)
        return result

    def _get_backend_kwargs(
        self,
        output_dtype: torch.dtype,
        all_rank_num_tokens: list[int] | None,
        do_finalize: bool,
        lora_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        moe = self.moe
        kwargs: dict[str, Any] = {}
        if moe.backend.__class__ == CutlassFusedMoE:
            kwargs["is_sf_swizzled"] = moe.comm is None or not moe.comm.supports_post_quant_dispatch()
            kwargs["output_dtype"] = output_dtype
            kwargs["enable_alltoall"] = moe.enable_alltoall
            if moe.enable_alltoall:
                kwargs["tuner_num_tokens"] = sum(all_rank_num_tokens or [])
                kwargs["tuner_top_k"] = moe.routing_method.experts_per_token
            kwargs["moe_output"] = None
            kwargs["lora_params"] = lora_params
        elif isinstance(moe.backend, TRTLLMGenFusedMoE):
            kwargs["do_finalize"] = do_finalize
        return kwargs
