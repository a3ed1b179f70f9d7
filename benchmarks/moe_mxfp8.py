"""MXFP8 MoE layers on our Triton kernels: decode against the card's bandwidth, prefill against cuBLAS on bfloat16 experts.

``python -m benchmarks.moe_mxfp8 OUT`` on a GPU of capability 8.9 or newer writes OUT.json and OUT.md; about 2 minutes.  With
``--format nvfp4`` the same of NVFP4 layers from the counts on that the grouped kernels may serve; decode is ``moe_decode``'s, and
the host's CUTLASS, where TensorRT-LLM is installed, ``trtllm-b12x tune``'s.

A captured graph goes through layers with weights of their own, several times the L2 in all.  Decode reads codes and scales of the
experts that are hit; the bandwidth is that of a copy in the same run.  Prefill is compared with one cuBLAS product per expert and
projection, with cuBLAS's own grouped product, and where torch has it with torch's (CUTLASS), all without activation and sum.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import SAME, cublas, require_gpu
from benchmarks.geometries import MXFP8, routes
from tests import mxfp8, nvfp4_layer
from trtllm_b12x.dispatch.timing import copy_bandwidth, graph_seconds
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.triton.decode_mxfp8 import TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel
from trtllm_b12x.kernels.triton.grouped_nvfp4 import GroupedNVFP4Kernel

DECODE = (1, 2, 4, 8, 16, 32, 64)
PREFILL = (1, 16, 64, 256, 1024, 4096)
KINDS: dict[str, tuple[tuple[type[TritonMXFP8Kernel] | type[GroupedKernel], tuple[int, ...]], ...]] = {
    "mxfp8": ((TritonMXFP8Kernel, DECODE), (GroupedKernel, PREFILL)),
    "nvfp4": ((GroupedNVFP4Kernel, (64, 128, *PREFILL[3:], 8192)),),
}
BYTES = {"mxfp8": 33 / 32, "nvfp4": 9 / 16}
"""Of an element and its share of a scale."""
FLOOR = 0.70
"""Of the copy bandwidth, from 4 tokens on."""
LAYERS = 6
_PER_LAYER = 2
_QUEUED = 8


@dataclass
class Line:
    geometry: str
    kernel: str
    tokens: int
    us: float
    experts: float
    fraction: float
    """Of the copy bandwidth."""
    tflops: float
    error: float
    """Relative L2 from the same layer in torch, with the same rounding points."""
    cublas_us: float | None = None
    cublas_grouped_us: float | None = None
    grouped_us: float | None = None


def measure(name: str, bandwidth: float, form: str) -> list[Line]:
    geometry = dataclasses.replace(MXFP8[name], format=form.upper())
    weights = [random_weights(geometry, seed) for seed in range(LAYERS)]
    size = 3 * geometry.hidden_size * geometry.intermediate_size
    found = []
    for kind, counts in KINDS[form]:
        kernels = []
        for own in weights:
            kernel = kind()
            kernel.plan(geometry, max(counts), torch.device("cuda", torch.cuda.current_device()))
            kernel.bind(own)
            kernel.self_test()
            kernels.append(kernel)
        yardstick = kind.reference()
        yardstick.plan(geometry, max(counts), torch.device("cuda"))
        yardstick.bind(weights[0])
        for tokens in counts:
            x, _, router_weights = mxfp8.random_call(geometry, tokens, device="cuda")
            places = [i for _ in range(_PER_LAYER if tokens <= 64 else 1) for i in range(LAYERS)]
            calls = [(i, routes(geometry, tokens, seed).cuda()) for seed, i in enumerate(places)]

            def run(
                calls: Any = calls, x: Any = x, router_weights: Any = router_weights, kernels: Any = kernels
            ) -> list[torch.Tensor]:
                return [kernels[i].run(x, ids, router_weights) for i, ids in calls]

            seconds = graph_seconds(run, replays=3) / len(calls)
            ids = calls[0][1]
            expected = yardstick.run(x, ids, router_weights, out=torch.zeros(x.shape, device="cuda"))
            error = float((kernels[0].run(x, ids, router_weights).float() - expected).norm() / expected.norm())
            hit = statistics.mean(int(ids.unique().numel()) for _, ids in calls)
            line = Line(
                name,
                kind.features.name,
                tokens,
                1e6 * seconds,
                hit,
                hit * size * BYTES[form] / seconds / bandwidth,
                2 * tokens * geometry.top_k * size / seconds / 1e12,
                error,
            )
            if issubclass(kind, GroupedKernel):
                times = [1e6 * seconds for seconds in peers(geometry, ids)]
                line.cublas_us, line.cublas_grouped_us, line.grouped_us = times
            print(" | ".join(row(line)), flush=True)
            found.append(line)
    return found


def random_weights(geometry: Geometry, seed: int) -> Weights:
    if geometry.format == "NVFP4":
        return nvfp4_layer.random_layer(geometry, "cuda", seed).kernel_weights()
    return mxfp8.random_weights(geometry, "cuda", seed)


def peers(geometry: Geometry, ids: torch.Tensor) -> Iterator[float]:
    """Seconds of both products on bfloat16 experts: by cuBLAS expert by expert, by its grouped product, by torch's."""
    hidden, size, experts = geometry.hidden_size, geometry.intermediate_size, geometry.num_experts
    counts = torch.bincount(ids.flatten().long(), minlength=experts)
    w1 = torch.randn(experts, 2 * size, hidden, dtype=torch.bfloat16, device="cuda")
    w2 = torch.randn(experts, hidden, size, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(ids.numel(), hidden, dtype=torch.bfloat16, device="cuda")
    h = torch.randn(ids.numel(), size, dtype=torch.bfloat16, device="cuda")
    split = counts.tolist()

    def one_by_one() -> list[torch.Tensor]:
        pairs = [(a, w) for a, w in zip(x.split(split), w1, strict=True) if len(a)]
        pairs += [(a, w) for a, w in zip(h.split(split), w2, strict=True) if len(a)]
        return [a @ w.T for a, w in pairs]

    def grouped() -> list[torch.Tensor]:
        ends = counts.cumsum(0).int()
        multiply: Callable[..., torch.Tensor] = torch._grouped_mm
        return [multiply(a, w.transpose(1, 2), offs=ends) for a, w in ((x, w1), (h, w2))]

    yield graph_seconds(one_by_one, replays=3)
    first = [(a, w) for a, w in zip(x.split(split), w1, strict=True) if len(a)]
    second = [(a, w) for a, w in zip(h.split(split), w2, strict=True) if len(a)]
    for timed, prepare in ((queue_seconds, lambda: by_cublas(first, second)), (graph_seconds, lambda: grouped)):
        try:
            yield timed(prepare(), replays=3)
        except (AttributeError, OSError, RuntimeError) as error:
            print(f"not measured: {error}", flush=True)
            yield float("nan")


def queue_seconds(run: Callable[[], Any], replays: int) -> float:
    """Median of calls that no graph holds (cuBLAS copies its lists of problems), eight behind each other."""
    run()
    times = []
    for _ in range(replays):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for _ in range(_QUEUED):
            run()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3 / _QUEUED)
    return statistics.median(times)


def by_cublas(*products: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
    """Each list of inputs and weights as one product.

    Raises:
        RuntimeError: it gives other numbers than one product after the other.
    """
    calls = []
    for pairs in products:
        outputs = [torch.empty(len(a), len(w), dtype=a.dtype, device=a.device) for a, w in pairs]
        calls.append(cublas.grouped([a for a, _ in pairs], [w for _, w in pairs], outputs))
        calls[-1]()
        if not all(nvfp4_layer.distance(out, a @ w.T) < SAME for out, (a, w) in zip(outputs, pairs, strict=True)):
            raise RuntimeError("cuBLAS's grouped product gives other numbers than its plain one")

    def run() -> None:
        for call in calls:
            call()

    return run


TITLES = (
    "layer",
    "kernel",
    "tokens",
    "us",
    "experts",
    "of copy",
    "TFLOP/s",
    "error",
    "cuBLAS us",
    "cuBLAS grouped us",
    "torch grouped us",
)


def row(line: Line) -> list[str]:
    peers = [f"{us:.0f}" if us is not None else "-" for us in (line.cublas_us, line.cublas_grouped_us, line.grouped_us)]
    numbers = [f"{line.us:.1f}", f"{line.experts:.1f}", f"{line.fraction:.2f}", f"{line.tflops:.1f}", f"{line.error:.4f}"]
    return [line.geometry, line.kernel, str(line.tokens), *numbers, *peers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--format", choices=list(KINDS), default="mxfp8", help="default: %(default)s")
    parser.add_argument("--geometry", action="append", choices=list(MXFP8), default=None)
    given = parser.parse_args()
    require_gpu()
    bandwidth = copy_bandwidth()
    facts = {"gpu": torch.cuda.get_device_name(), "copy": bandwidth, "torch": torch.__version__, "triton": triton.__version__}
    print(facts, flush=True)
    lines = []
    for name in given.geometry or MXFP8:
        lines += measure(name, bandwidth, given.format)
        torch.cuda.empty_cache()
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        results = {**facts, "lines": [asdict(line) for line in lines]}
        given.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        cells = [list(TITLES), ["---"] * len(TITLES), *(row(line) for line in lines)]
        head = f"{facts['gpu']}, copy {bandwidth / 1e12:.2f} TB/s, torch {facts['torch']}, Triton {facts['triton']}."
        text = "\n".join([head, "", *(f"| {' | '.join(found)} |" for found in cells)]) + "\n"
        given.out.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
