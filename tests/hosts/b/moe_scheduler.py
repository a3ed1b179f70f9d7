"""The calls into a backend in generation B; keywords go to ``CutlassFusedMoE`` alone, by its exact class."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import EventType, Fp4QuantizedTensor

from .fused_moe_cutlass import CutlassFusedMoE
from .other_backends import DenseGEMMFusedMoE, TRTLLMGenFusedMoE


class ExternalCommMoEScheduler:
    def __init__(self, moe: Any) -> None:
        self.moe = moe

    def forward(self, x: Any, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        moe = self.moe
        all_rank_num_tokens = kwargs.get("all_rank_num_tokens") or [x.shape[0]]
        self.do_finalize = kwargs.get("do_finalize", True)
        output_dtype = kwargs.get("output_dtype") if isinstance(x, Fp4QuantizedTensor) else x.dtype
        assert output_dtype is not None
        num_chunks = -(-sum(all_rank_num_tokens) // moe.moe_max_num_tokens)
        if num_chunks == 1:
            return self._forward_chunk_impl(x, router_logits, output_dtype, all_rank_num_tokens)
        quotient, remainder = divmod(x.shape[0], num_chunks)
        sizes = [quotient + 1] * remainder + [quotient] * (num_chunks - remainder)
        outputs = []
        if moe.aux_stream is not None:
            moe.event_dict[EventType.Main].record()
            with torch.cuda.stream(moe.aux_stream):
                moe.event_dict[EventType.Main].wait()
        for index, (chunk, logits) in enumerate(zip(x.split(sizes), router_logits.split(sizes), strict=True)):
            if moe.aux_stream is not None and index % 2 == 0:
                with torch.cuda.stream(moe.aux_stream):
                    outputs.append(self._forward_chunk_impl(chunk, logits, output_dtype, None))
            else:
                outputs.append(self._forward_chunk_impl(chunk, logits, output_dtype, None))
        if moe.aux_stream is not None:
            with torch.cuda.stream(moe.aux_stream):
                moe.event_dict[EventType.MoeChunkingOverlap].record()
            moe.event_dict[EventType.MoeChunkingOverlap].wait()
        return torch.cat(outputs)

    def _forward_chunk_impl(
        self, x: Any, router_logits: torch.Tensor, output_dtype: torch.dtype, all_rank_num_tokens: list[int] | None
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
        if moe.comm is not None and moe.comm.supports_post_quant_dispatch():
            x, x_sf = moe.backend.quantize_input(x)
            x, x_sf, token_selected_experts, token_final_scales = moe.comm.dispatch(
                x, x_sf, token_selected_experts, token_final_scales, all_rank_num_tokens or []
            )
        else:
            x, x_sf = moe.backend.quantize_input(x, post_quant_comm=False)
        result: torch.Tensor = moe.backend.run_moe(
            x=x,
            token_selected_experts=token_selected_experts,
            token_final_scales=token_final_scales,
            x_sf=x_sf,
            **self._get_backend_kwargs(output_dtype, all_rank_num_tokens),
        )
        if moe.comm is not None:
            return moe.comm.combine(result)
        if moe.parallel_size > 1 and moe.reduce_results:
            assert moe.all_reduce is not None
            return moe.all_reduce(result)
        return result

    def _get_backend_kwargs(self, output_dtype: torch.dtype, all_rank_num_tokens: list[int] | None) -> dict[str, Any]:
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
        elif isinstance(moe.backend, TRTLLMGenFusedMoE):
            kwargs["do_finalize"] = self.do_finalize
        return kwargs
