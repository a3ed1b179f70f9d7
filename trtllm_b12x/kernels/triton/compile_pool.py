# SPDX-License-Identifier: Apache-2.0
"""Compile kernels into Triton's cache in several processes, without torch and without a GPU.

Triton holds the interpreter's lock while it compiles, so threads do not help. ``fill`` runs this file as a program. The
program imports only Triton and the kernels, and forks a pool. Each process runs the JIT's own warm-up for a named card,
without querying a GPU, so that the JIT of a server finds every kernel under its key.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

MOST_PROCESSES = 16
"""Maximum number of processes, each of 150 MB."""
_FEWEST_KERNELS = 3
"""Minimum number of kernels for which starting processes pays."""
_TIMEOUT_S = 600
_LACKING = (ImportError, AttributeError, TypeError, OSError, RuntimeError, subprocess.SubprocessError)
"""Errors for a name or an argument that this Triton lacks, and for a missing or failing C compiler."""


def fill(
    variants: Sequence[Any],
    capability: int,
    workers: int | None = None,
    report: Callable[[dict[str, Any]], None] | None = None,
    ahead: bool = False,
) -> int:
    """Compile ``variants`` into Triton's cache. Return the number of processes that compiled.

    Without ``ahead``, the JIT compiles failures, and all kernels if they are few. With ``ahead``, this machine may lack a driver:
    Triton's C modules are compiled too, and RuntimeError is raised if a process died. ``workers``: default one per usable core.
    ``report`` receives ``index`` in ``variants``, ``seconds``, ``cached`` and ``error`` of each kernel.
    """
    import triton

    from trtllm_b12x.core import child
    from trtllm_b12x.environment.triton import cache_folder, driver_folders

    workers = min(workers or len(os.sched_getaffinity(0)), MOST_PROCESSES, len(variants))
    if not ahead and (workers < 2 or len(variants) < _FEWEST_KERNELS):
        return 0
    jobs = [
        {**asdict(variant), "types": [kind if isinstance(kind, int) else str(kind) for kind in variant.types], "index": index}
        for index, variant in enumerate(variants)
    ]
    # The products take three times as long, so short compiles come last.
    jobs.sort(key=lambda job: (job["name"] == "route_kernel", job["name"]))
    # The child imports Triton from this process's folder, whatever a subprocess would find.
    request = {"jobs": jobs, "processes": workers, "site": str(Path(triton.__file__).parents[1]), "capability": capability}
    env = {**child.variables(), "TRITON_CACHE_DIR": str(cache_folder())}
    with ExitStack() as stack:
        if ahead:
            folder = stack.enter_context(_libcuda())
            request |= {"libcuda": folder, "drivers": driver_folders()}
            env["LIBRARY_PATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("LIBRARY_PATH"))))
        command = [sys.executable, str(Path(__file__))]
        status = child.answers(command, request, env, report or (lambda answer: None), None if ahead else _TIMEOUT_S)
    if ahead and status:
        raise RuntimeError("a process that compiles for Triton has died")
    return workers


@contextmanager
def _libcuda() -> Iterator[str]:
    """Make a folder with a libcuda whose functions do nothing. Triton's C modules link with libcuda; a build machine has none."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        sources = Path(triton.__file__).parent / "backends" / "nvidia"
        text = "".join((sources / name).read_text(encoding="utf-8") for name in ("driver.c", "driver.py"))
        names = sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))
        source, library = Path(folder) / "libcuda.c", Path(folder) / "libcuda.so.1"
        source.write_text("".join(f"void {name}(void) {{}}\n" for name in names), encoding="utf-8")
        compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
        command = [*compiler.split(), "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", str(source), "-o", str(library)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        (Path(folder) / "libcuda.so").symlink_to(library)  # Triton 3.5 links with this name
        yield folder


def driver(capability: int) -> Any:
    """Return a stand-in for Triton's driver that reports a card of ``capability`` without a GPU."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    answers = {"get_current_device": lambda: 0, "get_current_stream": lambda device: 0, "get_current_target": lambda: target}
    return types.SimpleNamespace(**answers)


def main() -> None:
    """Read the request from standard input; print a JSON line for each kernel."""
    request = json.load(sys.stdin)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [request["site"], *(entry for entry in sys.path if entry and os.path.abspath(entry) != here)]
    # Empty packages make the kernels' modules importable by name: the real packages import torch.
    root = os.path.dirname(os.path.dirname(here))
    for name in ("", ".kernels", ".kernels.triton"):
        module = types.ModuleType(f"trtllm_b12x{name}")
        module.__path__ = [os.path.join(root, *name.split("."))]
        sys.modules[module.__name__] = module
    from triton import knobs, runtime

    runtime.driver.set_active(driver(request["capability"]))
    for name in {job["module"] for job in request["jobs"]}:
        with suppress(*_LACKING):  # each job of this module reports the error
            importlib.import_module(f"trtllm_b12x.kernels.{name}")
    if folder := request.get("libcuda"):
        ctypes.CDLL(os.path.join(folder, "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # compiled modules are also loaded
        knobs.nvidia.libcuda_path = folder
    with ProcessPoolExecutor(request["processes"], get_context("fork"), close_output) as pool:
        utilities = [pool.submit(_compile_utilities, folder) for folder in request.get("drivers", ())]
        for result in as_completed([pool.submit(_compile, job) for job in request["jobs"]]):
            print(json.dumps(result.result()), flush=True)
        for done in utilities:
            done.result()


def close_output() -> None:
    """Close standard output in a worker, so that the stream ends with the process that started the pool."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _compile(job: dict[str, Any]) -> dict[str, Any]:
    from triton import knobs
    from triton.runtime.jit import MockTensor

    hits: list[bool] = []
    knobs.compilation.listener = lambda cache_hit, **others: hits.append(bool(cache_hit))
    started, error = time.monotonic(), ""
    try:
        arguments = [MockTensor(kind) if isinstance(kind, str) else kind for kind in job["types"]]
        function = getattr(importlib.import_module(f"trtllm_b12x.kernels.{job['module']}"), job["name"])
        kernel = function.warmup(*arguments, grid=(1,), **job["constants"], **job["options"])
        with suppress(*_LACKING):  # Triton before 3.7 compiles a launcher in C for each signature
            importlib.import_module("triton.backends.nvidia.driver").CudaLauncher(kernel.src, kernel.metadata)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
    return {"index": job["index"], "cached": all(hits), "error": error, "seconds": round(time.monotonic() - started, 3)}


def _compile_utilities(folder: str) -> None:
    """Compile Triton's ``cuda_utils`` for a process whose libcuda is in ``folder``, which is part of Triton 3.9's cache key."""
    from triton import knobs
    from triton.backends.nvidia import driver as cuda

    knobs.nvidia.libcuda_path = folder
    cuda.libcuda_dirs.cache_clear()
    cuda.library_dirs.cache_clear()
    with suppress(*_LACKING):
        cuda.CudaUtils()


if __name__ == "__main__":
    main()
