"""Decode of whole NVFP4 MoE layers on our Triton kernels: time, and the share of the card's bandwidth that it is.

``python -m benchmarks.moe_decode OUT`` on a GPU of capability 8.0 or newer writes OUT.json, OUT.md and, with matplotlib, OUT.png.
``--geometry``, ``--tokens``, ``--layers``, ``--no-overlap``, ``--seconds`` narrow it; the defaults take about 8 minutes.

A captured graph goes through as many layers as memory holds, each with weights of its own and several times the L2 in all, so no
weight is read from the cache.  Bytes are what must be read once: codes and scales of the experts that are hit.  The bandwidth is
that of a copy in the same run, read plus written.  The numbers of one layer are compared with float32.

Peers (:mod:`benchmarks.peers`): OpenAI's triton_kernels with MXFP4 weights, where it is importable; FlashInfer's wrapper of its
b12x kernels, on SM12x; and the same experts as plain bfloat16 matrices through cuBLAS, one product per expert and projection (a
floor for what weights of 16 bits cost: no activation, no sum).  The host's CUTLASS is ``trtllm-b12x tune``'s to measure.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import peers, require_gpu
from benchmarks.geometries import GEOMETRIES, routes
from tests.nvfp4_layer import Layer, distance, random_call, random_layer
from trtllm_b12x.dispatch.timing import copy_bandwidth, expert_bytes, graph_seconds
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.triton.decode import TritonKernel

SPLITS: tuple[tuple[str, int, int], ...] = (("TP1", 1, 1), ("TP2", 2, 1), ("TP4", 4, 1), ("EP4", 1, 4))
"""Name, tensor parallel, expert parallel."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FLOORS = {
    "Qwen3-30B-A3B": {1: 0.45, 4: 0.60, 8: 0.70, 16: 0.78, 32: 0.78, 64: 0.78},
    "Nemotron-3-Super": {1: 0.65, 4: 0.80, 16: 0.85, 32: 0.85, 64: 0.85},
}
"""Fractions to reach on an H100."""
BOUND = 0.004
MOST_CHECKED = 32
"""Tokens; float32 takes longer than all else."""
_PER_LAYER = 2
"""Routings that a layer sees within the graph."""


@dataclass
class Measured:
    """One line of the table."""

    geometry: str
    split: str
    routing: str
    tokens: int
    us: float
    experts: float
    """Hit, on average."""
    megabytes: float
    fraction: float
    """Of the copy bandwidth."""
    bytes_per_clock_sm: float
    floor: float | None
    launches: int
    host_us: float
    """Of a call outside a graph, until it has been launched."""
    error: float
    tiles: str


def split(geometry: Geometry, tp: int, ep: int) -> Geometry:
    size = geometry.intermediate_size // tp
    return replace(geometry, num_experts=geometry.num_experts // ep, intermediate_size=-(-size // 16) * 16, ranks=ep)


def stack(geometry: Geometry, limit: int) -> list[Layer]:
    """Layers with weights of their own, at least twice and, where memory allows, eight times 100 MB."""
    size = expert_bytes(geometry) * geometry.num_experts
    count = max(2, min(limit, int(0.6 * torch.cuda.mem_get_info()[0]) // size))
    layers = [random_layer(geometry, "cuda", 0)]
    for seed in range(1, count):
        first, torch_seed = layers[0], torch.Generator("cuda").manual_seed(seed)
        w1, w2 = (torch.empty_like(w).random_(0, 256, generator=torch_seed) for w in (first.w1, first.w2))
        layers.append(replace(first, w1=w1, w2=w2, s1=first.s1.clone(), s2=first.s2.clone()))
    return layers


def measure(
    name: str, part: tuple[str, int, int], tokens: tuple[int, ...], limit: int, overlap: bool, bandwidth: float, deadline: float
) -> list[Measured]:
    label, tp, ep = part
    whole, geometry = GEOMETRIES[name], split(GEOMETRIES[name], tp, ep)
    layers = stack(geometry, limit)
    kernels = []
    for layer in layers:
        kernel = TritonKernel(overlap=overlap)
        kernel.plan(geometry, max(tokens), torch.device("cuda", torch.cuda.current_device()))
        kernel.bind(layer.kernel_weights())
        kernels.append(kernel)
    found: list[Measured] = []
    for count in tokens:
        for routing in ("random", "skewed"):
            if time.monotonic() > deadline:
                return found
            x, _, router_weights = random_call(geometry, count, whole.num_experts, "cuda")
            skewed = routing == "skewed"
            calls = [
                (i, routes(whole, count, i * 97 + turn, skewed).cuda()) for turn in range(_PER_LAYER) for i in range(len(layers))
            ]
            error = math.nan
            if count <= MOST_CHECKED and not skewed:
                error = distance(
                    kernels[0].run(x, calls[0][1], router_weights), layers[0].expected(x, calls[0][1], router_weights)
                )
            hit = statistics.mean(int(ids[ids < geometry.num_experts].unique().numel()) for _, ids in calls)

            def run(calls: Any = calls, x: Any = x, router_weights: Any = router_weights) -> list[torch.Tensor]:
                return [kernels[i].run(x, ids, router_weights) for i, ids in calls]

            seconds = graph_seconds(run) / len(calls)
            size = hit * expert_bytes(geometry)
            clock = clock_rate()
            line = Measured(
                name,
                label,
                routing,
                count,
                1e6 * seconds,
                hit,
                size / 1e6,
                size / seconds / bandwidth,
                size / seconds / clock / kernels[0].build.card.multiprocessors,
                FLOORS.get(name, {}).get(count) if label == "TP1" and routing == "random" else None,
                2 if kernels[0].build.step(count).inline else 3,
                host_microseconds(functools.partial(kernels[0].run, x, calls[0][1], router_weights)),
                error,
                str(kernels[0].build.step(count).tiles),
            )
            if error > BOUND:
                print(f"WRONG: {line}", flush=True)
            print(" | ".join(row(line)), flush=True)
            found.append(line)
    return found


def host_microseconds(run: Callable[[], Any]) -> float:
    """Median; each call waits for the one before it to end, so that no queue fills."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def clock_rate() -> float:
    """Highest clock of the multiprocessors, hertz."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return float(getattr(properties, "clock_rate", 0) or 1_755_000) * 1e3


# ---- peers ---------------------------------------------------------------------------------------------------------------


def bfloat16_floor(name: str, tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """cuBLAS on dense bfloat16 experts, products alone: each expert that is hit, with its share of the tokens."""
    geometry = GEOMETRIES[name]
    halves = expert_bytes(geometry) * 16 // 9 // geometry.hidden_size // geometry.intermediate_size - 1
    size = 2 * (halves + 1) * geometry.hidden_size * geometry.intermediate_size
    experts = min(geometry.num_experts, int(0.5 * torch.cuda.mem_get_info()[0]) // size)
    w1 = torch.randn(experts, halves * geometry.intermediate_size, geometry.hidden_size, dtype=torch.bfloat16, device="cuda")
    w2 = torch.randn(experts, geometry.hidden_size, geometry.intermediate_size, dtype=torch.bfloat16, device="cuda")
    found = []
    for count in tokens:
        ids = routes(geometry, count, 1).cuda().flatten()
        hit, shares = ids.unique(return_counts=True)
        each = [(e % experts, n) for e, n in zip(hit.tolist(), shares.tolist(), strict=True)]
        x = [torch.randn(n, geometry.hidden_size, dtype=torch.bfloat16, device="cuda") for _, n in each]
        h = [torch.randn(n, geometry.intermediate_size, dtype=torch.bfloat16, device="cuda") for _, n in each]

        def run(each: Any = each, x: Any = x, h: Any = h) -> list[torch.Tensor]:
            first = [a @ w1[e].T for a, (e, _) in zip(x, each, strict=True)]
            return first + [a @ w2[e].T for a, (e, _) in zip(h, each, strict=True)]

        seconds = graph_seconds(run)
        found.append({"geometry": name, "tokens": count, "us": 1e6 * seconds, "megabytes": len(each) * size / 1e6})
    return found


# ---- tables --------------------------------------------------------------------------------------------------------------

TITLES = (
    "layer",
    "split",
    "routing",
    "tokens",
    "us",
    "experts",
    "MB",
    "of copy",
    "floor",
    "B/clock/SM",
    "launches",
    "host us",
    "error",
)


def row(m: Measured) -> list[str]:
    floor = "-" if m.floor is None else f"{m.floor:.2f}{'' if m.fraction >= m.floor else ' missed'}"
    numbers = [f"{m.us:.1f}", f"{m.experts:.1f}", f"{m.megabytes:.1f}", f"{m.fraction:.2f}", floor, f"{m.bytes_per_clock_sm:.1f}"]
    return [m.geometry, m.split, m.routing, str(m.tokens), *numbers, str(m.launches), f"{m.host_us:.0f}", f"{m.error:.4f}"]


def markdown(results: dict[str, Any], lines: list[Measured]) -> str:
    def table(titles: tuple[str, ...], rows: list[list[str]]) -> list[str]:
        return [f"| {' | '.join(cells)} |" for cells in (list(titles), ["---"] * len(titles), *rows)]

    text = [
        f"{results['gpu']}, copy {results['copy'] / 1e12:.2f} TB/s, torch {results['torch']}, Triton {results['triton']}.",
        "",
    ]
    text += table(TITLES, [row(line) for line in lines])
    ours = {(m.geometry, m.tokens): m.us for m in lines if m.split == "TP1" and m.routing == "random"}

    def own(peer: dict[str, Any]) -> str:
        us = ours.get((peer["geometry"], peer["tokens"]))
        return f"{us:.1f}" if us else "-"

    if results["bfloat16"]:
        rows = [[p["geometry"], str(p["tokens"]), f"{p['us']:.1f}", own(p)] for p in results["bfloat16"]]
        text += ["", "Against cuBLAS on the same experts in bfloat16, products alone:", ""]
        text += table(("layer", "tokens", "cuBLAS us", "ours us"), rows)
    if results["flashinfer"]:
        rows = [[p["geometry"], str(p["tokens"]), f"{p['us']:.1f}", own(p)] for p in results["flashinfer"]]
        text += ["", "Against FlashInfer's B12xMoEWrapper, which quantizes activations to FP4:", ""]
        text += table(("layer", "tokens", "theirs us", "ours us"), rows)
    if results["triton_kernels"]:
        rows = [
            [p["geometry"], str(p["tokens"]), f"{p['us']:.1f}", f"{p['products_us']:.1f}", own(p), f"{p['error']:.4f}"]
            for p in results["triton_kernels"]
        ]
        text += ["", "Against OpenAI's triton_kernels, MXFP4 weights, whole and without its routing:", ""]
        text += table(("layer", "tokens", "theirs us", "without routing us", "ours us", "their error"), rows)
    if results["not_measured"]:
        text += ["", *(f"Not measured: {line}" for line in results["not_measured"])]
    return "\n".join(text) + "\n"


def plot(lines: list[Measured], path: Path) -> bool:
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name in GEOMETRIES:
        points = [(m.tokens, m.fraction) for m in lines if (m.geometry, m.split, m.routing) == (name, "TP1", "random")]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(xscale="log", xlabel="tokens", ylabel="fraction of copy bandwidth", ylim=(0, 1))
    axes.set_xticks(TOKENS, [str(count) for count in TOKENS])
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--geometry", action="append", choices=list(GEOMETRIES), default=None)
    parser.add_argument("--split", action="append", choices=[name for name, *_ in SPLITS], default=None)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--no-overlap", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--seconds", type=float, default=540)
    given = parser.parse_args()
    require_gpu()
    deadline = time.monotonic() + given.seconds
    bandwidth = copy_bandwidth()
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "copy": bandwidth,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "overlap": not given.no_overlap,
    }
    print(results, flush=True)
    lines: list[Measured] = []
    parts = [part for part in SPLITS if given.split is None or part[0] in given.split]
    # What has a floor first: a run that is cut short has it.
    order = [(name, part) for part in parts for name in given.geometry or GEOMETRIES]
    for name, part in order:
        tokens = tuple(count for count in given.tokens if part[0] == "TP1" or count in (1, 8, 64))
        lines += measure(name, part, tokens, given.layers, not given.no_overlap, bandwidth, deadline)
        torch.cuda.empty_cache()
    names = [] if given.no_peers or time.monotonic() > deadline else given.geometry or list(GEOMETRIES)
    results["bfloat16"] = [line for name in names for line in bfloat16_floor(name, tuple(given.tokens))]
    results["not_measured"] = []
    for peer, (lacks, measured) in peers.PEERS.items():
        results[peer] = []
        why = lacks()
        if why and names:
            results["not_measured"].append(f"{peer}: {why}")
        for name in names if not why else ():
            torch.cuda.empty_cache()
            try:
                found = measured(GEOMETRIES[name], tuple(given.tokens), min(given.layers, 4), graph_seconds, routes)
            except Exception as error:  # a peer's own trouble
                results["not_measured"].append(f"{peer}, {name}: {type(error).__name__}: {error}"[:500])
                continue
            results[peer] += [{"geometry": name, **line} for line in found]
    print(*results["not_measured"], sep="\n", flush=True)
    results["lines"] = [asdict(line) for line in lines]
    text = markdown(results, lines)
    print(text)
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        given.out.with_suffix(".md").write_text(text)
        if not plot(lines, given.out.with_suffix(".png")):
            print("no plot: matplotlib is not here")


if __name__ == "__main__":
    main()
