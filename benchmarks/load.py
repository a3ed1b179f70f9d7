"""What b12x adds to the load of a model: kernels compiled or loaded, scratch memory, the self-test.

``python -m benchmarks.load OUT`` writes OUT.json and OUT.md.  Timed are the first plan of a geometry (cold: FlashInfer has kept
nothing) and a second process's (warm), with kernels compiled for ``sm_120a``, which needs no GPU.  On a Hopper GPU, where the
kernels run translated (docs/sm12x-on-hopper.md), also what the self-test takes and what memory is held behind it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.integration.sm12x_on_hopper import sm12x_on_hopper
from tests.integration.sm12x_on_hopper.kernels import NEMOTRON_SUPER, QWEN3_30B, QWEN36_35B, Shape
from trtllm_b12x.dispatch.schedule import default_crossover
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.b12x.kernel import B12xKernel

DEEPSEEK_TP8 = Shape("DeepSeek-V3, TP 8", 256, 8, 7168, 256, True)
SHAPES = (QWEN3_30B, QWEN36_35B, NEMOTRON_SUPER, DEEPSEEK_TP8)


def planned(shape: Shape, device: str) -> B12xKernel:
    kernel = B12xKernel()
    activation = "Swiglu" if shape.gated else "Relu2"
    geometry = Geometry(shape.num_experts, shape.top_k, shape.hidden_size, shape.padded, activation)
    kernel.plan(geometry, default_crossover(shape.top_k, [B12xKernel.features]) - 1, torch.device(device))
    return kernel


def compiled(shape: Shape) -> dict[str, Any]:
    """In a process of its own: one plan, for the card that ``tests.integration.b12x_on_cpu`` answers for."""
    from tests.integration.b12x_on_cpu import card

    os.environ["CUTE_DSL_ARCH"] = "sm_120a"
    with card():
        started = time.monotonic()
        kernel = planned(shape, "cpu")
        seconds = time.monotonic() - started
    kinds: dict[str, set[int]] = {}
    for candidates in kernel._plan.candidates.values():
        for candidate in candidates:
            kinds.setdefault(candidate.kind.name, set()).add(candidate.variant)
    scratch = kernel._plan.scratch.nbytes()
    return {"kernels": {name: len(variants) for name, variants in kinds.items()}, "seconds": seconds, "scratch bytes": scratch}


def twice(shape: Shape) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        found = []
        for _ in range(2):
            command = [sys.executable, "-m", "benchmarks.load", "--one", shape.name]
            result = subprocess.run(
                command, env={**os.environ, "FLASHINFER_WORKSPACE_BASE": cache}, capture_output=True, text=True, check=False
            )
            if result.returncode:
                raise RuntimeError(result.stderr[-2000:])
            found.append(json.loads(result.stdout.splitlines()[-1]))
    cold, warm = found
    return {"layer": shape.name, **warm, "seconds": None, "cold": cold["seconds"], "warm": warm["seconds"]}


def on_the_gpu(shape: Shape) -> dict[str, Any]:
    """Self-test and memory behind it."""
    from benchmarks.decode import weights

    tensors = weights(shape)
    kernel = planned(shape, "cuda:0")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    kernel.bind(tensors)
    torch.cuda.synchronize()
    started = time.monotonic()
    kernel.self_test()
    torch.cuda.synchronize()
    seconds = time.monotonic() - started
    return {
        "self-test seconds": seconds,
        "reserved behind it": torch.cuda.memory_reserved() - before,
        "outcomes": list(map(str, kernel._plan.outcomes)),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    titles = ("layer", "kernels", "cold s", "warm s", "scratch MB", "self-test s", "reserved behind it MB")
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for row in rows:
        kinds = ", ".join(f"{count} {name}" for name, count in row["kernels"].items())
        tested = f"{row['self-test seconds']:.1f}" if "self-test seconds" in row else "-"
        reserved = f"{row['reserved behind it'] / 1e6:.0f}" if "reserved behind it" in row else "-"
        cells = (row["layer"], kinds, f"{row['cold']:.1f}", f"{row['warm']:.1f}", f"{row['scratch bytes'] / 1e6:.1f}")
        lines.append(f"| {' | '.join((*cells, tested, reserved))} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(compiled(next(shape for shape in SHAPES if shape.name == sys.argv[2]))))
        return
    rows = [twice(shape) for shape in SHAPES]
    result: dict[str, Any] = {"cores": os.cpu_count(), "rows": rows}
    if torch.cuda.is_available():
        result["gpu"] = torch.cuda.get_device_name()
        with sm12x_on_hopper():
            for shape, row in zip(SHAPES, rows, strict=True):
                row.update(on_the_gpu(shape))
    print(markdown(rows))
    out = Path(sys.argv[1])
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(rows))


if __name__ == "__main__":
    main()
