"""Choose the path that serves a token count, from measured times or by a fixed threshold. Pure: no torch.

A row is a token count with the microseconds of one call on each path: kernel families, by name and form, and ``HOST``. A count
between two measured ones takes the choice of the nearest (as a ratio), which loses 0.4 % over 500 sets of simulated step curves.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

HOST = "host"
"""The host's path, with its quantization of the input. If the host has none, the family that serves every count."""
GAIN = 0.97
"""A kernel serves a count if it takes at most this share of the host's time."""
DEFAULT_CROSSOVER = 64
"""First token count that CUTLASS serves if nothing was measured: what TensorRT-LLM's own b12x backend uses
(``_PREFILL_VIA_CUTLASS_THRESHOLD``, PR 13773)."""
COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Token counts that are measured, as far as a kernel serves them; 10 because ``cuda`` gathers routes from 9 on."""
MANY = (1024, 4096)
"""Counts that are measured besides, if a kernel serves them."""

Rows = Mapping[int, Mapping[str, float]]


class FixedThreshold:
    """The first family serves fewer than ``first`` tokens, the host the rest."""

    def __init__(self, first: int = DEFAULT_CROSSOVER, source: str = "default", measured: bool = False) -> None:
        """``measured``: families that serve only where they were measured take part."""
        self.first, self.source, self.measured = first, source, measured

    def select(self, tokens: int, serving: Sequence[str]) -> str | None:
        """Return one of ``serving``, the families that serve so many tokens in order of preference, or None for the host."""
        return serving[0] if serving and tokens < self.first else None

    def summary(self, base: str = "CUTLASS") -> str:
        """Say where the policy comes from and what it chooses. ``base`` is the host's path, or the family in its place."""
        return f"{self.source}, fixed: {base} from {self.first} tokens"


class Timings:
    """Measured rows of one geometry, by token count."""

    def __init__(self, rows: Rows) -> None:
        """Raise ValueError if there is no row, a count or a time is not positive, or the host's time is missing."""
        if not rows:
            raise ValueError("no counts")
        for tokens, paths in rows.items():
            positive = all(isinstance(t, (int, float)) and 0 < t < math.inf for t in paths.values())
            if tokens < 1 or not positive or HOST not in paths:
                raise ValueError(f"{tokens} tokens, {dict(paths)}: counts and times must be positive, the host's time among them")
        self.rows = {tokens: {name: float(t) for name, t in rows[tokens].items()} for tokens in sorted(rows)}
        self.counts = list(self.rows)

    def around(self, tokens: int) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return the row of the measured count whose ratio to ``tokens`` is closest to one, and the one on the other side.

        Of two as close it is the smaller. Where there is no other side it is the same row.
        """
        above = bisect.bisect_left(self.counts, tokens)
        counts = sorted(self.counts[max(above - 1, 0) : above + 1], key=lambda n: max(n / tokens, tokens / n))
        return self.rows[counts[0]], self.rows[counts[-1]]


class MeasuredPolicy:
    """The fastest path at the nearest measured count."""

    measured = True

    def __init__(self, timings: Timings, source: str) -> None:
        """``source``: "measured in 1.2 s", "stored", or the setting that named a file."""
        self.timings, self.source = timings, source

    def select(self, tokens: int, serving: Sequence[str]) -> str | None:
        row, other = self.timings.around(tokens)
        times = {name: row[name] for name in (*serving, HOST) if name in row}
        for name in serving:
            family = name.split()[0]
            here, there = (min((t for form, t in of.items() if form.split()[0] == family), default=0.0) for of in (row, other))
            if here and name not in row and name in other:
                times[name] = here * other[name] / there  # it begins in between: its ratio to its family's best holds here too
            elif here and not any(form.split()[0] == family for form in times):
                times[name] = here  # no form of the nearest count serves here: this one stands for them
        return fastest(times)

    def ranges(self, max_tokens: int, serving: Mapping[str, int]) -> list[tuple[int, int, str]]:
        """Return (first count, last count, path) of each stretch. ``serving`` has the largest count of each family."""

        def path(tokens: int) -> str:
            return self.select(tokens, [family for family, last in serving.items() if tokens <= last]) or HOST

        stretches = [(name, list(counts)) for name, counts in itertools.groupby(range(1, max_tokens + 1), path)]
        return [(counts[0], counts[-1], name) for name, counts in stretches]

    def summary(self, base: str = "CUTLASS") -> str:
        largest: dict[str, int] = {}
        for tokens, paths in self.timings.rows.items():
            largest.update(dict.fromkeys(paths, tokens))
        largest.pop(HOST, None)
        stretches = self.ranges(max(largest.values(), default=0), largest)
        if stretches and stretches[-1][2] == HOST:
            stretches.pop()
        parts = [f"{base if name == HOST else name} {first}-{last}" for first, last, name in stretches]
        return f"{self.source}: {', '.join([*parts, f'then {base}'] if parts else [base])}"


DispatchPolicy = FixedThreshold | MeasuredPolicy


def fastest(paths: Mapping[str, float], serving: Collection[str] | None = None) -> str | None:
    """Return the fastest family (of ``serving``, if given) if it beats the host by ``GAIN``, else None."""
    rivals = [name for name in paths if name != HOST and (serving is None or name in serving)]
    best = min(rivals, key=paths.__getitem__, default=None)
    return best if best is not None and paths[best] <= GAIN * paths[HOST] else None


def counts_to_measure(largest: Collection[int]) -> list[int]:
    """Return the counts to measure; powers of two and ``largest``, the largest count of each family, come first.

    Without the last count of a family, the nearest one may be a count that the family does not serve.
    """
    counts = {*(n for n in (*COUNTS, *MANY) if n <= max(largest)), *largest}
    return sorted(counts, key=lambda n: (n.bit_count() > 1 and n not in largest, n))
