"""Compare kernels on this card with the torch kernels: a few calls at load, before the first request.

The layer's own weights are used: random ones would need as much memory again. Activations and routes are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.formats.nvfp4 import BLOCK_SIZE, E2M1_MAX, round_to_e2m1, round_to_e4m3
from trtllm_b12x.formats.weights import Weights

from . import Geometry, MoECall, first_line
from .reference import ReferenceKernel

BOUND = 0.02
"""Relative L2 over all calls of b12x. Right kernels stay below 0.005 (docs/sm12x-on-hopper.md), but a code or a block scale that
rounds the other way, because a card adds in another order, moves a single token by 0.024 (seen)."""
TOKEN_BOUND = 0.1
"""Relative L2 of the worst token. Every expert of a token has equal weight, so one of 22 that is off by a half moves the token by
0.107; a lost tile or a stale buffer by more."""
CALLS = 16
"""Minimum number of calls; more if it takes more to reach every expert."""
_SLACK = 0.01
"""Added to the bound of atomic sums, for codes that round the other way."""
_DRAWS = 3
"""Activations are drawn again, 64 times smaller, if the reference overflows."""
_OFF_TIES = 0.97
_TIE = 5e-4
"""Relative distance from a rounding tie that counts as one. A bf16 step is 8 times as far."""
QUICK_BOUNDS = (0.01, 0.05)
"""Relative L2 of a call and of its worst token, where the reference has the kernel's rounding points. Right kernels stay below
0.004: bf16 rounding of the activation's result and of the output."""
_QUICK_EXPERTS = 16
"""Number of experts that a quick test calls; the others are the same code at other addresses."""
_QUANTIZED_TOKENS = 8
"""Maximum number of tokens of the call with quantized input."""


@dataclass(frozen=True)
class SelfTestCase:
    """One kernel at one token count."""

    kernel: str
    tokens: int
    variant: int = 0
    """Kernels of one variant are the same code."""
    atomic: bool = False
    """Adds with bf16 atomics. Other kernels must repeat to the bit."""
    origin: str = ""
    """Package and version, for the message."""


@dataclass(frozen=True)
class SelfTestResult:
    case: SelfTestCase
    error: float
    """Relative L2 over all calls."""
    worst: float
    """Largest relative L2 of a token."""
    bounds: tuple[float, float]
    """Largest ``error`` and ``worst`` that pass."""
    repeatable: bool = True
    fault: str = ""
    """First line of the exception, if the kernel raised one."""

    @property
    def passed(self) -> bool:
        return not self.fault and self.repeatable and self.error <= self.bounds[0] and self.worst <= self.bounds[1]

    def __str__(self) -> str:
        if self.fault:
            verdict = self.fault
        elif not self.repeatable:
            verdict = "two runs differ"
        elif self.error > self.bounds[0] or self.passed:
            verdict = f"error {self.error:.2g} {'within' if self.passed else 'beyond'} {self.bounds[0]:.2g}"
        else:
            verdict = f"error {self.worst:.2g} of one token beyond {self.bounds[1]:.2g}"
        return f"{self.case.kernel}, {self.case.tokens} tokens: {verdict} {self.case.origin}".rstrip()


Run = Callable[[MoECall], torch.Tensor]


def _compared(
    case: SelfTestCase, run: Run, calls: Sequence[MoECall], expected: torch.Tensor, bounds: tuple[float, float]
) -> SelfTestResult:
    """Run the calls, and the first of them again, and compare with ``expected``, whose rows that are not finite do not count."""
    outputs = [run(call) for call in (*calls, calls[0])]
    usable = expected.isfinite().all(1)
    wrong = (torch.cat(outputs[:-1]).float() - expected)[usable].double().square().sum(1)
    size = expected[usable].double().square().sum(1)
    # NaN would compare as no error; where nothing is expected, nothing may come.
    ratio = torch.where(wrong == 0, 0.0, wrong / size).nan_to_num(nan=torch.inf, posinf=torch.inf)
    whole, worst = (wrong.sum() / size.sum()).sqrt().nan_to_num(nan=torch.inf), ratio.max().sqrt()
    same = case.atomic or torch.equal(*(output.view(torch.int16) for output in (outputs[-1], outputs[0])))
    return SelfTestResult(case, float(whole), float(worst), bounds, same)


# ---- b12x: every expert of the layer -------------------------------------------------------------------------------------


def run_self_test(
    cases: Mapping[SelfTestCase, Run], geometry: Geometry, weights: Weights, first_expert: int = 0
) -> list[SelfTestResult] | None:
    """Compare each case with the reference.

    Every case reaches every expert, alone with others and with all tokens on the same ``top_k``, so that each tile of rows and,
    with the most tokens, each wave of tasks is run; and some ids that are not this rank's.

    Returns:
        A result for each, or None if nearly all outputs are zero or not finite.
    """
    drawn = _draw_until_finite(geometry, weights, sorted({case.tokens for case in cases}), first_expert)
    if drawn is None:
        return None
    results = []
    for case, run in cases.items():
        bounds = max(BOUND, geometry.atomic_rounding + _SLACK) if case.atomic else BOUND, TOKEN_BOUND
        try:
            results.append(_compared(case, run, *drawn[case.tokens], bounds))
        except Exception as error:
            results.append(SelfTestResult(case, float("inf"), float("inf"), bounds, fault=first_line(error)))
    return results


Drawn = dict[int, tuple[list[MoECall], torch.Tensor]]
"""Token count to calls, and the reference's output of all of them, float32."""


def _draw_until_finite(geometry: Geometry, weights: Weights, sizes: list[int], first_expert: int) -> Drawn | None:
    for attempt in range(_DRAWS):
        drawn = _draw(geometry, weights, sizes, first_expert, 64.0**-attempt)
        expected = torch.cat([expected for _, expected in drawn.values()])
        finite, not_zero = expected.isfinite().all(1), expected.any(1)
        if bool(finite.float().mean() > 0.5):
            return drawn if bool((finite & not_zero).float().mean() > 0.25) else None
    return None


def _draw(geometry: Geometry, weights: Weights, sizes: list[int], first_expert: int, factor: float) -> Drawn:
    """Draw the calls of each size. The reference runs them all at once: it dequantizes an expert once."""
    device = weights.device
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):  # whatever the host's default is while it loads
        routes = [_routes(geometry, tokens, generator) for tokens in sizes]
    local = torch.cat(routes).to(device)
    reference, capacity = ReferenceKernel(), max(len(local), geometry.num_experts)
    reference.plan(geometry, capacity, device)
    reference.bind(weights)
    x = _activations(reference, capacity, factor)
    router_weights = _router_weights(reference, x, local)
    expected = reference.run(MoECall(x[: len(local)], local, router_weights)).float()
    ids = _global(local, geometry.num_experts, first_expert)
    drawn, first = {}, 0
    for tokens, part in zip(sizes, routes, strict=True):
        end = first + len(part)
        rows = [slice(start, start + tokens) for start in range(first, end, tokens)]
        drawn[tokens] = [MoECall(x[row], ids[row], router_weights[row]) for row in rows], expected[first:end]
        first = end
    return drawn


def _activations(reference: ReferenceKernel, tokens: int, factor: float) -> torch.Tensor:
    """Draw bf16 ``(tokens, H)``: ``factor`` of the weights' calibrated range, off rounding ties."""
    device, divisor = reference.weights.device, float(reference.weights.fc1_divisor[0])
    divisor = divisor if 0 < divisor < float("inf") else 1.0
    x = torch.randn(tokens, reference.geometry.hidden_size, device=device, generator=torch.Generator(device).manual_seed(0))
    return _off_ties((x * (_OFF_TIES * factor * divisor * 6 * 448 / x.abs().max())).to(torch.bfloat16), divisor)


def _off_ties(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Move bf16 values ``(tokens, H)`` whose block scale or code sits on a rounding tie by one bf16 step.

    Kernels that divide and kernels that multiply by a reciprocal round a tie to different codes.
    """
    values = x.unflatten(-1, (-1, BLOCK_SIZE))
    amax = values.abs().amax(-1, keepdim=True)
    values = _next_bf16(values, _tied(amax.float() / (E2M1_MAX * divisor), round_to_e4m3) & (values.abs() == amax))
    block_scale = round_to_e4m3(values.abs().amax(-1, keepdim=True).float() / (E2M1_MAX * divisor)).float()
    return _next_bf16(values, _tied(values.float() / (block_scale * divisor).clamp(min=1e-30), round_to_e2m1)).flatten(-2)


def _tied(values: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    below, above = (rounded(values * factor).view(torch.uint8) for factor in (1 - _TIE, 1 + _TIE))
    return below != above


def _next_bf16(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the bf16 values next farther from zero where ``mask`` is set."""
    return (values.view(torch.int16) + mask.to(torch.int16)).view(torch.bfloat16)


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
    """Return float32 router weights with which every expert of a token counts the same, however small its weights."""
    experts, top_k = reference.geometry.num_experts, reference.geometry.top_k
    ids = torch.full((experts, top_k), -1, dtype=torch.int32, device=x.device)
    ids[:, 0] = torch.arange(experts, device=x.device)
    size = reference.run(MoECall(x[:experts], ids, torch.ones(experts, top_k, device=x.device))).double().norm(dim=1)
    usable = size.isfinite() & (size > 0)
    smallest = size[usable].min() if bool(usable.any()) else 1.0
    weight = torch.where(usable, smallest / size, 1.0).float()
    return weight[local.clamp(min=0).long()] / local.shape[1]


def _global(local: torch.Tensor, experts: int, first: int) -> torch.Tensor:
    """Convert to a host's ids. -1 becomes an id beyond this rank's, the largest integer, or one below this rank's."""
    ids = local + first
    turn = torch.arange(local.numel(), dtype=torch.int32, device=local.device).view(local.shape) % 3
    others = torch.where(turn == 0, first + experts, torch.where(turn == 1, 2**31 - 1, first - 1))
    return torch.where(local < 0, others, ids).int()


# ---- Triton: a few experts, one call per size ----------------------------------------------------------------------------


def run_quick_self_test(
    kernel: Any, reference_class: type[ReferenceKernel], first_expert: int, sizes: Sequence[int]
) -> list[SelfTestResult] | None:
    """Compare a kernel with its reference in a call of each of ``sizes`` tokens, and in one with quantized input.

    Returns:
        None if all outputs are zero or not finite.
    """
    g, device, total = kernel.geometry, kernel.weights.device, sum(sizes)
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        shuffled = torch.randperm(g.num_experts, generator=generator)
        called = torch.cat((torch.tensor([0, g.num_experts - 1]), shuffled))[:_QUICK_EXPERTS].unique()
        drawn = torch.randn(total, g.hidden_size, generator=generator)
        local = called[torch.randint(len(called), (total, g.top_k), generator=generator)].to(torch.int32)
        router_weights = torch.rand(total, g.top_k, generator=generator) + 0.1
        ends = torch.tensor(sizes).cumsum(0).tolist()
        count = min(_QUANTIZED_TOKENS, total, kernel.capacity)
        codes = torch.randint(256, (count, g.hidden_size // 2), generator=generator, dtype=torch.uint8).to(device)
        scales = torch.randint(0x28, 0x68, (count, g.hidden_size // 16), generator=generator, dtype=torch.uint8).to(device)
    for size, end in zip(sizes, ends, strict=True):
        if size * g.top_k > 1:
            local[end - 1, -1] = -1
    x = (drawn.to(device) * kernel.weights.typical_input()).to(g.dtype)
    local, router_weights = local.to(device), router_weights.to(device)
    ids = torch.where(local >= 0, local + first_expert, -1).to(torch.int32)
    reference = reference_class()
    reference.plan(g, total, device)
    reference.bind(kernel.weights)
    # All sizes in one call: each expert is dequantized once, and those of a large layer do not fit beside the model.
    expected = reference.run(MoECall(x, local, router_weights, out=torch.zeros(x.shape, device=device)))
    tests = [
        (kernel.features.name, MoECall(x[rows], ids[rows], router_weights[rows]), expected[rows])
        for rows in (slice(end - size, end) for size, end in zip(sizes, ends, strict=True))
    ]
    if kernel.features.quantized_input and kernel.weights.input_scales.fc31_input_scale.numel() == 1:
        # A host has one input scale for all experts where it quantizes for them.
        call = MoECall(codes, ids[-count:], router_weights[-count:], scales)
        unrounded = torch.zeros(count, g.hidden_size, device=device)
        reference.run(call._replace(ids=local[-count:], out=unrounded))
        tests.append((f"{kernel.features.name} on quantized input", call, unrounded))
    results = []
    for name, call, wanted in tests:
        wanted[~wanted.any(1)] = torch.nan  # zeros do not count
        if bool(wanted.isfinite().all(1).any()):
            results.append(_compared(SelfTestCase(name, len(wanted)), kernel.run, [call], wanted, QUICK_BOUNDS))
    return results or None
