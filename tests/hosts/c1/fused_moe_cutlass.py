"""``CutlassFusedMoE`` from C1 on: called with a context, wrapped always."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from tensorrt_llm.models.modeling_utils import QuantAlgo

from ...model_config import ModelConfig
from ._generation import ACTIVATIONS, cutlass_rejection
from .grouped_gemm import run_grouped_gemm
from .impl_base import MoEImplBase, apply_moe_impl_construction_state
from .impl_contract import (
    MoEDeployment,
    MoEEligibility,
    MoEInputRequirement,
    MoEProblem,
    MoERejectReason,
    MoERunContext,
    MoEStaticCapability,
)
from .input_quant import quantize_nvfp4
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
        return quantize_nvfp4(self, x, post_quant_comm) if self.has_any_quant else (x, None)

    def run_moe(self, ctx: MoERunContext, *, workspace: dict[str, Any] | None = None) -> torch.Tensor:
        """The doubles' operator has no FC2 scale of its own for dynamic quantization: the loaded one is taken."""
        if self._moe_lora_active(ctx.lora_params):
            raise NotImplementedError("the double computes no LoRA")
        return run_grouped_gemm(self, ctx)
