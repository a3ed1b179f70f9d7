"""What stands in for a GPU's times where there is none: every path is called, and the clock says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trtllm_b12x.crossover import measuring
from trtllm_b12x.crossover.measuring import Path
from trtllm_b12x.crossover.table import HOST, Times


class Clock:
    """In the place of :func:`trtllm_b12x.crossover.measuring.measure`."""

    def __init__(self, microseconds: Callable[[str, int], float], before: Callable[[], None] = lambda: None) -> None:
        """``before`` is called first, and may raise."""
        self._microseconds, self._before = microseconds, before
        self.asked: list[Any] = []
        """Geometries, in order."""
        self.layers = 0
        """On which the last one was measured."""
        self.largest_gap = 0.0
        """Relative L2 between the host's path and a kernel."""

    def __call__(self, paths: dict[str, Path], geometry: Any, draw: Any, device: torch.device, **_: Any) -> Times:
        assert not torch.cuda.is_current_stream_capturing()
        self.asked.append(geometry)
        self._before()
        self.layers = len(paths[HOST].runs)
        points = {}
        for tokens in measuring.counts(paths):
            there = {name: path for name, path in paths.items() if name == HOST or tokens <= path.most}
            if tokens in (1, 8):
                self._call(there, geometry, draw, tokens)
            points[tokens] = {name: self._microseconds(name, tokens) for name in there}
        return Times(points)

    def _call(self, paths: dict[str, Path], geometry: Any, draw: Any, tokens: int) -> None:
        x = torch.randn(tokens, geometry.hidden_size, generator=torch.Generator().manual_seed(tokens)).to(geometry.dtype)
        ids, scales = draw(tokens, 0)
        for layer in range(self.layers):
            results = {name: path.runs[layer](x, ids, scales).float() for name, path in paths.items()}
            for result in results.values():
                gap = float((result - results[HOST]).norm() / results[HOST].norm())
                self.largest_gap = max(self.largest_gap, gap)


@contextmanager
def standing_in(clock: Clock) -> Iterator[Clock]:
    """This machine has something to measure on, and nothing is being captured."""
    before = measuring.measure, measuring.possible
    measuring.measure, measuring.possible = clock, lambda device: True  # type: ignore[assignment]
    try:
        with capturing(False):
            yield clock
    finally:
        measuring.measure, measuring.possible = before


@contextmanager
def capturing(yes: bool = True) -> Iterator[None]:
    """As far as torch says."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: yes
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked
