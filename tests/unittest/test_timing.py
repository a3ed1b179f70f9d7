"""How a timer spends its budget, on a simulated machine, since no GPU here has a clock; and what is made of its times."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trtllm_b12x.dispatch import timing
from trtllm_b12x.dispatch.policy import GAIN, HOST, FixedThreshold, MeasuredPolicy, Timings, counts_to_measure, fastest
from trtllm_b12x.dispatch.timing import BUDGET_S, PathTimer, TimedPath
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.triton.tiles import proposals

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


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(monotonic=lambda: found.now))
    monkeypatch.setattr(timing, "_graphs", lambda: contextlib.nullcontext(found))
    monkeypatch.setattr(timing, "_seconds", found.seconds)
    monkeypatch.setattr(timing, "_calls", lambda *_: CALLS)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: contextlib.nullcontext())
    return found


def test_times_are_those_of_a_call(machine: Machine) -> None:
    found = machine.timer(machine.path(lambda n: 1e-6 * n), machine.path(lambda n: 50e-6))([16, 1, 4])
    assert {n: pytest.approx(times) for n, times in found.rows.items()} == {n: {"a": n, HOST: 50} for n in (1, 4, 16)}
    slow = machine.timer(machine.path(lambda n: 1e-3), machine.path(lambda n: 5e-3, captured=False))
    assert slow([8]).rows[8] == pytest.approx({"a": 1000, HOST: 5000})


@pytest.mark.parametrize(
    ("kernel", "host", "captured", "least"),
    [
        (lambda n: 50e-6 * n**0.5, lambda n: 200e-6, True, 14),
        (lambda n: 500e-6 * n**0.5, lambda n: 2e-3, True, 14),
        (lambda n: 50e-6 * n**0.5, lambda n: 50e-3, False, 10),
        (lambda n: 50e-6 * n**0.5, lambda n: 5e-3 * n, False, 6),
        (lambda n: 20e-3, lambda n: 20e-3, True, 8),
    ],
)
def test_the_budget_is_a_bound(
    machine: Machine, kernel: Callable[[int], float], host: Callable[[int], float], captured: bool, least: int
) -> None:
    timer = machine.timer(machine.path(kernel), machine.path(host, captured))
    found = timer(counts_to_measure([256])).counts
    print(f"{len(found)} counts in {timer.spent_s:.2f} s: {found}")
    assert timer.spent_s == pytest.approx(machine.now)
    assert timer.spent_s <= BUDGET_S
    assert len(found) >= least


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
    assert timer.spent_s <= BUDGET_S


def test_the_first_count_is_measured_in_any_case(machine: Machine) -> None:
    assert machine.timer(machine.path(lambda n: 3.0), machine.path(lambda n: 3.0, False))([4, 5]).counts == [4]


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


def test_the_fastest_serves_and_the_host_where_it_is_not_beaten_by_three_percent() -> None:
    assert fastest({"a": 10.0, "b": 9.0, HOST: 10.0}) == "b"
    assert fastest({"a": 10.0, "b": 9.0, HOST: 10.0}, ["a"]) is None
    assert fastest({"a": 9.71, HOST: 10.0}) is None
    assert fastest({"a": 10 * GAIN, HOST: 10.0}) == "a"
    assert fastest({HOST: 10.0}) is None


def test_the_nearest_count_as_a_ratio_decides() -> None:
    policy = measured({n: {"a": float(n), HOST: 9.0} for n in (16, 4, 1)})
    assert [policy.timings.around(tokens)[0]["a"] for tokens in (1, 2, 3, 4, 8, 9, 16, 999)] == [1, 1, 4, 4, 4, 16, 16, 16]
    assert [policy.select(tokens, ["a"]) for tokens in (8, 9)] == ["a", None]
    assert policy.select(1, []) is None


def test_the_counts_that_are_measured() -> None:
    assert counts_to_measure([256]) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 3, 6, 10, 12, 24, 48, 96, 160, 192, 224]
    assert counts_to_measure([5]) == [1, 2, 4, 5, 3]
    assert counts_to_measure([63, 8192])[:13] == [1, 2, 4, 8, 16, 32, 63, 64, 128, 256, 1024, 4096, 8192]


def test_a_family_serves_up_to_its_last_count_beside_one_that_goes_on() -> None:
    last = {"a": 63, "b": 512}
    counts = counts_to_measure(last.values())
    policy = measured({n: {"b": 2.0, HOST: 9.0, **({"a": 1.0} if n <= 63 else {})} for n in counts})
    assert policy.ranges(512, last) == [(1, 63, "a"), (64, 512, "b")]
    assert policy.summary() == "stored: a 1-63, b 64-512, then CUTLASS"


def test_a_fixed_threshold() -> None:
    assert [FixedThreshold(8).select(tokens, ["a", "b"]) for tokens in (1, 7, 8)] == ["a", "a", None]
    assert FixedThreshold(8).select(1, []) is None
    assert FixedThreshold().summary("grouped") == "default, fixed: grouped from 64 tokens"


def test_the_summary_names_every_stretch() -> None:
    policy = measured({1: {"a": 9, "b": 1, HOST: 4}, 2: {"a": 1, "b": 2, HOST: 4}, 4: {"a": 1, HOST: 4}, 8: {"a": 8, HOST: 4}})
    assert policy.summary() == "stored: b 1-1, a 2-5, then CUTLASS"
    assert policy.summary("grouped") == "stored: b 1-1, a 2-5, then grouped"
    assert measured({1: {"a": 9, HOST: 4}}).summary() == "stored: CUTLASS"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "fast", None, [1]])
def test_a_time_that_can_be_none(value: float) -> None:
    with pytest.raises(ValueError, match="positive"):
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


def forms_of(geometry: Geometry, card: Card) -> dict[int, list[str]]:
    """Names of what serves each count from 1 to 256: both ways of one launch, and the sets of tiles of three."""
    one = {n: ["cuda"] + ["cuda gathering"] * (1 < n <= 8) if n <= 64 else [] for n in range(1, LARGEST + 1)}
    return {n: [*names, *(f"triton {tiles}" for tiles in proposals(geometry, card, 4, 16, n))] for n, names in one.items()}


def test_forms_on_simulated_cards() -> None:
    """With noise of 3 %. Of 500 such sets: 0.4 % on average, less than 2 % at 95 % of the counts, at worst 112 % at 41 tokens."""
    draw, found = random.Random(SEED), []
    geometries = (
        Geometry(128, 8, 2048, 768, "Swiglu"),
        Geometry(512, 22, 1024, 2688, "Relu2"),
        Geometry(32, 8, 2048, 768, "Swiglu", ranks=4),
    )
    cards = Card(132, 228 << 10, 90), Card(188, 100 << 10, 120), Card(48, 100 << 10, 121)
    forms = {pair: forms_of(*pair) for pair in itertools.product(geometries, cards)}
    for _ in range(TRIALS // 2):
        serving = draw.choice(list(forms.values()))
        of_family = {name: step_curve(draw) for name in ("cuda", "triton", HOST)}
        names = {name for names in serving.values() for name in names} | {HOST}
        # Forms of a family differ by a fifth, and by steps of their own.
        steps = {name: (draw.uniform(0.9, 1.2), round(2 ** draw.uniform(0, 8)), draw.uniform(0.85, 1.2)) for name in names}
        times = {
            n: {
                name: of_family[name.split()[0]](n) * steps[name][0] * (steps[name][2] if n >= steps[name][1] else 1)
                for name in (*served, HOST)
            }
            for n, served in serving.items()
        }
        rows = {
            n: {name: time * draw.gauss(1, 0.03) for name, time in times[n].items()} for n in counts_to_measure([64, LARGEST])
        }
        policy = measured(rows)
        for n, served in serving.items():
            best = min(time * (GAIN if name == HOST else 1) for name, time in times[n].items())
            chosen = policy.select(n, served) or HOST
            found.append(times[n][chosen] * (GAIN if chosen == HOST else 1) / best - 1)
    assert sum(found) / len(found) <= 0.01
    assert sorted(found)[int(0.95 * len(found))] <= 0.05


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
    assert policy.ranges(LARGEST, {"b12x": LARGEST}) == [(1, 19, HOST), (20, 256, "b12x")]
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
