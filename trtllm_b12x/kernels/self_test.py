# SPDX-License-Identifier: Apache-2.0
"""Compare kernels on this card with the torch kernels: a few calls at load, before the first request.

The layer's own weights are used: random weights would need as much memory again. Activations and routes are random.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.formats.nvfp4 import BLOCK_SIZE, E2M1_MAX, NVFP4Weights, round_to_e2m1, round_to_e4m3
from trtllm_b12x.formats.weights import Weights

from . import Geometry, Kernel, MoECall, first_line
from .call import of_logits
from .reference import ReferenceKernel

BOUND = 0.02
"""Relative L2 over all calls of b12x. Correct kernels stay below 0.005 (docs/sm12x-on-hopper.md). A code or a block scale that
rounds the other way, because a card adds in another order, has moved a single token by 0.024."""
TOKEN_BOUND = 0.1
"""Relative L2 of the worst token. Every expert of a token has equal weight, so one of 22 that is off by a half moves the token by
0.107. A lost tile or a stale buffer moves it by more."""
CALLS = 16
"""Minimum number of calls. Reaching every expert may take more."""
_SLACK = 0.01
"""Added to the bound of atomic sums, for codes that round the other way."""
_OF_THE_RANGE = 0.97
"""The largest activation, as a fraction of the calibrated range."""
_TIE = 5e-4
"""Relative distance from a rounding tie that counts as one. A bf16 step is 8 times as far."""
QUICK_BOUNDS = (0.01, 0.05)
"""Relative L2 of a call and of its worst token, where the reference has the kernel's rounding points. Correct kernels stay below
0.004, which comes from bf16 rounding of the activation's result and of the output."""
QUICK_EXPERTS = 16
"""Number of experts that a quick test calls; other experts run the same code at other addresses."""
_QUANTIZED_TOKENS = 8
"""Maximum number of tokens of the call with quantized input."""


@dataclass(frozen=True)
class SelfTestCase:
    kernel: str
    tokens: int
    variant: int = 0
    """Kernels of one variant are the same code."""
    atomic: bool = False
    """True if the kernel adds with bf16 atomics. Other kernels must be bitwise repeatable."""
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


def compared(
    case: SelfTestCase, run: Run, calls: Sequence[MoECall], expected: torch.Tensor, bounds: tuple[float, float]
) -> SelfTestResult:
    """Run the calls, then the first one again. Compare the outputs with the finite rows of ``expected``."""
    outputs = [run(call) for call in (*calls, calls[0])]
    usable = expected.isfinite().all(1)
    wrong = (torch.cat(outputs[:-1]).float() - expected)[usable].double().square().sum(1)
    size = expected[usable].double().square().sum(1)
    # NaN would compare as no error. Tokens with an expected output of zero must give zero.
    ratio = torch.where(wrong == 0, 0.0, wrong / size).nan_to_num(nan=torch.inf, posinf=torch.inf)
    error = torch.where(wrong.sum() == 0, 0.0, wrong.sum() / size.sum()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    whole, worst = error.sqrt(), ratio.max().sqrt()
    same = case.atomic or torch.equal(*(output.view(torch.int16) for output in (outputs[-1], outputs[0])))
    return SelfTestResult(case, float(whole), float(worst), bounds, same)


# ---- b12x: every expert of the layer -------------------------------------------------------------------------------------


def run_self_test(
    cases: Mapping[SelfTestCase, Run], geometry: Geometry, weights: Weights, first_expert: int = 0
) -> list[SelfTestResult] | None:
    """Compare each case with the reference. Return None if nearly all outputs are zero or not finite.

    Every case reaches every expert, also with all tokens on the same ``top_k`` experts. So each tile of rows and, with the most
    tokens, each wave of tasks runs. Some ids belong to other ranks.
    """
    sizes = sorted({case.tokens for case in cases})
    drawn = _draw(ReferenceKernel(), geometry, weights, first_expert, sizes)
    if drawn is None:
        return None
    results = []
    for case, run in cases.items():
        bounds = max(BOUND, geometry.atomic_rounding + _SLACK) if case.atomic else BOUND, TOKEN_BOUND
        try:
            results.append(compared(case, run, *drawn[case.tokens], bounds))
        except Exception as error:
            results.append(SelfTestResult(case, float("inf"), float("inf"), bounds, fault=first_line(error)))
    return results


# ---- Triton: a few experts, one call per size ----------------------------------------------------------------------------


def run_quick_self_test(
    kernel: Any, reference: ReferenceKernel, first_expert: int, tested: Mapping[int, Sequence[Kernel]]
) -> list[SelfTestResult] | None:
    """Compare a kernel with its reference, and once with quantized input. Return None as ``run_self_test`` does.

    ``tested`` maps each token count to the variants of ``kernel`` that the test calls with it.
    """
    name, weights, sizes = kernel.features.name, kernel.weights, sorted(tested)
    drawn = _draw(reference, kernel.geometry, weights, first_expert, sizes, quick=True)
    if drawn is None:
        return None
    usable = [size for size in sizes if bool(drawn[size][1].isfinite().all(1).any())]
    results = [
        compared(SelfTestCase(name, size), form.run, *drawn[size], QUICK_BOUNDS) for size in usable for form in tested[size]
    ]
    if kernel.features.quantized_input and weights.input_scales.fc31_input_scale.numel() == 1:
        # An engine that quantizes the input has one input scale for all experts.
        (call,), _ = drawn[sizes[-1]]
        call = call.of_tokens(max(0, len(call.x) - _QUANTIZED_TOKENS), len(call.x))
        x = call.x
        generator = torch.Generator(x.device).manual_seed(0)
        drawn_bytes: dict[str, Any] = {"generator": generator, "dtype": torch.uint8, "device": x.device}
        codes = torch.randint(256, (len(x), x.shape[1] // 2), **drawn_bytes)
        scales = torch.randint(0x28, 0x68, (len(x), x.shape[1] // BLOCK_SIZE), **drawn_bytes)
        call = call._replace(x=codes, x_sf=scales)
        case, expected = SelfTestCase(f"{name} on quantized input", len(x)), reference.run(call).float()
        if bool(expected.isfinite().all(1).any()):
            results.append(compared(case, kernel.run, [call], expected, QUICK_BOUNDS))
    return results


Drawn = dict[int, tuple[list[MoECall], torch.Tensor]]
"""Calls and the reference's float32 output of all calls, by token count."""


def _draw(
    reference: ReferenceKernel,
    geometry: Geometry,
    weights: Weights,
    first_expert: int,
    sizes: Sequence[int],
    quick: bool = False,
) -> Drawn | None:
    """Draw the calls of each size. The reference runs all calls at once, so that it dequantizes an expert once.

    Return None if nearly all outputs are zero or not finite.
    """
    device, generator = weights.device, torch.Generator().manual_seed(0)
    with torch.device("cpu"):  # the engine may have another default device during weight loading
        routes = [_routes(geometry, tokens, generator, quick) for tokens in sizes]
    local = torch.cat(routes).to(device)
    capacity = max(len(local), geometry.num_experts)
    reference.plan(geometry, capacity, device)
    reference.bind(weights, first_expert)
    x = activations(geometry, weights, capacity)
    ids = _global(local, geometry.num_experts, first_expert)
    if geometry.scoring is None:
        whole = MoECall(x[: len(local)], ids, _router_weights(reference, x, local))
    else:
        whole = of_logits(x[: len(local)], *_logits(geometry, ids))
    expected = reference.run(whole).float()
    if bool((expected.isfinite().all(1) & expected.any(1)).float().mean() <= 0.25):
        return None
    drawn, first = {}, 0
    for tokens, part in zip(sizes, routes, strict=True):
        end = first + len(part)
        drawn[tokens] = [whole.of_tokens(start, start + tokens) for start in range(first, end, tokens)], expected[first:end]
        first = end
    return drawn


def _logits(geometry: Geometry, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Draw bfloat16 logits ``(tokens, E)`` that prefer ``ids``, and a bias if ``scoring.bias``. Ids may be invalid."""
    experts, generator = geometry.num_experts * geometry.ranks, torch.Generator(ids.device).manual_seed(0)
    logits = 0.5 * torch.randn(len(ids), experts, device=ids.device, generator=generator)
    known = (ids >= 0) & (ids < experts)
    logits += torch.zeros_like(logits).scatter_(1, ids.where(known, 0).long(), 3.0 * known)
    bias = None
    if geometry.scoring is not None and geometry.scoring.bias:
        bias = 0.1 * torch.randn(experts, device=ids.device, generator=generator)
    return logits.bfloat16(), bias


def activations(geometry: Geometry, weights: Weights, tokens: int) -> torch.Tensor:
    """Draw ``(tokens, H)`` in the weights' calibrated range, off rounding ties."""
    device, calibrated = weights.device, 4 * weights.typical_input()
    x = torch.randn(tokens, geometry.hidden_size, device=device, generator=torch.Generator(device).manual_seed(0))
    x = (x * (_OF_THE_RANGE * calibrated / x.abs().max())).to(torch.bfloat16)
    return (_off_ties(x, calibrated / (6 * 448)) if isinstance(weights, NVFP4Weights) else x).to(geometry.dtype)


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


def _routes(geometry: Geometry, tokens: int, generator: torch.Generator, quick: bool = False) -> torch.Tensor:
    """Return local ids ``(calls * tokens, top_k)`` int32, -1 for a route to another rank.

    The first calls go through all experts in turn, two have all tokens on the same experts, and the rest are random. A quick
    test has one random call among a few experts, which are the same for each number of tokens.
    """
    experts, top_k = geometry.num_experts, geometry.top_k
    if quick:
        order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))[: max(top_k, QUICK_EXPERTS)]
        turns, skewed, calls = 0, [], 1
    else:
        order = torch.randperm(experts, generator=generator)
        turns = -(-experts // (tokens * top_k))
        skewed = [torch.arange(top_k).repeat(tokens, 1), torch.arange(experts - top_k, experts).repeat(tokens, 1)]
        calls = max(CALLS, turns + 2)
    spread = order.repeat(-(-turns * tokens * top_k // experts))[: turns * tokens * top_k].view(-1, top_k)
    others = (calls - turns) * tokens - sum(map(len, skewed))
    ids = torch.cat([spread, *skewed, order[torch.rand(others, len(order), generator=generator).argsort(1)[:, :top_k]]])
    if geometry.expert_parallel:
        # Routes to other ranks lie between this rank's routes, and the last token has no local route.
        remote = torch.rand(ids.shape, generator=generator) < 0.5
        remote[: len(spread)] = False
        remote[-1] = True
        remote[0, 0] = False  # a single token has one local expert
        ids[remote] = -1
    elif tokens > 1:
        ids[-1, -1] = -1
    return ids.int()


def _router_weights(reference: ReferenceKernel, x: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return float32 router weights with which all experts of a token contribute equally, however small the experts' weights."""
    called = local[local >= 0].unique()
    ids = torch.full((len(called), local.shape[1]), -1, dtype=torch.int32, device=x.device)
    ids[:, 0] = called + reference.experts.first
    alone = MoECall(x[: len(called)], ids, torch.ones(ids.shape, device=x.device))
    size = reference.run(alone).double().norm(dim=1)
    usable = size.isfinite() & (size > 0)
    smallest = size[usable].min() if bool(usable.any()) else 1.0
    weight = torch.ones(reference.geometry.num_experts, device=x.device)
    weight[called.long()] = torch.where(usable, smallest / size, 1.0).float()
    return weight[local.clamp(min=0).long()] / local.shape[1]


def _global(local: torch.Tensor, experts: int, first: int) -> torch.Tensor:
    """Convert to global ids. -1 becomes, in turn, an id above this rank's experts, the largest integer, or an id below them."""
    ids = local + first
    turn = torch.arange(local.numel(), dtype=torch.int32, device=local.device).view(local.shape) % 3
    others = torch.where(turn == 0, first + experts, torch.where(turn == 1, 2**31 - 1, first - 1))
    return torch.where(local < 0, others, ids).int()
