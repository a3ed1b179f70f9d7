# SPDX-License-Identifier: Apache-2.0
"""Choose the path that serves a token count, from measured times or by a fixed threshold. This module does not import torch.

A row is a token count with the microseconds of one call on each path: kernel families, by name and variant, and ``HOST``. Between
two measured counts, the logarithm of a path's time relative to the engine's is interpolated over the logarithm of the count.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

HOST = "host"
"""The engine's own path, with its quantization of the input. Without such a path: the family that serves every count."""
GAIN = 0.97
"""A kernel serves a count if it takes at most this share of the engine's time. If one of our families stands in for the
engine, equal times suffice."""
DEFAULT_CROSSOVER = 64
"""First token count that CUTLASS serves without measurements, as in TensorRT-LLM's own b12x backend
(``_PREFILL_VIA_CUTLASS_THRESHOLD``, PR 13773)."""
COUNTS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Token counts that are measured, as far as a kernel serves them; 10 because ``cuda`` gathers routes from 9 on."""

Rows = Mapping[int, Mapping[str, float]]
LARGEST = 8192
"""Largest token count that is measured."""
_LONGEST_US = 1e9
"""Longest credible time of a call."""


class FixedThreshold:
    """Policy by which the first family serves fewer than ``first`` tokens, and the engine serves the rest."""

    def __init__(
        self, first: int = DEFAULT_CROSSOVER, source: str = "default", measured: bool = False, asked: bool = False
    ) -> None:
        """Take the threshold and its source.

        ``measured``: families that serve only where they were measured take part. ``asked``: the threshold is the user's setting,
        which holds even if the engine's path is wrong.
        """
        self.first, self.source, self.measured, self.asked = first, source, measured, asked

    def select(self, tokens: int, serving: Sequence[str]) -> str | None:
        """Return one of ``serving``, the families that serve this count in order of preference, or None for the engine."""
        return serving[0] if serving and tokens < self.first else None


class Timings:
    """Measured rows of one geometry, by token count."""

    def __init__(self, rows: Rows) -> None:
        """Raise ValueError if there are no rows, or with the first row that cannot have been measured."""
        if not rows:
            raise ValueError("no counts")
        for tokens, paths in rows.items():
            if not 0 < tokens <= LARGEST:
                raise ValueError(f"{_short(tokens)} tokens: counts are 1 to {LARGEST}")
            for name, t in paths.items():
                if not re.fullmatch(r"\S+( \S+)*", name):
                    raise ValueError(f"{tokens} tokens: {_short(name)!r} is not the name of a path")
                if not isinstance(t, (int, float)) or not 0 < t <= _LONGEST_US:
                    raise ValueError(f"{tokens} tokens: {_short(t)} is no time of {_short(name)} in microseconds")
            if HOST not in paths:
                raise ValueError(f"{tokens} tokens: the time of {HOST!r} is missing")
        self.rows = {tokens: {name: float(t) for name, t in rows[tokens].items()} for tokens in sorted(rows)}
        self.counts = list(self.rows)
        self.last: dict[str, int] = {}
        """Largest measured count of each family."""
        for tokens, paths in self.rows.items():
            self.last.update((name.split()[0], tokens) for name in paths)

    def around(self, tokens: int) -> tuple[int, int, float]:
        """Return the measured count whose ratio to ``tokens`` is closest to one, its neighbor beyond ``tokens``, and the weight.

        Of two equally close counts, the smaller comes first. Without a neighbor, the same count is returned twice.
        """
        above = bisect.bisect_left(self.counts, tokens)
        near, *_, far = sorted(self.counts[max(above - 1, 0) : above + 1] * 2, key=lambda n: max(n / tokens, tokens / n))
        return near, far, math.log(tokens / near) / math.log(far / near) if far != near else 0.0


def _short(value: object) -> str:
    try:
        text = str(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 40 else f"{text[:37]}..."


class MeasuredPolicy:
    """Policy that chooses the fastest path by measured times. A family serves at most as many tokens as it was measured with."""

    measured = True

    def __init__(self, timings: Timings, source: str, asked: bool = False, base: str = "") -> None:
        """``source``: "measured in 1.2 s", "stored", or the setting that names a file. ``asked``: the user set it.

        ``base``: the family that stands in for an engine without a path. Others need not be 3 % faster than ``base``.
        """
        self.timings, self.source, self.asked, self.base = timings, source, asked, base

    def select(self, tokens: int, serving: Sequence[str]) -> str | None:
        first, second, weight = self.timings.around(tokens)
        near, far = self.timings.rows[first], self.timings.rows[second]
        times = {HOST: 1.0}  # relative to the engine's
        for name in serving:
            family = name.split()[0]
            if tokens > self.timings.last.get(family, 0):
                continue
            if name in near:
                times[name] = near[name] / near[HOST]
                if name in far:
                    times[name] *= (far[name] / far[HOST] / times[name]) ** weight
            elif name in far and first < tokens and (best := _best(near, family)):
                # The variant begins in between: it is as far behind its family's fastest variant as at the farther count.
                times[name] = best / near[HOST] * far[name] / _best(far, family)
        return fastest(times, gain=1.0 if self.base else GAIN)

    def ranges(self, max_tokens: int, serving: Mapping[str, int]) -> list[Stretch]:
        """Return the stretches of counts. ``serving`` has the largest count of each family."""
        return stretches(lambda n: self.select(n, [family for family, last in serving.items() if n <= last]) or HOST, max_tokens)

    def summary(self) -> str:
        """Describe where the times come from and what they choose."""
        largest: dict[str, int] = {}
        for tokens, paths in self.timings.rows.items():
            largest.update(dict.fromkeys(paths, tokens))
        largest.pop(HOST, None)
        return described(self.source, self.ranges(max(largest.values(), default=0), largest), self.base or "CUTLASS")


Stretch = tuple[int, int, str]
"""First count, last count, and the path that serves them all."""


def stretches(path: Callable[[int], str], last: int) -> list[Stretch]:
    """Group the counts from 1 to ``last`` into stretches that one path serves."""
    groups = [(name, list(counts)) for name, counts in itertools.groupby(range(1, last + 1), path)]
    return [(counts[0], counts[-1], name) for name, counts in groups]


def described(source: str, found: Sequence[Stretch], base: str) -> str:
    """Describe the source and what serves which counts. ``base`` serves the counts of ``HOST`` and those beyond the last."""
    ours = found[:-1] if found and found[-1][2] in (HOST, base) else found
    parts = [f"{base if name == HOST else name} {first}-{last}" for first, last, name in ours]
    return f"{source}: {', '.join([*parts, f'then {base}'] if parts else [base])}"


def _best(times: Mapping[str, float], family: str) -> float:
    """Return the time of a family's fastest variant, or 0 if the family has none."""
    return min((t for name, t in times.items() if name.split()[0] == family), default=0.0)


DispatchPolicy = FixedThreshold | MeasuredPolicy


def fastest(paths: Mapping[str, float], gain: float = GAIN) -> str | None:
    """Return the fastest path if it takes at most ``gain`` times the engine's time, else None."""
    rivals = [name for name in paths if name != HOST]
    best = min(rivals, key=paths.__getitem__, default=None)
    return best if best is not None and paths[best] <= gain * paths[HOST] else None


def counts_to_measure(largest: Collection[int]) -> list[int]:
    """Return the counts to measure; powers of two and ``largest``, the largest count of each family, come first.

    Without the last count of a family, the nearest one may be a count that the family does not serve.
    """
    counts = {*(n for n in COUNTS if n <= max(largest)), *largest}
    return sorted(counts, key=lambda n: (n.bit_count() > 1 and n not in largest, n))
