"""What the kernels compute on this card, against the layer in float32: a few calls at load, on the layer's own weights.

The family's own, because the torch kernel of :mod:`trtllm_b12x.kernels.self_test` quantizes activations, and these do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from trtllm_b12x.kernels.reference import activate, dequantized

if TYPE_CHECKING:
    from trtllm_b12x.kernels import InputScales

    from . import TritonKernel

BOUND = 0.01
"""Relative L2 of a call.  Right kernels stay below 0.004: bfloat16's rounding of the activation's result and of the output."""
TOKEN_BOUND = 0.05
EXPERTS = 16
"""That are called; each of the others is the same code at another address."""


def faults(kernel: TritonKernel, sizes: Iterable[int]) -> list[str] | None:
    """One line for each of ``sizes``, in tokens, that is wrong.

    Returns:
        None where the weights say nothing: outputs are zero or not finite.
    """
    g, device, inputs = kernel.geometry, kernel.weights.w1_weight.device, _inputs(kernel)
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        shuffled = torch.randperm(g.num_experts, generator=generator)
        called = torch.cat((torch.tensor([0, g.num_experts - 1]), shuffled))[:EXPERTS].unique()
        draws = {
            tokens: (
                torch.randn(tokens, g.hidden_size, generator=generator),
                called[torch.randint(len(called), (tokens, g.top_k), generator=generator)],
                torch.rand(tokens, g.top_k, generator=generator) + 0.1,
            )
            for tokens in sizes
        }
    inverse = float(inputs.fc31_input_scale.flatten()[0])
    # A quarter of the calibrated range: 6 * 448 of the input scale.
    factor = 672 / inverse if 0 < inverse < math.inf else 1.0
    calls = []
    for drawn, local, scales in draws.values():
        x, local, scales = (drawn.to(device) * factor).to(g.dtype), local.to(device, torch.int32), scales.to(device)
        local[-1, -1] = -1
        calls.append((x, local, scales, torch.zeros(x.shape, device=device)))
    for e in called.tolist():  # one after the other: those of a large layer do not fit beside the model
        matrices = _matrices(kernel, e)
        for x, local, scales, expected in calls:
            _add(kernel, e, matrices, x, local, scales, expected)
    found, told = [], False
    for tokens, (x, local, scales, expected) in zip(draws, calls, strict=True):
        usable = expected.isfinite().all(1) & expected.any(1)
        if not bool(usable.any()):
            continue
        told = True
        ids = torch.where(local >= 0, local + kernel.first_expert, -1).to(torch.int32)
        first, second = kernel.run(x, ids, scales), kernel.run(x, ids, scales)
        wrong = (first.float() - expected)[usable].square().sum(1)
        size = expected[usable].square().sum(1)
        whole, worst = float((wrong.sum() / size.sum()).sqrt()), float((wrong / size).max().sqrt())
        if not (whole <= BOUND and worst <= TOKEN_BOUND):  # not a number passes neither
            found.append(f"{tokens} tokens: error {whole:.2g}, {worst:.2g} of one token")
        elif not torch.equal(first.view(torch.int16), second.view(torch.int16)):
            found.append(f"{tokens} tokens: two runs differ")
    return found if told else None


def _matrices(kernel: TritonKernel, e: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FC1 and FC2 of a local expert, float32, gate's ``weight_scale_2`` for both halves."""
    w, inputs = kernel.weights, _inputs(kernel)
    count = kernel.geometry.num_experts
    scale_1 = w.folded_w1_alpha[e] * inputs.fc31_input_scale.expand(count)[e]
    scale_2 = w.w2_alpha[e] * inputs.fc2_input_scale.expand(count)[e]
    first = dequantized(w.w1_weight, w.w1_weight_sf, e) * scale_1
    return first, dequantized(w.w2_weight, w.w2_weight_sf, e) * scale_2


def _inputs(kernel: TritonKernel) -> InputScales:
    assert kernel.weights.input_scales is not None  # it would not have been bound
    return kernel.weights.input_scales


def _add(
    kernel: TritonKernel,
    e: int,
    matrices: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    local: torch.Tensor,
    scales: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    """What expert ``e`` adds to ``expected``."""
    extra, on_input = kernel.epilogue, kernel.form.weight_on_input
    token, slot = (local == e).nonzero(as_tuple=True)
    weight = scales[token, slot].unsqueeze(1)
    fc1 = x[token].float() @ matrices[0].T * (weight if on_input else 1.0)
    bias = 0.0 if extra.w1_bias is None else extra.w1_bias[e].float()
    fc2 = _inner(kernel, e, fc1, bias) @ matrices[1].T
    if extra.w2_bias is not None:
        fc2 = fc2 + extra.w2_bias[e].float()
    expected.index_add_(0, token, fc2 * (1.0 if on_input else weight))


def _inner(kernel: TritonKernel, e: int, fc1: torch.Tensor, bias: torch.Tensor | float) -> torch.Tensor:
    name, extra = kernel.geometry.activation, kernel.epilogue
    if kernel.geometry.gated:
        size = kernel.geometry.intermediate_size
        fc1 = torch.cat((fc1[:, :size] * _inputs(kernel).up_to_gate[e], fc1[:, size:]), dim=1)
        given = ((extra.swiglu_alpha, 1.0), (extra.swiglu_beta, 0.0), (extra.swiglu_limit, math.inf))
        constants = (default if tensor is None else float(tensor[e]) for tensor, default in given)
        return activate(name, *(fc1 + bias).split(size, dim=1), *constants)
    return activate(name, fc1 + bias)
