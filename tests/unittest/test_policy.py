"""Which path serves a token count, by measured times or a fixed threshold."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from trtllm_b12x.dispatch.policy import GAIN, HOST, FixedThreshold, MeasuredPolicy, Timings, counts_to_measure, fastest

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
    assert [policy.timings.nearest(tokens)["a"] for tokens in (1, 2, 3, 4, 8, 9, 16, 999)] == [1, 1, 4, 4, 4, 16, 16, 16]
    assert [policy.select(tokens, ["a"]) for tokens in (8, 9)] == ["a", None]
    assert policy.select(1, []) is None


def test_the_counts_that_are_measured() -> None:
    assert counts_to_measure([256]) == [1, 2, 4, 8, 16, 32, 64, 128, 256, 12, 24, 48, 96, 192]
    assert counts_to_measure([5]) == [1, 2, 4, 5]
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


def test_a_kernel_that_wins_late_is_found() -> None:
    paths: dict[str, Curve] = {HOST: lambda n: 10.0, "b12x": lambda n: 5.0 if n >= 24 else 12.0}
    policy = measured({n: {name: time(n) for name, time in paths.items()} for n in counts_to_measure([LARGEST])})
    assert policy.ranges(LARGEST, {"b12x": LARGEST}) == [(1, 19, HOST), (20, 256, "b12x")]
    assert all(policy.select(tokens, ["b12x"]) == "b12x" for tokens in range(24, 257))
