"""A plan's kernels compiled in several processes, into Triton's cache, before its JIT asks for them.

Threads would not do: Triton holds the interpreter's lock for all of a compile but ptxas.  A process compiles what the JIT itself
would, for a card that is named instead of asked, so what it leaves in the cache is what the JIT looks for.  It imports Triton and
the kernels, no torch and nothing of the GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.environment import triton as toolchain

from . import worker
from .variant import Variant

_FEWEST = 3
"""Kernels for which a process is worth its start."""
_MOST_PROCESSES = 16
"""150 MB each."""
_TIMEOUT_S = 600


def fill_cache(variants: Sequence[Variant], capability: int, workers: int | None = None) -> int:
    """Once per cache, kernels and Triton: ranks that start together wait for the one that is first.

    What goes wrong here is left to the JIT, which compiles what it does not find.

    Args:
        capability: of the card, major * 10 + minor.
        workers: processes; None: one for each core that this one may use.

    Returns:
        How many processes have compiled.
    """
    from filelock import FileLock

    workers = min(workers or len(os.sched_getaffinity(0)), _MOST_PROCESSES, len(variants))
    if workers < 2 or len(variants) < _FEWEST:
        return 0
    with suppress(Exception):
        # The products take three times as long, and are dealt out first.
        jobs = [_job(variant) for variant in sorted(variants, key=lambda variant: variant.name == "route_kernel")]
        folder = toolchain.cache_folder()
        sources = sorted({variant.function.cache_key for variant in variants})
        said = json.dumps([toolchain.version(), capability, sources, jobs])
        marker = folder / f"trtllm_b12x-{hashlib.sha256(said.encode()).hexdigest()[:32]}"
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{marker}.lock", timeout=_TIMEOUT_S):
            if not marker.exists():
                _run([jobs[first::workers] for first in range(workers)], capability)
                marker.touch()
                return workers
    return 0


def _job(variant: Variant) -> dict[str, Any]:
    types = [str(kind) if isinstance(kind, torch.dtype) else kind for kind in variant.types]
    return {**asdict(variant), "types": types}


def _run(shares: list[list[dict[str, Any]]], capability: int) -> None:
    import triton

    # Triton from where this process has it, whatever a subprocess would find.
    site = str(Path(triton.__file__).parents[1])
    environment = {**os.environ, "TRTLLM_B12X": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
    environment["TRITON_CACHE_DIR"] = str(toolchain.cache_folder())
    command = [sys.executable, str(Path(worker.__file__)), site, str(capability)]
    started = []
    try:
        for share in shares:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd="/"
            )
            started.append(process)
            assert process.stdin is not None
            process.stdin.write(json.dumps(share).encode())
            process.stdin.close()
        for process in started:
            process.wait(_TIMEOUT_S)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
