"""Which counts are measured: on paths whose times are known, with steps and noise, is the choice right at every count?"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from trtllm_b12x.crossover.search import TOLERANCE, Search
from trtllm_b12x.crossover.table import GAIN, HOST, NO_STEPS, Measured, Times

WITHIN = 0.03
TRIALS = 200
POINTS = 20
"""That there is time for: in 2 s, of 100 ms each."""
Curve = Callable[[int], float]


def smooth(draw: random.Random) -> Curve:
    """Experts that are hit, rows, and what a call costs in any case."""
    experts = draw.choice([8, 32, 64, 128, 256])
    share = min(draw.choice([1, 2, 4, 8]) / experts, 0.5)
    fixed, weights, rows = draw.uniform(3, 15), draw.uniform(20, 300), draw.uniform(0, 0.01)
    return lambda tokens: fixed + weights * (1 - (1 - share) ** tokens + rows * tokens)


@dataclass
class Stepped:
    """A curve that is tilted, jumps at some counts, and takes 100 at one."""

    curve: Curve
    tilt: float
    jumps: dict[int, float]
    hundred: int

    def __call__(self, tokens: int) -> float:
        return 100 * self._of(tokens) / self._of(self.hundred)

    def _of(self, tokens: int) -> float:
        return self.curve(tokens) * tokens**self.tilt * math.prod(by for step, by in self.jumps.items() if step <= tokens)


@dataclass
class Card:
    """Exact times of two or three paths that are close at many counts; each launches otherwise from some counts on."""

    seed: int
    noise: float = 0.0
    """Relative, of one path at one count; standard deviation."""

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        most = draw.choice([64, 128, 256])
        self.serving: dict[str, Sequence[int]] = {"a": range(1, most + 1)}
        if draw.random() < 0.5:
            self.serving["b"] = range(1, min(most, 47) + 1)
        crossing, shared = round(2 ** draw.uniform(1, math.log2(most) - 1)), smooth(draw)
        self.exact: dict[str, Curve] = {}
        self.steps: dict[str, list[int]] = {}
        for name in (*self.serving, HOST):
            places = {max(2, round(2 ** draw.uniform(0.5, math.log2(most)))) for _ in range(draw.randint(0, 5))}
            self.steps[name] = [1 << power for power in range(1, 9)] if name == HOST else sorted(places)
            jumps = {step: math.exp((0.08 if name == HOST else 0.2) * draw.uniform(-1, 1)) for step in self.steps[name]}
            curve = shared if draw.random() < 0.6 else smooth(draw)
            self.exact[name] = Stepped(curve, draw.uniform(-0.15, 0.15), jumps, crossing)
        self._noise = random.Random(-self.seed - 1)
        self.asked: list[int] = []

    def there(self, tokens: int) -> list[str]:
        return [name for name, counts in self.serving.items() if tokens in counts]

    def measure(self, counts: Sequence[int]) -> Times:
        points = {}
        for tokens in counts[: POINTS - len(self.asked)]:
            self.asked.append(tokens)
            routes = math.exp(self._noise.gauss(0, 0.02))  # they are the same for every path
            names = (*self.there(tokens), HOST)
            points[tokens] = {n: self.exact[n](tokens) * routes * math.exp(self._noise.gauss(0, self.noise)) for n in names}
        return Times(points)

    def behind(self, split: Measured) -> list[float]:
        """How far the choice is behind the best one at each count, where the host's time is what a kernel has to reach."""
        found = []
        for tokens in range(1, split.times.counts[-1] + 1):
            times = {name: self.exact[name](tokens) for name in self.there(tokens)} | {HOST: GAIN * self.exact[HOST](tokens)}
            found.append(times[split.pick(tokens, self.there(tokens)) or HOST] / min(times.values()) - 1)
        return found


def searched(card: Card, knows_steps: bool = True) -> Measured:
    steps = card.steps if knows_steps else NO_STEPS
    times = Search(card.serving, steps).run(card.measure)
    assert times is not None
    return Measured(times, "measured", 64, steps)


def behind(noise: float = 0.0, knows_steps: bool = True) -> list[list[float]]:
    """By card."""
    cards = [Card(seed, noise) for seed in range(TRIALS)]
    return [card.behind(searched(card, knows_steps)) for card in cards]


@pytest.mark.parametrize(("noise", "worst", "above"), [(0.0, TOLERANCE, 0.0), (0.005, WITHIN, 0.0), (0.01, 0.05, 0.001)])
def test_the_choice_is_within_three_percent_at_every_count(noise: float, worst: float, above: float) -> None:
    found = [share for shares in behind(noise) for share in shares]
    assert max(found) <= worst
    assert sum(share > WITHIN for share in found) <= above * len(found)
    assert len(found) > 50 * TRIALS


def test_powers_of_two_alone_would_not_do_and_steps_have_to_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the cards are hard ones."""
    assert sum(max(shares) > WITHIN for shares in behind(knows_steps=False)) > 0.05 * TRIALS
    monkeypatch.setattr(Search, "_risks", lambda self, times: {})
    assert sum(max(shares) > WITHIN for shares in behind()) > 0.25 * TRIALS


def test_time_goes_where_the_choice_is_in_doubt() -> None:
    card = Card(0)
    card.serving, card.steps = {"a": range(1, 257)}, {"a": [81]}
    card.exact = {"a": lambda tokens: tokens**0.5, HOST: lambda tokens: 12.0}  # 135 tokens
    searched(card)
    assert card.asked[:9] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert set(card.asked[9:]) <= set(range(65, 256))
    assert {80, 81} & set(card.asked)
    far = Card(0)
    far.serving, far.steps, far.exact = card.serving, card.steps, {"a": lambda tokens: 1.0, HOST: lambda tokens: 12.0}
    searched(far)
    assert far.asked == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    far.asked, far.exact = [], {"a": lambda tokens: 12.0, HOST: lambda tokens: 1.0}
    assert searched(far).times.counts == [1, 2, 4, 8, 16]  # the first round; the host has won twice
    for ratio, clear in ((1.035, True), (0.985, False)):  # a kernel has to be 3 % faster
        near = Card(0)
        near.serving, near.steps, near.exact = card.serving, {}, {"a": lambda n, t=ratio: t, HOST: lambda n: 1.0}  # type: ignore[misc]
        assert (searched(near).times.counts == [1, 2, 4, 8, 16]) is clear


def test_beyond_decode_few_counts_are_measured_and_last() -> None:
    card = Card(0)
    card.serving, card.steps = {"a": range(1, 257), "b": range(64, 8193)}, {}
    near, beyond = [1, 2, 4, 8, 16, 32, 64, 128, 256], [1024, 4096, 8192]
    card.exact = {"a": lambda n: n / 9, "b": lambda n: 20.0 if n < 700 else 5.0, HOST: lambda n: 10.0}
    split = searched(card)
    first = card.asked.index(1024)
    assert set(near) <= set(card.asked[:first])
    assert set(card.asked[:first]) - set(near)  # decode is settled by then
    assert set(beyond) <= set(card.asked[first:])
    assert split.ranges(300, {"a": 256, "b": 8192}) == [(1, 87, "a"), (88, 300, HOST)]
    assert [split.pick(tokens, ["b"]) for tokens in (256, 600, 1024, 3000, 8192)] == [None, None, "b", "b", "b"]
    card.asked, card.exact = [], {"a": lambda n: 12.0, "b": lambda n: 12.0, HOST: lambda n: 1.0}
    split = searched(card)
    assert card.asked == [1, 2, 4, 8, 16, 256, 1024, 4096]  # the host has won twice, and twice again
    assert {split.pick(tokens, ["a", "b"]) for tokens in range(1, 9000, 7)} == {None}


def test_what_has_won_twice_in_a_row_goes_on() -> None:
    """The time was up; no decode kernel does."""
    for counts, found in (([256, 1024], "b"), ([128, 256], None), ([1024], None)):
        split = Measured(Times({n: {"b": 1.0, HOST: 2.0} for n in counts}), "measured", 64)
        assert split.pick(5000, ["b"]) == found
        assert split.pick(5000, ["a"]) is None
    assert Measured(Times({256: {"b": 3.0, HOST: 2.0}, 1024: {"b": 1.0, HOST: 2.0}}), "measured", 64).pick(5000, ["b"]) is None


def test_a_crossing_that_nobody_knows_of_is_found_to_the_token() -> None:
    card = Card(0)
    card.serving, card.steps = {"a": range(1, 257)}, {}
    card.exact = {"a": lambda tokens: 8.0 if tokens < 91 else 15.0, HOST: lambda tokens: 10.0}
    assert searched(card).ranges(256, {"a": 256}) == [(1, 90, "a"), (91, 256, HOST)]


def test_nothing_to_measure() -> None:
    for serving in ({}, {"a": ()}):
        times = Search(serving).run(Card(0).measure)
        assert times is not None
        assert not times.counts
    asked: list[Sequence[int]] = []

    def fails(counts: Sequence[int]) -> Times:
        asked.append(counts)
        return Times({})

    times = Search({"a": range(1, 9)}).run(fails)
    assert times is not None
    assert not times.counts
    assert asked == [[1, 2, 4, 8]]


# ---- ranks ---------------------------------------------------------------------------------------------------------------


class Ranks:
    """Searches that hear of each other, each at its own pace."""

    def __init__(self, cards: Sequence[Card]) -> None:
        self.cards = cards
        self.searches = [Search(cards[0].serving, cards[0].steps) for _ in cards]
        self.said: dict[int, dict[int, str]] = defaultdict(dict)
        self.mute: set[int] = set()
        """Ranks that cannot measure."""

    def run(self, order: random.Random) -> list[Times]:
        found: dict[int, Times] = {}
        while len(found) < len(self.cards):
            rank = order.choice([rank for rank in range(len(self.cards)) if rank not in found])

            times = self._searched(rank)
            if times is not None:
                found[rank] = times
        return [found[rank] for rank in range(len(self.cards))]

    def _searched(self, rank: int) -> Times | None:
        def measure(counts: Sequence[int]) -> Times:
            return Times({}) if rank in self.mute else self.cards[rank].measure(counts)

        def together(own: Times, number: int) -> Times | None:
            said = self.said[number]
            assert said.setdefault(rank, own.text()) == own.text()
            return Times.sum(Times.of(text) for text in said.values() if text) if len(said) == len(self.cards) else None

        return self.searches[rank].run(measure, together)


@pytest.mark.parametrize("mute", [(), (1,), (0, 1, 2)])
def test_ranks_measure_the_same_counts_and_choose_alike(mute: tuple[int, ...]) -> None:
    for seed in range(10):
        cards = [Card(seed, noise=0.05) for _ in range(3)]
        for number, card in enumerate(cards):
            card._noise = random.Random(number)
        cards[2].asked = [0] * 8  # has less time
        ranks = Ranks(cards)
        ranks.mute = set(mute)
        first, *others = ranks.run(random.Random(seed))
        assert all(other.points == first.points for other in others)
        if len(mute) == 3:
            assert first.counts == []
            continue
        speaking = [cards[rank].asked for rank in range(3) if rank not in mute]
        assert set(first.counts) == set.intersection(*({n for n in asked if n} for asked in speaking))
        assert len(first.counts) > 5
