# SPDX-License-Identifier: Apache-2.0
"""Emulate ``CutlassFusedMoE`` of ``fused_moe/fused_moe_cutlass.py``, the class of the CUTLASS backend."""

from __future__ import annotations

from typing import Any

import torch

from . import ops, quantization
from .config import ActivationType, Fp4QuantizedTensor, ModelConfig, QuantAlgo
from .interface import MoE

METHODS: dict[QuantAlgo | None, type[quantization.FusedMoEMethodBase]] = {
    None: quantization.UnquantizedFusedMoEMethod,
    QuantAlgo.NVFP4: quantization.NVFP4CutlassFusedMoEMethod,
    QuantAlgo.W4A16_NVFP4: quantization.W4A16NVFP4CutlassFusedMoEMethod,
    QuantAlgo.W4A8_MXFP4_MXFP8: quantization.W4A8MXFP4MXFP8CutlassFusedMoEMethod,
}


class CutlassFusedMoE(MoE):
    """Layer of quantized or unquantized experts. ``__init__`` ends with ``create_weights`` unless the model config defers it."""

    enable_alltoall = False
    quant_scales: Any
    quant_method: Any
    w3_w1_bias: torch.nn.Parameter | None
    w2_bias: torch.nn.Parameter | None
    fc31_input_scale: torch.nn.Parameter
    w3_w1_weight: torch.nn.Parameter
    w2_weight: torch.nn.Parameter

    def __init__(self, *, model_config: ModelConfig, apply_router_weight_on_input: bool = False, **arguments: Any) -> None:
        super().__init__(model_config=model_config, **arguments)
        self.apply_router_weight_on_input = apply_router_weight_on_input
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def _get_quant_method(self) -> quantization.FusedMoEMethodBase:
        algo = self.quant_algo
        if algo not in METHODS:
            raise ValueError(f"Unsupported quantization mode: {algo.value if isinstance(algo, QuantAlgo) else algo}")
        return METHODS[algo]()

    def create_weights(self) -> None:
        if self._weights_created:
            return
        self.quant_method = self._get_quant_method()
        self.quant_method.create_weights(self)
        self._weights_created = True

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        """Load weights from a list with one mapping, whose keys are ``"{expert}.w1.weight"`` and so on."""
        assert self._weights_created
        assert len(weights) == 1
        if allow_partial_loading and self.quant_algo is not None:
            raise ValueError("partial loading of quantized experts is not supported")
        self.quant_method.load_weights(self, weights[0], self.weight_loading_mode)

    def post_load_weights(self) -> None:
        self.quant_method.post_load_weights(self)

    def quantize_input(
        self, x: torch.Tensor | Fp4QuantizedTensor, post_quant_comm: bool = True, **kwargs: Any
    ) -> tuple[Any, torch.Tensor | None]:
        """Quantize ``x [T, H]`` to FP4 bytes and scales. Scales are ``[T, H/16]`` before communication, else swizzled.

        An ``Fp4QuantizedTensor`` is split into both before communication, and returned unchanged otherwise.
        """
        if isinstance(self.quant_method, quantization.W4A8MXFP4MXFP8CutlassFusedMoEMethod):
            assert isinstance(x, torch.Tensor)
            x, x_sf = ops.mxfp8_quantize(x, not post_quant_comm, alignment=self.quant_method.weight_alignment)
            return x, x_sf.view(x.shape[0], -1) if post_quant_comm else x_sf
        # TensorRT-LLM also treats W4A16_NVFP4 as NVFP4, except for its method.
        if self.quant_algo not in (QuantAlgo.NVFP4, QuantAlgo.W4A16_NVFP4) or self._is_w4a16:
            return x, None
        if isinstance(x, Fp4QuantizedTensor):
            if not post_quant_comm:
                return x, None
            assert not x.is_sf_swizzled, "Fp4QuantizedTensor should not be swizzled before communication"
            return x.fp4_tensor, x.scaling_factor.view(x.shape[0], -1)
        packed, x_sf = ops.fp4_quantize(x, self.fc31_input_scale, is_sf_swizzled_layout=not post_quant_comm)
        return packed, x_sf.view(x.shape[0], -1) if post_quant_comm else x_sf

    @property
    def _is_w4a16(self) -> bool:
        return isinstance(self.quant_method, quantization.W4A16NVFP4CutlassFusedMoEMethod)

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
        """Run the experts on ``x`` (from ``quantize_input``), ids ``[T, k]`` and scales ``[T, k]``. Return ``[T, H]``."""
        if isinstance(x, Fp4QuantizedTensor):
            x, x_sf, is_sf_swizzled = x.fp4_tensor, x.scaling_factor, x.is_sf_swizzled
        if output_dtype is None:
            output_dtype = x.dtype  # like the real op, which also fails for quantized input
        if output_dtype is torch.uint8:
            raise RuntimeError("Invalid output type Byte: pass output_dtype when x is quantized")
        weights, quant_scales = (self.w3_w1_weight, self.w2_weight), self.quant_scales
        if self._is_w4a16:
            weights = self.quant_method.dequant_active_experts_to_hp(self, token_selected_experts, output_dtype)
            quant_scales = ()
        return ops.fused_moe(
            x,
            token_selected_experts,
            token_final_scales,
            *weights,
            output_dtype,
            quant_scales=quant_scales,
            input_sf=x_sf,
            swizzled_input_sf=is_sf_swizzled,
            ep_size=self.ep_size,
            ep_rank=self.ep_rank,
            activation_type=ActivationType(self.activation_type),
            out_tensor=moe_output,
            swiglu_alpha=self.swiglu_alpha,
            swiglu_beta=self.swiglu_beta,
            swiglu_limit=self.swiglu_limit,
            fc1_expert_biases=self.w3_w1_bias,
            fc2_expert_biases=self.w2_bias,
            tp_rank=self.tp_rank,
            unpadded_hidden_size=self.hidden_size,
        )
