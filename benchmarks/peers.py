"""Time whole MoE layers on our Triton kernels, beside other kernels for the same experts and the card's bandwidth.

``python -m benchmarks.peers OUT`` on a GPU of capability 8.0 or newer (8.9 for MXFP8) writes OUT.json, OUT.md and, with
matplotlib, OUT.png. The defaults take about 8 minutes; ``--help`` lists what narrows them.

A captured graph cycles through as many layers as memory holds, each with its own weights, several times the L2 cache in all, so
no weight is read from the cache. Bytes are what must be read once: codes and scales of the experts that are hit. The bandwidth is
that of a copy in the same run, read plus written. ``benchmarks.other_kernels`` lists the peers. TensorRT-LLM's own CUTLASS is
measured by ``trtllm-b12x tune``.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import other_kernels, require_gpu
from benchmarks.geometries import GEOMETRIES, MXFP8, routes
from benchmarks.markdown import table
from benchmarks.plots import by_tokens
from tests import mxfp8
from tests.nvfp4_layer import distance, random_call, random_layer
from trtllm_b12x.dispatch.timing import copy_bandwidth, expert_bytes, graph_seconds
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel
from trtllm_b12x.kernels.triton.jit import JitKernel

KERNELS: dict[str, dict[str, type[JitKernel]]] = {
    "nvfp4": {"triton": TritonKernel, "grouped": GroupedNVFP4Kernel},
    "mxfp8": {"triton": TritonMXFP8Kernel, "grouped": GroupedKernel},
}
LAYERS = {"nvfp4": GEOMETRIES, "mxfp8": MXFP8}
SPLITS: dict[str, tuple[int, int]] = {"TP1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "EP4": (1, 4)}
"""Tensor parallel and expert parallel ranks."""
TOKENS = {"triton": (1, 2, 4, 8, 16, 32, 64, 128, 256), "grouped": (1, 16, 64, 128, 256, 1024, 4096)}
SPLIT_TOKENS = (1, 8, 64)
MOST_CHECKED = 4096
"""Largest token count that is compared with the reference."""
BOUND = 0.004
"""Relative L2 from the reference in torch."""
_PER_LAYER = 2
"""Routings that a layer sees within the graph."""


@dataclass
class Line:
    """Time of one kernel family on one layer at one token count."""

    geometry: str
    kernel: str
    split: str
    routing: str
    tokens: int
    us: float
    experts: float
    """Mean number of experts that are hit."""
    megabytes: float
    fraction: float
    """Share of the copy bandwidth."""
    bytes_per_clock_sm: float
    tflops: float
    host_us: float
    """Host time of a call outside graphs."""
    error: float
    """Relative L2 from the kernel's reference in torch: float32 for decode, with quantized activations for ``grouped``."""


def split(geometry: Geometry, tp: int, ep: int) -> Geometry:
    size = geometry.intermediate_size // tp
    return replace(geometry, num_experts=geometry.num_experts // ep, intermediate_size=-(-size // 16) * 16, ranks=ep)


def stack(geometry: Geometry, limit: int) -> Iterator[Weights]:
    """Yield the weights of at least two layers and, where memory allows, of ``limit``."""
    size = expert_bytes(geometry) * geometry.num_experts
    count = max(2, min(limit, int(0.6 * torch.cuda.mem_get_info()[0]) // size))
    if geometry.format == "MXFP8":
        yield from (mxfp8.random_weights(geometry, "cuda", seed) for seed in range(count))
        return
    first = random_layer(geometry, "cuda", 0)
    yield first.kernel_weights()
    for seed in range(1, count):
        generator = torch.Generator("cuda").manual_seed(seed)
        w1, w2 = (torch.empty_like(w).random_(0, 256, generator=generator) for w in (first.w1, first.w2))
        yield replace(first, w1=w1, w2=w2).kernel_weights()


class Layers:
    """The same kernel on several layers' weights."""

    def __init__(self, kind: type[JitKernel], geometry: Geometry, weights: list[Weights], most_tokens: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.geometry = geometry
        self.kernels = []
        for layer in weights:
            kernel = kind()
            kernel.plan(geometry, most_tokens, device)
            kernel.bind(layer)
            kernel.self_test()
            self.kernels.append(kernel)
        self.reference = self.kernels[0].reference()
        self.reference.plan(geometry, most_tokens, device)
        self.reference.bind(weights[0])

    def error(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> float:
        if len(x) > MOST_CHECKED:
            return math.nan
        call = MoECall(x, ids, router_weights)
        expected = self.reference.run(call._replace(out=torch.zeros(x.shape, device=x.device)))
        return distance(self.kernels[0].run(call), expected)


def measure(layers: Layers, whole: Geometry, tokens: int, skewed: bool, bandwidth: float) -> dict[str, float]:
    """Measure one line's numbers."""
    g, kernels = layers.geometry, layers.kernels
    x, _, router_weights = random_call(g, tokens, whole.num_experts, "cuda")
    turns = range(_PER_LAYER if tokens <= 256 else 1)
    calls = [(i, routes(whole, tokens, i * 97 + turn, skewed).cuda()) for turn in turns for i in range(len(kernels))]
    error = math.nan if skewed else layers.error(x, calls[0][1], router_weights)
    hit = statistics.mean(int(ids[ids < g.num_experts].unique().numel()) for _, ids in calls)
    routed = statistics.mean(int((ids < g.num_experts).sum()) for _, ids in calls)

    def run() -> list[torch.Tensor]:
        return [kernels[i].run(MoECall(x, ids, router_weights)) for i, ids in calls]

    seconds = graph_seconds(run) / len(calls)
    size, products = hit * expert_bytes(g), (3 if g.gated else 2) * g.hidden_size * g.intermediate_size
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    clock = 1e3 * float(getattr(properties, "clock_rate", 0) or 1_755_000)
    return {
        "us": 1e6 * seconds,
        "experts": hit,
        "megabytes": size / 1e6,
        "fraction": size / seconds / bandwidth,
        "bytes_per_clock_sm": size / seconds / clock / properties.multi_processor_count,
        "tflops": 2 * routed * products / seconds / 1e12,
        "host_us": host_microseconds(functools.partial(kernels[0].run, MoECall(x, calls[0][1], router_weights))),
        "error": error,
    }


def host_microseconds(run: Callable[[], Any]) -> float:
    """Return the median host time; each call waits for the previous one to end, so that no queue fills."""
    times = []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


# ---- tables --------------------------------------------------------------------------------------------------------------

TITLES = (
    "layer",
    "kernel",
    "split",
    "routing",
    "tokens",
    "us",
    "experts",
    "MB",
    "of copy",
    "B/clock/SM",
    "TFLOP/s",
    "host us",
    "error",
)


def row(line: Line) -> list[str]:
    numbers = [f"{line.us:.1f}", f"{line.experts:.1f}", f"{line.megabytes:.1f}", f"{line.fraction:.2f}"]
    numbers += [f"{line.bytes_per_clock_sm:.1f}", f"{line.tflops:.1f}", f"{line.host_us:.0f}", f"{line.error:.4f}"]
    return [line.geometry, line.kernel, line.split, line.routing, str(line.tokens), *numbers]


def markdown(results: dict[str, Any]) -> str:
    lines = [Line(**line) for line in results["lines"]]
    head = f"{results['gpu']}, copy {results['copy'] / 1e12:.2f} TB/s, torch {results['torch']}, Triton {results['triton']}."
    text = [head, "", *table(TITLES, map(row, lines))]
    ours = {(m.geometry, m.tokens): f"{m.us:.1f}" for m in reversed(lines) if m.split == "TP1" and m.routing == "random"}
    for peer, (title, _, _) in other_kernels.PEERS.items():
        rows = [
            [p["geometry"], p["tokens"], f"{p['us']:.1f}", ours.get((p["geometry"], p["tokens"]), "-"), f"{p['error']:.4f}"]
            for p in results[peer]
        ]
        if rows:
            text += ["", f"Beside {title}:", "", *table(("layer", "tokens", "theirs us", "ours us", "their error"), rows)]
    if results["not_measured"]:
        text += ["", *(f"Not measured: {line}" for line in results["not_measured"])]
    return "\n".join(text) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--format", choices=list(KERNELS), default="nvfp4", help="default: %(default)s")
    parser.add_argument("--kernel", choices=list(TOKENS), nargs="+", help="default: triton; for mxfp8 both")
    parser.add_argument("--geometry", action="append", help="default: all of the format")
    parser.add_argument("--split", action="append", choices=list(SPLITS), help="default: all; for mxfp8 TP1")
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540, help="begin no further layer after this time")
    options = parser.parse_args()
    known = LAYERS[options.format]
    options.geometry = options.geometry or list(known)
    if not {*options.geometry} <= known.keys():
        parser.error(f"--geometry: {options.format} has {', '.join(known)}")
    decode_alone = options.format == "nvfp4"
    options.kernel = options.kernel or (["triton"] if decode_alone else list(TOKENS))
    options.split = options.split or (list(SPLITS) if decode_alone else ["TP1"])
    return options


def measure_ours(options: argparse.Namespace, bandwidth: float, deadline: float) -> Iterator[Line]:
    """Yield the lines of all layers, the whole ones first."""
    for part in options.split:
        for name in options.geometry:
            whole = replace(LAYERS[options.format][name], format=options.format.upper())
            geometry = split(whole, *SPLITS[part])
            if time.monotonic() > deadline:
                return
            weights = list(stack(geometry, options.layers))
            for family in options.kernel:
                counts = options.tokens or [n for n in TOKENS[family] if part == "TP1" or n in SPLIT_TOKENS]
                layers = Layers(KERNELS[options.format][family], geometry, weights, max(counts))
                for tokens in counts:
                    for routing in ("random", "skewed") if family == "triton" else ("random",):
                        numbers = measure(layers, whole, tokens, routing == "skewed", bandwidth)
                        line = Line(name, family, part, routing, tokens, **numbers)
                        print(" | ".join(row(line)), "WRONG" if line.error > BOUND else "", flush=True)
                        yield line
                        if time.monotonic() > deadline:
                            return
                del layers
            del weights
            torch.cuda.empty_cache()


def main() -> None:
    options = arguments()
    require_gpu()
    deadline = time.monotonic() + options.seconds
    bandwidth = copy_bandwidth()
    results: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "copy": bandwidth,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "format": options.format.upper(),
    }
    print(results, flush=True)
    results["lines"] = [asdict(line) for line in measure_ours(options, bandwidth, deadline)]
    results["not_measured"] = []
    names = [] if time.monotonic() > deadline else options.geometry
    for peer, (_, lacks, measured) in other_kernels.PEERS.items():
        results[peer] = []
        reason = lacks()
        if reason and names:
            results["not_measured"].append(f"{peer}: {reason}")
        for name in names if not reason else ():
            torch.cuda.empty_cache()
            geometry = replace(LAYERS[options.format][name], format=results["format"])
            counts = options.tokens or sorted({n for family in options.kernel for n in TOKENS[family]})
            try:
                lines = measured(geometry, counts, min(options.layers, 4))
            except Exception as error:  # the peer's own fault
                results["not_measured"].append(f"{peer}, {name}: {type(error).__name__}: {error}"[:500])
                continue
            print(*(f"{peer}, {name}: {line}" for line in lines), sep="\n", flush=True)
            results[peer] += [{"geometry": name, **line} for line in lines]
    text = markdown(results)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)
        curves: dict[str, list[tuple[int, float]]] = {}
        for line in results["lines"]:
            if (line["split"], line["routing"]) == ("TP1", "random"):
                name = f"{line['geometry']}, {line['kernel']}"
                curves.setdefault(name, []).append((line["tokens"], line["fraction"]))
        if not by_tokens(options.out.with_suffix(".png"), curves, "fraction of copy bandwidth", 1):
            print("no plot: matplotlib is not installed")


if __name__ == "__main__":
    main()
