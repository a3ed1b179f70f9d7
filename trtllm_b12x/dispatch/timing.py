# SPDX-License-Identifier: Apache-2.0
"""Time calls in captured CUDA graphs over several layers, so that no weight is read from the L2 cache."""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x import formats
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.call import of_logits

from .policy import HOST, LARGEST, Timings

BUDGET_S = 3.0
"""Seconds for all token counts of a geometry, unless the minimum calls and replays take longer, as on small cards."""
LONGEST_S = 15.0
"""Seconds after which further counts are skipped."""
_CALLS = (12, 48)
"""Minimum and maximum number of calls in a graph, for fast calls."""
_FEWEST_CALLS = 2
"""Minimum number of calls in a graph, for slow calls: one with each kind of routes."""
_REPLAYS = (5, 9)
"""Minimum and maximum number of replays of a graph. The median of five tolerates two outliers."""
_BEHIND = (1.5, 1.2)
"""A path is skipped at a count if it exceeds these multiples of the fastest time at its one measured neighbor, or at both."""
_APART = 4
"""Largest ratio between a count and a neighbor."""
_COLD = 2.5
"""Bytes that other calls of a graph read before a layer is read again, in multiples of the L2 cache size."""
_DRAWN = 1024
"""Maximum number of tokens that routes are drawn for, on the CPU. More tokens repeat these routes."""

Runner = Callable[[MoECall], Any]
RouteSampler = Callable[[int, int, bool], tuple[torch.Tensor, torch.Tensor]]
"""Function from token count, seed, and the skew flag of ``router_logits`` to ids and router weights."""


@dataclass(frozen=True)
class TimedPath:
    """Implementation of a call, to be timed. ``runs`` has one entry per layer."""

    runs: Sequence[Runner]
    serves: Callable[[int], bool] = lambda tokens: True
    captured: bool = True
    """False if the path synchronizes to choose its launches, so that graphs cannot capture it. Calls are then timed eagerly."""


def possible(device: torch.device) -> bool:
    """Return whether there is a GPU to measure on."""
    return device.type == "cuda"


def largest_served(paths: Mapping[str, TimedPath]) -> dict[str, int]:
    """Return the largest token count of each family, at most ``LARGEST``. Omit families that serve none."""
    limits = {name: max((n for n in range(1, LARGEST + 1) if path.serves(n)), default=0) for name, path in paths.items()}
    return {name: limit for name, limit in limits.items() if limit and name != HOST}


@dataclass
class PathTimer:
    """Timer for the paths of one geometry.

    A captured graph of each path cycles through the layers. Every call has its own routes: half of them from a router without
    preferences, half from one that prefers some experts, as real routers are in between. Paths alternate, so that clock drift
    affects all of them.
    """

    paths: Mapping[str, TimedPath]
    """Families by name, and ``HOST``."""
    geometry: Geometry
    sample_routes: RouteSampler
    device: torch.device
    budget_s: float = BUDGET_S
    longest_s: float = LONGEST_S
    behind: tuple[float, float] = _BEHIND
    """Multiples of the fastest time beyond which a path is skipped, at one measured neighbor and at both. Infinity skips none."""
    seed: int = 0
    spent_s: float = field(default=0.0, init=False)
    _warm: bool = field(default=False, init=False)

    def __call__(self, counts: Sequence[int]) -> Timings:
        """Measure the counts in order, each for an equal share of the remaining budget, or for as long as its minimum calls take.

        Skip a path that is far behind at the neighbors, and a count, except the first, that would end after ``longest_s``.

        Raises:
            Exception: a path failed.
        """
        started = time.monotonic()
        deadline = started + self.budget_s
        rows: dict[int, dict[str, float]] = {}
        with torch.cuda.device(self.device), torch.inference_mode(), _graphs() as graphs:
            for done, tokens in enumerate(counts):
                now = time.monotonic()
                paths = self._promising(tokens, rows)
                if not rows or now + _least_s(tokens, paths, rows) <= started + self.longest_s:
                    share_s = max(deadline - now, 0) / (len(counts) - done)
                    rows[tokens] = self._row(tokens, paths, share_s, deadline, graphs)
        self.spent_s = time.monotonic() - started
        return Timings(rows)

    def _promising(self, tokens: int, rows: Mapping[int, Mapping[str, float]]) -> dict[str, TimedPath]:
        """Return the paths that serve this token count, without those that are far behind at their nearest measured counts."""
        serving = {name: path for name, path in self.paths.items() if path.serves(tokens)}

        def far_behind(name: str) -> bool:
            measured = [n for n in rows if name in rows[n] and tokens <= n * _APART and n <= tokens * _APART]
            near = [*sorted(n for n in measured if n < tokens)[-1:], *sorted(n for n in measured if n > tokens)[:1]]
            best = {n: min(t for other, t in rows[n].items() if other in serving) for n in near}
            return bool(near) and all(rows[n][name] > self.behind[len(near) - 1] * best[n] for n in near)

        return {name: path for name, path in serving.items() if name == HOST or not far_behind(name)}

    def _row(
        self, tokens: int, paths: Mapping[str, TimedPath], share_s: float, deadline: float, graphs: _Graphs
    ) -> dict[str, float]:
        """Return microseconds by path. Half of ``share_s`` is for replays, the rest for inputs, first calls and captures."""
        g = self.geometry
        generator = torch.Generator(self.device).manual_seed(self.seed)  # the global generator stays unchanged
        x = torch.randn(tokens, g.hidden_size, dtype=g.dtype, device=self.device, generator=generator)
        layers = min(len(path.runs) for path in paths.values())
        routes = [self._routes(tokens, 0)]

        def run(path: TimedPath, calls: int) -> None:
            for place, call in enumerate(routes[:calls]):
                path.runs[place % layers](call._replace(x=x))

        def run_once() -> float:
            begun = time.monotonic()
            for path in paths.values():
                run(path, 1)
            torch.cuda.synchronize(self.device)
            return time.monotonic() - begun

        if not self._warm:
            run_once()  # modules load at their first call
            self._warm = True
        torch.cuda.synchronize(self.device)
        begun = time.monotonic()
        fit = int(share_s / 2 / run_once() / _REPLAYS[0])
        calls = max(min(_calls(g, tokens, layers, self.device), fit // 2 * 2), _FEWEST_CALLS)
        routes += [self._routes(tokens, call) for call in range(1, calls)]
        replays: dict[str, tuple[Callable[[], float], int]] = {}
        for name, path in paths.items():
            count = calls if path.captured else _FEWEST_CALLS
            seconds: Callable[[], float] = functools.partial(_seconds, functools.partial(run, path, count))
            if path.captured:
                seconds = graphs.captured(functools.partial(run, path, count))
                if calls > _FEWEST_CALLS:
                    seconds()  # the first replay uploads the graph
            replays[name] = seconds, count
        torch.cuda.synchronize(self.device)
        times: dict[str, list[float]] = {name: [] for name in paths}
        for turn in range(1, _REPLAYS[1] + 1):
            turned = time.monotonic()
            for name, (seconds, count) in replays.items():
                times[name].append(seconds() / count)
            now = time.monotonic()
            if turn >= _REPLAYS[0] and now + (now - turned) > min(begun + share_s, deadline):
                break
        graphs.drop()
        return {name: 1e6 * statistics.median(of_path) for name, of_path in times.items()}

    def _routes(self, tokens: int, call: int) -> MoECall:
        """Return a call without ``x``."""
        drawn, seed, skewed = min(tokens, _DRAWN), 1_000_003 * self.seed + 1009 * tokens + call, call % 2 == 1
        times = -(-tokens // drawn)
        if (scoring := self.geometry.scoring) is not None:
            logits = router_logits(self.geometry, drawn, seed, skewed).repeat(times, 1)[:tokens].to(self.device, torch.bfloat16)
            return of_logits(logits, logits, torch.zeros_like(logits[0], dtype=torch.float32) if scoring.bias else None)
        ids, router_weights = self.sample_routes(drawn, seed, skewed)
        return MoECall(ids, ids.repeat(times, 1)[:tokens], router_weights.repeat(times, 1)[:tokens])


def _least_s(tokens: int, paths: Collection[str], rows: Mapping[int, Mapping[str, float]]) -> float:
    """Estimate the seconds that the minimum calls of ``paths`` take, from the nearest of ``rows``."""
    nearest = min(rows, key=lambda n: abs(math.log(n / tokens)))
    known = rows[nearest]
    calls = 1 + _FEWEST_CALLS * _REPLAYS[0]
    return 1e-6 * calls * sum(known.get(name, max(known.values())) for name in paths) * max(tokens / nearest, 1)


def _calls(geometry: Geometry, tokens: int, layers: int, device: torch.device) -> int:
    """Return the even number of calls after which a layer's weights have left the L2 cache when the layer runs again."""
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    read = expert_bytes(geometry) * expected_hits(geometry, tokens)
    calls = max(min(math.ceil(_COLD * cache / max(read, 1)) + 1, _CALLS[1]), _CALLS[0], min(layers, _CALLS[1] // 2))
    return calls + calls % 2


def _seconds(run: Callable[[], Any]) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


class _Graphs:
    """Graphs captured on a private stream and pool. ``torch.cuda.graph`` collects garbage first, which is slow in a server."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._kept: list[torch.cuda.CUDAGraph] = []

    def captured(self, run: Callable[[], Any]) -> Callable[[], float]:
        """Capture ``run``. Return a function that replays it and returns the seconds.

        Events are graph nodes. Events around a replay would also time launch delays, such as another Python thread that holds
        the interpreter's lock for 5 ms at a time.
        """
        graph, first, last = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads are not affected
            try:
                first.record()
                run()
                last.record()
            finally:
                graph.capture_end()
        self._kept.append(graph)

        def seconds() -> float:
            graph.replay()
            torch.cuda.current_stream().synchronize()
            return first.elapsed_time(last) / 1e3

        return seconds

    def drop(self) -> None:
        torch.cuda.synchronize()
        self._kept.clear()
        self._pool = torch.cuda.graph_pool_handle()  # the old pool is released with its graphs


@contextmanager
def _graphs() -> Iterator[_Graphs]:
    collecting, graphs = gc.isenabled(), _Graphs()
    gc.disable()  # freeing objects during a capture may invalidate it
    try:
        yield graphs
    finally:
        graphs.drop()
        if collecting:
            gc.enable()
        torch.cuda.empty_cache()  # the engine sizes its KV cache by free memory


# ---- what a call reads ---------------------------------------------------------------------------------------------------


def expert_bytes(geometry: Geometry) -> int:
    """Return the bytes of codes and block scales of one expert."""
    matrices = 3 if geometry.gated else 2
    return formats.stored_bytes(geometry.format, matrices * geometry.hidden_size * geometry.intermediate_size)


def expected_hits(geometry: Geometry, tokens: int) -> float:
    """Return the expected number of local experts hit by ``tokens`` tokens, for a router without preferences."""
    experts = geometry.num_experts * geometry.ranks
    return geometry.num_experts * (1 - (1 - geometry.top_k / experts) ** tokens)


def router_logits(geometry: Geometry, tokens: int, seed: int, skewed: bool = False) -> torch.Tensor:
    """Return ``(tokens, experts of all ranks)`` float32 logits on the CPU. Skewed: experts have popularity 1 / rank."""
    experts = geometry.num_experts * geometry.ranks
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        logits = -torch.log(-torch.log(torch.rand(tokens, experts, generator=generator)))
        if skewed:
            logits -= torch.log(torch.arange(1, experts + 1).float())[torch.randperm(experts, generator=generator)]
        return logits


def copy_bandwidth() -> float:
    """Return the bytes per second, read plus written, of a kernel that copies 1 GiB. A graph memcpy is a third slower."""
    a = torch.rand(2**28, device="cuda")
    b = torch.empty_like(a)
    return 8 * a.nbytes / graph_seconds(lambda: [torch.mul(a, 1.0, out=b) for _ in range(4)])


def graph_seconds(run: Callable[[], Any], replays: int = 5) -> float:
    """Return the median time in seconds of a captured graph's replays."""
    run()
    with _graphs() as graphs:
        seconds = graphs.captured(run)
        seconds()
        return statistics.median(seconds() for _ in range(replays))
