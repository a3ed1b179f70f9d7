# SPDX-License-Identifier: Apache-2.0
"""The tensors of a layer, as our own kernels read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trtllm_b12x.formats import BY_TURNS, GATE_UP, ROWS, UP_GATE, constants
from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.formats.weights import Weights

from . import Geometry

ACTIVATIONS = ("Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu")
"""Names of TensorRT-LLM's ``ActivationType``, in the kernels' numbering. GELU is exact, also in Geglu, as in
CUTLASS (``moe_kernels.cu``); SwigluBias has alpha, beta and limit (gpt-oss)."""
ORDERS = (UP_GATE, GATE_UP, BY_TURNS)
"""Orders of FC1's rows, in the kernels' numbering."""


def check(geometry: Geometry, weights: Weights) -> None:
    """Raise ValueError, naming the tensor, if a tensor does not have the layout that the kernels read."""
    weights.check(geometry)
    for name, tensor in weights.tensors().items():
        plain = scales_in_memory(weights, name) if name.endswith("_sf") else tensor
        if not plain.is_contiguous() or ("weight" in name and tensor.data_ptr() % 16):
            raise ValueError(f"{name} is not contiguous, or not at a multiple of 16 bytes")


class Scalars(NamedTuple):
    """Tensors of a layer that kernels read besides codes and block scales. ``one`` replaces tensors that the layer lacks."""

    one: torch.Tensor
    """The number 1. It is FC1's input scale for quantized input, which is in units of the scale that the alpha contains."""

    fc1_alpha: torch.Tensor
    fc1_half_alphas: torch.Tensor
    """Recorded alphas of up and gate, which count if the larger equals ``fc1_alpha``. Zeros if weight loading recorded none."""
    fc1_input: torch.Tensor
    """``fc31_input_scale``, by which the engine multiplies FC1's input."""
    fc2_alpha: torch.Tensor
    fc2_input: torch.Tensor
    steps: tuple[int, int]
    """Distance from one expert's input scale to the next, of FC1 and FC2: 0 or 1."""
    biases: tuple[torch.Tensor, ...]
    """Biases of FC1 and FC2."""
    swiglu: tuple[torch.Tensor, ...]
    """Alpha, beta and limit."""


def scalars_of(geometry: Geometry, weights: Any) -> Scalars:
    """Return the scalars of a layer. Raise ValueError if the weights have only divisors and no input scales."""
    one, extra = constants.filled(1.0, (1,), weights.device), weights.epilogue
    biases = tuple(one if bias is None else bias for bias in (extra.fc1_bias, extra.fc2_bias))
    swiglu = extra.swiglu(geometry.num_experts, one.device) if geometry.activation == "SwigluBias" else (one,) * 3
    if not isinstance(weights, NVFP4Weights):
        return Scalars(one, one, one, one, one, one, (0, 0), biases, swiglu)
    inputs, halves = weights.input_scales, weights.fc1_half_alphas
    if inputs is None:
        raise ValueError("the kernels take the host's input scales, not their reciprocals")
    if halves is None:
        halves = constants.filled(0.0, (2, weights.fc1_alpha.numel()), weights.device)
    fc1, fc2 = inputs.fc31_input_scale, inputs.fc2_input_scale
    steps = int(fc1.numel() > 1), int(fc2.numel() > 1)
    return Scalars(one, weights.fc1_alpha, halves, fc1, weights.fc2_alpha, fc2, steps, biases, swiglu)


def scales_in_memory(weights: Weights, name: str) -> torch.Tensor:
    """Return block scales as they lie in memory, uint8."""
    scales = weights.tensors()[name].view(torch.uint8)
    return scales if weights.layout.scales == ROWS else scales.permute(5, 2, 4, 0, 1, 3)
