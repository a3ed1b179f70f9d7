"""What was measured, and which path serves a token count by it.  Pure: no torch, nothing of ours.

A point is a token count with the microseconds of a call on each path: the families by name, and the host's own, :data:`HOST`.
Between two points each path's time is a straight line in the logarithms of both.  Routed rows per local expert, which a path's
time really goes by, are proportional to tokens within a geometry, so that the line is the same over either.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

HOST = "host"
"""The host's own path, with its quantization of the input."""
GAIN = 0.97
"""A kernel serves a count where it takes at most this share of the host's time."""
LONGEST = 480
"""Characters of :meth:`Times.text`: what ranks send each other at once."""
_DIGITS = 5

Points = Mapping[int, Mapping[str, float]]


class Split(Protocol):
    """Which path serves a token count."""

    def pick(self, tokens: int, serving: Sequence[str]) -> str | None:
        """One of ``serving``, families that serve so many tokens, the preferred one first; None: the host."""

    @property
    def summary(self) -> str:
        """Where it comes from, and what it says."""


class Fixed:
    """The first family below a token count, the host from there on."""

    def __init__(self, first: int, source: str = "default") -> None:
        self.first, self.source = first, source

    def pick(self, tokens: int, serving: Sequence[str]) -> str | None:
        return serving[0] if serving and tokens < self.first else None

    @property
    def summary(self) -> str:
        return f"{self.source}, fixed: CUTLASS from {self.first} tokens"


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

    @property
    def ended(self) -> bool:
        """The host has won twice in a row, so that no more counts are needed."""
        return len(self.counts) > 1 and all(winner(self.points[tokens]) is None for tokens in self.counts[-2:])

    def at(self, tokens: int) -> dict[str, float]:
        """Microseconds by path; outside the points, of the nearest one."""
        place = bisect_left(self.counts, tokens)
        if place == len(self.counts) or place == 0 or self.counts[place] == tokens:
            return self.points[self.counts[min(place, len(self.counts) - 1)]]
        low, high = self.counts[place - 1 : place + 1]
        share = math.log(tokens / low) / math.log(high / low)
        before, after = self.points[low], self.points[high]
        return {name: before[name] ** (1 - share) * after[name] ** share for name in before if name in after}

    def text(self) -> str:
        """For :meth:`of`; every digit is kept, as times have no more than these.

        Raises:
            ValueError: it would be longer than :data:`LONGEST`.
        """
        names = sorted({name for paths in self.points.values() for name in paths})
        rows = (
            f"{tokens}:" + ",".join(f"{paths[name]:.{_DIGITS}g}" if name in paths else "" for name in names)
            for tokens, paths in self.points.items()
        )
        text = ",".join(names) + "|" + ";".join(rows)
        if len(text) > LONGEST:
            raise ValueError(f"{len(text)} characters of times")
        return text

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


def winner(paths: Mapping[str, float], serving: Collection[str] | None = None) -> str | None:
    """The fastest of the families, or of ``serving``, where it is :data:`GAIN` of the host's time; None: the host."""
    rivals = [name for name in paths if name != HOST and (serving is None or name in serving)]
    best = min(rivals, key=paths.__getitem__, default=None)
    return best if best is not None and paths[best] <= GAIN * paths[HOST] else None


class Measured:
    """By measured times."""

    def __init__(self, times: Times, source: str, default: int) -> None:
        """
        Args:
            source: ``measured``, or where it is from.
            default: the first count that is the host's where the points end before anything is decided.
        """
        self.times, self.source, self._default = times, source, default

    def pick(self, tokens: int, serving: Sequence[str]) -> str | None:
        counts = self.times.counts
        if not counts or (tokens > counts[-1] and (self.times.ended or tokens >= self._default)):
            return None
        return winner(self.times.at(tokens), serving)

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

    @property
    def summary(self) -> str:
        most: dict[str, int] = {}
        for tokens, paths in self.times.points.items():
            most.update(dict.fromkeys(paths, tokens))
        most.pop(HOST, None)
        stretches = self.ranges(max(most.values(), default=0), most)
        if stretches and stretches[-1][2] == HOST:
            stretches.pop()
        parts = [f"{'CUTLASS' if name == HOST else name} {first}-{last}" for first, last, name in stretches]
        return f"{self.source}: {', '.join([*parts, 'then CUTLASS'] if parts else ['CUTLASS'])}"
