# SPDX-License-Identifier: Apache-2.0
"""An unmodified ``vllm.LLM`` on a GPU with the package: sleep, reload, new weights, its compile cache, memory.

Hopper counts as SM120 (``TRTLLM_B12X_HOPPER``). Each engine has a process of its own; those of a model share vLLM's caches.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.vllm import models

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm.cumem_allocator") is None, reason="needs vLLM's extensions"),
]
MODELS = {"gpt-oss": "MXFP4Sm12xExperts", "W4A16_NVFP4": "W4A16_NVFP4Sm12xExperts", "MXFP8": "MXFP8Sm12xExperts"}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    for seed in (0, 1):
        models.write(request.param, folder / str(seed), seed)
    return request.param, folder


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run ``engine.py`` on the first checkpoint."""
    command = [sys.executable, "-m", "tests.integration.vllm.engine", str(folder / "0"), *arguments]
    # Without the switches that conftest.py sets.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRTLLM_B12X")}
    environment |= {"VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_USE_FLASHINFER_SAMPLER": "0", "OMP_NUM_THREADS": "4"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    result: dict[str, Any] = {"log": done.stdout + done.stderr, **json.loads(lines[-1])}
    return result


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "captured"])
def test_sleep_and_reload(model: tuple[str, Path], eager: bool) -> None:
    """Level 2 discards all that was allocated while the model loaded. Afterwards every bit is as before."""
    name, folder = model
    other, back = f"load={folder / '1'}", f"load={folder / '0'}"
    steps = "sleep-1", "sleep-2", other, back
    result = run(folder, "--sleep", *(["--eager"] if eager else []), *steps)
    assert result["experts"] == [MODELS[name]]
    assert {step: result[step] for step in ("sleep-1", "sleep-2", back)} == {"sleep-1": 0, "sleep-2": 0, back: 0}
    assert result[other] > 0


def test_starts_through_one_compile_cache(model: tuple[str, Path]) -> None:
    """With the package, without, and with it again: each starts, and nobody takes the other's compiled graph."""
    name, folder = model
    first, without, second = run(folder), run(folder, "--without"), run(folder)
    assert first["experts"] == second["experts"] == [MODELS[name]] != without["experts"]
    assert first["tokens"] == second["tokens"]


def test_memory_of_a_deleted_engine(model: tuple[str, Path]) -> None:
    _, folder = model
    ours, theirs = run(folder, "--eager"), run(folder, "--eager", "--without")
    assert ours["left"] <= theirs["left"] + ours["peak"] / 100


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_choose_alike(model: tuple[str, Path]) -> None:
    """If the kernels of one rank fail, Marlin serves on both: it has another width of x on gpt-oss."""
    name, folder = model
    served, failed, without = (run(folder, "--eager", "--two-ranks", *more) for more in ((), ("--one-fails",), ("--without",)))
    assert f"{MODELS[name].removesuffix('Sm12xExperts')} experts run on trtllm-b12x" in served["log"]
    assert "experts run on trtllm-b12x" not in failed["log"]
    assert "another rank does not run our kernels" in failed["log"]
    assert "no memory for kernels" in failed["log"]
    assert failed["tokens"] == without["tokens"]
