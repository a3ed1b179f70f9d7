"""Which counts are worth their time: powers of two first, then where the choice between two paths is in doubt.  Pure.

Beyond :data:`trtllm_b12x.crossover.table.NEAR`, where a family serves so many tokens, powers of four, once all is clear before.

How far the ratio of two paths' times may be off between two measured counts is estimated by how it bends around them; a count is
worth measuring where that is more than the faster path is ahead by.  Ranks go through the same rounds: what is asked next
follows from the times of all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from .table import GAIN, HOST, NEAR, NO_STEPS, Steps, Times

TOLERANCE = 0.015
"""Relative time that a wrong choice may cost before another count is measured."""
_BEND = 0.06
"""What the ratio of two paths may be off by in the middle of a straight octave."""
_STEP = 0.3
"""The same, where a path launches its calls otherwise."""
_GRID = 32
"""Counts of an octave beyond :data:`NEAR` that are looked at."""
_FIRST = 5
"""Counts of the first round."""
_BATCH = 4
"""Of a later one."""

Measure = Callable[[Sequence[int]], Times]
"""Of counts, as many as there is time for."""
Together = Callable[[Times, int], Times | None]
"""One rank's times and the number of the round to those of all ranks; None: not all have spoken yet."""


class Search:
    """Of one geometry."""

    def __init__(self, serving: Mapping[str, Collection[int]], steps: Steps = NO_STEPS) -> None:
        """
        Args:
            serving: by family, the counts that it serves.
        """
        self._serving, self._steps = {name: frozenset(counts) for name, counts in serving.items()}, steps
        limits = {max(counts) for counts in serving.values() if counts}
        powers = {1 << power for power in range(max(limits, default=0).bit_length()) if 1 << power <= NEAR or power % 2 == 0}
        self._coarse = sorted(powers | limits)
        self.own = Times({})
        """That this rank has measured."""
        self._round = 0
        self._known: list[int] | None = None
        """Counts that all ranks had."""

    def run(self, measure: Measure, together: Together = lambda own, number: own) -> Times | None:
        """Until the choice is clear at every count, or no more can be measured.

        Returns:
            The times of all ranks; empty where none could measure.  None: others are not there yet, to be called again.
        """
        if not self._round:
            self._next(measure, Times({}))
        while True:
            whole = together(self.own, self._round)
            if whole is None or not whole.counts or whole.counts == self._known:  # who has no more time says the same again
                return whole
            self._known = whole.counts
            if not self._next(measure, whole):
                return whole

    def _next(self, measure: Measure, whole: Times) -> bool:
        """Go on to the next round, if there is one."""
        wanted = self.wanted(whole)
        self._round += 1
        if wanted:
            self.own = Times({**self.own.points, **measure(wanted).points})
        return bool(wanted)

    def wanted(self, times: Times) -> list[int]:
        """Counts to measure next, the most important first; none where all is clear."""
        last = times.counts[-1] if times.counts else 0
        coarse = Times({tokens: paths for tokens, paths in times.points.items() if tokens in self._coarse})
        later = [tokens for tokens in self._coarse if tokens > last]
        near = [tokens for tokens in later if tokens <= NEAR]
        if near and not coarse.ended:
            return near[: 1 if last else _FIRST]
        found, beyond = self._doubtful(times), [tokens for tokens in self._coarse if tokens > NEAR]
        far = Times({tokens: times.points[tokens] for tokens in beyond if tokens in times.points})
        if not any(tokens <= NEAR for tokens in found) and beyond and not far.ended:
            found = [tokens for tokens in later if tokens >= NEAR][:1] or found
        return found

    def _doubtful(self, times: Times) -> list[int]:
        last = times.counts[-1] if times.counts else 0
        found: list[int] = []
        while last and len(found) < _BATCH:
            risks = self._risks(times)
            tokens = max(risks, key=lambda n: risks[n], default=0)
            if not tokens or risks[tokens] <= TOLERANCE:
                break
            found.append(tokens)
            times = Times({**times.points, tokens: times.at(tokens, self._steps)})
        return found

    def _risks(self, times: Times) -> dict[int, float]:
        """Counts that were not measured, and what the choice there may cost in relative time."""
        found: dict[int, float] = {}
        logs = {tokens: self._logs(times, tokens) for tokens in self._looked_at(times)}
        for pair in itertools.combinations(sorted({name for paths in logs.values() for name in paths}), 2):
            for tokens, doubt in self._doubts(times, logs, pair):
                here = logs[tokens]
                if all(name in here for name in pair):
                    one, other = (here[name] for name in pair)
                    behind = min(one, other) - min(here.values())
                    found[tokens] = max(found.get(tokens, 0), doubt - behind - abs(one - other))
        return found

    def _looked_at(self, times: Times) -> list[int]:
        last = times.counts[-1]
        found = {*range(1, min(last, NEAR) + 1), *times.counts}
        found |= {side for steps in self._steps.values() for step in steps for side in (step - 1, step)}
        for first in (NEAR << octave for octave in range(max(last // NEAR, 1).bit_length())):
            found |= set(range(first, 2 * first, first // _GRID))
        return sorted(tokens for tokens in found if 0 < tokens <= last)

    def _logs(self, times: Times, tokens: int) -> dict[str, float]:
        """Of the paths that serve a count; the host's time is what a kernel has to reach."""
        paths = times.at(tokens, self._steps)
        there = {name: t for name, t in paths.items() if name == HOST or tokens in self._serving.get(name, ())}
        return {name: math.log(GAIN * t if name == HOST else t) for name, t in there.items()}

    def _doubts(self, times: Times, logs: Mapping[int, Mapping[str, float]], pair: Sequence[str]) -> Iterator[tuple[int, float]]:
        """By how much the ratio of two paths may be off at counts between those at which both were measured."""
        one, other = pair
        counts = [tokens for tokens, paths in times.points.items() if one in paths and other in paths and tokens in logs]
        counts = [tokens for tokens in counts if one in logs[tokens] and other in logs[tokens]]
        steps = sorted({*self._steps.get(one, ()), *self._steps.get(other, ())})
        y = {tokens: logs[tokens][one] - logs[tokens][other] for tokens in counts}
        bends = dict.fromkeys(counts, 0.0)
        for low, middle, high in zip(counts, counts[1:], counts[2:], strict=False):
            if not any(low < step <= high for step in steps):
                share = _share(low, middle, high)
                bends[middle] = abs(y[middle] - (1 - share) * y[low] - share * y[high])
        for low, high in itertools.pairwise(counts):
            inside = [step for step in steps if low < step <= high]
            if inside:
                sides = {side for step in inside for side in (step - 1, step)}
                yield from ((tokens, _STEP) for tokens in sides - {low, high})
                continue
            most = max(_BEND * math.log2(high / low) ** 2, bends[low] / 2, bends[high] / 2)
            if most > TOLERANCE:
                for tokens in (tokens for tokens in logs if low < tokens < high):
                    share = _share(low, tokens, high)
                    yield tokens, most * 4 * share * (1 - share)


def _share(low: int, tokens: int, high: int) -> float:
    return math.log(tokens / low) / math.log(high / low)
