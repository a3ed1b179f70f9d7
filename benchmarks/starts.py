# SPDX-License-Identifier: Apache-2.0
"""Time a layer's start in vLLM (choice, load and first call) without the package, and its first and second start with it.

``python -m benchmarks.starts OUT`` writes OUT.json, one row per format and start, each from its own process. The caches are empty
at a first start and filled at the second. ``choice`` plans and tests the kernels that serve until the measurement. ``first call``
waits for the other kernels, then measures. Those compile while an engine loads weights (``--loading`` seconds here). The
package's log lines have the seconds since the choice began. vLLM must be importable. Hopper counts as SM120.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CASES: dict[str, tuple[tuple[int, int, int, int], str]] = {
    "MXFP8": ((128, 8, 2048, 768), "silu"),
    "NVFP4": ((128, 8, 2048, 768), "silu"),
    "W4A16_NVFP4": ((256, 8, 2048, 512), "silu"),
    "MXFP4": ((32, 4, 2880, 2880), "swigluoai"),
}
"""Format to experts, experts per token, hidden and intermediate size, and vLLM's activation. MXFP4 is gpt-oss-20b."""
SMALL = (8, 2, 256, 128)
"""Sizes on a machine without a GPU, where torch stands in for kernels and nothing is compiled."""
LAYERS = 48
TOKENS = 4096
STARTS = {"without": {"TRTLLM_B12X": "0"}, "first": {}, "second": {}}


def start(form: str, loading: float) -> dict[str, Any]:
    """Start one layer in this process, and let vLLM choose experts for ``LAYERS`` layers of its sizes."""
    import torch

    from tests.integration.vllm import layers

    gpu = torch.cuda.is_available()
    if not gpu:
        layers.pretend_sm120()
    from trtllm_b12x.core import log
    from trtllm_b12x.engines.vllm import plugin

    sizes, activation = CASES[form]
    sizes, device = (sizes, "cuda") if gpu else (SMALL, "cpu")
    gpt_oss = activation == "swigluoai"
    plugin.register()
    with layers.vllm_config(device), torch.no_grad():
        drawn = layers.random_experts(form, sizes[0], *sizes[2:], device, bias=gpt_oss)
        stored = layers.by_turns(drawn) if gpt_oss else drawn
        config = layers.config_of(*sizes, activation=activation, device=device, has_bias=gpt_oss)
        call = layers.routes(config, TOKENS if gpu else 32, 0, device)
        seconds: dict[str, float] = {}
        begun, lines = time.monotonic(), list[tuple[float, str]]()
        handler: Any = logging.Handler()
        handler.emit = lambda line: lines.append((round(time.monotonic() - begun, 2), line.getMessage()))
        logger = logging.getLogger(log.logger.logger.name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            since = time.monotonic()
            yield
            if gpu:
                torch.cuda.synchronize()
            seconds[name] = round(time.monotonic() - since, 3)

        with phase("choice"):
            method = layers.method_of(form, config)
        with phase("other choices"):
            for _ in range(LAYERS - 1):
                layers.method_of(form, config)
        row = {"format": form, "experts": method.experts_cls.__name__, "seconds": seconds, "lines": lines}
        if "Sm12x" not in row["experts"] and not gpu:
            return row  # the CPU cannot run vLLM's own experts
        with phase("load"):
            method, layer = layers.loaded(form, config, stored, method)
        time.sleep(loading)
        for name in ("first call", "second call"):
            with phase(name):
                layers.call(method, layer, *call)
    return row


def measured(form: str, loading: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each of ``STARTS``."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": f"{folder}/triton", "XDG_CACHE_HOME": f"{folder}/xdg", "TRTLLM_B12X_HOPPER": "1"}
        for name, variables in STARTS.items():
            command = [sys.executable, "-m", "benchmarks.starts", "-", "--only", form, "--loading", str(loading)]
            done = subprocess.run(command, env={**os.environ, **caches, **variables}, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode or not lines:
                raise RuntimeError(done.stderr[-2000:])
            yield {"start": name, **json.loads(lines[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starts", description=__doc__)
    parser.add_argument("out", help="file to write, without its suffix; - starts the layer of --only in this process")
    parser.add_argument("--only", choices=CASES, help="one format instead of all")
    parser.add_argument("--loading", type=float, default=0.0, help="seconds between load and first call  [default: 0]")
    options = parser.parse_args()
    if options.out == "-":
        print("\n" + json.dumps(start(options.only, options.loading)))
        return
    if importlib.util.find_spec("vllm") is None:
        sys.exit("error: vLLM is not installed in this Python: run this with the environment that serves")
    rows = []
    for form in [options.only] if options.only else CASES:
        for row in measured(form, options.loading):
            rows.append(row)
            print(form, row["start"], row["experts"], row["seconds"], flush=True)
            for at, line in row["lines"]:
                print(f"  {at:7.2f} {line}", flush=True)
            Path(options.out).with_suffix(".json").write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
