"""What was measured, and which path serves a token count by it.  Pure: no torch, nothing of ours.

A point is a token count with the microseconds of a call on each path: the families by name, and the host's own, :data:`HOST`.
Between two points each path's time is a straight line in the logarithms of both, broken where the path is known to launch calls
otherwise from some count on (:data:`Steps`).  Routed rows per local expert, which a path's time really goes by, are proportional
to tokens within a geometry, so that the line is the same over either.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Protocol

HOST = "host"
"""The host's own path, with its quantization of the input; where it has none, the family that serves every count."""
GAIN = 0.97
"""A kernel serves a count where it takes at most this share of the host's time."""
NEAR = 256
"""Tokens up to which paths are bound by different things; from there on what wins twice in a row goes on to."""
_SPAN = 1.4
"""From one count to the next where the line between them is followed further."""
_DIGITS = 5
"""Of what ranks tell each other."""

Points = Mapping[int, Mapping[str, float]]
Steps = Mapping[str, Sequence[int]]
"""By path: counts from which on it launches calls otherwise (other tiles, another kernel, a launch more), in order."""
NO_STEPS: Steps = MappingProxyType({})


class Split(Protocol):
    """Which path serves a token count."""

    measured: bool
    """It chooses from families, too, that serve only what was measured."""

    def pick(self, tokens: int, serving: Sequence[str]) -> str | None:
        """One of ``serving``, families that serve so many tokens, the preferred one first; None: the host."""

    def summary(self, base: str = "CUTLASS") -> str:
        """Where it comes from, and what it says; ``base`` is the host's path, or the family in its place."""


class Fixed:
    """The first family below a token count, the host from there on."""

    def __init__(self, first: int, source: str = "default", measured: bool = False) -> None:
        self.first, self.source, self.measured = first, source, measured

    def pick(self, tokens: int, serving: Sequence[str]) -> str | None:
        return serving[0] if serving and tokens < self.first else None

    def summary(self, base: str = "CUTLASS") -> str:
        return f"{self.source}, fixed: {base} from {self.first} tokens"


class Times:
    """Points of one geometry, in order."""

    def __init__(self, points: Points) -> None:
        """
        Raises:
            ValueError: a count or a time that can be none.
        """
        for tokens, paths in points.items():
            sound = all(isinstance(t, (int, float)) and 0 < t < math.inf for t in paths.values())
            if tokens < 1 or not sound or HOST not in paths:
                raise ValueError(
                    f"{tokens} tokens, {dict(paths)}: positive counts and times are meant, and the host's among them"
                )
        self.points = {tokens: {name: float(t) for name, t in points[tokens].items()} for tokens in sorted(points)}
        self.counts = list(self.points)
        names = sorted({name for paths in self.points.values() for name in paths})
        self._lines = {name: _Line({n: paths[name] for n, paths in self.points.items() if name in paths}) for name in names}

    @property
    def ended(self) -> bool:
        """The host has won twice in a row, so that no more counts are needed."""
        return len(self.counts) > 1 and all(winner(self.points[tokens]) is None for tokens in self.counts[-2:])

    def at(self, tokens: int, steps: Steps = NO_STEPS) -> dict[str, float]:
        """Microseconds by path; outside the points, of the nearest one."""
        if tokens > self.counts[-1]:
            return self.points[self.counts[-1]]
        lines = ((name, line, bisect_left(line.counts, tokens)) for name, line in self._lines.items())
        return {name: line.at(tokens, place, steps.get(name, ())) for name, line, place in lines if place < len(line.counts)}

    def text(self) -> str:
        """For :meth:`of`; empty where there is nothing."""
        if not self.points:
            return ""
        names = list(self._lines)
        rows = (
            f"{tokens}:" + ",".join(_short(paths[name]) if name in paths else "" for name in names)
            for tokens, paths in self.points.items()
        )
        return ",".join(names) + "|" + ";".join(rows)

    @classmethod
    def of(cls, text: str) -> Times:
        """
        Raises:
            ValueError: it is none of :meth:`text`.
        """
        head, _, rows = text.partition("|")
        points = {}
        for row in rows.split(";"):
            tokens, _, cells = row.partition(":")
            named = zip(head.split(","), cells.split(","), strict=True)
            points[int(tokens)] = {name: float(cell) for name, cell in named if cell}
        return cls(points)

    @classmethod
    def sum(cls, parts: Iterable[Times]) -> Times:
        """Of ranks that work at a time: counts and paths that all of them have."""
        parts = list(parts)
        counts = set.intersection(*(set(part.points) for part in parts)) if parts else set()
        points = {}
        for tokens in counts:
            names = set.intersection(*(set(part.points[tokens]) for part in parts))
            points[tokens] = {name: math.fsum(part.points[tokens][name] for part in parts) for name in names}
        return cls(points)


class _Line:
    """One path's time over tokens."""

    def __init__(self, times: Mapping[int, float]) -> None:
        self.counts = list(times)
        self._x, self._y = [math.log(n) for n in times], [math.log(t) for t in times.values()]
        self._times = list(times.values())

    def at(self, tokens: int, place: int, steps: Sequence[int]) -> float:
        """``place``: of the first count that is not below ``tokens``."""
        low, high = self.counts[max(place - 1, 0)], self.counts[place]
        if place == 0 or high == tokens:
            return self._times[place]
        inside = [step for step in steps if low < step <= high]
        start, slope = place - 1, (self._y[place] - self._y[place - 1]) / (self._x[place] - self._x[place - 1])
        if inside and not inside[0] <= tokens < inside[-1]:
            # Before a step as the times before it go on, behind it as those behind; where neither is known, straight through.
            behind = tokens >= inside[-1]
            near, far = (place, place - 2) if behind else (place - 2, place)
            known = [found for segment in (near, far) if (found := self._slope(segment, steps)) is not None]
            if known:
                start, slope = place - 1 + behind, known[0]
        return math.exp(self._y[start] + slope * (math.log(tokens) - self._x[start]))

    def _slope(self, start: int, steps: Sequence[int]) -> float | None:
        """From that count to the next, where no step is between them, and enough that noise does not make it."""
        if not 0 <= start < len(self.counts) - 1:
            return None
        low, high = self.counts[start : start + 2]
        if high < _SPAN * low or any(low < step <= high for step in steps):
            return None
        return (self._y[start + 1] - self._y[start]) / (self._x[start + 1] - self._x[start])


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10.0 ** (_DIGITS - 1) else f"{value:.{_DIGITS}g}"


def winner(paths: Mapping[str, float], serving: Collection[str] | None = None) -> str | None:
    """The fastest of the families, or of ``serving``, where it is :data:`GAIN` of the host's time; None: the host."""
    rivals = [name for name in paths if name != HOST and (serving is None or name in serving)]
    best = min(rivals, key=paths.__getitem__, default=None)
    return best if best is not None and paths[best] <= GAIN * paths[HOST] else None


class Measured:
    """By measured times."""

    measured = True

    def __init__(self, times: Times, source: str, default: int, steps: Steps = NO_STEPS) -> None:
        """
        Args:
            source: ``measured``, or where it is from.
            default: the first count that is the host's where the points end before anything is decided.
            steps: of the paths that were measured.
        """
        self.times, self.source, self._default, self._steps = times, source, default, steps

    def pick(self, tokens: int, serving: Sequence[str]) -> str | None:
        counts = self.times.counts
        if not counts or (tokens > counts[-1] and self.times.ended):
            return None
        if tokens > counts[-1] and tokens >= self._default:
            return self._onward if self._onward in serving else None
        return winner(self.times.at(tokens, self._steps), serving)

    @cached_property
    def _onward(self) -> str | None:
        """What has won twice in a row where the points end."""
        last = self.times.counts[-2:]
        found = {winner(self.times.points[tokens]) for tokens in last}
        return found.pop() if len(last) == 2 and last[0] >= NEAR and len(found) == 1 else None

    def ranges(self, most: int, serving: Mapping[str, int]) -> list[tuple[int, int, str]]:
        """First and last token count of each stretch up to ``most`` and who serves it; ``serving`` has each family's most."""
        found: list[tuple[int, int, str]] = []
        for tokens in range(1, most + 1):
            name = self.pick(tokens, [family for family, last in serving.items() if tokens <= last]) or HOST
            if found and found[-1][2] == name:
                found[-1] = (found[-1][0], tokens, name)
            else:
                found.append((tokens, tokens, name))
        return found

    def summary(self, base: str = "CUTLASS") -> str:
        most: dict[str, int] = {}
        for tokens, paths in self.times.points.items():
            most.update(dict.fromkeys(paths, tokens))
        most.pop(HOST, None)
        stretches = self.ranges(max(most.values(), default=0), most)
        if stretches and stretches[-1][2] == HOST:
            stretches.pop()
        parts = [f"{base if name == HOST else name} {first}-{last}" for first, last, name in stretches]
        return f"{self.source}: {', '.join([*parts, f'then {base}'] if parts else [base])}"
