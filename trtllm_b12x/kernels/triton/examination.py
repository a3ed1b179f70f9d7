"""What the kernels compute on this card, against the layer in float32: a few calls at load, on the layer's own weights.

The family's own, because the torch kernel of :mod:`trtllm_b12x.kernels.self_test` quantizes activations, and these do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from trtllm_b12x.kernels.layout import plain_scales
from trtllm_b12x.nvfp4 import dequantize

if TYPE_CHECKING:
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
    g, weights, device = kernel.geometry, kernel.weights, kernel.weights.w1_weight.device
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
    scale = float(weights.input_global_scale[0])
    # A quarter of the calibrated range: 6 * 448 of the divisor.
    factor = 672 * scale if 0 < scale < math.inf else 1.0
    matrices = {e: _matrices(kernel, e) for e in called.tolist()}
    found, told = [], False
    for tokens, (drawn, local, scales) in draws.items():
        x = (drawn.to(device) * factor).to(kernel.form.dtype)
        local, scales = local.to(device, torch.int32), scales.to(device)
        local[-1, -1] = -1
        expected = _expected(kernel, matrices, x, local, scales)
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
    w, extra = kernel.weights, kernel.epilogue
    ratio = 1.0 if extra.up_to_gate is None else extra.up_to_gate[e]
    first = _plain(w.w1_weight[e], w.w1_weight_sf[..., e : e + 1]) * w.w1_alpha[e]
    return first, _plain(w.w2_weight[e], w.w2_weight_sf[..., e : e + 1]) * (w.w2_alpha[e] / (w.fc2_input_scale[e] * ratio))


def _plain(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows, halves = packed.shape
    return dequantize(packed, plain_scales(scales)[0, :rows, : halves // 8])


def _expected(
    kernel: TritonKernel,
    matrices: dict[int, tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    local: torch.Tensor,
    scales: torch.Tensor,
) -> torch.Tensor:
    extra, on_input = kernel.epilogue, kernel.form.weight_on_input
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e, (first, second) in matrices.items():
        token, slot = (local == e).nonzero(as_tuple=True)
        weight = scales[token, slot].unsqueeze(1)
        fc1 = x[token].float() @ first.T * (weight if on_input else 1.0)
        bias = 0.0 if extra.w1_bias is None else extra.w1_bias[e].float()
        fc2 = _inner(kernel, e, fc1, bias) @ second.T
        if extra.w2_bias is not None:
            fc2 = fc2 + extra.w2_bias[e].float()
        result.index_add_(0, token, fc2 * (1.0 if on_input else weight))
    return result


def _inner(kernel: TritonKernel, e: int, fc1: torch.Tensor, bias: torch.Tensor | float) -> torch.Tensor:
    name, extra = kernel.geometry.activation, kernel.epilogue
    if kernel.gated:
        size = kernel.geometry.intermediate_size
        if extra.up_to_gate is not None:
            fc1 = torch.cat((fc1[:, :size] * extra.up_to_gate[e], fc1[:, size:]), dim=1)
        up, gate = (fc1 + bias).split(size, dim=1)
        if name == "Swiglu":
            return torch.nn.functional.silu(gate) * up
        if name == "Geglu":
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        limit = math.inf if extra.swiglu_limit is None else float(extra.swiglu_limit[e])
        alpha = 1.0 if extra.swiglu_alpha is None else extra.swiglu_alpha[e]
        gate = gate.clamp(max=limit)
        return (
            gate
            * torch.sigmoid(alpha * gate)
            * (up.clamp(-limit, limit) + (0.0 if extra.swiglu_beta is None else extra.swiglu_beta[e]))
        )
    values = fc1 + bias
    if name == "Relu2":
        return torch.relu(values).square()
    return torch.nn.functional.silu(values) if name == "Silu" else torch.nn.functional.gelu(values)
