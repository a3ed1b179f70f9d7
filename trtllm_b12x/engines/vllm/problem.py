# SPDX-License-Identifier: Apache-2.0
"""Describe vLLM's layers in the terms of decisions and kernels."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from trtllm_b12x.decision import Deployment
from trtllm_b12x.formats import BY_TURNS, FORMATS, ROWS, UP_GATE
from trtllm_b12x.formats.geometry import GATED, Geometry, LayerShape

from .facts import FUSED_MOE, Slot

BY_TURNS_ACTIVATION = "swigluoai"
"""SwiGLU with gate/up interleaved, and with gpt-oss's constants."""
ACTIVATIONS = {
    "silu": "Swiglu",
    "swigluoai": "Swiglu",
    "swigluoai_uninterleave": "Swiglu",
    "gelu": "Geglu",
    "gelu_tanh": "Geglu",
    "relu2_no_mul": "Relu2",
    "silu_no_mul": "Silu",
    "gelu_no_mul": "Gelu",
}
"""Kernels' activation by value of vLLM's ``MoEActivation``. Both GELUs are computed exactly, as vLLM's FlashInfer experts do;
the approximation by tanh differs by a relative L2 of 2e-4, a tenth of bf16's rounding."""


def swiglu_constants(config: Any) -> tuple[float, float, float] | None:
    """Return SwiGLU's alpha, beta and limit, or None for plain SwiGLU; see ``apply_moe_activation`` of vLLM."""
    if config.activation.value == BY_TURNS_ACTIVATION:
        return 1.702, 1.0, 7.0  # defaults of ``swigluoai_and_mul``; GptOssMxfp4MoEMethod has the same
    limit = config.swiglu_limit
    if limit is None or ACTIVATIONS.get(config.activation.value) != "Swiglu":
        return None
    if config.activation.value == "silu":
        return 1.0, 0.0, float(limit)
    alpha, beta = config.swiglu_alpha, config.swiglu_beta
    return float(1.0 if alpha is None else alpha), float(0.0 if beta is None else beta), float(limit)


def shape_of(config: Any, slot: Slot) -> LayerShape:
    return LayerShape(
        num_experts=config.num_experts,
        top_k=config.experts_per_token,
        hidden_size=config.hidden_dim,
        intermediate_size=config.intermediate_size,
        activation=ACTIVATIONS.get(config.activation.value, config.activation.value),
        quant_algo=next(form.quant_algo for form in FORMATS if form.name == slot.format),
        dtype=str(config.in_dtype).removeprefix("torch."),
        activation_constants=swiglu_constants(config) is not None,
        bias=config.has_bias,
    )


def deployment_of(config: Any) -> Deployment:
    parallel = config.moe_parallel_config
    return Deployment(ep_size=parallel.ep_size, tp_size=parallel.tp_size, lora=config.is_lora_enabled)


def unsupported(config: Any) -> str:
    """Return the feature in the layer's configuration that our kernels do not support; empty if they support all."""
    parallel, swiglu = config.moe_parallel_config, swiglu_constants(config)
    if parallel.enable_eplb:
        return "expert load balancing (EPLB)"
    if parallel.use_all2all_kernels:
        return "all-to-all of DP+EP"
    if swiglu is not None and swiglu[2] <= 0:
        # ``swiglu_limit_func`` (expert parallelism) ignores it; ``silu_and_mul_with_clamp`` and FlashInfer clamp to it.
        return f"a SwiGLU limit of {swiglu[2]}, which vLLM's kernels read in two ways"
    return ""


def convertible(config: Any, slot: Slot) -> bool:
    """Return whether vLLM can convert the layer's weights for the slot.

    The NVFP4 conversion pads only matrices without a gate. In 0.26, only gpt-oss's MXFP4 conversion supports EMULATION.
    """
    if slot.oracle == "mxfp4":
        name = "gpt_oss_weight" if config.activation.value == BY_TURNS_ACTIVATION else "weight"
        convert = getattr(importlib.import_module(f"{FUSED_MOE}.oracle.mxfp4"), f"convert_{name}_to_mxfp4_moe_kernel_format")
        return slot.backend in convert.__code__.co_names
    gated = str(shape_of(config, slot).kernel_activation) in GATED
    return not gated or 2 * config.intermediate_size_per_partition % slot.rows == 0


def geometry_of(config: Any, slot: Slot) -> Geometry:
    """Return the geometry of this rank's part of the layer, as vLLM stores it in the slot."""
    activation = str(shape_of(config, slot).kernel_activation)
    layout, size = slot.layout, -(-config.intermediate_size_per_partition // slot.multiple) * slot.multiple
    if config.activation.value == BY_TURNS_ACTIVATION:
        layout = replace(layout, fc1=BY_TURNS)
    if activation not in GATED:
        layout = replace(layout, fc1=UP_GATE)  # FC1 has one half
        if layout.scales != ROWS:
            size = -(-size // 128) * 128  # prepare_nvfp4_moe_layer_for_fi_or_cutlass pads both matrices with zeros
    return Geometry(
        num_experts=config.num_local_experts,
        top_k=config.experts_per_token,
        hidden_size=config.hidden_dim,
        intermediate_size=size,
        activation=activation,
        dtype=config.in_dtype,
        ranks=config.moe_parallel_config.ep_size,
        bias=config.in_dtype if config.has_bias else None,
        format=slot.format,
        layout=layout,
    )
