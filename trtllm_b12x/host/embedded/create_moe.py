"""``get_moe_cls``, ``create_moe_backend`` and ``create_moe`` of ``fused_moe/create_moe.py``, with their exact-class tests."""

from __future__ import annotations

from typing import Any

from .config import ModelConfig, QuantConfig
from .configurable_moe import ConfigurableMoE
from .fused_moe_cutlass import CutlassFusedMoE
from .interface import MoE
from .routing import BaseMoeRoutingMethod


def get_moe_cls(model_config: ModelConfig, override_quant_config: QuantConfig | None = None) -> type[MoE]:
    """The class for ``model_config.moe_backend``: CUTLASS whatever the quantization; AUTO ends there."""
    del override_quant_config
    if model_config.moe_backend.upper() in ("CUTLASS", "AUTO"):
        return CutlassFusedMoE
    raise ValueError(f"Unsupported moe backend: {model_config.moe_backend}")


def create_moe_backend(
    moe_cls: type[MoE],
    routing_method: BaseMoeRoutingMethod,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    **arguments: Any,
) -> MoE:
    """The module that owns the weights; ``arguments`` are those of :class:`CutlassFusedMoE`."""
    if moe_cls == CutlassFusedMoE:
        return moe_cls(
            routing_method=routing_method,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            **arguments,
        )
    raise ValueError(f"Unsupported moe backend: {moe_cls}")


def create_moe(
    routing_method: BaseMoeRoutingMethod,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    *,
    model_config: ModelConfig,
    override_quant_config: QuantConfig | None = None,
    **arguments: Any,
) -> MoE:
    """The layer a model file asks for: the backend's class wrapped in :class:`ConfigurableMoE`."""
    moe_cls = get_moe_cls(model_config, override_quant_config)
    sizes = (routing_method, num_experts, hidden_size, intermediate_size)
    if moe_cls in (CutlassFusedMoE,):
        return ConfigurableMoE(*sizes, model_config=model_config, override_quant_config=override_quant_config, **arguments)
    return create_moe_backend(moe_cls, *sizes, model_config=model_config, **arguments)
