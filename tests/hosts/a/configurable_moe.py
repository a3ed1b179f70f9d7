"""``ConfigurableMoE`` of generation A: asks for the class again, and feeds a backend by its exact class."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import AuxStreamType, EventType, Fp4QuantizedTensor

from ...model_config import ModelConfig
from .communication import AllGatherReduceScatter, CommunicationFactory
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE
from .other_backends import CuteDslFusedMoE, DeepGemmFusedMoE
from .routing import BaseMoeRoutingMethod

_SYNCHRONIZED = (
    "layer_idx",
    "layer_idx_str",
    "num_slots",
    "layer_load_balancer",
    "repeat_count",
    "repeat_idx",
    "initial_local_expert_ids",
    "initial_global_assignments",
    "slot_start",
    "slot_end",
    "expert_size_per_partition",
)


class ConfigurableMoE(MoE):
    def __init__(
        self,
        *,
        routing_method: BaseMoeRoutingMethod,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        aux_stream_dict: Any = None,
        weight_loading_mode: Any = None,
        apply_router_weight_on_input: bool = False,
        layer_idx: int | None = None,
        override_quant_config: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            routing_method=routing_method,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=dtype,
            reduce_results=reduce_results,
            model_config=model_config,
            weight_loading_mode=weight_loading_mode,
            layer_idx=layer_idx,
            **kwargs,
        )
        self.model_config = model_config
        self.aux_stream_dict = aux_stream_dict
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.backend: Any = self._build(model_config, override_quant_config, kwargs)
        for name in _SYNCHRONIZED:
            setattr(self.backend, name, getattr(self, name))
        if not model_config.skip_create_weights_in_init:
            self.backend.create_weights()
        self.comm = CommunicationFactory.create_strategy(model_config)
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self.aux_stream, self.event_dict = None, None
        if self.moe_max_num_tokens < model_config.max_num_tokens * model_config.mapping.dp_size and torch.cuda.is_available():
            self.aux_stream = (aux_stream_dict or {}).get(AuxStreamType.MoeChunkingOverlap) or torch.cuda.Stream()
            self.event_dict = {key: torch.cuda.Event() for key in (EventType.Main, EventType.MoeChunkingOverlap)}
        self._weights_removed = True

    def _build(self, model_config: Any, override_quant_config: Any, kwargs: dict[str, Any]) -> MoE:
        from tensorrt_llm._torch.modules.fused_moe.create_moe import create_moe_backend, get_moe_cls

        moe_cls = get_moe_cls(model_config, override_quant_config=override_quant_config)
        skip = model_config.skip_create_weights_in_init
        model_config._frozen = False
        model_config.skip_create_weights_in_init = True
        model_config._frozen = True
        backend = create_moe_backend(
            moe_cls=moe_cls,
            routing_method=self.routing_method,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            dtype=self.dtype,
            reduce_results=self.reduce_results,
            model_config=model_config,
            aux_stream_dict=self.aux_stream_dict,
            weight_loading_mode=self.weight_loading_mode,
            bias=kwargs.get("bias", False),
            apply_router_weight_on_input=self.apply_router_weight_on_input,
            layer_idx=None,
            swiglu_alpha=kwargs.get("swiglu_alpha"),
            swiglu_beta=kwargs.get("swiglu_beta"),
            swiglu_limit=kwargs.get("swiglu_limit"),
            init_load_balancer=False,
            without_comm=True,
            activation_type=self.activation_type,  # type: ignore[arg-type]
        )
        model_config._frozen = False
        model_config.skip_create_weights_in_init = skip
        model_config._frozen = True
        return backend

    def _supports_load_balancer(self) -> bool:
        return bool(self.backend._supports_load_balancer()) if hasattr(self, "backend") else self.use_dp

    def create_weights(self) -> None:
        self.backend.create_weights()

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        self.backend.load_weights(weights)

    def post_load_weights(self) -> None:
        self.backend.post_load_weights()

    def process_weights_after_loading(self) -> None:
        self.backend.process_weights_after_loading()

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

    @property
    def enable_alltoall(self) -> bool:
        return self.comm is not None and not isinstance(self.comm, AllGatherReduceScatter)

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
