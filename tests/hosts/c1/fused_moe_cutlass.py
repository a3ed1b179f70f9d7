# SPDX-License-Identifier: Apache-2.0
"""``CutlassFusedMoE`` from C1 on: called with a context, wrapped always."""

import torch
from tensorrt_llm._ops import quantized_input, run_operator
from tensorrt_llm.models.modeling_utils import QuantAlgo

from ...model_config import ModelConfig
from ._generation import operator_constants
from .impl_base import MoEImplBase, apply_moe_impl_construction_state
from .impl_contract import MoEInputRequirement, MoEStaticCapability, require_comm_plan
from .moe_lora import has_moe_lora_targets
from .quantization import (
    MXFP8CutlassFusedMoEMethod,
    NVFP4CutlassFusedMoEMethod,
    UnquantizedFusedMoEMethod,
    W4A8MXFP4MXFP8CutlassFusedMoEMethod,
    W4A16NVFP4CutlassFusedMoEMethod,
)

_RUNS_ON = {
    None: lambda sm: True,
    QuantAlgo.FP8: lambda sm: sm >= 89,
    QuantAlgo.NVFP4: lambda sm: sm in (100, 103, 120, 121),
    QuantAlgo.MXFP8: lambda sm: sm in (100, 103),
    QuantAlgo.W4A16_NVFP4: lambda sm: sm >= 80,
    QuantAlgo.W4A8_MXFP4_MXFP8: lambda sm: sm in (100, 103, 120, 121),
}
_METHODS = {
    None: UnquantizedFusedMoEMethod,
    QuantAlgo.NVFP4: NVFP4CutlassFusedMoEMethod,
    QuantAlgo.MXFP8: MXFP8CutlassFusedMoEMethod,
    QuantAlgo.W4A16_NVFP4: W4A16NVFP4CutlassFusedMoEMethod,
    QuantAlgo.W4A8_MXFP4_MXFP8: W4A8MXFP4MXFP8CutlassFusedMoEMethod,
}


class CutlassFusedMoE(MoEImplBase):
    capabilities = MoEStaticCapability(
        supports_moe_lora=True, supports_expert_bias=True, supports_eplb=True, supports_apply_router_weight_on_input=True
    )
    input_requirement = MoEInputRequirement(routing_scales_dtype=torch.float32)

    @classmethod
    def rejection(cls, p, d):
        takes = (None, QuantAlgo.W4A8_MXFP4_MXFP8) if p.bias else (None, QuantAlgo.W4A8_MXFP4_MXFP8, QuantAlgo.NVFP4)
        if p.swiglu_gptoss_style and p.quant_algo not in takes:
            return f"CutlassFusedMoE cannot load a gpt-oss bias for {p.quant_algo}"
        if p.quant_algo not in _RUNS_ON or not _RUNS_ON[p.quant_algo](d.sm):
            return f"CutlassFusedMoE has no {p.quant_algo} on SM{d.sm}"
        if d.moe_lora_enabled and p.quant_algo not in (None, QuantAlgo.FP8):
            return "CutlassFusedMoE MoE LoRA supports unquantized and FP8 experts only"
        return None

    def __init__(
        self,
        *,
        model_config=ModelConfig(),  # noqa: B008 - as the host's
        apply_router_weight_on_input=False,
        **arguments,
    ):
        super().__init__()
        apply_moe_impl_construction_state(self, model_config=model_config, **arguments)
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self._moe_lora_enabled = has_moe_lora_targets(model_config.lora_config)
        self._weights_created = False
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def _moe_lora_active(self, lora_params):
        return self._moe_lora_enabled and bool(lora_params)

    def _supports_load_balancer(self):
        return True

    def _get_quant_method(self):
        algo = None if self.quant_config is None else self.quant_config.quant_algo
        if algo not in _METHODS:
            raise ValueError(f"Unsupported quantization mode: {algo}")
        return _METHODS[algo]()

    def quantize_input(self, x, post_quant_comm=True, **kwargs):
        if self.quant_algo is None or isinstance(self.quant_method, W4A16NVFP4CutlassFusedMoEMethod):
            return x, None
        return quantized_input(self, x, post_quant_comm)

    def run_moe(self, ctx, *, workspace=None):
        plan = require_comm_plan(self, ctx)
        tuner_num_tokens = tuner_top_k = None
        if plan.enable_alltoall:
            rows = ctx.all_rank_num_tokens
            tuner_num_tokens = sum(rows) if rows is not None else ctx.x.shape[0] * self.mapping.tp_size
            tuner_top_k = self.routing_method.top_k
        dtype, dequantized = ctx.output_dtype, None
        if isinstance(self.quant_method, W4A16NVFP4CutlassFusedMoEMethod):
            dtype = dtype or ctx.x.dtype
            dequantized = self.quant_method.dequant_active_experts_to_hp(self, ctx.token_selected_experts, dtype)
        return run_operator(
            self,
            ctx.x,
            ctx.token_selected_experts,
            ctx.token_final_scales,
            ctx.x_sf,
            plan.moe_output,
            swizzled_input_sf=plan.input_sf_swizzled,
            output_dtype=dtype,
            dequantized=dequantized,
            enable_alltoall=plan.enable_alltoall,
            tuner_num_tokens=tuner_num_tokens,
            tuner_top_k=tuner_top_k,
            **operator_constants(self),
        )
