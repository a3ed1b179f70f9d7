# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a GPU's clock: every path is called, and the times are a function's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch

from trtllm_b12x.dispatch import timing
from trtllm_b12x.dispatch.policy import HOST, Timings
from trtllm_b12x.dispatch.timing import RouteSampler, TimedPath
from trtllm_b12x.kernels import MoECall

Paths = dict[str, TimedPath]


class Clock:
    """Stands in for the class ``trtllm_b12x.dispatch.timing.PathTimer``."""

    def __init__(self, microseconds: Callable[[str, int], float], before: Callable[[], None] = lambda: None) -> None:
        """
        Args:
            microseconds: time of a path at a token count.
            before: called before each measurement; may raise.
        """
        self.microseconds, self.before = microseconds, before
        self.asked: list[Any] = []
        """Geometries that were measured, in order."""
        self.layers = 0
        """Layers of the last measurement."""
        self.largest_gap = 0.0
        """Relative L2 between the host's path and a kernel."""

    def __call__(self, paths: Paths, geometry: Any, sample_routes: RouteSampler, device: torch.device, **options: Any) -> _Timer:
        return _Timer(self, paths, geometry, sample_routes)


class _Timer:
    def __init__(self, clock: Clock, paths: Paths, geometry: Any, sample_routes: RouteSampler) -> None:
        self._clock, self._paths, self._geometry, self._sample_routes = clock, paths, geometry, sample_routes
        self.spent_s = 0.05

    def __call__(self, counts: Sequence[int]) -> Timings:
        assert not torch.cuda.is_current_stream_capturing()
        clock = self._clock
        clock.asked.append(self._geometry)
        clock.before()
        clock.layers = len(self._paths[HOST].runs)
        rows = {}
        for tokens in counts:
            serving = {name: path for name, path in self._paths.items() if path.serves(tokens)}
            if tokens in (1, 8):
                self._call(serving, tokens)
            rows[tokens] = {name: clock.microseconds(name, tokens) for name in serving}
        return Timings(rows)

    def _call(self, serving: Paths, tokens: int) -> None:
        g = self._geometry
        x = torch.randn(tokens, g.hidden_size, generator=torch.Generator().manual_seed(tokens)).to(g.dtype)
        ids, router_weights = self._sample_routes(tokens, 0, tokens == 8)
        for layer in range(self._clock.layers):
            results = {name: path.runs[layer](MoECall(x, ids, router_weights)).float() for name, path in serving.items()}
            gaps = [float((result - results[HOST]).norm() / results[HOST].norm()) for result in results.values()]
            self._clock.largest_gap = max(self._clock.largest_gap, *gaps)


@contextmanager
def standing_in(clock: Clock) -> Iterator[Clock]:
    """This machine has something to measure on, and captures nothing."""
    with mock.patch.multiple(timing, PathTimer=clock, possible=lambda device: True), capturing(False):
        yield clock


def capturing(yes: bool = True) -> AbstractContextManager[Any]:
    """As far as torch says."""
    return mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=yes)
