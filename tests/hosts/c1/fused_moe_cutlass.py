"""``CutlassFusedMoE`` from C1 on: called with a context, wrapped always."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensorrt_llm._torch.utils import Fp4QuantizedTensor
from tensorrt_llm.models.modeling_utils import QuantAlgo

from ...model_config import ModelConfig
from ._generation import ACTIVATIONS, cutlass_rejection, operator_constants
from .impl_base import MoEImplBase, apply_moe_impl_construction_state
from .impl_contract import (
    MoEDeployment,
    MoEEligibility,
    MoEInputRequirement,
    MoEProblem,
    MoERejectReason,
    MoERunContext,
    MoEStaticCapability,
    require_comm_plan,
)
from .interface import _reject
from .moe_lora import has_moe_lora_targets
from .quantization import MXFP8CutlassFusedMoEMethod, NVFP4CutlassFusedMoEMethod, UnquantizedFusedMoEMethod


class CutlassFusedMoE(MoEImplBase):
    capabilities = MoEStaticCapability(
        supports_moe_lora=True,
        supports_expert_bias=True,
        supports_eplb=True,
        supports_apply_router_weight_on_input=True,
    )
    input_requirement = MoEInputRequirement(routing_scales_dtype=torch.float32)
    activation_support = ACTIVATIONS
    _HALF = frozenset({torch.float16, torch.bfloat16})
    _QUANT_SUPPORT_TABLE: ClassVar[dict[QuantAlgo | None, tuple[Any, frozenset[torch.dtype]]]] = {
        None: (lambda sm: True, _HALF),
        QuantAlgo.FP8: (lambda sm: sm >= 89, _HALF | {torch.float32}),
        QuantAlgo.FP8_BLOCK_SCALES: (lambda sm: sm in (90, 120), frozenset({torch.bfloat16})),
        QuantAlgo.NVFP4: (lambda sm: sm in (100, 103, 120, 121), _HALF | {torch.float8_e4m3fn}),
        QuantAlgo.W4A16_NVFP4: (lambda sm: True, _HALF),
        QuantAlgo.MXFP8: (lambda sm: sm in (100, 103), _HALF),
    }

    @classmethod
    def can_implement(cls, p: MoEProblem, d: MoEDeployment) -> MoEEligibility:
        sm, algo = d.env.sm, p.quant_algo
        if sm < 80:
            return _reject(MoERejectReason.SM_UNSUPPORTED, f"CutlassFusedMoE requires SM >= 80, got SM{sm}")
        if p.swiglu_gptoss_style and (algo not in (None, QuantAlgo.NVFP4) or (algo is QuantAlgo.NVFP4 and p.bias is True)):
            return _reject(MoERejectReason.ACTIVATION_UNSUPPORTED, f"CutlassFusedMoE cannot load a gpt-oss bias for {algo}")
        if algo not in cls._QUANT_SUPPORT_TABLE:
            return _reject(MoERejectReason.QUANT_UNSUPPORTED, f"CutlassFusedMoE does not support quant_algo={algo}")
        runs_on, dtypes = cls._QUANT_SUPPORT_TABLE[algo]
        if not runs_on(sm):
            return _reject(MoERejectReason.SM_UNSUPPORTED, f"CutlassFusedMoE has no {algo} on SM{sm}")
        if p.dtype_act not in dtypes:
            return _reject(MoERejectReason.DTYPE_UNSUPPORTED, f"CutlassFusedMoE has no {algo} of {p.dtype_act}")
        if d.moe_lora_enabled and algo not in (None, QuantAlgo.FP8):
            return _reject(MoERejectReason.LORA_UNSUPPORTED, "CutlassFusedMoE MoE LoRA supports unquantized and FP8 experts only")
        rejection = cutlass_rejection(p, d)
        return MoEEligibility.ok() if rejection is None else rejection  # a rejection is false

    def __init__(
        self,
        *,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        apply_router_weight_on_input: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(eplb=None)
        apply_moe_impl_construction_state(self, model_config=model_config, **arguments)
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.use_fused_finalize = not model_config.moe_disable_finalize_fusion and model_config.lora_config is None
        self._moe_lora_enabled = has_moe_lora_targets(model_config.lora_config)
        self._weights_created = False
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def _moe_lora_active(self, lora_params: dict[str, Any] | None) -> bool:
        return self._moe_lora_enabled and bool(lora_params)

    def _check_configs(self) -> None:
        assert self._weights_created
        if self.apply_router_weight_on_input:
            assert self.routing_method.top_k == 1, "Current walkaround only supports top-1 routing"

    def _supports_load_balancer(self) -> bool:
        return True

    def supports_moe_output_in_alltoall_workspace(self) -> bool:
        return True

    def _get_quant_method(self) -> Any:
        mode = None if self.quant_config is None else self.quant_config.layer_quant_mode
        if mode is None or not mode.has_any_quant(exclude_kv_cache=True):
            return UnquantizedFusedMoEMethod()
        if mode.has_nvfp4():
            return NVFP4CutlassFusedMoEMethod()
        if mode.has_mxfp8():
            return MXFP8CutlassFusedMoEMethod()
        raise ValueError(f"Unsupported quantization mode: {mode}")

    def quantize_input(self, x: Any, post_quant_comm: bool = True, **kwargs: Any) -> tuple[Any, torch.Tensor | None]:
        if not self.has_any_quant:
            return x, None
        if getattr(self, "fc31_act_scale", None) is not None:
            x = x * self.fc31_act_scale
        if self.force_dynamic_quantization and hasattr(self, "fc31_weight_scale_2"):
            scale = 448.0 * 6.0 / x.abs().amax().float()
            self.fc31_alpha.data.copy_(self.fc31_weight_scale_2.data / scale)
            self.fc31_input_scale.data.copy_(scale)
        if isinstance(x, Fp4QuantizedTensor):
            if not post_quant_comm:
                return x, None
            assert not x.is_sf_swizzled, "Fp4QuantizedTensor should not be swizzled before communication"
            x, x_sf = x.fp4_tensor, x.scaling_factor
        else:
            swizzled = not post_quant_comm
            x, x_sf = torch.ops.trtllm.fp4_quantize(x, self.fc31_input_scale, self.scaling_vector_size, False, swizzled)
        return x, x_sf.view(x.shape[0], -1) if post_quant_comm else x_sf

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        """The doubles' operator has no FC2 scale of its own for dynamic quantization: the loaded one is taken."""
        if self._moe_lora_active(ctx.lora_params):
            raise NotImplementedError("the double computes no LoRA")
        plan = require_comm_plan(self, ctx)
        tuner_num_tokens = tuner_top_k = None
        if plan.enable_alltoall:
            rows = ctx.all_rank_num_tokens
            tuner_num_tokens = sum(rows) if rows is not None else ctx.x.shape[0] * self.mapping.tp_size
            tuner_top_k = self.routing_method.top_k
        results = torch.ops.trtllm.fused_moe(
            ctx.x,
            ctx.token_selected_experts,
            ctx.token_final_scales,
            self.w3_w1_weight,
            self.w3_w1_bias,
            self.w2_weight,
            self.w2_bias,
            ctx.output_dtype,
            quant_scales=list(self.quant_scales),
            input_sf=ctx.x_sf,
            swizzled_input_sf=plan.input_sf_swizzled,
            **operator_constants(self),
            tp_size=self.tp_size,
            tp_rank=self.tp_rank,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
            cluster_size=self.cluster_size,
            cluster_rank=self.cluster_rank,
            enable_alltoall=plan.enable_alltoall,
            tuner_num_tokens=tuner_num_tokens,
            tuner_top_k=tuner_top_k,
            activation_type=int(self.activation_type),
            out_tensor=plan.moe_output,
        )
        return plan.moe_output if plan.moe_output is not None else results[0]
