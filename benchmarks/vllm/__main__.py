# SPDX-License-Identifier: Apache-2.0
"""Time whole layers in vLLM's modular kernel: our experts beside its MarlinExperts, from the same checkpoint tensors.

``python -m benchmarks.vllm OUT`` writes ``OUT/vllm.json`` and prints a line for each token count. Graphs cycle through several
layers, so that no weight is in the L2 cache. Marlin's gpt-oss is padded as vLLM pads it; padding x is not timed. vLLM must be
importable. Hopper counts as SM120, and runs NVFP4 as W4A16_NVFP4. Only our kernels ``cuda`` and ``gemm`` run, unless
TRTLLM_B12X_KERNELS names others: Triton kernels use a Hopper instruction (wgmma) that SM12x cards do not have.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks import require_gpu
from benchmarks.peers.layers import REPLAYS, draw
from benchmarks.peers.ours import host_microseconds
from tests.integration.vllm import layers as vllm_layers
from trtllm_b12x.core import settings
from trtllm_b12x.dispatch.policy import HOST
from trtllm_b12x.dispatch.timing import graph_seconds
from trtllm_b12x.engines.vllm import facts, marlin, plugin
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cuda import gemm

TOKENS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
LAYERS = 3
CASES = (
    ("Qwen3-30B-A3B", "MXFP8", (128, 8, 2048, 768), "silu"),
    ("gemma-4-26B-A4B", "MXFP8", (128, 8, 2816, 704), "gelu_tanh"),
    ("Qwen3-30B-A3B", "NVFP4", (128, 8, 2048, 768), "silu"),
    ("Qwen3.6-35B-A3B", "W4A16_NVFP4", (256, 8, 2048, 512), "silu"),
    ("gpt-oss-120b", "MXFP4", (128, 4, 2880, 2880), "swigluoai"),
    ("gpt-oss-20b", "MXFP4", (32, 4, 2880, 2880), "swigluoai"),
    ("Mixtral-8x7B", "W4A16_NVFP4", (8, 2, 4096, 14336), "silu"),
)
"""Name, format, number of experts, experts per token, hidden and intermediate size, and vLLM's activation. gpt-oss has biases."""


def turned(experts: vllm_layers.Experts, places: int) -> vllm_layers.Experts:
    """Return a copy of the layer with its experts rotated by ``places``."""
    parameters = {name: torch.cat((tensor[places:], tensor[:places])) for name, tensor in experts.parameters.items()}
    return replace(experts, parameters=parameters)


def measure(
    name: str, form: str, sizes: tuple[int, int, int, int], activation: str, counts: Sequence[int], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each token count. Start no new row after ``seconds`` of measuring."""
    experts, top_k, hidden, size = sizes
    gpt_oss = activation == "swigluoai"
    more: dict[str, Any] = {"activation": activation, "device": "cuda", "has_bias": gpt_oss}
    config = vllm_layers.config_of(*sizes, **more)
    geometry = Geometry(experts, top_k, hidden, size, "Swiglu", format=form)
    built: dict[str, list[Any]] = {"ours": [], "marlin": []}
    drawn = vllm_layers.random_experts(form, experts, hidden, size, "cuda", bias=gpt_oss)
    stored = vllm_layers.by_turns(drawn) if gpt_oss else drawn
    for places in range(LAYERS):
        marlin = vllm_layers.config_of(*sizes, **more, moe_backend="marlin")  # loading may round up its sizes
        tensors = turned(stored, places)
        built["ours"].append(vllm_layers.loaded(form, config, tensors))
        built["marlin"].append(vllm_layers.loaded(form, marlin, tensors))
    del stored, tensors
    for who, pairs in built.items():
        print(name, form, who, type(pairs[0][0].moe_kernel.fused_experts).__name__, flush=True)
    x, weights, ids = vllm_layers.routes(config, 4096, 0, "cuda")
    for made, layer in built["ours"]:  # vLLM's profile run
        vllm_layers.call(made, layer, x, weights, ids)
    ours = built["ours"][0][0].moe_kernel.fused_experts
    print(name, form, ours.dispatch.schedule.summary, flush=True)
    until = time.monotonic() + seconds
    for tokens in counts:
        if time.monotonic() > until:
            print("out of time before", name, form, tokens)
            return
        calls = draw(geometry, geometry, tokens, LAYERS).calls
        x, weights, _ = vllm_layers.routes(config, tokens, 1, "cuda")
        on_device = [(i, ids.cuda()) for i, ids in calls]
        expected = drawn.expected(x, weights, on_device[0][1], activation)
        row: dict[str, Any] = {"model": name, "format": form, "tokens": tokens}
        path = ours.dispatch.schedule.path(tokens)
        row["kernel"] = ours.dispatch.schedule.base if path == HOST else path
        for who, pairs in built.items():
            padded = torch.nn.functional.pad(x, (0, pairs[0][1].hidden_size - hidden))

            def run(pairs: Any = pairs, x: Any = padded, weights: Any = weights, calls: Any = on_device) -> list[torch.Tensor]:
                return [_call(pairs[i], x, weights, ids) for i, ids in calls]

            result = _call(pairs[0], padded, weights, on_device[0][1])
            row[f"{who} error"] = vllm_layers.distance(result[:, :hidden], expected)
            row[f"{who} us"] = 1e6 * graph_seconds(run, REPLAYS) / len(on_device)
            once = functools.partial(_call, pairs[0], padded, weights, on_device[0][1])
            row[f"{who} host us"] = host_microseconds(once)
        yield row


def _call(built: tuple[Any, Any], x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return vllm_layers.call(*built, x, weights, ids)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=90, help="time to measure one model, once its kernels are compiled")
    parser.add_argument("--only", default="", help="part of a format's name")
    parser.add_argument("--model", default="", help="models of the table, such as Qwen3-30B-A3B,gpt-oss-20b")
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")], default=TOKENS, help="such as 1,8,64")
    parser.add_argument("--sm12x", action="store_true", help="only kernels that fit into SM12x's 99 KB of shared memory")
    options = parser.parse_args()
    require_gpu()
    os.environ[settings.HOPPER.name] = "1"
    os.environ.setdefault(settings.KERNELS.name, "cuda,gemm")
    if options.sm12x:
        gemm.SHAPES = gemm.SMALL_SHAPES
    marlin.refusal = lambda *layer: ""  # our kernels are timed even where Marlin is faster
    plugin.register()
    options.out.mkdir(parents=True, exist_ok=True)
    properties = torch.cuda.get_device_properties(0)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "vllm": facts.version()}
    report: dict[str, Any] = {"gpu": properties.name, "versions": versions, "layers": []}
    with vllm_layers.vllm_config("cuda"), torch.no_grad():
        for case in CASES:
            if options.only not in case[1] or (options.model and case[0] not in options.model.split(",")):
                continue
            try:
                for row in measure(*case, options.tokens, options.seconds):
                    report["layers"].append(row)
                    print(" ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()), flush=True)
                    (options.out / "vllm.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            except Exception as error:  # the next case may run
                print(case[0], case[1], f"failed: {type(error).__name__}: {error}", flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
