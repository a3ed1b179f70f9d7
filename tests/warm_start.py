# SPDX-License-Identifier: Apache-2.0
"""A server's plans on a card that is not here, in processes without compilers and with.

The driver is ``tests/driver.c``; Triton's launchers and FlashInfer's loader are their own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
LIBCUDA = "/usr/lib/x86_64-linux-gnu"
"""Where containers have it."""


def driver(folder: Path) -> Path:
    """``libcuda.so.1`` with which nothing runs; needs a compiler."""
    import triton

    library = folder / "libcuda.so.1"
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1", str(ROOT / "tests/driver.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    if not (folder / "libcuda.so").exists():
        (folder / "libcuda.so").symlink_to(library)  # what Triton 3.5 links with
    return library


def start(
    library: Path, geometries: Sequence[dict[str, Any]], card: dict[str, int], environment: dict[str, str], compiler: bool = False
) -> list[dict[str, Any]]:
    """Plan each of ``geometries`` (``family``, ``capacity`` and the fields of a geometry) in a process without a C compiler.

    Small ones are called once too, so that their launches reach the driver. PATH has ``file`` alone, if it was there: Python's
    ``platform.architecture`` asks it, which is part of the keys of Triton's modules in C.
    """
    path = library.parent / "path"
    path.mkdir(exist_ok=True)
    if (file := shutil.which("file")) and not (path / "file").exists():
        (path / "file").symlink_to(file)
    variables = environment if compiler else {**environment, "PATH": str(path)}
    return _lines(library, geometries, card, variables)


def together(
    ranks: int, library: Path, geometries: Sequence[dict[str, Any]], card: dict[str, int], environment: dict[str, str]
) -> list[dict[str, Any]]:
    """The first of ``geometries`` in so many processes at once, with compilers."""
    with ThreadPoolExecutor(ranks) as pool:
        return [lines[0] for lines in pool.map(lambda rank: _lines(library, geometries, card, environment), range(ranks))]


def _lines(
    library: Path, geometries: Sequence[dict[str, Any]], card: dict[str, int], environment: dict[str, str]
) -> list[dict[str, Any]]:
    """What a process prints that runs :func:`plans`."""
    variables = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_INTERPRET")}
    result = subprocess.run(
        [sys.executable, "-c", "from tests import warm_start; warm_start.plans()"],
        env={**variables, **environment},
        input=json.dumps({"geometries": list(geometries), "library": str(library), "card": card}),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    if result.returncode or not lines:
        raise RuntimeError(result.stderr[-3000:])
    return lines


def plans() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    ctypes.CDLL(asked["library"], mode=ctypes.RTLD_GLOBAL)
    import torch

    torch.version.cuda = torch.version.cuda or "13.0"  # FlashInfer's folder is named by what that, or an nvcc, knows
    from triton import knobs

    from trtllm_b12x.core import log
    from trtllm_b12x.kernels import Geometry
    from trtllm_b12x.kernels.b12x.compiler import DISPATCH
    from trtllm_b12x.kernels.triton import compile_pool

    if any(given["family"] == "b12x" for given in asked["geometries"]):
        importlib.import_module(DISPATCH)
    processes: list[int] = []
    fill = compile_pool.fill

    def counted(*arguments: Any, **named: Any) -> int:
        processes.append(fill(*arguments, **named))
        return processes[-1]

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    log.logger.logger.addHandler(handler)
    log.logger.logger.setLevel(logging.INFO)
    kept: list[bool] = []
    knobs.compilation.listener = lambda cache_hit, **others: kept.append(bool(cache_hit))
    for given in asked["geometries"]:
        family, capacity = given.pop("family"), given.pop("capacity")
        for of_last in (kept, processes, said):
            of_last.clear()
        error, cpu = "", time.process_time()
        try:
            with _on(asked["card"]), mock.patch.object(compile_pool, "fill", counted):
                _plan(family, Geometry(**given), capacity, asked["card"])
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}"
        found: dict[str, Any] = {"kernels": len(kept), "compiled": kept.count(False), "processes": max(processes, default=0)}
        found |= {"family": family, "cpu": time.process_time() - cpu, "error": error, "said": said}
        print(json.dumps(found), flush=True)


@contextlib.contextmanager
def compiles() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles in here, whether it finds them in its cache or not."""
    from triton import knobs

    names: list[str] = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda src, **others: names.append(src.fn.__name__)
    try:
        yield names
    finally:
        knobs.compilation.listener = before


def activate(capability: int) -> None:
    """Let Triton's own launchers run, on a card that is not here."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime import driver as triton_driver

    from trtllm_b12x.kernels.triton import compile_pool

    active: Any = compile_pool.driver(capability)
    active.utils, active.launcher_cls = CudaUtils(), CudaLauncher
    triton_driver.set_active(active)


@contextlib.contextmanager
def _on(card: dict[str, int]) -> Iterator[None]:
    """torch and Triton see the card."""
    import torch

    activate(card["capability"])
    major, minor = divmod(card["capability"], 10)
    answer = {"multi_processor_count": card["multiprocessors"], "shared_memory_per_multiprocessor": 100 << 10}
    properties = mock.Mock(major=major, minor=minor, total_memory=96 << 30, **answer)
    answers: dict[str, Any] = {
        "get_device_properties": lambda *arguments: properties,
        "get_device_capability": lambda *arguments: (major, minor),
        "current_device": lambda: 0,
        "current_stream": lambda *arguments: mock.Mock(cuda_stream=0),
        "device": lambda *arguments: contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, function in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        yield


def _plan(family: str, geometry: Any, capacity: int, card: dict[str, int]) -> None:
    import torch

    from trtllm_b12x.kernels.b12x import routes
    from trtllm_b12x.kernels.catalog import KERNELS

    if family == "routes":  # a few small kernels
        routes.warm_up(torch.device("cuda"), "")
        return
    kernel = KERNELS[family, geometry.format][0]()
    if family != "b12x":
        kernel.plan(geometry, capacity, torch.device("cuda"))
        if geometry.hidden_size <= 256:  # weights of a larger one would take longer than all else
            _call(kernel, geometry)
        return
    from trtllm_b12x.kernels.b12x.compiler import DISPATCH

    dispatch = importlib.import_module(DISPATCH)
    vars(dispatch).update(dict.fromkeys(("get_num_sm", "get_max_active_clusters"), lambda *arguments: card["multiprocessors"]))
    kernel.plan(geometry, capacity, torch.device("cpu"))  # a GPU's memory is not there; kernels are loaded all the same
    routes.warm_up(torch.device("cuda"), "")


def _call(kernel: Any, geometry: Any) -> None:
    """Through Triton's JIT, which takes tensors of the CPU."""
    from tests import mxfp8, nvfp4_layer
    from trtllm_b12x.kernels import MoECall

    kernel._plan.compiled = None
    kernel.bind(
        mxfp8.random_weights(geometry) if geometry.format == "MXFP8" else nvfp4_layer.random_layer(geometry).kernel_weights()
    )
    kernel.run(MoECall(*nvfp4_layer.random_call(geometry, 1)))
