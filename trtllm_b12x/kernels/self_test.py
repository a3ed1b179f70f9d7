"""Compare a kernel on this card with the torch kernel: a few calls at load, before the first request.

The layer's own weights are used, because random ones of the same size would need as much memory again, on a card that holds the
model already; activations and routes are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from trtllm_b12x.environment import inspect_flashinfer
from trtllm_b12x.formats.weights import Weights

from . import Geometry, MoECall, first_line
from .reference import ReferenceKernel

BOUND = 0.02
"""Relative L2 over all calls.  Right kernels stay below 0.005 (docs/sm12x-on-hopper.md), but a code or a block scale that falls
the other way, because a card adds up in another order, moves a single token by 0.024 (seen)."""
TOKEN_BOUND = 0.1
"""Relative L2 of the worst token.  Every expert of a token counts alike (:func:`_routed`), so one of 22 that is off by a half
moves it by 0.107; a lost tile or a stale buffer by more."""
CALLS = 16
"""At least; as many as reach every expert."""
_SLACK = 0.01
"""For codes that fall the other way."""
_DRAWS = 3
"""Activations are drawn again, 64 times smaller, where what the reference makes of them is not finite."""


@dataclass(frozen=True)
class Examinee:
    """One kernel at one token count."""

    kernel: str
    variant: int
    """Kernels of one variant are the same code."""
    tokens: int
    atomic: bool
    """It adds up in bf16 atomics; else reruns must agree to the bit."""
    run: Callable[[MoECall], torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """Result of testing a :class:`Examinee`."""

    kernel: str
    variant: int
    tokens: int
    error: float
    """Relative L2 over all calls."""
    worst: float
    """Largest relative L2 of a single token."""
    bound: float
    """Largest ``error`` that passes."""
    repeatable: bool = True
    """False: it ought to, and two runs differ."""
    fault: str = ""
    """First line of what it raised."""

    @property
    def passed(self) -> bool:
        return not self.fault and self.repeatable and self.error <= self.bound and self.worst <= TOKEN_BOUND

    def __str__(self) -> str:
        what, version = f"{self.kernel}, {self.tokens} tokens", f"(flashinfer-python {inspect_flashinfer().version})"
        if self.fault:
            return f"{what}: {self.fault} {version}"
        if not self.repeatable:
            return f"{what}: two runs differ {version}"
        if self.error > self.bound or self.passed:
            return f"{what}: error {self.error:.2g} {'within' if self.passed else 'beyond'} {self.bound:.2g} {version}"
        return f"{what}: error {self.worst:.2g} of one token beyond {TOKEN_BOUND:.2g} {version}"


@dataclass(frozen=True)
class _Calls:
    """Calls of one token count, one behind the other."""

    tokens: int
    x: torch.Tensor
    """``(calls * tokens, hidden_size)`` bfloat16."""
    ids: torch.Tensor
    """``(calls * tokens, top_k)`` int32, global."""
    router_weights: torch.Tensor
    expected: torch.Tensor
    """float32, of the reference."""

    def parts(self) -> list[slice]:
        return [slice(first, first + self.tokens) for first in range(0, len(self.x), self.tokens)]


def examine(tests: Iterable[Examinee], geometry: Geometry, weights: Weights, first_expert: int = 0) -> list[Outcome] | None:
    """Run each of ``tests`` against the reference.

    Every test reaches every expert, alone with others and with all tokens on the same ``top_k``, so that each tile of rows and,
    with the most tokens, each wave of tasks is run; and some ids that are in no table.

    Returns:
        An outcome for each, or None where the weights say nothing: nearly all outputs are zero or not finite.
    """
    tests = list(tests)
    sizes = sorted({test.tokens for test in tests})
    drawn = _draw_until_finite(geometry, weights, sizes, first_expert)
    if drawn is None:
        return None
    return [_outcome(test, geometry, drawn[test.tokens]) for test in tests]


def _outcome(test: Examinee, geometry: Geometry, calls: _Calls) -> Outcome:
    bound = max(BOUND, geometry.atomic_rounding + _SLACK) if test.atomic else BOUND
    try:
        parts = (*calls.parts(), calls.parts()[0])
        results = [test.run(MoECall(calls.x[part], calls.ids[part], calls.router_weights[part])) for part in parts]
        found = torch.cat(results[:-1]).float()
    except Exception as error:
        return Outcome(test.kernel, test.variant, test.tokens, float("inf"), float("inf"), bound, fault=first_line(error))
    usable = calls.expected.isfinite().all(1)
    wrong = (found - calls.expected)[usable].double().square().sum(1)
    size = calls.expected[usable].double().square().sum(1)
    # Not a number compares as no error at all; where nothing is expected, nothing may come.
    ratio = torch.where(wrong == 0, 0.0, wrong / size).nan_to_num(nan=torch.inf, posinf=torch.inf)
    whole, worst = (wrong.sum() / size.sum()).sqrt().nan_to_num(nan=torch.inf), ratio.max().sqrt()
    same = test.atomic or torch.equal(results[-1], results[0])
    return Outcome(test.kernel, test.variant, test.tokens, float(whole), float(worst), bound, same)


def _draw_until_finite(geometry: Geometry, weights: Weights, sizes: list[int], first_expert: int) -> dict[int, _Calls] | None:
    for attempt in range(_DRAWS):
        drawn = _draw(geometry, weights, sizes, first_expert, 64.0**-attempt)
        expected = torch.cat([calls.expected for calls in drawn.values()])
        finite, told = expected.isfinite().all(1), expected.any(1)
        if bool(finite.float().mean() > 0.5):
            return drawn if bool((finite & told).float().mean() > 0.25) else None
    return None


def _draw(geometry: Geometry, weights: Weights, sizes: list[int], first_expert: int, factor: float) -> dict[int, _Calls]:
    """Calls of each size, and what the reference makes of them, in one go: it dequantizes an expert once."""
    device = weights.device
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):  # whatever the host's default is while it loads
        routes = {tokens: _routes(geometry, tokens, generator) for tokens in sizes}
    total = sum(map(len, routes.values()))
    reference, most = ReferenceKernel(), max(total, geometry.num_experts)
    reference.plan(geometry, most, device)
    reference.bind(weights)
    x = reference.activations(most, factor)
    local = torch.cat(list(routes.values())).to(device)
    router_weights = _router_weights(reference, x, local)
    expected = reference.run(MoECall(x[:total], local, router_weights)).float()
    ids = _global(local, geometry.num_experts, first_expert)
    drawn, first = {}, 0
    for tokens, part in routes.items():
        rows = slice(first, first + len(part))
        drawn[tokens] = _Calls(tokens, x[rows], ids[rows], router_weights[rows], expected[rows])
        first += len(part)
    return drawn


def _routes(geometry: Geometry, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Local ids ``(calls * tokens, top_k)`` int32, -1 for a route that is not this rank's.

    First calls that go through all experts in turn, then two with all tokens on the same experts, the rest at random.
    """
    experts, top_k = geometry.num_experts, geometry.top_k
    turns = -(-experts // (tokens * top_k))
    order = torch.randperm(experts, generator=generator)
    spread = order.repeat(-(-turns * tokens * top_k // experts))[: turns * tokens * top_k].view(-1, top_k)
    skewed = [torch.arange(top_k).repeat(tokens, 1), torch.arange(experts - top_k, experts).repeat(tokens, 1)]
    calls = max(CALLS, turns + 2)
    others = torch.rand((calls - turns - 2) * tokens, experts, generator=generator).argsort(1)[:, :top_k]
    ids = torch.cat([spread, *skewed, others])
    if geometry.expert_parallel:
        # Experts of other ranks between those of this one, and a token that has none here.
        remote = torch.rand(ids.shape, generator=generator) < 0.5
        remote[: len(spread)] = False
        remote[-1] = True
        ids[remote] = -1
    elif tokens > 1:
        ids[-1, -1] = -1
    return ids.int()


def _router_weights(reference: ReferenceKernel, x: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Router weights with which every expert of a token counts alike, however small its weights are: float32, as ``local``."""
    experts, top_k = reference.geometry.num_experts, reference.geometry.top_k
    every = torch.full((experts, top_k), -1, dtype=torch.int32, device=x.device)
    every[:, 0] = torch.arange(experts, device=x.device)
    size = reference.run(MoECall(x[:experts], every, torch.ones(experts, top_k, device=x.device))).double().norm(dim=1)
    usable = size.isfinite() & (size > 0)
    smallest = size[usable].min() if bool(usable.any()) else 1.0
    weight = torch.where(usable, smallest / size, 1.0).float()
    return weight[local.clamp(min=0).long()] / local.shape[1]


def _global(local: torch.Tensor, experts: int, first: int) -> torch.Tensor:
    """As a host has them: -1 becomes an id beyond this rank's, the largest integer there is, or one below."""
    ids = local + first
    beyond = torch.arange(local.numel(), dtype=torch.int32, device=local.device).view(local.shape) % 3
    others = torch.where(beyond == 0, first + experts, torch.where(beyond == 1, 2**31 - 1, first - 1))
    return torch.where(local < 0, others, ids).int()
