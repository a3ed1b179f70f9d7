"""Times of calls in captured CUDA graphs over several layers, so that no weight is read from the L2 cache."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.kernels import Geometry

from .table import HOST, Times

BUDGET_S = 2.0
"""For all counts of a geometry."""
_SHARE = 0.75
"""Of the time that is left, what replays may take: the rest goes into draws, warm calls and captures."""
_CALLS = (12, 48)
"""Fewest and most calls in a graph."""
_COLD = 2.5
"""Bytes that the other calls of a graph read before a layer is read again, in multiples of the L2 cache."""
_REPLAYS = (5, 25)

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
"""Tokens ``(T, H)``, global ids ``(T, top_k)`` and scales ``(T, top_k)`` to outputs."""
Draw = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""Token count and seed to ids and scales."""


@dataclass(frozen=True)
class Path:
    """One way to serve a call."""

    runs: Sequence[Run]
    """By layer."""
    most: int
    """Tokens."""
    captured: bool = True
    """False: it asks the GPU what to launch, so no graph holds it and its calls are timed as they are launched."""


def possible(device: torch.device) -> bool:
    """There is something to measure on."""
    return device.type == "cuda"


def counts(paths: Mapping[str, Path]) -> list[int]:
    """Powers of two, and the most tokens of each family."""
    limits = {path.most for name, path in paths.items() if name != HOST}
    most = max(limits, default=0)
    return sorted({1 << power for power in range(most.bit_length())} | limits)


def measure(
    paths: Mapping[str, Path],
    geometry: Geometry,
    draw: Draw,
    device: torch.device,
    budget_s: float = BUDGET_S,
    given: Sequence[int] | None = None,
    seed: int = 0,
    progress: Callable[[float], None] = lambda share: None,
) -> Times:
    """Microseconds of a call, count by count from 1 on, until the host has won twice or the time is up.

    Paths take turns, so that a clock that drifts is every path's.

    Args:
        paths: families by name, and :data:`HOST`.
        given: counts, all of them; default :func:`counts`, as far as they are needed.
        progress: told the share of the counts that is done.

    Raises:
        Exception: whatever a path raises.
    """
    wanted = list(given or counts(paths))
    started = time.monotonic()
    points: dict[int, dict[str, float]] = {}
    with torch.cuda.device(device), torch.inference_mode(), _graphs() as graphs:
        for done, tokens in enumerate(wanted):
            left = budget_s - (time.monotonic() - started)
            if points and left < 0.05:
                break
            there = {name: path for name, path in paths.items() if name == HOST or tokens <= path.most}
            share = _SHARE * left / max(len(wanted) - done, 1)
            points[tokens] = _point(there, geometry, draw, device, tokens, share, seed, graphs)
            progress((done + 1) / len(wanted))
            if given is None and Times(points).ended:
                break
    return Times(points)


def _point(
    paths: Mapping[str, Path],
    geometry: Geometry,
    draw: Draw,
    device: torch.device,
    tokens: int,
    budget_s: float,
    seed: int,
    graphs: _Graphs,
) -> dict[str, float]:
    own = torch.Generator(device).manual_seed(seed)  # the server's own generator stays as it is
    x = torch.randn(tokens, geometry.hidden_size, dtype=geometry.dtype, device=device, generator=own)
    layers = min(len(path.runs) for path in paths.values())
    calls = _calls(geometry, tokens, layers, device)
    routed = [draw(tokens, 1_000_003 * seed + 1009 * tokens + call) for call in range(calls)]
    replays: dict[str, tuple[Callable[[], None], int]] = {}
    for name, path in paths.items():

        def run(path: Path = path, some: int = calls) -> None:
            for call, (ids, scales) in enumerate(routed[:some]):
                path.runs[call % layers](x, ids, scales)

        run(some=1)  # modules load at their first call
        if path.captured:
            replays[name] = graphs.captured(run), calls
        else:
            replays[name] = lambda run=run: run(some=2), min(2, calls)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in paths}
    torch.cuda.synchronize(device)
    begun = time.monotonic()
    for turn in range(_REPLAYS[1] + 1):
        for name, (replay, some) in replays.items():
            seconds = _seconds(replay) / some
            if turn:  # the first of a graph uploads it
                times[name].append(seconds)
        if turn >= _REPLAYS[0] and time.monotonic() - begun > budget_s:
            break
        if turn > 1 and time.monotonic() - begun > 2 * budget_s:
            break
    graphs.drop()
    return {name: 1e6 * statistics.median(found) for name, found in times.items()}


def _calls(geometry: Geometry, tokens: int, layers: int, device: torch.device) -> int:
    """So many that what a layer reads is out of the L2 cache when its turn comes again; each call has routes of its own."""
    cache = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20))
    read = expert_bytes(geometry) * expected_hits(geometry, tokens)
    return max(min(math.ceil(_COLD * cache / max(read, 1)) + 1, _CALLS[1]), _CALLS[0], min(layers, _CALLS[1] // 2))


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
    return (rows + 1) * geometry.hidden_size * geometry.intermediate_size * 9 // 16


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


def routes(geometry: Geometry, tokens: int, seed: int, skewed: bool = False) -> torch.Tensor:
    """Global ids ``(tokens, top_k)`` int32 on the CPU."""
    return router_logits(geometry, tokens, seed, skewed).topk(geometry.top_k, dim=1).indices.int()


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
