"""Our kernels on whole layers: time, bytes, host time and error of one call."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.peers.layers import REPLAYS, draw
from tests.nvfp4_layer import Layer, distance
from trtllm_b12x.dispatch.timing import expert_bytes, graph_seconds
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, Kernel, MoECall
from trtllm_b12x.kernels.cuda.decode import CudaKernel, CudaMXFP4Kernel, CudaMXFP8Kernel, CudaW4A16Kernel
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP4Kernel, TritonMXFP8Kernel, TritonW4A16Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedMXFP4Kernel, GroupedNVFP4Kernel, GroupedW4A16Kernel
from trtllm_b12x.kernels.triton.jit import JitKernel

KERNELS: dict[str, dict[str, type[CudaKernel | JitKernel]]] = {
    "nvfp4": {"cuda": CudaKernel, "triton": TritonKernel, "grouped": GroupedNVFP4Kernel},
    "w4a16_nvfp4": {"cuda": CudaW4A16Kernel, "triton": TritonW4A16Kernel, "grouped": GroupedW4A16Kernel},
    "mxfp4": {"cuda": CudaMXFP4Kernel, "triton": TritonMXFP4Kernel, "grouped": GroupedMXFP4Kernel},
    "mxfp8": {"cuda": CudaMXFP8Kernel, "triton": TritonMXFP8Kernel, "grouped": GroupedKernel},
}
QUANTIZATION = {"nvfp4": "W4A16 NVFP4", "w4a16_nvfp4": "W4A16 NVFP4", "mxfp4": "W4A16 MXFP4", "mxfp8": "W8A16 MXFP8"}
GROUPED_QUANTIZATION = QUANTIZATION | {"nvfp4": "W4A4 NVFP4", "mxfp8": "W8A8 MXFP8"}
SPLITS: dict[str, tuple[int, int]] = {"TP1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "EP4": (1, 4)}
"""Tensor parallel and expert parallel ranks."""
MOST_CHECKED = 4096
"""Largest token count that is compared with the reference."""
BOUND = 0.004
"""Relative L2 from the reference in torch."""


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
    """Codes and scales of those experts, which a call must read once."""
    fraction: float
    """Share of the copy bandwidth."""
    bytes_per_clock_sm: float
    tflops: float
    host_us: float
    """Host time of a call outside graphs."""
    error: float
    """Relative L2 from the kernel's reference in torch: float32 for decode, with quantized activations for ``grouped``."""
    replay_megabytes: float = math.nan
    """Bytes that a replay of the graph must read."""
    quantization: str = ""
    form: str = ""
    """The fastest of the kernel's forms: its tiles, or how it takes its tokens."""


def split(geometry: Geometry, tp: int, ep: int) -> Geometry:
    size = geometry.intermediate_size // tp
    return replace(geometry, num_experts=geometry.num_experts // ep, intermediate_size=-(-size // 16) * 16, ranks=ep)


class Layers:
    """The same kernel on several layers' weights."""

    def __init__(
        self, kind: type[CudaKernel | JitKernel], geometry: Geometry, layers: Sequence[Layer | Weights], most_tokens: int
    ) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.geometry = geometry
        self.kernels = []
        weights = [layer.kernel_weights() if isinstance(layer, Layer) else layer for layer in layers]
        for layer in weights:
            kernel = kind()
            kernel.plan(geometry, most_tokens, device)
            kernel.bind(layer)
            kernel.self_test()
            self.kernels.append(kernel)
        self.reference = self.kernels[0].reference()
        self.reference.plan(geometry, most_tokens, device)
        self.reference.bind(weights[0])

    def error(self, kernel: Kernel, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> float:
        if len(x) > MOST_CHECKED:
            return math.nan
        call = MoECall(x, ids, router_weights)
        expected = self.reference.run(call._replace(out=torch.zeros(x.shape, device=x.device)))
        return distance(kernel.run(call), expected)


def measure(layers: Layers, whole: Geometry, tokens: int, skewed: bool, bandwidth: float) -> dict[str, Any]:
    """Measure one line's numbers, in the kernel's fastest form."""
    g, kernels = layers.geometry, layers.kernels
    drawn = draw(g, whole, tokens, len(kernels), skewed)
    x, router_weights, calls = drawn.x, drawn.router_weights, drawn.calls
    hit = drawn.hits
    routed = statistics.mean(int((ids < g.num_experts).sum()) for _, ids in calls)
    forms = [kernel.forms() for kernel in kernels]

    def seconds_of(form: str) -> float:
        return graph_seconds(lambda: [forms[i][form].run(MoECall(x, ids, router_weights)) for i, ids in calls], REPLAYS)

    serving = [form for form, kernel in forms[0].items() if kernel.serves(tokens)] or [next(iter(forms[0]))]
    times = {form: seconds_of(form) / len(calls) for form in serving}
    form = min(times, key=times.__getitem__)
    seconds, kernel = times[form], forms[0][form]
    error = math.nan if skewed else layers.error(kernel, x, calls[0][1], router_weights)
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
        "host_us": host_microseconds(functools.partial(kernel.run, MoECall(x, calls[0][1], router_weights))),
        "error": error,
        "replay_megabytes": len(calls) * size / 1e6,
        "form": form,
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
