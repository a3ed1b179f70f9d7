"""Compiles kernels into Triton's cache: run as a file, with Triton's folder, a capability and perhaps a folder to link with.

What is asked for comes on stdin: ``jobs``, ``drivers`` and how many ``processes``, which are forked when all is imported and
take one job after the other.  A JSON line says what became of each: ``digest``, ``name``, ``seconds``, ``cached``, ``error``.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import time
import types
from contextlib import suppress
from typing import Any


class _Driver:
    """Answers for a card that this process does not look at."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


class _Tensor:
    """Of a dtype, at a multiple of 16 bytes; what Triton's JIT looks at while it warms up."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    @staticmethod
    def data_ptr() -> int:
        return 0

    @staticmethod
    def ptr_range() -> int:
        return 0


def main() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [sys.argv[1], *(entry for entry in sys.path if entry and os.path.abspath(entry) != here)]
    # The kernels' modules by their names, without the packages around them, which import torch.
    root = os.path.dirname(os.path.dirname(here))
    for name in ("", ".kernels", ".kernels.triton", ".kernels.grouped"):
        module = types.ModuleType(f"trtllm_b12x{name}")
        module.__path__ = [os.path.join(root, *name.split("."))]
        sys.modules[module.__name__] = module
    from triton import knobs
    from triton.runtime import driver

    driver.set_active(_Driver(int(sys.argv[2])))
    hits: list[bool] = []
    knobs.compilation.listener = lambda cache_hit, **others: hits.append(bool(cache_hit))
    asked = json.load(sys.stdin)
    for name in {job["module"] for job in asked["jobs"]}:
        with suppress(Exception):  # its jobs say it
            importlib.import_module(f"trtllm_b12x.kernels.{name}")
    for stand_in in sys.argv[3:]:
        with suppress(OSError):
            ctypes.CDLL(os.path.join(stand_in, "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # what is compiled is also loaded
        _link_with(stand_in)
    numbers = _numbers(len(asked["jobs"]) + len(asked["drivers"]))
    children: list[int] = []
    for _ in range(asked["processes"] - 1):
        child = os.fork()
        if child == 0:
            children = []
            break
        children.append(child)
    while number := os.read(numbers, _DIGITS):
        place = int(number)
        if place < len(asked["jobs"]):
            _compile(asked["jobs"][place], hits)
        else:
            _utilities(asked["drivers"][place - len(asked["jobs"])], *sys.argv[3:])
    for child in children:
        os.waitpid(child, 0)


_DIGITS = 4


def _numbers(count: int) -> int:
    """A pipe from which every process reads the number of its next job, until there is none."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(b"%0*d" % (_DIGITS, number) for number in range(count)))
    os.close(writing)
    return reading


def _compile(job: dict[str, Any], hits: list[bool]) -> None:
    started, error = time.monotonic(), ""
    hits.clear()
    try:
        given = [_Tensor(kind) if isinstance(kind, str) else kind for kind in job["types"]]
        kernel = getattr(importlib.import_module(f"trtllm_b12x.kernels.{job['module']}"), job["name"])
        made = kernel.warmup(*given, grid=(1,), **job["constants"], **job["options"])
        _launcher(made)
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
    said = {"digest": job["digest"], "name": job["name"], "cached": all(hits), "error": error}
    line = json.dumps({**said, "seconds": round(time.monotonic() - started, 3)})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())  # at once: other processes write too


def _launcher(made: Any) -> None:
    """Triton before 3.7 compiles one in C for each signature."""
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(made.src, made.metadata)


def _utilities(folder: str, stand_in: str) -> None:
    """Triton's own module in C, as a process finds it whose libcuda is in ``folder`` (part of its key in 3.9).

    Args:
        stand_in: a folder with a libcuda to link with, which LIBRARY_PATH names too: there need not be another.
    """
    from triton.backends.nvidia import driver as cuda

    _link_with(folder)
    with suppress(Exception):
        cuda.CudaUtils()
    _link_with(stand_in)


def _link_with(folder: str) -> None:
    from triton import knobs
    from triton.backends.nvidia import driver as cuda

    knobs.nvidia.libcuda_path = folder
    for answer in (cuda.libcuda_dirs, cuda.library_dirs):
        answer.cache_clear()


if __name__ == "__main__":
    main()
