"""What the kernels compute on this card, against the same layer in torch: a few calls at load, on the layer's own weights.

The family's own, because :mod:`trtllm_b12x.kernels.self_test` has b12x's faults in mind, and its yardstick quantizes activations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from trtllm_b12x.kernels.reference import UnquantizedReferenceKernel

if TYPE_CHECKING:
    from . import TritonKernel

BOUND = 0.01
"""Relative L2 of a call.  Right kernels stay below 0.004: bfloat16's rounding of the activation's result and of the output."""
TOKEN_BOUND = 0.05
EXPERTS = 16
"""That are called; each of the others is the same code at another address."""


def faults(kernel: TritonKernel, sizes: Sequence[int]) -> list[str] | None:
    """One line for each of ``sizes``, in tokens, that is wrong.

    Returns:
        None where the weights say nothing: outputs are zero or not finite.
    """
    g, device, inputs = kernel.geometry, kernel.weights.w1_weight.device, kernel.weights.input_scales
    assert inputs is not None  # it would not have been bound
    total = sum(sizes)
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        shuffled = torch.randperm(g.num_experts, generator=generator)
        called = torch.cat((torch.tensor([0, g.num_experts - 1]), shuffled))[:EXPERTS].unique()
        drawn = torch.randn(total, g.hidden_size, generator=generator)
        local = called[torch.randint(len(called), (total, g.top_k), generator=generator)].to(torch.int32)
        scales = torch.rand(total, g.top_k, generator=generator) + 0.1
    for count, end in zip(sizes, torch.tensor(sizes).cumsum(0).tolist(), strict=True):
        if count * g.top_k > 1:
            local[end - 1, -1] = -1
    inverse = float(inputs.fc31_input_scale.flatten()[0])
    # A quarter of the calibrated range: 6 * 448 of the input scale.
    factor = 672 / inverse if 0 < inverse < math.inf else 1.0
    x, local, scales = (drawn.to(device) * factor).to(g.dtype), local.to(device), scales.to(device)
    reference = UnquantizedReferenceKernel()
    reference.plan(g, total, device)
    reference.bind(kernel.weights)
    # All sizes in one call: each expert is dequantized once, and those of a large layer do not fit beside the model.
    expected = reference.run(x, local, scales, out=torch.zeros(x.shape, device=device))
    ids = torch.where(local >= 0, local + kernel.first_expert, -1).to(torch.int32)
    found, told = [], False
    for part in torch.arange(total, device=device).split(list(sizes)):
        wanted = expected[part]
        usable = wanted.isfinite().all(1) & wanted.any(1)
        if not bool(usable.any()):
            continue
        told = True
        first, second = (kernel.run(x[part], ids[part], scales[part]) for _ in range(2))
        wrong = (first.float() - wanted)[usable].square().sum(1)
        size = wanted[usable].square().sum(1)
        whole, worst = float((wrong.sum() / size.sum()).sqrt()), float((wrong / size).max().sqrt())
        if not (whole <= BOUND and worst <= TOKEN_BOUND):  # not a number passes neither
            found.append(f"{len(part)} tokens: error {whole:.2g}, {worst:.2g} of one token")
        elif not torch.equal(first.view(torch.int16), second.view(torch.int16)):
            found.append(f"{len(part)} tokens: two runs differ")
    return found if told else None
