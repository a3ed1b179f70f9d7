# SPDX-License-Identifier: Apache-2.0
"""Measure a decode call's host time around its kernel, here and in another checkout in turn, for :mod:`benchmarks.overhead`.

In both checkouts the kernel is a function that returns its output argument, so only the package's work for a call remains. Each
checkout runs this file in its own process. The result is the ratio of two successive batches, so a busy machine slows both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CALLS = 400
"""Calls per batch."""
BATCHES = 101


def output_of(kernel: Any, call: Any) -> Any:
    """Stand in for ``Kernel.run``: return ``call.out`` if it is given, else x."""
    return call.x if call.out is None else call.out


def serve() -> None:
    """Run a batch for each line of stdin, which names the call, and print its seconds. PYTHONPATH selects the checkout."""
    import torch

    from tests import layers
    from tests.checkpoints import random_experts
    from trtllm_b12x.dispatch import crossover

    torch.set_num_threads(1)
    crossover.tuning()  # as after a server's warm-up, whose autotuner has run
    module = layers.load(layers.create(8, 128, 256), random_experts(8, 128, 256))
    backend = module.backend
    x, logits = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 8)
    ids, router_weights = module.routing_method.apply(logits)
    out = torch.zeros_like(x)
    kernel: Any = type(backend.kernel)
    kernel.run = output_of
    runs = {
        "quantize_input": lambda: backend.quantize_input(x, post_quant_comm=False),
        "run_moe": lambda: layers.run_moe(backend, x, ids, router_weights, moe_output=out, output_dtype=x.dtype),
        "the layer, routing and wrapper with it": lambda: module(x, logits),
    }
    assert runs["run_moe"]() is out, "the call is not the kernel's"
    print(json.dumps(list(runs)), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            run = runs[json.loads(line)]
            started = time.perf_counter()
            for _ in range(CALLS):
                run()
            print(time.perf_counter() - started, flush=True)


@contextmanager
def serving(checkout: Path) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that imports the package and the tests of ``checkout``."""
    env = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    env |= {"TRTLLM_B12X_KERNELS": "b12x", "TRTLLM_B12X_CROSSOVER": "64"}
    command = [sys.executable, str(Path(__file__))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=checkout, env=env, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.stdin.close()


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        git, there = ["git", "-C", str(ROOT), "worktree"], str(Path(folder) / "tree")
        subprocess.run([*git, "add", "--detach", "--quiet", there, commit], check=True)
        try:
            yield Path(there)
        finally:
            subprocess.run([*git, "remove", "--force", there], check=True)


def batch(process: subprocess.Popen[str], name: str) -> float:
    """Run a batch. Return microseconds per call."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(name) + "\n")
    process.stdin.flush()
    return 1e6 * float(process.stdout.readline()) / CALLS


def compared(other: Path) -> dict[str, dict[str, float]]:
    """Return by call: median microseconds in both checkouts, and the median ratio of ours to theirs with its quartiles."""
    with serving(ROOT) as ours, serving(other) as theirs:
        assert ours.stdout is not None
        assert theirs.stdout is not None
        names = json.loads(ours.stdout.readline())
        if names != json.loads(theirs.stdout.readline() or "[]"):
            raise SystemExit(f"{other}: its layers cannot be called as ours")
        found = {}
        for name in names:
            batch(ours, name), batch(theirs, name)  # warm
            pairs = []
            for number in range(BATCHES):
                first = batch(ours if number % 2 else theirs, name)
                second = batch(theirs if number % 2 else ours, name)
                pairs.append((first, second) if number % 2 else (second, first))
            ratios = [mine / other for mine, other in pairs]
            low, ratio, high = statistics.quantiles(ratios, n=4)
            mine, before = (statistics.median(times) for times in zip(*pairs, strict=True))
            found[name] = {"us": mine, "us before": before, "ratio": ratio, "low": low, "high": high}
    return found


if __name__ == "__main__":
    print(__doc__) if sys.argv[1:] else serve()
