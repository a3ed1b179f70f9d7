"""Compare kernels on this card with the same layer in torch: a few calls at load, on the layer's own weights.

The family's own, because :mod:`trtllm_b12x.kernels.self_test` has b12x's faults in mind, and its yardstick quantizes activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.reference import ReferenceKernel

BOUND = 0.01
"""Relative L2 of a call.  Right kernels stay below 0.004: bfloat16's rounding of the activation's result and of the output."""
TOKEN_BOUND = 0.05
EXPERTS = 16
"""Number of experts that are called; each of the others is the same code at another address."""
QUANTIZED = 8
"""Tokens at most of the call whose input arrives quantized."""


def faults(kernel: Any, yardstick: type[ReferenceKernel], first_expert: int, sizes: Sequence[int]) -> list[str] | None:
    """One line for each of ``sizes``, in tokens, that is wrong.

    Returns:
        None where the weights say nothing: outputs are zero or not finite.
    """
    g, device = kernel.geometry, kernel.weights.device
    total = sum(sizes)
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        shuffled = torch.randperm(g.num_experts, generator=generator)
        called = torch.cat((torch.tensor([0, g.num_experts - 1]), shuffled))[:EXPERTS].unique()
        drawn = torch.randn(total, g.hidden_size, generator=generator)
        local = called[torch.randint(len(called), (total, g.top_k), generator=generator)].to(torch.int32)
        router_weights = torch.rand(total, g.top_k, generator=generator) + 0.1
    for count, end in zip(sizes, torch.tensor(sizes).cumsum(0).tolist(), strict=True):
        if count * g.top_k > 1:
            local[end - 1, -1] = -1
    x = (drawn.to(device) * kernel.weights.typical_input()).to(g.dtype)
    local, router_weights = local.to(device), router_weights.to(device)
    reference = yardstick()
    reference.plan(g, total, device)
    reference.bind(kernel.weights)
    # All sizes in one call: each expert is dequantized once, and those of a large layer do not fit beside the model.
    expected = reference.run(MoECall(x, local, router_weights, out=torch.zeros(x.shape, device=device)))
    ids = torch.where(local >= 0, local + first_expert, -1).to(torch.int32)
    said = []
    for part in torch.arange(total, device=device).split(list(sizes)):
        runs = [kernel.run(MoECall(x[part], ids[part], router_weights[part])) for _ in range(2)]
        said.append(_compared(f"{len(part)} tokens", runs, expected[part]))
    if (
        kernel.features.quantized_input and kernel.weights.input_scales.fc31_input_scale.numel() == 1
    ):  # a host has one for all experts where it quantizes for them
        said.append(_of_quantized_input(kernel, reference, ids, local, router_weights, generator))
    told = [line for line in said if line is not None]
    return list(filter(None, told)) if told else None


def _of_quantized_input(
    kernel: Any,
    reference: Any,
    ids: torch.Tensor,
    local: torch.Tensor,
    router_weights: torch.Tensor,
    generator: torch.Generator,
) -> str | None:
    """A call of the last of ``ids``, on codes and block scales that no host need have made."""
    g, device = kernel.geometry, ids.device
    count = min(QUANTIZED, len(ids), kernel.capacity)
    ids, local, router_weights = ids[-count:], local[-count:], router_weights[-count:]
    with torch.device("cpu"):
        codes = torch.randint(256, (count, g.hidden_size // 2), generator=generator, dtype=torch.uint8).to(device)
        blocks = torch.randint(0x28, 0x68, (count, g.hidden_size // 16), generator=generator, dtype=torch.uint8).to(device)
    wanted = torch.zeros(count, g.hidden_size, device=device)
    reference.run(MoECall(codes, local, router_weights, blocks, out=wanted))
    runs = [kernel.run(MoECall(codes, ids, router_weights, blocks)) for _ in range(2)]
    return _compared(f"{count} tokens that arrive quantized", runs, wanted)


def _compared(what: str, runs: list[torch.Tensor], expected: torch.Tensor) -> str | None:
    """Return what is wrong, empty if nothing is, or None if ``expected`` has nothing to compare with."""
    usable = expected.isfinite().all(1) & expected.any(1)
    if not bool(usable.any()):
        return None
    wrong = (runs[0].float() - expected)[usable].square().sum(1)
    size = expected[usable].square().sum(1)
    whole, worst = float((wrong.sum() / size.sum()).sqrt()), float((wrong / size).max().sqrt())
    if not (whole <= BOUND and worst <= TOKEN_BOUND):  # not a number passes neither
        return f"{what}: error {whole:.2g}, {worst:.2g} of one token"
    return "" if torch.equal(*(run.view(torch.int16) for run in runs)) else f"{what}: two runs differ"
