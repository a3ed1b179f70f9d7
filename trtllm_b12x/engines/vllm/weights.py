# SPDX-License-Identifier: Apache-2.0
"""View vLLM's tensors as kernels read them, and draw random tensors in vLLM's layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.formats import ROWS, constants
from trtllm_b12x.formats.catalog import WEIGHTS
from trtllm_b12x.formats.geometry import Geometry
from trtllm_b12x.formats.nvfp4 import InputScales, NVFP4Weights, W4A16NVFP4Weights
from trtllm_b12x.formats.weights import Epilogue, Weights, tensors_of

ALIGNED = 256
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
    """``(E,)`` float32 each, for NVFP4."""
    biases: tuple[torch.Tensor, torch.Tensor] | None = None
    """``(E, r*I)`` in the order of the rows, and ``(E, H)``."""

    def _all(self) -> tuple[torch.Tensor, ...]:
        return self.w1, self.w2, *self.scales, *(self.alphas or ()), *(self.biases or ())

    def addresses(self) -> tuple[int, ...]:
        return tuple(map(torch.Tensor.data_ptr, self._all()))

    def devices(self) -> set[str]:
        return {str(tensor.device) for tensor in self._all()}


@dataclass(frozen=True)
class Scalars:
    """Our scalars of an NVFP4 layer, stored on vLLM's layer. Every load writes them in place: captured graphs read them.

    They are not buffers: vLLM's reload would replace buffers, wait for them, and never write them
    (model_loader/reload/layerwise.py).
    """

    inputs: InputScales
    """Input scales whose reciprocals the alphas contain; 1 if vLLM's alphas contain none."""
    fc1_half_alphas: torch.Tensor | None
    """``(2, E)`` float32, FC1's alphas of up and gate. None if vLLM's own alpha holds for both."""
    fc1_alpha: torch.Tensor | None
    """``(E,)``, the larger of the two."""

    def tensors(self) -> list[torch.Tensor]:
        return [*tensors_of(self.inputs).values(), *tensors_of(self).values()]


def view(t: Tensors, geometry: Geometry, scalars: Scalars | None, swiglu: tuple[float, float, float] | None) -> Weights:
    """Return the weights of a layer on vLLM's own storage. ``swiglu`` has alpha, beta and limit."""
    fields: dict[str, Any] = {}
    if t.alphas is not None:
        assert scalars is not None
        inputs = scalars.inputs
        fields |= {"fc1_alpha": t.alphas[0], "fc2_alpha": t.alphas[1], "input_scales": inputs}
        fields |= {"fc1_divisor": inputs.fc1_divisor, "fc2_divisor": inputs.fc2_divisor}
        fields["fc1_half_alphas"] = scalars.fc1_half_alphas
    values = (constants.filled(value, (geometry.num_experts,), t.w1.device) for value in swiglu or ())
    epilogue = Epilogue(*(t.biases or (None, None)), *values)
    return WEIGHTS[geometry.format].on_storage((t.w1, t.w2), t.scales, geometry.layout, **fields, epilogue=epilogue)


def record_halves(layer: Any) -> None:
    """Store ``weight_scale_2`` of up and gate, ``(2, E)``, for ``scalars``. vLLM applies gate's scale to both.

    ModelOpt and Quark have both in ``w13_weight_scale_2``; compressed-tensors has their reciprocals in another parameter. The
    parameter has one column after the conversion, and for weights that vLLM quantizes itself.
    """
    for name, power in (("w13_weight_scale_2", 1), ("w13_weight_global_scale", -1)):
        both = getattr(layer, name, None)
        if both is not None and both.shape[1:] == (2,):
            layer.trtllm_b12x_halves = torch.stack(both.detach().float().pow(power).unbind(1)[::-1])


def scalars(layer: Any, gscales: tuple[torch.Tensor, torch.Tensor] | None, like: torch.Tensor, shared: bool) -> Scalars:
    """Write the layer's scalars and return them.

    Their shapes do not depend on values: graphs captured on dummy weights later read the scalars of real weights.

    Args:
        gscales: input scales of FC1 and FC2 that the alphas contain, if any.
        like: an alpha, which gives shape and device.
        shared: FC1's input scales are equal, so that kernels may quantize a token once for all experts.
    """
    ones = torch.ones_like(like, dtype=torch.float32)
    first, second = (ones, ones) if gscales is None else (g.detach().float().expand_as(like) for g in gscales)
    halves: torch.Tensor | None = getattr(layer, "trtllm_b12x_halves", None)
    halves = None if halves is None else halves / first
    inputs = InputScales((first[:1] if shared else first).clone(), second.clone(), ones.clone(), ones.clone())
    inputs.derive()
    new = Scalars(inputs, halves, None if halves is None else halves.amax(0))
    kept: Scalars = vars(layer).setdefault("trtllm_b12x_scalars", new)
    if [(t.shape, t.device) for t in kept.tensors()] != [(t.shape, t.device) for t in new.tensors()]:
        kept = layer.trtllm_b12x_scalars = new
    for old, value in zip(kept.tensors(), new.tensors(), strict=True):
        old.copy_(value)
    return kept


def scale_ratio(scalars: Scalars) -> float:
    """Return the largest ratio between gate's and up's scales in an expert."""
    if scalars.fc1_half_alphas is None:
        return 1.0
    larger, smaller = scalars.fc1_half_alphas.amax(0), scalars.fc1_half_alphas.amin(0)
    return float(torch.where(smaller > 0, larger / smaller, 1.0).max())


def _neighbors(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return tensors in one allocation, which ``marlin.view`` reinterprets. Each begins at a multiple of ``ALIGNED`` bytes."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    places = [-(-size // ALIGNED) * ALIGNED for size in sizes]
    parts = torch.empty(sum(places), dtype=torch.uint8, device=device).split(places)
    return [part[:size].view(dtype).view(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)]


def draw(geometry: Geometry, device: torch.device) -> tuple[Tensors, tuple[torch.Tensor, torch.Tensor] | None]:
    """Draw the tensors of a layer, and the input scales that its alphas contain, for a rehearsal."""
    kind, experts, hidden = WEIGHTS[geometry.format], geometry.num_experts, geometry.hidden_size
    generator = torch.Generator(device).manual_seed(0)
    size, rows = geometry.intermediate_size, (2 if geometry.gated else 1) * geometry.intermediate_size
    code_shapes, scale_shapes = [], []
    for height, width in ((rows, hidden), (hidden, size)):
        code_shapes.append((experts, height, width // kind.packed))
        blocks = width // kind.group_size
        if geometry.layout.scales != ROWS:
            height, blocks = -(-height // 128) * 128, -(-blocks // 4) * 4
        scale_shapes.append((experts, height, blocks))
    codes, scales = _neighbors(code_shapes, kind.code_dtype, device), _neighbors(scale_shapes, kind.scale_dtype, device)
    for matrix in zip(codes, scales, strict=True):
        kind.draw(*matrix, generator)
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
