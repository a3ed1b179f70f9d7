"""What the bench does with its time, on a machine whose time is told: no GPU here has any."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from trtllm_b12x.crossover import measuring

from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.dispatch.timing import BUDGET_S, Bench, Path
from trtllm_b12x.kernels import Geometry

GEOMETRY = Geometry(8, 2, 128, 256, "Swiglu")
CALLS = 24
LAUNCH_S, CAPTURE_S, DRAW_S = 100e-6, 300e-6, 500e-6
"""Of a call that is launched or captured, and of its routes."""


class Machine:
    def __init__(self) -> None:
        self.now = 0.0
        self.capturing, self.per_token = False, 0.0
        self.draws: list[tuple[int, int, bool]] = []

    def path(self, seconds: Callable[[int], float], captured: bool = True, **named: Any) -> Path:
        def run(x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> None:
            tokens = x.shape[0]
            self.now += CAPTURE_S if self.capturing else max(LAUNCH_S, seconds(tokens))
            self.replayed += seconds(tokens)

        return Path([run] * 3, captured=captured, **named)

    replayed = 0.0

    def draw(self, tokens: int, seed: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        self.now += DRAW_S + self.per_token * tokens
        self.draws.append((tokens, seed, skewed))
        return torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2)

    def captured(self, run: Callable[[], None]) -> Callable[[], None]:
        self.capturing, self.replayed = True, 0.0
        run()
        self.capturing, took = False, self.replayed

        def replay() -> None:
            self.now += took

        return replay

    def seconds(self, run: Callable[[], None]) -> float:
        start = self.now
        run()
        return self.now - start

    def drop(self) -> None:
        self.now += 1e-3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(measuring, "time", types.SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(measuring, "_graphs", lambda: contextlib.nullcontext(found))
    monkeypatch.setattr(measuring, "_seconds", found.seconds)
    monkeypatch.setattr(measuring, "_calls", lambda *_: CALLS)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    return found


def bench(machine: Machine, paths: dict[str, Path], **named: Any) -> Bench:
    return Bench(paths, GEOMETRY, machine.draw, torch.device("cpu"), **named)


def test_times_are_those_of_a_call(machine: Machine) -> None:
    paths = {"a": machine.path(lambda n: 1e-6 * n), HOST: machine.path(lambda n: 50e-6)}
    found = bench(machine, paths)([1, 4, 16])
    assert {n: pytest.approx(times) for n, times in found.points.items()} == {n: {"a": n, HOST: 50} for n in (1, 4, 16)}
    slow = {"a": machine.path(lambda n: 1e-3), HOST: machine.path(lambda n: 5e-3, captured=False)}
    assert bench(machine, slow)([8]).points[8] == pytest.approx({"a": 1000, HOST: 5000})


@pytest.mark.parametrize("budget", [0.8, BUDGET_S])
@pytest.mark.parametrize(
    ("kernel", "host", "captured", "least"),
    [
        (lambda n: 50e-6 * n**0.5, lambda n: 200e-6, True, 16),
        (lambda n: 500e-6 * n**0.5, lambda n: 2e-3, True, 12),
        (lambda n: 50e-6 * n**0.5, lambda n: 50e-3, False, 4),
        (lambda n: 50e-6 * n**0.5, lambda n: 5e-3 * n, False, 4),
        (lambda n: 20e-3, lambda n: 20e-3, True, 4),
    ],
)
def test_the_budget_is_a_bound(
    machine: Machine,
    budget: float,
    kernel: Callable[[int], float],
    host: Callable[[int], float],
    captured: bool,
    least: int,
) -> None:
    shares: list[float] = []
    made = bench(
        machine, {"a": machine.path(kernel), HOST: machine.path(host, captured)}, budget_s=budget, progress=shares.append
    )
    rounds = [1, 2, 4, 8, 16], [32], [64], [128], [256], [255, 127, 181, 90], [63, 31, 45, 23], [15, 7, 11, 5], [80, 81, 3, 20]
    found = [tokens for counts in rounds for tokens in made(counts).counts]
    print(f"{len(found)} counts in {made.spent:.2f} s: {found}")
    assert made.spent == pytest.approx(machine.now)
    assert made.spent <= budget
    assert len(found) >= least * budget / BUDGET_S
    assert shares == pytest.approx(sorted(shares))
    assert max(shares) <= 1


@pytest.mark.parametrize(("slower", "last"), [(1, 4096), (8, 8192)])
def test_there_is_time_for_prefill(machine: Machine, slower: int, last: int) -> None:
    """A call of 4096 tokens takes 1 ms, or as much longer as a small card is slower: there fewer calls make a time."""
    paths = {
        "a": machine.path(lambda n: 100e-6 + 1e-6 * n, serves=lambda n: n <= 256),
        "b": machine.path(lambda n: slower * (100e-6 + 0.2e-6 * n), captured=False, serves=lambda n: n >= 64),
        HOST: machine.path(lambda n: slower * (100e-6 + 0.25e-6 * n)),
    }
    machine.per_token = 8e-6  # of draws
    made = bench(machine, paths)
    rounds = [1, 2, 4, 8, 16], [32], [64], [128], [256], [45, 90], [1024], [4096], [8192]
    found = [tokens for counts in rounds for tokens in made(counts).counts]
    assert found == [tokens for counts in rounds for tokens in counts if tokens <= last]
    assert made.spent <= BUDGET_S


def test_the_first_count_is_measured_in_any_case(machine: Machine) -> None:
    made = bench(machine, {"a": machine.path(lambda n: 3.0), HOST: machine.path(lambda n: 3.0, False)})
    assert made([4, 5]).counts == [4]
    assert made([6]).counts == []


def test_another_bench_goes_on_with_what_is_left(machine: Machine) -> None:
    paths = {"a": machine.path(lambda n: 1e-3), HOST: machine.path(lambda n: 40e-3, captured=False)}
    least: dict[int, float] = {}
    assert bench(machine, paths, budget_s=0.5, least=least)([1, 2]).counts == [1, 2]
    assert set(least) == {1, 2}
    assert bench(machine, paths, budget_s=0.05, least=least)([4]).counts == []


def test_half_of_the_calls_have_skewed_routes_and_every_call_its_own(machine: Machine) -> None:
    paths = {"a": machine.path(lambda n: 1e-6 * n), HOST: machine.path(lambda n: 50e-6)}
    bench(machine, paths)([4, 8])
    for tokens in (4, 8):
        own = [draw for draw in machine.draws if draw[0] == tokens]
        assert len({seed for _, seed, _ in own}) == CALLS
        assert [skewed for *_, skewed in own] == [False, True] * (CALLS // 2)
    for skewed in (False, True):
        machine.draws.clear()
        bench(machine, paths, skewed=skewed)([4])
        assert {draw[2] for draw in machine.draws} == {skewed}
    first = machine.draws[:]
    machine.draws.clear()
    bench(machine, paths, skewed=True, seed=1)([4])
    assert not {seed for _, seed, _ in first} & {seed for _, seed, _ in machine.draws}
    machine.draws.clear()
    bench(machine, {"a": machine.path(lambda n: 1.0), HOST: machine.path(lambda n: 1.0)})([4])
    assert [draw[2] for draw in machine.draws] == [False, True]  # as few as there are where calls are slow


def test_where_launches_change(machine: Machine) -> None:
    paths = {
        "a": machine.path(lambda n: 1.0, serves=lambda n: n <= 40, launches=lambda n: (n > 5, n > 20)),
        "b": machine.path(lambda n: 1.0, serves=lambda n: n in (1, 2, 3, 8, 16), launches=lambda n: n // 3),
        HOST: machine.path(lambda n: 1.0, launches=int.bit_length),
    }
    assert measuring.served(paths) == {"a": list(range(1, 41)), "b": [1, 2, 3, 8, 16]}
    assert measuring.steps(paths) == {"a": [6, 21], "b": [3, 8, 16], HOST: [2, 4, 8, 16, 32]}
    assert measuring.steps({HOST: paths[HOST]}) == {HOST: []}


def test_what_a_path_raises_is_raised(machine: Machine) -> None:
    def fails(tokens: int) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        bench(machine, {"a": machine.path(fails), HOST: machine.path(lambda n: 1.0)})([1])
