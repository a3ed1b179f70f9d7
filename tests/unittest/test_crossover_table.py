"""What follows from measured times."""

from __future__ import annotations

import math
import random

import pytest

from trtllm_b12x.dispatch.policy import GAIN, HOST, Fixed, Measured, Times, winner


def times(**paths: list[float]) -> Times:
    """Of 1, 2, 4, ... tokens; 0 where a path has none."""
    rows = zip(*paths.values(), strict=True)
    return Times({1 << i: {name: t for name, t in zip(paths, row, strict=True) if t} for i, row in enumerate(rows)})


def chosen(split: Measured, *counts: int, serving: tuple[str, ...] = ("a", "b")) -> list[str | None]:
    return [split.pick(tokens, serving) for tokens in counts]


def test_the_fastest_serves_and_the_host_where_it_is_not_beaten_by_three_percent() -> None:
    assert winner({"a": 10.0, "b": 9.0, HOST: 10.0}) == "b"
    assert winner({"a": 10.0, "b": 9.0, HOST: 10.0}, ["a"]) is None
    assert winner({"a": 9.71, HOST: 10.0}) is None
    assert winner({"a": 10 * GAIN, HOST: 10.0}) == "a"
    assert winner({HOST: 10.0}) is None


def test_between_two_counts_times_are_straight_in_logarithms() -> None:
    found = Times({4: {"a": 10.0, HOST: 40.0}, 16: {"a": 40.0, HOST: 40.0}})
    assert found.at(8) == pytest.approx({"a": 20.0, HOST: 40.0})
    assert found.at(2) == found.points[4]
    assert found.at(99) == found.points[16]
    split = Measured(found, "measured", 64)
    assert [tokens for tokens in range(1, 17) if split.pick(tokens, ["a"])] == list(range(1, 16))  # 15 tokens: 0.9375


def test_where_launches_change_the_line_has_a_step() -> None:
    exact = {"a": lambda n: n**0.5 * (1.5 if n >= 48 else 1), HOST: lambda n: n**0.25 * (0.8 if n >= 64 else 1)}
    found = Times({n: {name: t(n) for name, t in exact.items()} for n in (16, 32, 64, 128)})
    steps = {"a": [48], HOST: [64]}
    for tokens in (33, 40, 47, 48, 50, 63, 64, 65, 100, 128):
        assert found.at(tokens, steps) == pytest.approx({name: t(tokens) for name, t in exact.items()})
    assert found.at(47)["a"] > 1.2 * exact["a"](47)
    assert Measured(found, "measured", 64, {"a": [48]}).times.at(30) == found.at(30)
    near = Times({32: {HOST: 10.0}, 33: {HOST: 10.3}, 64: {HOST: 12.0}})  # no slope: it would be the noise's
    assert near.at(47, {HOST: [48]}) == near.at(47)
    assert found.at(90, {"a": [70, 100]}) == pytest.approx(found.at(90))  # between two steps nobody knows


def test_the_step_is_in_the_choice() -> None:
    found = Times({n: {"a": 6.0 if n < 40 else 11.0, HOST: 10.0} for n in (16, 32, 64, 128)})
    assert Measured(found, "measured", 64, {"a": [40]}).ranges(128, {"a": 128}) == [(1, 39, "a"), (40, 128, HOST)]
    assert Measured(found, "measured", 64).ranges(128, {"a": 128})[0][1] > 45


def test_paths_that_are_measured_at_other_counts() -> None:
    found = Times({8: {"a": 8.0, HOST: 8.0}, 12: {HOST: 12.0}, 16: {"a": 16.0, HOST: 16.0}, 20: {HOST: 20.0}})
    assert found.at(10) == pytest.approx({"a": 10.0, HOST: 10.0})
    assert found.at(14) == pytest.approx({"a": 14.0, HOST: 14.0})
    assert found.at(18) == pytest.approx({HOST: 18.0})


def test_a_family_that_ends_between_two_counts_is_measured_there() -> None:
    found = Times({4: {"a": 1.0, "b": 2.0, HOST: 9.0}, 6: {"a": 1.5, "b": 2.5, HOST: 9.0}, 8: {"b": 3.0, HOST: 9.0}})
    split = Measured(found, "measured", 64)
    assert chosen(split, 5, 6) == ["a", "a"]
    assert chosen(split, 7, 8, serving=("b",)) == ["b", "b"]
    assert split.ranges(8, {"a": 6, "b": 8}) == [(1, 6, "a"), (7, 8, "b")]


def test_the_host_has_everything_once_it_has_won_twice() -> None:
    split = Measured(times(a=[1.0, 2, 8, 9], host=[4.0, 4, 4, 4]), "measured", 64)
    assert split.times.ended
    assert chosen(split, 1, 2, 4, 8, 9, 30) == ["a", "a", None, None, None, None]
    assert not times(a=[1.0, 8, 3], host=[4.0, 4, 4]).ended
    assert not times(a=[8.0], host=[4.0]).ended


def test_where_time_was_up_the_last_count_speaks_up_to_the_default() -> None:
    split = Measured(times(a=[1.0, 2], host=[4.0, 4]), "measured", 64)
    assert chosen(split, 2, 63, 64, 200) == ["a", "a", None, None]
    assert Measured(Times({}), "measured", 64).pick(1, ["a"]) is None


def test_a_count_that_nobody_serves_is_the_hosts() -> None:
    assert Measured(times(a=[1.0], host=[4.0]), "measured", 64).pick(1, []) is None
    assert Fixed(64).pick(3, []) is None
    assert [Fixed(8).pick(tokens, ["a", "b"]) for tokens in (1, 7, 8)] == ["a", "a", None]


def test_the_summary_names_every_stretch() -> None:
    split = Measured(times(a=[9.0, 1, 1, 8, 8], b=[1.0, 2, 2, 0, 0], host=[4.0, 4, 4, 4, 4]), "stored", 64)
    assert split.summary() == "stored: b 1-1, a 2-6, then CUTLASS"
    assert Measured(times(a=[9.0, 9], host=[4.0, 4]), "stored", 64).summary() == "stored: CUTLASS"
    assert Fixed(64).summary("grouped") == "default, fixed: grouped from 64 tokens"
    assert split.summary("grouped") == "stored: b 1-1, a 2-6, then grouped"


def test_ranks_add_up_what_all_of_them_have() -> None:
    one, two = times(a=[1.0, 2, 3], host=[3.0, 3, 3]), times(a=[5.0, 1], host=[4.0, 9])
    whole = Times.sum([one, two])
    assert whole.points == {1: {"a": 6.0, HOST: 7.0}, 2: {"a": 3.0, HOST: 12.0}}
    assert Times.sum([times(a=[1.0], b=[1.0], host=[1.0]), times(a=[1.0], host=[1.0])]).points == {1: {"a": 2.0, HOST: 2.0}}


def test_two_ranks_with_opposite_noise_choose_alike() -> None:
    draw = random.Random(0)
    for _ in range(200):
        exact = [10 * 2 ** (0.4 * i) for i in range(8)]
        noise = [1 + 0.2 * draw.uniform(-1, 1) for _ in exact]
        ranks = [
            times(a=[t * n for t, n in zip(exact, noise, strict=True)], host=[20.0] * 8),
            times(a=[t / n for t, n in zip(exact, noise, strict=True)], host=[20.0] * 8),
        ]
        apart = [[winner(paths) for paths in rank.points.values()] for rank in ranks]
        heard = [Times.of(rank.text()) for rank in ranks]
        both = [Measured(Times.sum(order), "measured", 64) for order in (heard, heard[::-1])]
        alike = [[split.pick(tokens, ["a"]) for tokens in range(1, 200)] for split in both]
        assert alike[0] == alike[1]
        if apart[0] != apart[1]:
            return
    raise AssertionError("the noise never mattered")


def test_text_and_back() -> None:
    found = times(a=[1.23456, 2, 1234.5], b=[1.0, 0, 2], host=[3.0, 3, 3])
    assert Times.of(found.text()).points == {
        tokens: {n: float(f"{t:.5g}") for n, t in p.items()} for tokens, p in found.points.items()
    }
    assert Times({}).text() == ""
    long = Times({i: {"b12x": 123456.78, "triton": 1.2345678, HOST: 12.0} for i in range(1, 40)})
    assert Times.of(long.text()).points[39] == {"b12x": 123457, "triton": 1.2346, HOST: 12.0}


@pytest.mark.parametrize(
    "text", ["x", "a|1:2", "a,host|1:2,3;q:1,1", "a,host|1:2", "a,host|1:-2,3", "a,host|1:nan,3", "a,host|0:1,1"]
)
def test_what_is_no_text(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        Times.of(text)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, "fast", None, [1]])
def test_a_time_that_can_be_none(value: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Times({1: {"a": value, HOST: 1.0}})
