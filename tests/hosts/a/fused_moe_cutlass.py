"""``CutlassFusedMoE`` of generation A, which can also forward by itself (``ENABLE_CONFIGURABLE_MOE=0``)."""

from __future__ import annotations

from typing import Any

import torch
from tensorrt_llm._torch.utils import Fp4QuantizedTensor

from ...model_config import ModelConfig
from .communication import CommunicationFactory
from .interface import MoE
from .quantization import NVFP4CutlassFusedMoEMethod, UnquantizedFusedMoEMethod


class CutlassFusedMoE(MoE):
    def __init__(
        self,
        *,
        hidden_size: int,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        aux_stream_dict: Any = None,
        apply_router_weight_on_input: bool = False,
        without_comm: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(hidden_size=hidden_size, model_config=model_config, **arguments)
        self.unpadded_hidden_size = hidden_size
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self.comm = None if without_comm else CommunicationFactory.create_strategy(model_config)
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.use_fused_finalize = not model_config.moe_disable_finalize_fusion and model_config.lora_config is None
        self._weights_created = False
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def _supports_load_balancer(self) -> bool:
        return True

    def _get_quant_method(self) -> Any:
        mode = None if self.quant_config is None else self.quant_config.layer_quant_mode
        if mode is None or not mode.has_any_quant(exclude_kv_cache=True):
            return UnquantizedFusedMoEMethod()
        if mode.has_nvfp4():
            return NVFP4CutlassFusedMoEMethod()
        raise ValueError(f"Unsupported quantization mode: {mode}")

    def create_weights(self) -> None:
        if self._weights_created:
            return
        self.quant_method = self._get_quant_method()
        self.quant_method.create_weights(self)
        self._weights_created = True

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        assert self._weights_created
        assert len(weights) == 1
        if not isinstance(self.quant_method, UnquantizedFusedMoEMethod):
            assert not allow_partial_loading, "Partial loading is not supported for quantized MoE now"
        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode)

    def post_load_weights(self) -> None:
        self.quant_method.post_load_weights(self)

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        x_sf = None
        if self.has_any_quant and self.has_nvfp4:
            if getattr(self, "fc31_act_scale", None) is not None:
                x = x * self.fc31_act_scale
            if isinstance(x, Fp4QuantizedTensor):
                if not post_quant_comm:
                    return x, None
                assert not x.is_sf_swizzled
                return x.fp4_tensor, x.scaling_factor.view(x.shape[0], -1)
            rows = x.shape[0]
            x, x_sf = torch.ops.trtllm.fp4_quantize(
                x, self.fc31_input_scale, self.scaling_vector_size, False, not post_quant_comm
            )
            if post_quant_comm:
                x_sf = x_sf.view(rows, -1)
        return x, x_sf

    def run_moe(
        self,
        x: Any,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor | None,
        x_sf: torch.Tensor | None = None,
        is_sf_swizzled: bool = True,
        output_dtype: torch.dtype | None = None,
        tuner_num_tokens: int | None = None,
        tuner_top_k: int | None = None,
        moe_output: torch.Tensor | None = None,
        enable_alltoall: bool | None = None,
    ) -> torch.Tensor:
        results = torch.ops.trtllm.fused_moe(
            x,
            token_selected_experts,
            token_final_scales,
            self.w3_w1_weight,
            self.w3_w1_bias,
            self.w2_weight,
            self.w2_bias,
            output_dtype or x.dtype,
            quant_scales=list(self.quant_scales),
            input_sf=x_sf,
            swizzled_input_sf=is_sf_swizzled,
            swiglu_alpha=self.swiglu_alpha,
            swiglu_beta=self.swiglu_beta,
            swiglu_limit=self.swiglu_limit,
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
            cluster_size=self.cluster_size,
            cluster_rank=self.cluster_rank,
            enable_alltoall=bool(enable_alltoall),
            tuner_num_tokens=tuner_num_tokens,
            tuner_top_k=tuner_top_k,
            activation_type=self.activation_type,
            out_tensor=moe_output,
        )
        return moe_output if moe_output is not None else results[0]

    def forward_impl(self, x: Any, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        rows = kwargs.get("all_rank_num_tokens") or [x.shape[0]]
        chunks = -(-sum(rows) // self.moe_max_num_tokens)
        if chunks == 1:
            return self.forward_chunk(x, router_logits, rows)
        parts = zip(x.tensor_split(chunks), router_logits.tensor_split(chunks), strict=True)
        return torch.cat([self.forward_chunk(part, logits, [part.shape[0]]) for part, logits in parts])

    def forward_chunk(self, x: Any, router_logits: torch.Tensor, all_rank_num_tokens: list[int]) -> torch.Tensor:
        output_dtype = x.dtype
        ids, scales = self.routing_method.apply(router_logits)
        ids = ids.to(torch.int32)
        x, x_sf = self.quantize_input(x, post_quant_comm=self.comm is not None)
        if self.comm is not None:
            x, x_sf, ids, scales = self.comm.dispatch(x, x_sf, ids, scales, all_rank_num_tokens)  # type: ignore[assignment]
        result = self.run_moe(
            x=x,
            token_selected_experts=ids,
            token_final_scales=scales,
            x_sf=x_sf,
            is_sf_swizzled=self.comm is None,
            output_dtype=output_dtype,
            tuner_num_tokens=None,
            tuner_top_k=None,
            moe_output=None,
        )
        if self.comm is not None:
            return self.comm.combine(result)
        if self.parallel_size > 1 and self.reduce_results:
            assert self.all_reduce is not None
            return self.all_reduce(result)
        return result
