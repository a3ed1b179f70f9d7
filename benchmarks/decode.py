"""What the driver of FlashInfer's kernels costs beside the kernels: host time and scratch memory.

``python -m benchmarks.decode OUT`` on a Hopper GPU, where the SM120 kernels run translated (docs/sm12x-on-hopper.md), writes
OUT.json and OUT.md. Every figure stands beside that of plain FlashInfer in the same run. No kernel's speed is measured: it would
say nothing about a card.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import require_gpu
from benchmarks.markdown import table
from tests import layers
from tests.checkpoints import random_experts
from tests.integration.sm12x_on_hopper import sm12x_on_hopper
from tests.integration.sm12x_on_hopper.kernels import NEMOTRON_SUPER, QWEN3_30B, SMALL_RELU2, SMALL_SWIGLU, Shape
from tests.integration.sm12x_on_hopper.problem import arguments, wrapper
from tests.nvfp4_layer import random_call, random_layer
from trtllm_b12x.dispatch.schedule import default_crossover
from trtllm_b12x.formats.nvfp4 import NVFP4Weights
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.b12x.kernel import B12xKernel

MOE_MAX_NUM_TOKENS = 8192
"""The host's default: ``max_num_tokens``."""
LAYERS = 48
REPEATS = 300


def planned(shape: Shape, tensors: NVFP4Weights) -> B12xKernel:
    kernel = B12xKernel()
    kernel.plan(shape.geometry, default_crossover(shape.top_k, [B12xKernel.features]) - 1, torch.device("cuda", 0))
    kernel.bind(tensors)
    return kernel


# ---- memory --------------------------------------------------------------------------------------------------------------


def allocated(make: Callable[[], Any]) -> tuple[int, Any]:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    made = make()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before, made


def memory(shape: Shape) -> dict[str, Any]:
    tensors = random_layer(shape.geometry, "cuda").kernel_weights()
    stack = LAYERS
    one, first = allocated(lambda: planned(shape, tensors))
    more, others = allocated(lambda: [planned(shape, tensors) for _ in range(stack - 1)])
    capacity = default_crossover(shape.top_k, [B12xKernel.features]) - 1
    small, _ = allocated(lambda: wrapper(shape, "cuda", capacity))
    found: dict[str, Any] = {
        "layer": shape.name,
        "layers": stack,
        "capacity": capacity,
        "weights of a layer": sum(t.untyped_storage().nbytes() for t in tensors.tensors().values()),
        "padding of a layer": round(
            (1 - shape.intermediate_size / shape.padded)
            * sum(t.nbytes for name, t in tensors.tensors().items() if "_weight" in name)
        ),
        "ours, one layer": one,
        "ours, all layers": one + more,
        "over one layer": (one + more) / one,
        "B12xMoEWrapper per layer, sized by the crossover": small,
    }
    del others, first
    torch.cuda.empty_cache()
    try:
        large, made = allocated(lambda: wrapper(shape, "cuda", MOE_MAX_NUM_TOKENS))
        found["B12xMoEWrapper per layer, sized by moe_max_num_tokens"] = large
        del made
        count = min(stack, int(0.8 * torch.cuda.mem_get_info()[0] // large))
        several, made = allocated(lambda: [wrapper(shape, "cuda", MOE_MAX_NUM_TOKENS) for _ in range(count)])
        found[f"{count} of them"] = several
        del made
    except (ValueError, RuntimeError) as error:
        found["B12xMoEWrapper per layer, sized by moe_max_num_tokens"] = str(error).splitlines()[0]
    torch.cuda.empty_cache()
    return found


# ---- host time -----------------------------------------------------------------------------------------------------------


def microseconds(**runs: Callable[[], Any]) -> dict[str, float]:
    """Median host time of a call of each, in turn; the GPU is waited for between batches, not within."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS // 10):
        for name, run in runs.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(10):
                run()
            times[name].append(1e5 * (time.perf_counter() - started))
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in times.items()}


def overhead(shape: Shape, tokens: int, stubbed: bool) -> dict[str, Any]:
    """``run_moe`` of the layer, the launch alone, and FlashInfer's wrapper."""
    tensors = random_experts(shape.num_experts, shape.hidden_size, shape.intermediate_size, shape.gated)
    with torch.device("cuda"):
        sizes = (shape.num_experts, shape.hidden_size, shape.intermediate_size)
        module = layers.create(*sizes, top_k=shape.top_k, gated=shape.gated)
    backend = layers.load(module, tensors).backend
    kernel = backend.kernel
    assert isinstance(kernel, B12xKernel), backend.verdict
    x, ids, router_weights = random_call(shape.geometry, tokens, device="cuda")
    out = torch.empty_like(x)
    direct = MoECall(x, ids, router_weights, out=out)
    candidate = real = kernel._plan.candidates[tokens][0]
    if stubbed:
        candidate = kernel._plan.candidates[tokens][0] = dataclasses.replace(real, function=lambda *arguments: None)
    launch = candidate.launch
    scratch, table = kernel._plan.scratch, kernel._tables[False]
    bound = kernel._bound[candidate.kind.name]
    runs: dict[str, Callable[[], Any]] = {
        "the launch alone": lambda: launch(bound, scratch, table, kernel.weights.input_scales, direct),
        "run_moe": lambda: layers.run_moe(backend, x, ids, router_weights, moe_output=out),
        "run_moe, output allocated": lambda: layers.run_moe(backend, x, ids, router_weights),
    }
    if not stubbed:
        plain, given = wrapper(shape, "cuda", kernel.capacity), arguments(kernel.weights)
        named = {"x": x, "token_selected_experts": ids, "token_final_scales": router_weights}
        runs["B12xMoEWrapper.run"] = lambda: plain.run(**named, **given)
    for run in runs.values():
        run()
    times = microseconds(**runs)
    kernel._plan.candidates[tokens][0] = real
    added = times["run_moe"] - times["the launch alone"]
    facts = {"layer": shape.name, "tokens": tokens, "kernel": candidate.kind.name, "stubbed": stubbed}
    return {**facts, **times, "added": added}


# ---- tables --------------------------------------------------------------------------------------------------------------


def markdown(results: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [f"{results['gpu']}, {versions}.", ""]
    lines += ["## Host time of one call, microseconds", ""]
    kinds = ["the launch alone", "run_moe", "added", "run_moe, output allocated", "B12xMoEWrapper.run"]
    rows = [
        [row["layer"], row["tokens"], row["kernel"], "stubbed" if row["stubbed"] else "real"]
        + [f"{row[kind]:.1f}" if kind in row else "-" for kind in kinds]
        for row in results["host microseconds"]
    ]
    lines += table(["layer", "tokens", "kernel", "GPU work", *kinds], rows)
    lines += ["", "## Scratch memory of 48 layers, MB", ""]
    rows = []
    for row in results["memory"]:
        many = {name: value for name, value in row.items() if name.endswith(" of them")}
        (count, total), *_ = many.items() if many else [("-", 0)]
        large = row["B12xMoEWrapper per layer, sized by moe_max_num_tokens"]
        rows.append(
            [
                *(row["layer"], row["capacity"], _mega(row["ours, one layer"]), _mega(row["ours, all layers"])),
                *(f"{row['over one layer']:.2f}", _mega(large), f"{_mega(total)} ({count})", _mega(row["padding of a layer"])),
            ]
        )
    titles = ["ours, one layer", "ours, all", "all over one", f"wrapper for {MOE_MAX_NUM_TOKENS} tokens, one layer", "all"]
    lines += table(["layer", "tokens", *titles, "padding of a layer's weights"], rows)
    return "\n".join(lines) + "\n"


def _mega(size: Any) -> str:
    return f"{size / 1e6:,.1f}" if isinstance(size, int) else str(size)


def main() -> None:
    require_gpu()
    results: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in ("flashinfer-python", "nvidia-cutlass-dsl", "torch")},
        "gpu": torch.cuda.get_device_name(),
    }
    with sm12x_on_hopper():
        results["host microseconds"] = [
            overhead(shape, tokens, stubbed)
            for shape in (SMALL_SWIGLU, SMALL_RELU2)
            for tokens in (1, 8, 16)
            for stubbed in (True, False)
        ]
        results["memory"] = [memory(shape) for shape in (QWEN3_30B, NEMOTRON_SUPER)]
    text = markdown(results)
    print(text)
    if len(sys.argv) > 1:
        Path(f"{sys.argv[1]}.json").write_text(json.dumps(results, indent=1) + "\n")
        Path(f"{sys.argv[1]}.md").write_text(text)


if __name__ == "__main__":
    main()
