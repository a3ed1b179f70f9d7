"""Times of calls in captured CUDA graphs over several layers, so that no weight is read from the L2 cache."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.checkpoint import kinds
from trtllm_b12x.kernels import Geometry

from .table import HOST, Steps, Times

BUDGET_S = 2.0
"""For all counts of a geometry."""
_MARGIN = 0.95
"""Of a budget, what is planned with."""
_POINT = 0.03
"""Of a budget, what replays of one count may take: the rest goes into draws, warm calls, captures and other counts."""
_CALLS = (12, 48)
"""Fewest and most calls in a graph, where they are quick."""
_FEWEST_CALLS = 2
"""Where they are slow: one with each kind of routes."""
_COLD = 2.5
"""Bytes that the other calls of a graph read before a layer is read again, in multiples of the L2 cache."""
_REPLAYS = (3, 25)
LARGEST = 8192
"""Tokens, of what is measured at all."""

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Tokens ``(T, H)``, global ids ``(T, top_k)`` and router weights ``(T, top_k)`` to outputs."""
Least = dict[int, tuple[float, float]]
"""By token count, the seconds that its time could have been had in, and what the fewest calls would have taken of them."""
Draw = Callable[[int, int, bool], tuple[torch.Tensor, torch.Tensor]]
"""Token count, seed, and whether some experts are preferred (:func:`router_logits`), to ids and router weights."""


@dataclass(frozen=True)
class Path:
    """One way to serve a call."""

    runs: Sequence[Run]
    """By layer."""
    serves: Callable[[int], bool] = lambda tokens: True
    captured: bool = True
    """False: it asks the GPU what to launch, so no graph holds it and its calls are timed as they are launched."""
    launches: Callable[[int], Hashable] = lambda tokens: None
    """Equal for counts that are launched alike."""


def possible(device: torch.device) -> bool:
    """There is something to measure on."""
    return device.type == "cuda"


def served(paths: Mapping[str, Path], limit: int = LARGEST) -> dict[str, list[int]]:
    """By family, the token counts up to ``limit`` that it serves."""
    return {name: [n for n in range(1, limit + 1) if path.serves(n)] for name, path in paths.items() if name != HOST}


def steps(paths: Mapping[str, Path]) -> Steps:
    """Where each path begins to launch its calls otherwise, as far as a family serves."""
    counts = served(paths)
    most = max((own[-1] for own in counts.values() if own), default=0)
    found = {}
    for name, path in paths.items():
        own = counts.get(name, range(1, most + 1))
        launches = [path.launches(tokens) for tokens in own]
        found[name] = [n for n, before, now in zip(own[1:], launches, launches[1:], strict=False) if before != now]
    return found


class Bench:
    """Times calls on the paths of one geometry, for at most so long altogether.

    A captured graph of each path goes through the layers, every call with routes of its own: half of them of a router that
    prefers no expert, half of one that prefers some.  A call's time goes by the experts that are hit, and users' routers are
    somewhere between.  Paths take turns, so that a clock that drifts is every path's.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        geometry: Geometry,
        draw: Draw,
        device: torch.device,
        budget_s: float = BUDGET_S,
        seed: int = 0,
        skewed: bool | None = None,
        progress: Callable[[float], None] = lambda share: None,
        least: Least | None = None,
    ) -> None:
        """
        Args:
            paths: families by name, and :data:`HOST`.
            skewed: every call's routes, or none's, instead of half of them.
            progress: told the share of the budget that is spent.
            least: what earlier benches found, and this one.
        """
        self.geometry, self._paths, self._draw, self._device = geometry, paths, draw, device
        self._budget, self._seed, self._skewed, self._progress = budget_s, seed, skewed, progress
        self.spent = 0.0
        """Seconds."""
        self._least: Least = {} if least is None else least

    def __call__(self, counts: Sequence[int]) -> Times:
        """Microseconds of a call at so many of the counts, in this order, as there is time for; the first of all in any case.

        Raises:
            Exception: whatever a path raises.
        """
        started, before = time.monotonic(), self.spent
        points: dict[int, dict[str, float]] = {}
        with torch.cuda.device(self._device), torch.inference_mode(), _graphs() as graphs:
            for tokens in counts:
                self.spent = before + time.monotonic() - started
                self._progress(min(self.spent / self._budget, 1))
                if self._least and self._expected(tokens) > _MARGIN * self._budget - self.spent:
                    break
                points[tokens] = self._point(tokens, started + _MARGIN * self._budget - before, graphs)
        self.spent = before + time.monotonic() - started
        return Times(points)

    def _expected(self, tokens: int) -> float:
        """Seconds for a count, at least, by what the nearest took: proportional to tokens where these are more and calls few."""
        nearest = min(self._least, key=lambda n: abs(math.log(n / tokens)))
        seconds, fewest = self._least[nearest]
        return max(seconds, fewest * tokens / nearest)

    def _point(self, tokens: int, deadline: float, graphs: _Graphs) -> dict[str, float]:
        g = self.geometry
        paths = {name: path for name, path in self._paths.items() if path.serves(tokens)}
        own = torch.Generator(self._device).manual_seed(self._seed)  # the server's own generator stays as it is
        x = torch.randn(tokens, g.hidden_size, dtype=g.dtype, device=self._device, generator=own)
        layers = min(len(path.runs) for path in paths.values())
        routed: list[tuple[torch.Tensor, torch.Tensor]] = []

        def run(path: Path, calls: int) -> None:
            for call, (ids, router_weights) in enumerate(routed[:calls]):
                path.runs[call % layers](x, ids, router_weights)

        self._draw_more(routed, tokens, 1)
        if not self._least:  # modules load at their first call
            for path in paths.values():
                run(path, 1)
        torch.cuda.synchronize(self._device)
        begun = time.monotonic()
        for path in paths.values():
            run(path, 1)
        torch.cuda.synchronize(self._device)
        once = time.monotonic() - begun
        share = _POINT * self._budget
        fit = int(share / once / _REPLAYS[0])
        calls = max(min(_calls(g, tokens, layers, self._device), fit // 2 * 2), _FEWEST_CALLS)
        self._draw_more(routed, tokens, calls)
        replays: dict[str, tuple[Callable[[], Any], int]] = {}
        for name, path in paths.items():
            some = calls if path.captured else _FEWEST_CALLS
            replays[name] = (lambda path=path, some=some: run(path, some)), some  # type: ignore[misc]
            if path.captured:
                replays[name] = graphs.captured(replays[name][0]), some
                replays[name][0]()  # the first of a graph uploads it
        torch.cuda.synchronize(self._device)
        times: dict[str, list[float]] = {name: [] for name in paths}
        start = now = time.monotonic()
        for turn in range(1, _REPLAYS[1] + 1):
            for name, (replay, some) in replays.items():
                times[name].append(_seconds(replay) / some)
            took, now = time.monotonic() - now, time.monotonic()
            self._least.setdefault(tokens, (now - begun, (now - begun) * _FEWEST_CALLS / calls))
            enough = share if turn >= _REPLAYS[0] else 2 * share
            if now - start + took > enough or now + took > deadline:
                break
        graphs.drop()
        return {name: 1e6 * statistics.median(found) for name, found in times.items()}

    def _draw_more(self, routed: list[tuple[torch.Tensor, torch.Tensor]], tokens: int, calls: int) -> None:
        for call in range(len(routed), calls):
            skewed = call % 2 == 1 if self._skewed is None else self._skewed
            routed.append(self._draw(tokens, 1_000_003 * self._seed + 1009 * tokens + call, skewed))


def _calls(geometry: Geometry, tokens: int, layers: int, device: torch.device) -> int:
    """So many that what a layer reads is out of the L2 cache when its turn comes again; an even number."""
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    read = expert_bytes(geometry) * expected_hits(geometry, tokens)
    found = max(min(math.ceil(_COLD * cache / max(read, 1)) + 1, _CALLS[1]), _CALLS[0], min(layers, _CALLS[1] // 2))
    return found + found % 2


def _seconds(run: Callable[[], Any]) -> float:
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    run()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1e3


class _Graphs:
    """Captures on a stream and in memory of their own.  torch's own context collects garbage before each: a server takes long."""

    def __init__(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._kept: list[torch.cuda.CUDAGraph] = []

    def captured(self, run: Callable[[], Any]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # other threads go on as they are
            try:
                run()
            finally:
                graph.capture_end()
        self._kept.append(graph)
        replay: Callable[[], None] = graph.replay
        return replay

    def drop(self) -> None:
        torch.cuda.synchronize()
        self._kept.clear()
        self._pool = torch.cuda.graph_pool_handle()  # without graphs the other is gone


@contextmanager
def _graphs() -> Iterator[_Graphs]:
    collecting = gc.isenabled()
    gc.disable()  # what is freed during a capture may end it
    graphs = _Graphs()
    try:
        yield graphs
    finally:
        graphs.drop()
        if collecting:
            gc.enable()
        torch.cuda.empty_cache()  # the host sizes its KV cache by what is free


# ---- what a call reads ---------------------------------------------------------------------------------------------------


def expert_bytes(geometry: Geometry) -> int:
    """Codes and block scales of one expert."""
    rows = 2 if geometry.gated else 1
    return kinds.of(geometry.format).nbytes((rows + 1) * geometry.hidden_size * geometry.intermediate_size)


def expected_hits(geometry: Geometry, tokens: int) -> float:
    """Local experts that some of ``tokens`` go to, on average, where the router prefers none."""
    experts = geometry.num_experts * geometry.ranks
    return geometry.num_experts * (1 - (1 - geometry.top_k / experts) ** tokens)


def router_logits(geometry: Geometry, tokens: int, seed: int, skewed: bool = False) -> torch.Tensor:
    """``(tokens, experts of all ranks)`` float32 on the CPU; skewed: an expert is liked by 1 / rank."""
    experts = geometry.num_experts * geometry.ranks
    generator = torch.Generator().manual_seed(seed)
    with torch.device("cpu"):
        logits = -torch.log(-torch.log(torch.rand(tokens, experts, generator=generator)))
        if skewed:
            logits -= torch.log(torch.arange(1, experts + 1).float())[torch.randperm(experts, generator=generator)]
        return logits


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a kernel that copies 1 GiB; a graph's own copy of memory is a third slower."""
    a = torch.rand(2**28, device="cuda")
    b = torch.empty_like(a)
    seconds = graph_seconds(lambda: [torch.mul(a, 1.0, out=b) for _ in range(4)]) / 4
    return 2 * a.nbytes / seconds


def graph_seconds(run: Callable[[], Any], replays: int = 5) -> float:
    """Median of a captured graph's replays."""
    run()
    with _graphs() as graphs:
        replay = graphs.captured(run)
        replay()
        return statistics.median(_seconds(replay) for _ in range(replays))
