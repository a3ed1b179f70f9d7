# SPDX-License-Identifier: Apache-2.0
"""How a timer spends its budget, on a simulated machine, since no GPU here has a clock; and what is made of its times."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trtllm_b12x.dispatch import timing
from trtllm_b12x.dispatch.policy import GAIN, HOST, FixedThreshold, MeasuredPolicy, Timings, counts_to_measure, fastest
from trtllm_b12x.dispatch.timing import BUDGET_S, LONGEST_S, PathTimer, TimedPath
from trtllm_b12x.kernels import Geometry, MoECall

GEOMETRY = Geometry(8, 2, 128, 256, "Swiglu")
CALLS = 24
LAUNCH_S, CAPTURE_S, DRAW_S, DRAW_TOKEN_S = 100e-6, 300e-6, 500e-6, 8e-6
"""Of a call that is launched or captured, and of its routes."""


class Machine:
    def __init__(self) -> None:
        self.now = self.replayed = 0.0
        self.capturing = False
        self.draws: list[tuple[int, int, bool]] = []

    def path(self, seconds: Callable[[int], float], captured: bool = True, **named: Any) -> TimedPath:
        def run(call: MoECall) -> None:
            (tokens,) = {len(tensor) for tensor in (call.x, call.ids, call.router_weights)}
            self.now += CAPTURE_S if self.capturing else max(LAUNCH_S, seconds(tokens))
            self.replayed += seconds(tokens)

        return TimedPath([run] * 3, captured=captured, **named)

    def sample(self, tokens: int, seed: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        self.now += DRAW_S + DRAW_TOKEN_S * tokens
        self.draws.append((tokens, seed, skewed))
        return torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2)

    def captured(self, run: Callable[[], None]) -> Callable[[], float]:
        self.capturing, self.replayed = True, 0.0
        run()
        self.capturing, took = False, self.replayed

        def replay() -> float:
            self.now += took
            return took

        return replay

    def seconds(self, run: Callable[[], None]) -> float:
        start = self.now
        run()
        return self.now - start

    def drop(self) -> None:
        self.now += 1e-3

    def timer(self, a: TimedPath, host: TimedPath, **named: Any) -> PathTimer:
        return PathTimer({"a": a, HOST: host}, GEOMETRY, self.sample, torch.device("cpu"), **named)


def stand_in(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(monotonic=lambda: machine.now))
    monkeypatch.setattr(timing, "_graphs", lambda: contextlib.nullcontext(machine))
    monkeypatch.setattr(timing, "_seconds", machine.seconds)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    stand_in(found, monkeypatch)
    monkeypatch.setattr(timing, "_calls", lambda *_: CALLS)
    return found


def test_times_are_those_of_a_call(machine: Machine) -> None:
    found = machine.timer(machine.path(lambda n: 1e-6 * n), machine.path(lambda n: 50e-6))([16, 1, 4])
    assert {n: pytest.approx(times) for n, times in found.rows.items()} == {n: {"a": n, HOST: 50} for n in (1, 4, 16)}
    slow = machine.timer(machine.path(lambda n: 1e-3), machine.path(lambda n: 5e-3, captured=False))
    assert slow([8]).rows[8] == pytest.approx({"a": 1000, HOST: 5000})


@pytest.mark.parametrize(
    ("kernel", "host", "captured", "bound"),
    [
        (lambda n: 50e-6 * n**0.5, lambda n: 200e-6, True, BUDGET_S),
        (lambda n: 500e-6 * n**0.5, lambda n: 2e-3, True, BUDGET_S),
        (lambda n: 50e-6 * n**0.5, lambda n: 50e-3, False, LONGEST_S),
        (lambda n: 50e-6 * n**0.5, lambda n: 5e-3 * n, False, LONGEST_S),
        (lambda n: 20e-3, lambda n: 20e-3, True, LONGEST_S),
    ],
)
def test_the_budget_is_a_bound(
    machine: Machine, kernel: Callable[[int], float], host: Callable[[int], float], captured: bool, bound: float
) -> None:
    """Each count has the fewest replays at least, which takes longer than the budget where calls are slow."""
    timer = machine.timer(machine.path(kernel), machine.path(host, captured))
    found = timer(counts_to_measure([256])).counts
    print(f"{len(found)} counts in {timer.spent_s:.2f} s: {found}")
    assert timer.spent_s == pytest.approx(machine.now)
    assert timer.spent_s <= 1.01 * bound
    assert len(found) == 17 or bound < timer.spent_s + 5


@pytest.mark.parametrize("slower", [1, 8])
def test_there_is_time_for_prefill(machine: Machine, slower: int) -> None:
    """A call of 4096 tokens takes 1 ms, or as much longer as a small card is slower: there fewer calls make a time."""
    paths = {
        "a": machine.path(lambda n: 100e-6 + 1e-6 * n, serves=lambda n: n <= 250),
        "b": machine.path(lambda n: slower * (100e-6 + 0.2e-6 * n), captured=False, serves=lambda n: n >= 64),
        HOST: machine.path(lambda n: slower * (100e-6 + 0.25e-6 * n)),
    }
    assert timing.largest_served(paths) == {"a": 250, "b": timing.LARGEST}
    timer = PathTimer(paths, GEOMETRY, machine.sample, torch.device("cpu"))
    counts = counts_to_measure(timing.largest_served(paths).values())
    found = timer(counts)
    print(f"{len(found.counts)} of {len(counts)} counts in {timer.spent_s:.2f} s: {found.counts}")
    assert found.counts == sorted(counts)
    assert timer.spent_s <= 1.01 * BUDGET_S


def test_the_first_count_is_measured_in_any_case(machine: Machine) -> None:
    assert machine.timer(machine.path(lambda n: 3.0), machine.path(lambda n: 3.0, False))([4, 5]).counts == [4]


def test_a_shorter_limit_and_paths_that_are_never_left_out(machine: Machine) -> None:
    slow, fast = machine.path(lambda n: 2e-3 * n), machine.path(lambda n: 1e-4 * n)
    assert "a" not in machine.timer(slow, fast)([1, 2, 4]).rows[2]
    timer = machine.timer(slow, fast, budget_s=1.0, longest_s=1.5, behind=(math.inf, math.inf))
    assert [*timer([1, 2, 4, 8, 200]).rows.values()] == [pytest.approx({"a": 2e3 * n, HOST: 1e2 * n}) for n in (1, 2, 4, 8)]
    assert timer.spent_s <= 1.5


def test_half_of_the_calls_have_skewed_routes_and_every_call_its_own(machine: Machine) -> None:
    def draws(seconds: float = 50e-6, **named: Any) -> list[tuple[int, int, bool]]:
        machine.draws.clear()
        machine.timer(machine.path(lambda n: seconds), machine.path(lambda n: seconds), **named)([4])
        return machine.draws[:]

    assert len({seed for _, seed, _ in draws()}) == CALLS
    assert [skewed for *_, skewed in draws()] == [False, True] * (CALLS // 2)
    assert not {seed for _, seed, _ in draws(seed=1)} & {seed for _, seed, _ in draws()}
    assert [draw[2] for draw in draws(1.0)] == [False, True]  # as few as there are where calls are slow


def test_what_a_path_raises_is_raised(machine: Machine) -> None:
    def fails(tokens: int) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        machine.timer(machine.path(fails), machine.path(lambda n: 1.0))([1])


# ---- which path serves a token count, by measured times or a fixed threshold -------------------------------------------


SEED, TRIALS, LARGEST = 7, 200, 256


def measured(rows: dict[int, dict[str, float]]) -> MeasuredPolicy:
    return MeasuredPolicy(Timings(rows), "stored")


def test_a_family_serves_no_more_tokens_than_it_was_measured_with() -> None:
    policy = measured({1: {"cuda": 1.0, HOST: 2.0}, 256: {"grouped": 1.0, HOST: 2.0}})
    chosen = [policy.select(tokens, ["cuda", "grouped"]) for tokens in (1, 2, 256, 257, 8192)]
    assert chosen == ["cuda", None, "grouped", None, None]
    assert policy.summary() == "stored: cuda 1-1, CUTLASS 2-16, grouped 17-256, then CUTLASS"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({10**9: {HOST: 1.0}}, "1000000000 tokens: counts are 1 to 8192"),
        ({10**400: {HOST: 1.0}}, "1000000000000000000000000000000000000... tokens"),
        ({1: {HOST: 10**400}}, "is no time of host"),
        ({1: {HOST: 1.0, " ": 1.0}}, "1 tokens: ' ' is not the name of a path"),
        ({1: {HOST: 1.0, "": 1.0}}, "1 tokens: '' is not the name of a path"),
        ({1: {"cuda": 1.0}}, "1 tokens: the time of 'host' is missing"),
    ],
)
def test_a_table_that_cannot_have_been_measured(rows: dict[int, dict[str, float]], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Timings(rows)


def test_the_fastest_serves_and_the_host_where_it_is_not_beaten_by_three_percent() -> None:
    assert fastest({"a": 10.0, "b": 9.0, HOST: 10.0}) == "b"
    assert fastest({"a": 10.0, HOST: 10.0}, gain=1.0) == "a"
    assert fastest({"a": 9.71, HOST: 10.0}) is None
    assert fastest({"a": 10 * GAIN, HOST: 10.0}) == "a"
    assert fastest({HOST: 10.0}) is None


def test_the_nearest_count_as_a_ratio_decides() -> None:
    policy = measured({n: {"a": float(n), HOST: 9.0} for n in (16, 4, 1)})
    assert [policy.timings.around(tokens)[0] for tokens in (1, 2, 3, 4, 8, 9, 16, 999)] == [1, 1, 4, 4, 4, 16, 16, 16]
    assert [policy.select(tokens, ["a"]) for tokens in (8, 9)] == ["a", None]
    assert policy.select(1, []) is None


def test_the_counts_that_are_measured() -> None:
    assert counts_to_measure([256]) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 3, 6, 10, 12, 24, 48, 96, 192]
    assert counts_to_measure([5]) == [1, 2, 4, 5, 3]
    assert counts_to_measure([63, 8192])[:15] == [1, 2, 4, 8, 16, 32, 63, 64, 128, 256, 512, 1024, 2048, 4096, 8192]


def test_a_family_serves_up_to_its_last_count_beside_one_that_goes_on() -> None:
    last = {"a": 63, "b": 512}
    counts = counts_to_measure(last.values())
    policy = measured({n: {"b": 2.0, HOST: 9.0, **({"a": 1.0} if n <= 63 else {})} for n in counts})
    assert policy.ranges(512, last) == [(1, 63, "a"), (64, 512, "b")]
    assert policy.summary() == "stored: a 1-63, b 64-512, then CUTLASS"


def test_a_fixed_threshold() -> None:
    assert [FixedThreshold(8).select(tokens, ["a", "b"]) for tokens in (1, 7, 8)] == ["a", "a", None]
    assert FixedThreshold(8).select(1, []) is None


def test_the_summary_names_every_stretch() -> None:
    policy = measured({1: {"a": 9, "b": 1, HOST: 4}, 2: {"a": 1, "b": 2, HOST: 4}, 4: {"a": 1, HOST: 4}, 8: {"a": 8, HOST: 4}})
    assert policy.summary() == "stored: b 1-1, a 2-6, then CUTLASS"
    assert measured({1: {"a": 9, HOST: 4}}).summary() == "stored: CUTLASS"


def test_a_form_of_ours_need_not_gain_on_the_family_in_the_hosts_place() -> None:
    timings = Timings({1: {"gemm a": 9.9, HOST: 10}, 2: {"gemm a": 10.1, HOST: 10}})
    assert MeasuredPolicy(timings, "stored", base="gemm").summary() == "stored: gemm a 1-1, then gemm"
    assert MeasuredPolicy(timings, "stored").summary() == "stored: CUTLASS"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "fast", None, [1]])
def test_a_time_that_can_be_none(value: float) -> None:
    with pytest.raises(ValueError, match="is no time of a in microseconds"):
        Timings({1: {"a": value, HOST: 1.0}})


# ---- simulated paths, whose times change in steps ------------------------------------------------------------------------

Curve = Callable[[int], float]


def step_curve(draw: random.Random) -> Curve:
    """A power of the count, times up to four factors from random counts on."""
    fixed, slope = draw.uniform(5, 30), draw.uniform(0, 0.6)
    steps = {round(2 ** draw.uniform(0.5, math.log2(LARGEST))): draw.uniform(0.6, 1.8) for _ in range(draw.randint(0, 4))}
    return lambda tokens: fixed * tokens**slope * math.prod(factor for first, factor in steps.items() if first <= tokens)


def losses(paths: dict[str, Curve]) -> list[float]:
    """How far the choice is behind the best one at every count, where the host's time counts GAIN: what a kernel has to reach."""
    policy = measured({n: {name: time(n) for name, time in paths.items()} for n in counts_to_measure([LARGEST])})
    found = []
    for tokens in range(1, LARGEST + 1):
        times = {name: time(tokens) * (GAIN if name == HOST else 1) for name, time in paths.items()}
        found.append(times[policy.select(tokens, ["a", "b"]) or HOST] / min(times.values()) - 1)
    return found


def test_the_average_choice_is_within_half_a_percent_of_the_best() -> None:
    draw = random.Random(SEED)
    sets = [[HOST, "a", "b"][: draw.randint(2, 3)] for _ in range(TRIALS)]
    found = [loss for names in sets for loss in losses({name: step_curve(draw) for name in names})]
    assert len(found) == TRIALS * LARGEST
    assert sum(found) / len(found) <= 0.005
    assert sum(loss > 0.03 for loss in found) / len(found) <= 0.02


class SimulatedCard(Machine):
    """A card of 20 to 188 multiprocessors and the paths of a layer: waves, cliffs where tiles change, noise, drift, outliers."""

    LAYERS = ((128, 8, 2048, 768, 3), (256, 8, 2048, 512, 3), (512, 22, 1024, 2688, 2), (128, 4, 2880, 2880, 3))
    """Experts, top k, hidden and intermediate size, matrices: Qwen3-30B, Qwen3.6, Nemotron-3-Super, gpt-oss-120b."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.draw = draw = random.Random(seed)
        uniform = draw.uniform
        self.multiprocessors = draw.choice((20, 26, 30, 36, 46, 48, 60, 70, 82, 84, 110, 170, 188))
        of = draw.choice(self.LAYERS[:2] if self.multiprocessors < 46 else self.LAYERS)
        self.experts, self.top_k, hidden, self.width, matrices = of
        self.size = 0.5625 * matrices * hidden * self.width
        """Bytes of an expert."""
        self.flops = 2 * matrices * hidden * self.width
        self.bandwidth = self.multiprocessors * uniform(5.7e9, 16e9)
        self.rate = self.multiprocessors * uniform(0.7e12, 1.2e12)
        self.noise, self.drift = uniform(0.01, 0.05), uniform(-0.03, 0.03)
        self.named: dict[str, tuple[Callable[[int], float], int, int]] = {}
        self.named["cuda"] = self.curve(8, uniform(0.7, 0.9), uniform(0.5, 0.9), uniform(3e-6, 8e-6), 64), 1, 64
        for form in range(draw.randint(3, 11)):
            rows = (8, 16)[form % 2]
            first = 1 + 11 * (rows == 16) if form < 4 else draw.choice((1, 3, 12, 24) if rows == 8 else (12, 28, 39, 48))
            last = max(47 if rows == 8 else 128, first + 8)
            curve = self.curve(rows, uniform(0.55, 0.85), uniform(0.4, 0.8), uniform(9e-6, 16e-6), draw.choice((32, 64, 128)))
            self.named[f"triton {form}"] = curve, first, last
        for rows in draw.sample((16, 32, 64, 128), draw.randint(2, 4)):
            curve = self.curve(rows, uniform(0.5, 0.85), uniform(1.6, 4.5), uniform(20e-6, 40e-6), 128)
            self.named[f"grouped {rows}"] = curve, 64, timing.LARGEST
        host = self.curve(128, uniform(0.45, 0.85), uniform(2, 5.5), uniform(25e-6, 60e-6), 128)
        self.named[HOST] = host, 1, timing.LARGEST

    def hits(self, tokens: int) -> float:
        return self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)

    def curve(self, rows: int, reads: float, computes: float, fixed: float, tile: int) -> Callable[[int], float]:
        """Seconds by tokens, of ``rows`` routes a block, shares of the bandwidth and of 16-bit products, and a fixed part."""
        cliffs = {2 ** self.draw.uniform(1, 12): self.draw.uniform(0.85, 1.25) for _ in range(self.draw.randint(0, 2))}

        def seconds(tokens: int) -> float:
            hits = self.hits(tokens)
            routes = tokens * self.top_k / hits
            blocks = hits * (math.ceil(routes / rows) if routes > rows else 1 + 0.3 * routes / rows)
            tiles = blocks * self.width / tile / self.multiprocessors
            waves = min(math.ceil(tiles) / tiles, 1.6) if tiles < 20 else 1
            read = (hits + 0.25 * (blocks - hits)) * self.size / (self.bandwidth * reads) * waves
            compute = blocks * rows * self.flops / (self.rate * computes) * waves
            took = fixed + max(read, compute) + 0.3 * min(read, compute)
            return took * math.prod(factor for first, factor in cliffs.items() if tokens >= first)

        return seconds

    def measured(self, seconds: float) -> float:
        noise = self.draw.lognormvariate(0, self.noise) * (1 + self.drift * min(self.now / 2, 1))
        seconds *= noise * (self.draw.uniform(1.5, 4) if self.draw.random() < 0.004 else 1)
        self.now += seconds
        return seconds

    def captured(self, run: Callable[[], None]) -> Callable[[], float]:
        super().captured(run)
        took = self.replayed
        return lambda: self.measured(took)

    def seconds(self, run: Callable[[], None]) -> float:
        began, self.replayed = self.now, 0.0
        run()
        self.now = began
        return self.measured(self.replayed)

    def policy(self, monkeypatch: pytest.MonkeyPatch) -> MeasuredPolicy:
        stand_in(self, monkeypatch)
        calls = [math.ceil(2.5 * 48e6 / (self.size * self.hits(tokens))) for tokens in range(1, timing.LARGEST + 1)]
        monkeypatch.setattr(timing, "_calls", lambda geometry, tokens, *_: 2 * max(6, min(24, calls[tokens - 1] // 2 + 1)))
        paths = {
            name: self.path(curve, not name.startswith("grouped"), serves=lambda n, first=first, last=last: first <= n <= last)
            for name, (curve, first, last) in self.named.items()
        }
        timer = PathTimer(paths, GEOMETRY, self.sample, torch.device("cpu"))
        return MeasuredPolicy(timer(counts_to_measure(timing.largest_served(paths).values())), "measured")


def test_simulated_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real timer and policy, on cards whose times are known: how far the choice is behind the best path and the host's."""
    counts = sorted({*range(1, 17), *(round(2 ** (step / 6)) for step in range(24, 79))})
    behind_best, behind_host, spent = [], [], []
    for seed in range(TRIALS):
        card = SimulatedCard(seed)
        policy = card.policy(monkeypatch)
        spent.append(card.now)
        for tokens in counts:
            times = {name: curve(tokens) for name, (curve, first, last) in card.named.items() if first <= tokens <= last}
            chosen = times[policy.select(tokens, [name for name in times if name != HOST]) or HOST]
            behind_best.append(chosen / min(times.values()) - 1)
            behind_host.append(chosen / times[HOST] - 1)
    more, slower = (sum(loss > bound for loss in losses) for losses, bound in ((behind_best, 0.03), (behind_host, 0.01)))
    print(f"{more / len(behind_best):.1%} {slower / len(behind_host):.1%} {max(behind_best):.2f} {sum(spent) / TRIALS:.1f} s")
    assert more <= 0.04 * len(behind_best)
    assert slower <= 0.015 * len(behind_host)
    assert max(behind_best) <= 0.7
    assert max(spent) <= LONGEST_S


def test_a_form_stands_for_those_that_do_not_serve() -> None:
    policy = measured({4: {"cuda": 9.0, "triton a": 5.0, HOST: 20.0}, 8: {"cuda": 10.0, "triton b": 12.0, HOST: 20.0}})
    assert policy.select(5, ["cuda", "triton b"]) == "triton b"  # as fast as its family at 4 tokens
    assert policy.select(5, ["cuda", "triton a", "triton b"]) == "triton a"
    assert policy.select(7, ["cuda", "triton b", "grouped"]) == "cuda"
    policy = measured({232: {"triton a": 8.6, "triton b": 8.0, HOST: 20.0}, 256: {"triton a": 8.9, "triton c": 8.1, HOST: 20.0}})
    assert policy.select(240, ["triton a", "triton c"]) == "triton c"


def test_a_kernel_that_wins_late_is_found() -> None:
    paths: dict[str, Curve] = {HOST: lambda n: 10.0, "b12x": lambda n: 5.0 if n >= 24 else 12.0}
    policy = measured({n: {name: time(n) for name, time in paths.items()} for n in counts_to_measure([LARGEST])})
    assert policy.ranges(LARGEST, {"b12x": LARGEST}) == [(1, 17, HOST), (18, 256, "b12x")]
    assert all(policy.select(tokens, ["b12x"]) == "b12x" for tokens in range(24, 257))


# ---- which layers and how many calls a graph has -------------------------------------------------------------------------


def test_calls_go_through_all_layers(machine: Machine) -> None:
    seen: list[int] = []
    path = machine.path(lambda n: 50e-6)

    def run(layer: int, call: MoECall) -> None:
        seen.append(layer)
        path.runs[layer](call)

    paths = TimedPath([functools.partial(run, layer) for layer in range(3)])
    machine.timer(paths, paths)([1])
    assert seen[-2 * CALLS :] == [0, 1, 2] * (2 * CALLS // 3)


@pytest.mark.parametrize(
    ("l2_mib", "tokens", "layers", "calls"),
    [(0, 1, 1, 12), (1, 1, 1, 26), (1, 64, 1, 12), (4, 64, 1, 26), (64, 1, 1, 48), (0, 1, 17, 18), (0, 1, 99, 24)],
)
def test_calls_read_more_than_the_l2_cache_holds(
    l2_mib: int, tokens: int, layers: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token reads two experts of 55,296 bytes, 64 tokens read all eight."""
    properties = types.SimpleNamespace(L2_cache_size=l2_mib << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert timing._calls(GEOMETRY, tokens, layers, torch.device("cuda")) == calls
