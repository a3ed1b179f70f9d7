# SPDX-License-Identifier: Apache-2.0
"""Emulate ``get_moe_cls``, ``create_moe_backend``, ``create_moe`` and ``ConfigurableMoE``, the wrapper that a model holds.

Routing and the calls into the backend follow ``fused_moe/configurable_moe.py``, the exact-class tests follow
``fused_moe/create_moe.py``. One module holds all four names, so that rebinding a name takes effect everywhere.
"""

from __future__ import annotations

from typing import Any

import torch

from .config import Fp4QuantizedTensor, ModelConfig, QuantConfig
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE
from .routing import RenormalizeMoeRoutingMethod


class ConfigurableMoE(MoE):
    """Wrapper of the ``backend``, which owns the weights. Ranks see all tokens with global ids and return partial sums."""

    def __init__(
        self,
        *,
        model_config: ModelConfig,
        override_quant_config: QuantConfig | None = None,
        apply_router_weight_on_input: bool = False,
        layer_idx: int | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(model_config=model_config, layer_idx=layer_idx, **arguments)
        self.model_config = model_config
        self.apply_router_weight_on_input = apply_router_weight_on_input

        # Both functions are looked up as module attributes, as in TensorRT-LLM, so that a rebound name takes effect.
        moe_cls = get_moe_cls(model_config, override_quant_config=override_quant_config)
        skip = model_config.skip_create_weights_in_init
        model_config.skip_create_weights_in_init = True
        try:
            self.backend: Any = create_moe_backend(
                moe_cls=moe_cls,
                model_config=model_config,
                apply_router_weight_on_input=apply_router_weight_on_input,
                layer_idx=None,
                **arguments,
            )
        finally:
            model_config.skip_create_weights_in_init = skip
        self.backend.layer_idx = layer_idx
        if override_quant_config is not None:
            self.quant_config = self.backend.quant_config = override_quant_config
        if not skip:
            self.backend.create_weights()
        self._weights_removed = True  # the model loader skips the wrapper and finds the backend as a submodule

    def create_weights(self) -> None:
        self.backend.create_weights()

    def load_weights(self, weights: list[Any], allow_partial_loading: bool = False) -> None:
        self.backend.load_weights(weights, allow_partial_loading)

    def post_load_weights(self) -> None:
        self.backend.post_load_weights()

    def forward(
        self, x: torch.Tensor | Fp4QuantizedTensor, router_logits: torch.Tensor, *, output_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Map ``x [T, H]`` and ``router_logits [T, E]`` to ``[T, H]``. Quantized ``x`` needs an ``output_dtype``."""
        if isinstance(x, torch.Tensor):
            output_dtype = x.dtype
        assert output_dtype is not None
        token_selected_experts, token_final_scales = self.routing_method.apply(router_logits)
        scales: torch.Tensor | None = token_final_scales
        if self.apply_router_weight_on_input:
            assert isinstance(x, torch.Tensor)
            x, scales = x * token_final_scales.to(x.dtype), None
        x, x_sf = self.backend.quantize_input(x, post_quant_comm=False)
        arguments: dict[str, Any] = {}
        # The comparison is exact, as in TensorRT-LLM: a plain subclass gets no arguments.
        if self.backend.__class__ == CutlassFusedMoE:
            arguments = {"is_sf_swizzled": True, "output_dtype": output_dtype, "enable_alltoall": False, "moe_output": None}
        output: torch.Tensor = self.backend.run_moe(
            x=x, token_selected_experts=token_selected_experts, token_final_scales=scales, x_sf=x_sf, **arguments
        )
        return output


def get_moe_cls(model_config: ModelConfig, override_quant_config: QuantConfig | None = None) -> type[MoE]:
    """Return the class for ``model_config.moe_backend``: CUTLASS for any quantization, also for AUTO."""
    if model_config.moe_backend.upper() in ("CUTLASS", "AUTO"):
        return CutlassFusedMoE
    raise ValueError(f"Unsupported moe backend: {model_config.moe_backend}")


def create_moe_backend(moe_cls: type[MoE], **arguments: Any) -> Any:
    """Build the module that owns the weights. ``arguments`` are those of ``CutlassFusedMoE``."""
    if moe_cls == CutlassFusedMoE:
        return moe_cls(**arguments)
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(
    routing_method: RenormalizeMoeRoutingMethod, num_experts: int, hidden_size: int, intermediate_size: int, **arguments: Any
) -> ConfigurableMoE:
    return ConfigurableMoE(
        routing_method=routing_method,
        num_experts=num_experts,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        **arguments,
    )
