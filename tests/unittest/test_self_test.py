# SPDX-License-Identifier: Apache-2.0
"""The self-test, on the torch kernel as it is and with mistakes that a real one could have; and that kernel's own contract."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import layers
from tests.checkpoints import random_experts
from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.kernels import Geometry, MoECall, PlanError
from trtllm_b12x.kernels.plans import Plan, PlannedKernel
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.kernels.self_test import BOUND, CALLS, SelfTestCase, SelfTestResult, _routes, run_quick_self_test, run_self_test

CAPACITY = 31
Run = Callable[..., torch.Tensor]


def bound(gated: bool = True, expert_parallel: bool = False) -> ReferenceKernel:
    tensors = random_experts(8, 256, 320, gated)
    kernel = layers.load(layers.create(8, 256, 320, top_k=3, gated=gated), tensors).backend.kernel
    kernel.geometry = dataclasses.replace(kernel.geometry, ranks=2 if expert_parallel else 1)
    return kernel


def examined(
    kernel: ReferenceKernel, run: Run, atomic: bool = False, sizes: tuple[int, ...] = (1, 8, 31)
) -> list[SelfTestResult]:
    cases = {SelfTestCase(f"of {size}", size, size, atomic, "(flashinfer)"): run for size in sizes}
    results = run_self_test(cases, kernel.geometry, kernel.weights)
    assert results is not None
    return results


@pytest.mark.all("True-False", "False-True")
@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("gated", [True, False])
def test_a_right_kernel_passes(gated: bool, expert_parallel: bool) -> None:
    kernel = bound(gated, expert_parallel)
    results = examined(kernel, kernel.run)
    assert [result.case.tokens for result in results] == [1, 8, 31]
    assert all(result.passed and result.error == 0 for result in results)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, CAPACITY])
def test_every_expert_every_row_of_a_tile_and_ids_of_no_expert(tokens: int, expert_parallel: bool) -> None:
    kernel = bound(expert_parallel=expert_parallel)
    seen: list[torch.Tensor] = []

    def watched(call: MoECall) -> torch.Tensor:
        seen.append(call.ids)
        return kernel.run(call)

    examined(kernel, watched, sizes=(tokens,))
    assert len(seen) == CALLS + 1  # one again
    ids = torch.stack(seen)
    assert set(range(8)) <= set(ids.flatten().tolist())
    assert all(len(set(row)) == 3 for row in ids.flatten(0, 1).tolist() if all(0 <= i < 8 for i in row))
    held = (ids >= 0) & (ids < 8)
    if tokens > 1 or expert_parallel:
        outside = set(ids[~held].tolist())
        assert outside <= {-1, 8, 2**31 - 1}
        assert outside
    if expert_parallel:
        assert not bool(held.any(2).all())  # a token that has no expert here
    else:
        rows = torch.stack([(call == expert).sum() for call in seen for expert in range(8)])
        assert int(rows.max()) == tokens  # all on one


@pytest.mark.parametrize("tokens", [1, 2, 8, CAPACITY])
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_calls_send_every_token_to_the_same_experts(tokens: int, ranks: int) -> None:
    """The first of the table, then the last: on the only rank by every route, on one of two by those that stay on it."""
    geometry = Geometry(40, 8, 128, 128, "Swiglu", ranks=ranks)
    calls = _routes(geometry, tokens, torch.Generator().manual_seed(0)).view(-1, tokens, 8)
    turns = -(-40 // (tokens * 8))
    assert set(range(40)) == set(calls[:turns].flatten().tolist())
    for call, first in ((calls[turns], 0), (calls[turns + 1], 32)):
        held = call >= 0
        assert torch.equal(call[held], torch.arange(first, first + 8).expand(tokens, 8)[held].int())
        assert held.all() if ranks == 1 else held.any()
    if ranks == 2:  # by chance one of 256 tokens with eight experts has none here: one is always drawn
        assert all((_routes(geometry, tokens, torch.Generator().manual_seed(seed))[-1] == -1).all() for seed in range(4))


def test_a_later_ranks_ids_are_global() -> None:
    kernel = bound(expert_parallel=True)
    kernel.bind(kernel.weights, first_expert=24)
    results = run_self_test({SelfTestCase("of 8", 8): kernel.run}, kernel.geometry, kernel.weights, 24)
    assert results is not None
    assert results[0].error == 0


def test_one_code_that_falls_the_other_way_is_no_defect() -> None:
    """A single token may be off by 0.024, as seen between two right kernels; all of them may not, and none by more."""
    kernel = bound()
    calls = iter(range(1000))

    def once(call: MoECall) -> torch.Tensor:
        result = kernel.run(call)
        return result * 1.024 if next(calls) == 3 else result

    assert examined(kernel, once, sizes=(1,))[0].passed
    assert not examined(kernel, lambda call: kernel.run(call) * 1.024, sizes=(1,))[0].passed


@pytest.mark.all(str(CAPACITY))
@pytest.mark.parametrize("tokens", [1, CAPACITY])
def test_each_single_expert_is_looked_at(tokens: int) -> None:
    """Of more experts than one call reaches, some of them nearly silent beside the others."""
    kernel = layers.load(layers.create(16, 128, 128, top_k=4), random_experts(16, 128, 128)).backend.kernel
    kernel.weights.fc2_alpha[::3] *= 1e-3
    kernel.bind(dataclasses.replace(kernel.weights, input_scales=None))  # what a test writes into the divisors stays there
    for expert in range(16):
        (result,) = examined(kernel, scaled(kernel, expert, 3), sizes=(tokens,))
        assert not result.passed, (expert, str(result))


def rebound(kernel: ReferenceKernel, **tensors: Any) -> Run:
    other = ReferenceKernel()
    other.plan(kernel.geometry, CAPACITY, torch.device("cpu"))
    other.bind(dataclasses.replace(kernel.weights, **tensors))
    return other.run


def scaled(kernel: ReferenceKernel, expert: int, factor: float) -> Run:
    """The kernel with a wrong scale of one expert."""
    alpha = kernel.weights.fc2_alpha.clone()
    alpha[expert] *= factor
    return rebound(kernel, fc2_alpha=alpha)


def overwritten(kernel: ReferenceKernel, part: Any, value: float, nth: int | None = None) -> Run:
    """A part of the output is ``value``: of every call, or of one of seventeen, as a race is lost."""
    calls = itertools.count()

    def run(call: MoECall) -> torch.Tensor:
        result = kernel.run(call)
        if nth is None or next(calls) % 17 == nth:
            result[part] = value
        return result

    return run


def the_output_of_the_call_before(kernel: ReferenceKernel) -> Run:
    stale: dict[int, torch.Tensor] = {}

    def run(call: MoECall) -> torch.Tensor:
        result = stale.get(len(call.x), torch.zeros_like(call.x))
        stale[len(call.x)] = kernel.run(call)
        return result

    return run


def rows_beyond_a_tile(kernel: ReferenceKernel) -> Run:
    """Drop an expert's rows behind the first 16 of a call, as 0.6.17's static kernel drops those behind 32 of 64."""

    def run(call: MoECall) -> torch.Tensor:
        ids = call.ids
        place = torch.stack([(ids[: at + 1] == ids[at, :1]).any(1).sum() for at in range(len(ids))])
        return kernel.run(call._replace(ids=torch.where((place > 16).unsqueeze(1), -1, ids)))

    return run


def an_exception(kernel: ReferenceKernel) -> Run:
    def run(call: MoECall) -> torch.Tensor:
        raise RuntimeError("CUDA error: too many resources requested for launch\nCompile with ...")

    return run


def zeros(kernel: ReferenceKernel) -> Run:
    return lambda call: torch.zeros_like(call.x)


LOST_TILE = slice(None), slice(64, 128)
MISTAKES: dict[str, Callable[[ReferenceKernel], Run]] = {
    "wrong scale of one expert": lambda kernel: scaled(kernel, 7, 1.5),
    "gate and up swapped": lambda kernel: rebound(kernel, fc1_weight=torch.cat(kernel.weights.fc1_weight.chunk(2, 1)[::-1], 1)),
    "input scale for its reciprocal": lambda kernel: rebound(kernel, fc2_divisor=kernel.weights.fc2_divisor.reciprocal()),
    "next expert's weights": lambda kernel: rebound(kernel, fc2_weight=kernel.weights.fc2_weight.roll(1, 0).contiguous()),
    "a lost tile": lambda kernel: overwritten(kernel, LOST_TILE, 0),
    "rarely a lost tile": lambda kernel: overwritten(kernel, LOST_TILE, 0, nth=5),
    "rows beyond a tile": rows_beyond_a_tile,
    "zeros": zeros,
    "something for a route to nowhere": lambda kernel: lambda call: kernel.run(call._replace(ids=call.ids.clamp(0, 7))),
    "an exception": an_exception,
    "the output of the call before": the_output_of_the_call_before,
    "no number": lambda kernel: overwritten(kernel, (-1, -1), torch.nan),
    "the second route forgotten": lambda kernel: (
        lambda call: kernel.run(call._replace(router_weights=call.router_weights * torch.tensor([1.0, 0.0, 1.0])))
    ),
}
LATE = ("rows beyond a tile", "something for a route to nowhere")
"""Mistakes that calls of few tokens do not meet."""


@pytest.mark.all("*-False")
@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(mistake: str, atomic: bool) -> None:
    kernel = bound()
    sizes = (CAPACITY,) if mistake in LATE else (1, 8, CAPACITY)
    results = examined(kernel, MISTAKES[mistake](kernel), atomic, sizes)
    assert not any(result.passed for result in results), list(map(str, results))
    text = str(results[0])
    assert "beyond" in text or "two runs differ" in text or "too many resources requested for launch (flash" in text


def test_a_kernel_that_ought_to_repeat_has_to() -> None:
    kernel = bound()
    calls = iter(range(1000))

    def run(call: MoECall) -> torch.Tensor:
        return kernel.run(call) * (1 + 0.002 * (next(calls) % 3))

    (strict,), (loose,) = examined(kernel, run, sizes=(8,)), examined(kernel, run, atomic=True, sizes=(8,))
    assert strict.error is not None
    assert strict.error < BOUND
    assert not strict.passed
    assert "two runs differ" in str(strict)
    assert loose.passed


def test_weights_that_say_nothing_are_no_test() -> None:
    """A host that loads dummies."""
    kernel = bound()
    for filler in (0, 0x7F):  # zeros, and block scales that are no number
        kernel.weights.fc2_weight_sf.view(torch.uint8).fill_(filler)
        assert run_self_test({SelfTestCase("any", 8): lambda call: call.x}, kernel.geometry, kernel.weights) is None


@pytest.mark.parametrize("mistake", [None, "zeros", "wrong scale of one expert"])
def test_experts_that_say_nothing_leave_the_others_to_be_tested(mistake: str | None) -> None:
    kernel = bound()
    kernel.weights.fc2_alpha[2] = torch.nan
    kernel.weights.fc2_alpha[5] = 0
    (result,) = examined(kernel, MISTAKES[mistake](kernel) if mistake else kernel.run, sizes=(1,))
    assert result.passed == (mistake is None), str(result)


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.0, torch.nan])
def test_a_quick_test_of_one_token(alpha: float, expert_parallel: bool) -> None:
    """Its experts may hold nothing, or no number; on one of several ranks one of its experts is here."""
    kernel = bound(expert_parallel=expert_parallel)
    called = _routes(kernel.geometry, 1, torch.Generator().manual_seed(0), quick=True)
    assert bool((called >= 0).any())
    held = called[called >= 0].long()
    kernel.weights.fc2_alpha[held if alpha == 0 else held[:1]] *= alpha
    results = run_quick_self_test(kernel, ReferenceKernel(), 0, {1: [kernel], CAPACITY: [kernel]})
    assert results
    assert all(result.passed for result in results), list(map(str, results))
    kernel.run = zeros(kernel)  # type: ignore[method-assign]
    assert not any(result.passed for result in run_quick_self_test(kernel, ReferenceKernel(), 0, {CAPACITY: [kernel]}) or ())


def test_larger_sums_of_atomics_are_allowed_what_they_cost() -> None:
    small, large = Geometry(16, 4, 512, 256, "Swiglu"), Geometry(512, 22, 1024, 2816, "Relu2")
    assert 0.0055 < small.atomic_rounding < 0.0075  # docs/sm12x-on-hopper.md: seen, and predicted 1.3 times
    assert 0.0271 < large.atomic_rounding < 0.04


class Planned(PlannedKernel):
    """A kernel that shares a plan. ``error`` is that of its test; None: its weights say nothing."""

    features, geometry, device = ReferenceKernel.features, Geometry(4, 2, 128, 128, "Swiglu"), torch.device("cpu")
    plan: Any = None
    bind: Any = None
    tests = 0

    def __init__(self, error: float | None) -> None:
        self.error = error

    def _test(self) -> list[SelfTestResult] | None:
        self.tests += 1
        return None if self.error is None else [SelfTestResult(SelfTestCase("a", 1), self.error, 0, (BOUND, BOUND))]


def test_plans_are_tested_once_and_shared_unless_they_fail() -> None:
    wrong, nothing, right, last = kernels = [Planned(error) for error in (1.0, None, 0.0, 0.0)]
    wrong._share(("key",), Plan)
    with pytest.raises(PlanError, match="error 1 beyond"):
        wrong.self_test()
    for kernel, testing in ((nothing, (False, True)), (right, (True, False)), (last, (True, False))):
        kernel._share(("key",), Plan)
        kernel.self_test()
        assert kernel._plan is nothing._plan is not wrong._plan
        assert (kernel._plan.tested, kernel._plan.untestable) == testing
    assert [kernel.tests for kernel in kernels] == [1, 1, 1, 0]


# ---- the torch kernel's argument contract and its numbers --------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [f.name for f in dataclasses.fields(NVFP4Weights) if f.name not in ("input_scales", "epilogue", "layout")]
)
def test_every_tensor_is_checked(name: str) -> None:
    kernel = bound()
    tensor = getattr(kernel.weights, name)
    with pytest.raises(ValueError, match=name):
        kernel.bind(dataclasses.replace(kernel.weights, **{name: tensor[:-1]}))


def test_plan_and_run_refuse_what_no_kernel_takes() -> None:
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match="Gelu"):
        ReferenceKernel().plan(Geometry(4, 2, 128, 256, "Gelu"), 8, cpu)
    with pytest.raises(ValueError, match="multiples of 128"):
        ReferenceKernel().plan(Geometry(4, 2, 128, 192, "Swiglu"), 8, cpu)
    with pytest.raises(ValueError, match=r"64.*63"):
        bound().run(MoECall(torch.zeros(64, 256, dtype=torch.bfloat16), torch.zeros(64, 3).int(), torch.zeros(64, 3)))
