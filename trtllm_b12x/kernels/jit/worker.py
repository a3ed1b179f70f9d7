"""Compiles kernels into Triton's cache: run as a file, with Triton's folder and a capability as arguments and jobs on stdin."""

from __future__ import annotations

import importlib
import json
import os
import sys
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
    from triton.runtime import driver

    driver.set_active(_Driver(int(sys.argv[2])))
    for job in json.load(sys.stdin):
        with suppress(Exception):  # the process that asked compiles it again, and says what is wrong
            given = [_Tensor(kind) if isinstance(kind, str) else kind for kind in job["types"]]
            kernel = getattr(importlib.import_module(f"trtllm_b12x.kernels.{job['module']}"), job["name"])
            made = kernel.warmup(*given, grid=(1,), **job["constants"], **job["options"])
            _launcher(made)


def _launcher(made: Any) -> None:
    """Triton before 3.7 compiles one in C for each signature."""
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(made.src, made.metadata)


if __name__ == "__main__":
    main()
