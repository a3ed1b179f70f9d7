"""View vLLM's tensors as kernels read them, and draw random ones as vLLM would hold them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.formats import ROWS, constants
from trtllm_b12x.formats.catalog import WEIGHTS
from trtllm_b12x.formats.geometry import Geometry
from trtllm_b12x.formats.nvfp4 import InputScales, NVFP4Weights, W4A16NVFP4Weights
from trtllm_b12x.formats.weights import Epilogue, Weights

_TYPICAL = 672.0
"""Reciprocal of an input scale for activations of about 1: a quarter of the calibrated range, 6 * 448."""


@dataclass
class Tensors:
    """The tensors of one layer, in vLLM's layout. E local experts, I intermediate size, H hidden size, r = 2 if gated."""

    w1: torch.Tensor
    """``(E, r*I, H)`` codes, rows [w1; w3] or [w3; w1]."""
    w2: torch.Tensor
    """``(E, H, I)`` codes."""
    scales: tuple[torch.Tensor, torch.Tensor]
    """Block scales, ``(E, rows, blocks)``: in rows, or padded and 128x4-interleaved."""
    alphas: tuple[torch.Tensor, torch.Tensor] | None = None
    """``(E,)`` float32 each, of NVFP4."""
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    """``(E, r*I)`` in the order of the rows, and ``(E, H)``."""

    def addresses(self) -> tuple[int, ...]:
        tensors = self.w1, self.w2, *self.scales, *(self.alphas or ()), *(self.biases or ())
        return tuple(map(torch.Tensor.data_ptr, tensors))


def view(t: Tensors, geometry: Geometry, inputs: InputScales | None, swiglu: tuple[float, float, float] | None) -> Weights:
    """Return the weights of a layer on vLLM's own storage.

    ``inputs`` are the scales that NVFP4's alphas contain the reciprocals of, ``swiglu`` alpha, beta and limit.
    """
    fields: dict[str, Any] = {}
    if t.alphas is not None:
        assert inputs is not None
        fields |= {"fc1_alpha": t.alphas[0], "fc2_alpha": t.alphas[1], "input_scales": inputs}
        fields |= {"fc1_divisor": inputs.fc1_divisor, "fc2_divisor": inputs.fc2_divisor}
    values = (constants.filled(value, (geometry.num_experts,), t.w1.device) for value in swiglu or ())
    epilogue = Epilogue(*(t.biases or (None, None)), *values)
    return WEIGHTS[geometry.format].on_storage((t.w1, t.w2), t.scales, geometry.layout, **fields, epilogue=epilogue)


def input_scales(holder: Any, gscales: tuple[torch.Tensor, torch.Tensor] | None, like: torch.Tensor) -> InputScales:
    """Return the input scales that the alphas contain the reciprocals of: 1 if vLLM has put none there.

    A captured graph reads them. They are kept on vLLM's layer (``holder``), and a reload writes them in place.
    """
    ones = torch.ones_like(like, dtype=torch.float32)
    first, second = (ones[:1], ones) if gscales is None else (g.detach().float().expand_as(like) for g in gscales)
    if bool((first == first[0]).all()):
        first = first[:1]  # one for all experts: a token is quantized once
    kept: InputScales | None = getattr(holder, "trtllm_b12x_input_scales", None)
    if kept is None or kept.fc31_input_scale.shape != first.shape or kept.fc1_divisor.device != like.device:
        kept = InputScales(first.clone(), second.clone(), ones.clone(), ones.clone())
        holder.trtllm_b12x_input_scales = kept
    kept.fc31_input_scale.copy_(first)
    kept.fc2_input_scale.copy_(second)
    kept.derive()
    return kept


def draw(geometry: Geometry, device: torch.device) -> tuple[Tensors, tuple[torch.Tensor, torch.Tensor] | None]:
    """Draw the tensors of a layer, and the input scales that its alphas contain, for a rehearsal."""
    kind, experts, hidden = WEIGHTS[geometry.format], geometry.num_experts, geometry.hidden_size
    generator = torch.Generator(device).manual_seed(0)
    size, rows = geometry.intermediate_size, (2 if geometry.gated else 1) * geometry.intermediate_size
    codes, scales = [], []
    for height, width in ((rows, hidden), (hidden, size)):
        codes.append(torch.empty(experts, height, width // kind.packed, dtype=kind.code_dtype, device=device))
        blocks = width // kind.group_size
        if geometry.layout.scales != ROWS:
            height, blocks = -(-height // 128) * 128, -(-blocks // 4) * 4
        scales.append(torch.empty(experts, height, blocks, dtype=kind.scale_dtype, device=device))
        kind.draw(codes[-1], scales[-1], generator)
    tensors = Tensors(codes[0], codes[1], (scales[0], scales[1]))
    if geometry.bias is not None:
        bias: Any = {"fill_value": 0.1, "dtype": geometry.bias, "device": device}
        tensors.biases = torch.full((experts, rows), **bias), torch.full((experts, hidden), **bias)
    if not issubclass(kind, NVFP4Weights):
        return tensors, None
    inputs = 1.0 if kind is W4A16NVFP4Weights else _TYPICAL
    alphas = (1 / (inputs * 3 * math.sqrt(width)) for width in (hidden, size))
    first, second = (torch.full((experts,), alpha, dtype=torch.float32, device=device) for alpha in alphas)
    tensors.alphas = first, second
    given = torch.full((experts,), inputs, dtype=torch.float32, device=device)
    return tensors, None if kind is W4A16NVFP4Weights else (given, given)
