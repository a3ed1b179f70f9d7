"""What a kernel computes on this card, against the torch kernel: a few calls at load, before the first request.

The layer's own weights are used, because random ones of the same size would need as much memory again, on a card that holds the
model already; activations and routes are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from trtllm_b12x.environment import inspect_flashinfer
from trtllm_b12x.strict_reference import move_off_ties

from . import Geometry, KernelWeights
from .reference import ReferenceKernel

BOUND = 0.02
"""Relative L2 over all calls.  Right kernels stay below 0.005 (docs/sm12x-on-hopper.md), but a code or a block scale that falls
the other way, because a card adds up in another order, moves a single token by 0.024 (seen).  A lost tile, a wrong scale or a
stale buffer moves a call by 0.1 and more, which shows also where only one of :data:`CALLS` is hit."""
CALLS = 16
_EXPERTS = 8
"""So many different ones at least, the first and the last among them."""
_OFF_TIES = 0.97
_SLACK = 0.01
"""For codes that fall the other way."""


@dataclass(frozen=True)
class Outcome:
    """One kernel of the plan.  ``variant`` counts the compiled kernels of a plan."""

    kernel: str
    variant: int
    tokens: int
    error: float | None
    """Relative L2 over :data:`CALLS` calls; None where the weights say nothing."""
    bound: float
    repeatable: bool = True
    """False: it ought to, and two runs differ."""

    @property
    def passed(self) -> bool:
        return self.repeatable and (self.error is None or self.error <= self.bound)

    def __str__(self) -> str:
        what = f"{self.kernel}, {self.tokens} tokens"
        if self.error is None:
            return f"{what}: not tested, the weights are all zero or not finite"
        if not self.repeatable:
            return f"{what}: two runs differ (flashinfer-python {inspect_flashinfer().version})"
        relation = "within" if self.passed else "beyond"
        return f"{what}: error {self.error:.2g} {relation} {self.bound:.2g} (flashinfer-python {inspect_flashinfer().version})"


def examine(
    kernels: Iterable[tuple[str, int, int, bool, Callable[..., torch.Tensor]]],
    geometry: Geometry,
    weights: KernelWeights,
    capacity: int,
) -> list[Outcome]:
    """Run each of ``kernels``: name, variant, token count, whether it adds up in bf16 atomics (else reruns must agree to the bit)
    and ``run(x, ids, scales)``."""
    device = weights.w1_weight.device
    with torch.device("cpu"):  # whatever the host's default is while it loads
        drawn = _draw(geometry, float(weights.input_global_scale[0]), capacity)
    x, ids, scales = (tensor.to(device) for tensor in drawn)
    reference = ReferenceKernel()
    reference.plan(geometry, capacity, device)
    reference.bind(weights)
    expected = reference.run(x, ids, scales).float()
    meaningful = bool(expected.isfinite().all()) and bool(expected.any())
    outcomes = []
    for name, variant, tokens, atomic, run in kernels:
        bound = max(BOUND, geometry.atomic_rounding + _SLACK) if atomic else BOUND
        parts = [slice(first, first + tokens) for first in (call % (capacity - tokens + 1) for call in range(CALLS))]
        results = [run(x[part], ids[part], scales[part]) for part in (*parts, parts[0])]
        if not meaningful:
            outcomes.append(Outcome(name, variant, tokens, None, bound))
            continue
        wrong = sum(float((out.float() - expected[part]).square().sum()) for out, part in zip(results, parts, strict=False))
        error = (wrong / sum(float(expected[part].square().sum()) for part in parts)) ** 0.5
        same = atomic or torch.equal(results[-1], results[0])
        # Not a number compares as no error at all.
        outcomes.append(Outcome(name, variant, tokens, error if error < float("inf") else float("inf"), bound, same))
    return outcomes


def _draw(geometry: Geometry, scale: float, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations within their calibrated range and off rounding ties, and routes to a few experts."""
    generator = torch.Generator().manual_seed(0)
    scale = scale if 0 < scale < float("inf") else 1.0
    x = torch.randn(tokens, geometry.hidden_size, generator=generator)
    x = move_off_ties((x * (_OFF_TIES * scale * 6 * 448 / x.abs().max())).to(torch.bfloat16), scale)
    count = min(geometry.num_experts, max(geometry.top_k, _EXPERTS))
    pool = torch.linspace(0, geometry.num_experts - 1, count).round().int()
    order = torch.rand(tokens, count, generator=generator).argsort(1)
    ids = pool[order.repeat(1, -(-geometry.top_k // count))[:, : geometry.top_k]]
    if geometry.expert_parallel:
        ids[torch.rand(ids.shape, generator=generator) < 0.5] = -1
        ids[:, 0] = pool[order[:, 0]]
        ids[-1] = -1
    scales = torch.softmax(torch.randn(tokens, geometry.top_k, generator=generator), 1)
    return x, ids.contiguous(), scales
