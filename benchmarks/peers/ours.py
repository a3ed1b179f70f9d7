# SPDX-License-Identifier: Apache-2.0
"""Our kernels on whole layers: time, bytes, host time and error of one call."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.peers.layers import REPLAYS, draw
from tests.nvfp4_layer import Layer, distance
from trtllm_b12x.dispatch.timing import expert_bytes, graph_seconds
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, Kernel, MoECall
from trtllm_b12x.kernels.cuda.decode import CudaKernel, CudaMXFP4Kernel, CudaMXFP8Kernel, CudaW4A16Kernel
from trtllm_b12x.kernels.cuda.gemm import GemmKernel, GemmMXFP4Kernel, GemmMXFP8Kernel, GemmW4A16Kernel
from trtllm_b12x.kernels.plans import OwnKernel
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP4Kernel, TritonMXFP8Kernel, TritonW4A16Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel

KERNELS: dict[str, dict[str, type[OwnKernel]]] = {
    "nvfp4": {"cuda": CudaKernel, "triton": TritonKernel, "gemm": GemmKernel, "grouped": GroupedNVFP4Kernel},
    "w4a16_nvfp4": {"cuda": CudaW4A16Kernel, "triton": TritonW4A16Kernel, "gemm": GemmW4A16Kernel},
    "mxfp4": {"cuda": CudaMXFP4Kernel, "triton": TritonMXFP4Kernel, "gemm": GemmMXFP4Kernel},
    "mxfp8": {"cuda": CudaMXFP8Kernel, "triton": TritonMXFP8Kernel, "gemm": GemmMXFP8Kernel, "grouped": GroupedKernel},
}
QUANTIZATION = {"nvfp4": "W4A16 NVFP4", "w4a16_nvfp4": "W4A16 NVFP4", "mxfp4": "W4A16 MXFP4", "mxfp8": "W8A16 MXFP8"}
GROUPED_QUANTIZATION = {"nvfp4": "W4A4 NVFP4", "mxfp8": "W8A8 MXFP8"}
SPLITS: dict[str, tuple[int, int]] = {"TP1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "EP4": (1, 4)}
"""Tensor parallel and expert parallel ranks."""
MOST_CHECKED = 4096
"""Largest token count that is compared with the reference."""
BOUND = 0.004
"""Bound on the relative L2 from the reference in torch."""


def split(geometry: Geometry, tp: int, ep: int) -> Geometry:
    size = geometry.intermediate_size // tp
    return replace(geometry, num_experts=geometry.num_experts // ep, intermediate_size=-(-size // 16) * 16, ranks=ep)


class Layers:
    """The same kernel on several layers' weights."""

    def __init__(self, kind: type[OwnKernel], geometry: Geometry, layers: Sequence[Layer | Weights], most_tokens: int) -> None:
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


def measure(layers: Layers, whole: Geometry, tokens: int, bandwidth: float) -> dict[str, Any]:
    """Measure a call of the kernel's fastest variant, whose tiles are ``form``.

    ``megabytes`` are codes and scales of the experts that are hit, ``fraction`` is the share of the copy bandwidth, ``host_us``
    the host time outside graphs. ``error`` is the relative L2 from the kernel's reference in torch. The reference is in float32
    for decode and quantizes activations for ``grouped``.
    """
    g, kernels = layers.geometry, layers.kernels
    drawn = draw(g, whole, tokens, len(kernels))
    x, router_weights, calls = drawn.x, drawn.router_weights, drawn.calls
    forms = [kernel.forms() for kernel in kernels]

    def seconds_of(form: str) -> float:
        return graph_seconds(lambda: [forms[i][form].run(MoECall(x, ids, router_weights)) for i, ids in calls], REPLAYS)

    serving = [form for form, kernel in forms[0].items() if kernel.serves(tokens)] or [next(iter(forms[0]))]
    times = {form: seconds_of(form) / len(calls) for form in serving}
    form = min(times, key=times.__getitem__)
    seconds, kernel = times[form], forms[0][form]
    error = layers.error(kernel, x, calls[0][1], router_weights)
    size = drawn.hits * expert_bytes(g)
    return {
        "us": 1e6 * seconds,
        "megabytes": size / 1e6,
        "fraction": size / seconds / bandwidth,
        "host_us": host_microseconds(functools.partial(kernel.run, MoECall(x, calls[0][1], router_weights))),
        "error": error,
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
