"""The tensors of a layer as kernels of our own read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trtllm_b12x.formats import BY_TURNS, GATE_UP, ROWS, UP_GATE, constants
from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.formats.weights import Weights

from . import Geometry

ACTIVATIONS = ("Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu")
"""Names of the host's ``ActivationType``, as kernels number them. GELU is exact, alone and in Geglu, as in
CUTLASS (``moe_kernels.cu``); SwigluBias has alpha, beta and limit (gpt-oss)."""
ORDERS = (UP_GATE, GATE_UP, BY_TURNS)
"""Orders of FC1's rows, as kernels number them."""


def check(geometry: Geometry, weights: Weights) -> None:
    """Raise ValueError, naming the tensor, if one is not laid out as the kernels read it."""
    weights.check(geometry)
    for name, tensor in weights.tensors().items():
        plain = scales_in_memory(weights, name) if name.endswith("_sf") else tensor
        if not plain.is_contiguous() or ("weight" in name and tensor.data_ptr() % 16):
            raise ValueError(f"{name} is not contiguous, or not at a multiple of 16 bytes")


class Scalars(NamedTuple):
    """Tensors of a layer that kernels read besides codes and block scales; ``one`` in place of those that it lacks."""

    one: torch.Tensor
    """Also FC1's input scale if the input arrives quantized, which is then in units of the scale that the alpha contains."""

    fc1_alpha: torch.Tensor
    fc1_half_alphas: torch.Tensor
    """Zeros if no load has recorded them: no alpha but zero equals those."""
    fc1_input: torch.Tensor
    """``fc31_input_scale``: the host multiplies FC1's input by it."""
    fc2_alpha: torch.Tensor
    fc2_input: torch.Tensor
    steps: tuple[int, int]
    """From one expert's input scale to the next."""
    biases: tuple[torch.Tensor, ...]
    """Of FC1 and FC2."""
    swiglu: tuple[torch.Tensor, ...]
    """Alpha, beta and limit."""


def scalars_of(geometry: Geometry, weights: Any) -> Scalars:
    """Return the scalars of a layer. Raise ValueError if the input scales are given as divisors alone."""
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
