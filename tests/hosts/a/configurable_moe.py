"""``ConfigurableMoE`` of generation A: the calls into a backend, which it feeds by its exact class."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import EventType, Fp4QuantizedTensor

from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE
from .other_backends import CuteDslFusedMoE, DeepGemmFusedMoE
from .wrapper import Wrapper


class ConfigurableMoE(Wrapper):
    def _resolve(self, model_config: Any, override_quant_config: Any) -> tuple[type[MoE], Any]:
        from tensorrt_llm._torch.modules.fused_moe.create_moe import get_moe_cls

        return get_moe_cls(model_config, override_quant_config=override_quant_config), model_config

    def forward_impl(self, x: Any, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        all_rank_num_tokens = kwargs.get("all_rank_num_tokens") or [x.shape[0]]
        output_dtype = kwargs.get("output_dtype") if isinstance(x, Fp4QuantizedTensor) else x.dtype
        assert output_dtype is not None
        num_chunks = -(-sum(all_rank_num_tokens) // self.moe_max_num_tokens)
        if num_chunks == 1:
            return self._forward_chunk_impl(x, router_logits, output_dtype, all_rank_num_tokens)
        quotient, remainder = divmod(x.shape[0], num_chunks)
        sizes = [quotient + 1] * remainder + [quotient] * (num_chunks - remainder)
        outputs = []
        if self.aux_stream is not None:
            self.event_dict[EventType.Main].record()
            with torch.cuda.stream(self.aux_stream):
                self.event_dict[EventType.Main].wait()
        for index, (chunk, logits) in enumerate(zip(x.split(sizes), router_logits.split(sizes), strict=True)):
            if self.aux_stream is not None and index % 2 == 0:
                with torch.cuda.stream(self.aux_stream):
                    outputs.append(self._forward_chunk_impl(chunk, logits, output_dtype, None))
            else:
                outputs.append(self._forward_chunk_impl(chunk, logits, output_dtype, None))
        if self.aux_stream is not None:
            with torch.cuda.stream(self.aux_stream):
                self.event_dict[EventType.MoeChunkingOverlap].record()
            self.event_dict[EventType.MoeChunkingOverlap].wait()
        return torch.cat(outputs)

    def _forward_chunk_impl(
        self, x: Any, router_logits: torch.Tensor, output_dtype: torch.dtype, all_rank_num_tokens: list[int] | None
    ) -> torch.Tensor:
        if self.backend._supports_load_balancer():
            token_selected_experts, token_final_scales = self.routing_method.apply(router_logits)
            token_selected_experts = token_selected_experts.to(torch.int32)
            if isinstance(self.backend, CutlassFusedMoE):
                assert token_final_scales.dtype == torch.float32
            if self.apply_router_weight_on_input:
                x, token_final_scales = x * token_final_scales.to(x.dtype), None
        else:
            token_selected_experts = token_final_scales = None
        if self.comm is not None and self.comm.supports_post_quant_dispatch():
            x, x_sf = self.backend.quantize_input(x)
            x, x_sf, token_selected_experts, token_final_scales = self.comm.dispatch(
                x, x_sf, token_selected_experts, token_final_scales, all_rank_num_tokens or []
            )
        else:
            x, x_sf = self.backend.quantize_input(x, post_quant_comm=False)
        result: torch.Tensor = self.backend.run_moe(
            x=x,
            token_selected_experts=token_selected_experts,
            token_final_scales=token_final_scales,
            x_sf=x_sf,
            **self._get_backend_kwargs(output_dtype, all_rank_num_tokens),
        )
        if self.comm is not None:
            return self.comm.combine(result)
        if self.parallel_size > 1 and self.reduce_results:
            assert self.all_reduce is not None
            return self.all_reduce(result)
        return result

    def _get_backend_kwargs(self, output_dtype: torch.dtype, all_rank_num_tokens: list[int] | None) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        if self.backend.__class__ in (CutlassFusedMoE, DeepGemmFusedMoE, CuteDslFusedMoE):
            pass
        if self.backend.__class__ == CutlassFusedMoE:
            kwargs["is_sf_swizzled"] = self.comm is None or not self.comm.supports_post_quant_dispatch()
            kwargs["output_dtype"] = output_dtype
            kwargs["enable_alltoall"] = self.enable_alltoall
            if self.enable_alltoall:
                kwargs["tuner_num_tokens"] = sum(all_rank_num_tokens or [])
                kwargs["tuner_top_k"] = self.routing_method.experts_per_token
            kwargs["moe_output"] = None
        return kwargs
