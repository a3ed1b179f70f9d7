"""What stands in for a GPU's times where there is none: every path is called, and the clock says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from trtllm_b12x.crossover import measuring

from trtllm_b12x.dispatch.policy import HOST, Times
from trtllm_b12x.dispatch.timing import Path


class Clock:
    """In the place of :class:`trtllm_b12x.dispatch.timing.Bench`."""

    def __init__(self, microseconds: Callable[[str, int], float], before: Callable[[], None] = lambda: None) -> None:
        """``before`` is called at the first round of each measurement, and may raise."""
        self._microseconds, self._before = microseconds, before
        self.asked: list[Any] = []
        """Geometries, in order."""
        self.rounds: list[list[int]] = []
        """Counts that the last measurement was asked for."""
        self.budgets: list[float] = []
        self.named: list[dict[str, Any]] = []
        """Other arguments."""
        self.steps: Any = {}
        self.time_for = 1000
        """Counts of a measurement."""
        self.layers = 0
        """On which the last one was measured."""
        self.largest_gap = 0.0
        """Relative L2 between the host's path and a kernel."""

    def __call__(
        self, paths: dict[str, Path], geometry: Any, draw: Any, device: torch.device, budget_s: float = 2.0, **named: Any
    ) -> Standing:
        self.named.append(named)
        self.steps = measuring.steps(paths)
        return Standing(self, paths, geometry, draw, budget_s)

    def _call(self, paths: dict[str, Path], geometry: Any, draw: Any, tokens: int) -> None:
        x = torch.randn(tokens, geometry.hidden_size, generator=torch.Generator().manual_seed(tokens)).to(geometry.dtype)
        ids, router_weights = draw(tokens, 0, tokens == 8)
        for layer in range(self.layers):
            results = {name: path.runs[layer](x, ids, router_weights).float() for name, path in paths.items()}
            for result in results.values():
                gap = float((result - results[HOST]).norm() / results[HOST].norm())
                self.largest_gap = max(self.largest_gap, gap)


class Standing:
    """A :class:`Clock`'s bench."""

    def __init__(self, clock: Clock, paths: dict[str, Path], geometry: Any, draw: Any, budget_s: float) -> None:
        self._clock, self._paths, self.geometry, self._draw, self._budget = clock, paths, geometry, draw, budget_s
        self.spent = 0.0
        self._left = clock.time_for

    def __call__(self, counts: Sequence[int]) -> Times:
        assert not torch.cuda.is_current_stream_capturing()
        clock = self._clock
        if not self.spent:
            clock.asked.append(self.geometry)
            clock.budgets.append(self._budget)
            clock.rounds = []
            clock._before()
        clock.rounds.append(list(counts))
        clock.layers = len(self._paths[HOST].runs)
        self.spent += 0.05
        points = {}
        for tokens in counts[: self._left]:
            self._left -= 1
            there = {name: path for name, path in self._paths.items() if path.serves(tokens)}
            if tokens in (1, 8):
                clock._call(there, self.geometry, self._draw, tokens)
            points[tokens] = {name: clock._microseconds(name, tokens) for name in there}
        return Times(points)


@contextmanager
def standing_in(clock: Clock) -> Iterator[Clock]:
    """This machine has something to measure on, and nothing is being captured."""
    before = measuring.Bench, measuring.possible
    measuring.Bench, measuring.possible = clock, lambda device: True  # type: ignore[misc, assignment]
    try:
        with capturing(False):
            yield clock
    finally:
        measuring.Bench, measuring.possible = before  # type: ignore[misc]


@contextmanager
def capturing(yes: bool = True) -> Iterator[None]:
    """As far as torch says."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: yes
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
