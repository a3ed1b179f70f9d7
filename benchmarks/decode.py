# SPDX-License-Identifier: Apache-2.0
"""Measure what our driver of FlashInfer's kernels costs besides the kernels: host time and scratch memory.

``python -m benchmarks.decode OUT`` on a Hopper GPU, where the SM120 kernels run translated (docs/sm12x-on-hopper.md), writes
OUT.json. Every figure stands beside the figure of plain FlashInfer in the same run. Kernel speed is not measured: it would say
nothing about an SM12x card.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import require_gpu
from tests import layers
from tests.checkpoints import random_experts
from tests.integration.sm12x_on_hopper import sm12x_on_hopper
from tests.integration.sm12x_on_hopper.kernels import NEMOTRON_SUPER, QWEN3_30B, SMALL_RELU2, SMALL_SWIGLU, Shape
from tests.integration.sm12x_on_hopper.problem import arguments, wrapper
from tests.nvfp4_layer import random_call, random_layer
from trtllm_b12x.dispatch.schedule import default_crossover
from trtllm_b12x.kernels.b12x.kernel import B12xKernel

LAYERS = 48
REPEATS = 30


def allocated(make: Callable[[], Any]) -> int:
    """Return the bytes of GPU memory that stay allocated while the result lives."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = make()
    torch.cuda.synchronize()
    size = torch.cuda.memory_allocated() - before
    del made
    return size


def memory(shape: Shape) -> dict[str, Any]:
    """Measure scratch memory of all layers on our driver, and of one layer on FlashInfer's wrapper."""
    weights = random_layer(shape.geometry, "cuda").kernel_weights()
    capacity = default_crossover(shape.top_k, [B12xKernel.features]) - 1

    def planned() -> B12xKernel:
        kernel = B12xKernel()
        kernel.plan(shape.geometry, capacity, torch.device("cuda", 0))
        kernel.bind(weights)
        return kernel

    return {
        "layer": shape.name,
        "layers": LAYERS,
        "capacity": capacity,
        "ours, all layers": allocated(lambda: [planned() for _ in range(LAYERS)]),
        "B12xMoEWrapper per layer, sized by the crossover": allocated(lambda: wrapper(shape, "cuda", capacity)),
    }


def overhead(shape: Shape, tokens: int) -> dict[str, Any]:
    """Measure the host time of a call: the layer's ``run_moe``, and FlashInfer's wrapper."""
    sizes = (shape.num_experts, shape.hidden_size, shape.intermediate_size)
    with torch.device("cuda"):
        module = layers.create(*sizes, top_k=shape.top_k, gated=shape.gated)
    backend = layers.load(module, random_experts(*sizes, shape.gated)).backend
    kernel = backend.kernel
    assert isinstance(kernel, B12xKernel), backend.verdict
    x, ids, router_weights = random_call(shape.geometry, tokens, device="cuda")
    out = torch.empty_like(x)
    plain, given = wrapper(shape, "cuda", kernel.capacity), arguments(kernel.weights)
    named = {"x": x, "token_selected_experts": ids, "token_final_scales": router_weights}
    runs: dict[str, Callable[[], Any]] = {
        "run_moe": lambda: layers.run_moe(backend, x, ids, router_weights, moe_output=out),
        "B12xMoEWrapper.run": lambda: plain.run(**named, **given),
    }
    for run in runs.values():
        run()
    return {"layer": shape.name, "tokens": tokens, **microseconds(runs)}


def microseconds(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return each run's median host time per call, in turn. The GPU is synchronized between batches, not within them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(10):
                run()
            times[name].append(1e5 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT", help="also write OUT.json")
    out = parser.parse_args().out
    require_gpu()
    versions = {name: importlib.metadata.version(name) for name in ("flashinfer-python", "nvidia-cutlass-dsl", "torch")}
    results: dict[str, Any] = {"versions": versions, "gpu": torch.cuda.get_device_name()}
    os.environ |= {"TRTLLM_B12X_KERNELS": "b12x", "TRTLLM_B12X_CROSSOVER": "64"}
    with sm12x_on_hopper():
        results["host microseconds"] = [overhead(shape, n) for shape in (SMALL_SWIGLU, SMALL_RELU2) for n in (1, 8, 16)]
        results["memory"] = [memory(shape) for shape in (QWEN3_30B, NEMOTRON_SUPER)]
    text = json.dumps(results, indent=1)
    print(text)
    if out is not None:
        Path(f"{out}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
