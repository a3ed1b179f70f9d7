# SPDX-License-Identifier: Apache-2.0
"""Run the CUDA kernels on a CPU: their own source, compiled by g++, with one fiber for each CUDA thread.

``ptx.cuh`` replaces the file of the kernel that has all instructions. ``machine.cpp`` schedules the threads, and ``Order`` says
how it draws whose turn it is. ``kernel_on_cpu`` and ``gemm_on_cpu`` return the package's own kernels whose launches run here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import torch

from trtllm_b12x.dispatch.policy import LARGEST
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.cuda import gemm
from trtllm_b12x.kernels.cuda.decode import CudaKernel, LaunchPlan
from trtllm_b12x.kernels.cuda.gemm import GemmKernel, GemmPlan, Shape
from trtllm_b12x.kernels.cuda.variant import TOKENS

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fno-strict-aliasing", "-fno-stack-protector", "-ffp-contract=off", f"-I{FOLDER}")
_START = """template <class L, class C> void start(void (*kernel)(L, C), const void* a, const void* b) {
  kernel(*(const L*)a, *(const C*)b);
}
"""


def main_of(source: str, *kernels: str) -> str:
    """Return what makes a source's kernels functions of a library: ``start_`` and the name."""
    entries = (f'extern "C" void start_{name}(const void* a, const void* b) {{ start({name}, a, b); }}\n' for name in kernels)
    return f'#include "{source}"\n{_START}{"".join(entries)}'


MAIN = main_of("layer.cu", "layer")


class FaultError(RuntimeError):
    """The kernel did what a GPU would not bear, or what the emulator holds to be wrong."""


class HangError(FaultError):
    """No thread of the launches can go on. The message says which warps wait where."""


@dataclass(frozen=True)
class Order:
    """How turns are drawn; ``Order`` of ``machine.h``."""

    seed: int = 0
    resident: int = 8
    """Blocks that run at once, of all launches together."""
    burst: int = 1
    """Most turns of a warp in a row."""
    apart: int = 0
    """0: threads of a warp read together what others write. Else each thread stops there once in so many times."""
    freeze: int = 0
    """Most turns for which a warp, a block or all other blocks stand still; 0: none does."""
    late: int = 0
    """Most turns after which a free multiprocessor takes a block; 0: at once."""
    races: bool = True
    """Accesses of different warps to shared memory that nothing orders are a fault: a fifth of the time."""
    clock_runs: bool = False
    """Time passes for launches that wait forever, so that they stop themselves."""

    @classmethod
    def drawn(cls, seed: int, resident: int = 8) -> Order:
        """Return the order of a seed: 0 is uniform; others have bursts, frozen warps or blocks, late blocks, threads apart."""
        if not seed:
            return cls(0, resident)
        turns: dict[str, Any] = {
            "burst": (1, 1, 8, 64),
            "apart": (0, 2, 4),
            "freeze": (0, 300, 3000, 30000),
            "late": (0, 300, 30000),
        }
        drawn = Random(seed)
        return cls(seed, resident, races=seed % 4 == 1, **{name: drawn.choice(values) for name, values in turns.items()})


class _Order(ctypes.Structure):
    _fields_ = [(field.name, ctypes.c_uint64 if field.name == "seed" else ctypes.c_int) for field in fields(Order)]


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("kernel", "layer", "call")),
        *((name, ctypes.c_int) for name in ("blocks", "threads", "shared_bytes")),
        ("readable", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("ranges", "stream")),
    ]


@functools.cache
def _build() -> tuple[tempfile.TemporaryDirectory[str], ThreadPoolExecutor]:
    """Return the folder of this process, which is removed when it ends, and what compiles."""
    return tempfile.TemporaryDirectory(prefix="emulator-"), ThreadPoolExecutor(len(os.sched_getaffinity(0)))


def compiler() -> str:
    """Return the C++ compiler. Raise RuntimeError if there is none."""
    name = os.environ.get("CXX", "g++")
    if shutil.which(name.split()[0]) is None:
        raise RuntimeError(f"the emulator needs a C++ compiler: {name} is not installed (CXX names another one)")
    return name


def _compile(source: Path, target: Path, *flags: str) -> Path:
    command = [*compiler().split(), *FLAGS, *flags, str(source), "-o", str(target)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)}: {run.stderr[:4000]}")
    return target


@functools.cache
def _machine() -> ctypes.CDLL:
    target = Path(_build()[0].name) / "machine.so"
    return ctypes.CDLL(str(_compile(FOLDER / "machine.cpp", target, "-O2", "-ftree-vectorize")), ctypes.RTLD_GLOBAL)


_libraries: dict[Any, Future[Path]] = {}


def library(files: Mapping[str, str], main: str = MAIN) -> Future[Path]:
    """Begin to compile a variant's files with ``main``, which includes one of them, to a shared object. Each is compiled once."""
    written = {**files, "main.cpp": main}
    del written["ptx.cuh"]  # the emulator's is found instead
    key = tuple(sorted(written.items()))
    if key not in _libraries:
        folder = Path(_build()[0].name) / f"variant{len(_libraries)}"

        def build() -> Path:
            folder.mkdir()
            for name, text in written.items():
                (folder / name).write_text(text, encoding="utf-8")
            return _compile(folder / "main.cpp", folder / "kernel.so", "-O0", "-w")

        _libraries[key] = _build()[1].submit(build)
    return _libraries[key]


def loaded(path: Future[Path]) -> ctypes.CDLL:
    _machine()  # has the symbols that a kernel needs
    return ctypes.CDLL(str(path.result()))


class Machine:
    """Runs launches, each at once or several together."""

    def __init__(self) -> None:
        self.order, self.stream, self.lock = Order(), 1, threading.Lock()
        self._waiting: list[tuple[_Launch, Any]] | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the launches of the block at its end: those of a stream one after the other, as soon as the kernel lets them.

        Tensors of a call must live until then. Memory that is freed and becomes another launch's output changes under a launch.
        """
        waiting: list[tuple[_Launch, Any]] = []
        self._waiting = waiting
        try:
            yield
        finally:
            self._waiting = None
        self._run(waiting)

    def launch(self, launch: _Launch, kept: Any) -> None:
        if self._waiting is None:
            self._run([(launch, kept)])
        else:
            self._waiting.append((launch, kept))

    def _run(self, launches: list[tuple[_Launch, Any]]) -> None:
        array, message = (_Launch * len(launches))(*(launch for launch, _ in launches)), ctypes.create_string_buffer(8192)
        with self.lock:
            code = _machine().emulator_run(array, len(array), ctypes.byref(_Order(*astuple(self.order))), message, len(message))
        if code:
            raise (HangError if code == 1 else FaultError)(f"{self.order}: {message.value.decode()}")


machine = Machine()


class Module:
    """``driver.Module`` on the emulator. It compiles when it is first needed."""

    def __init__(self, files: Mapping[str, str], main: str = MAIN) -> None:
        self._files, self._main = files, main
        self.readable: Any = (ctypes.c_uint64 * 0)()
        """Addresses and sizes that copies may read; empty: all."""

    def begin(self) -> None:
        library(self._files, self._main)

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        return loaded(library(self._files, self._main))

    def may_read(self, *tensors: torch.Tensor) -> None:
        ranges = [number for tensor in tensors for number in (tensor.data_ptr(), tensor.nbytes)]
        self.readable = (ctypes.c_uint64 * len(ranges))(*ranges)

    def constant(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def keep(self) -> None:
        """Nothing is unloaded."""


class Function:
    """``driver.Function`` on the emulator."""

    def __init__(self, module: Module, name: str, of: str = "") -> None:
        self.module, self._name, self._of = module, name, of

    def launcher(self, blocks: int, layer: ctypes.Structure, record: struct.Struct) -> Callable[..., None]:
        def launch(stream: int, *values: int) -> None:
            call = ctypes.create_string_buffer(record.pack(*values), record.size)
            module, ranges = self.module, self.module.readable
            kernel = ctypes.cast(getattr(module.library, f"start_{self._name}"), ctypes.c_void_p).value
            sizes = blocks, module.constant(f"{self._of}threads"), module.constant(f"{self._of}shared_bytes")
            records = kernel, ctypes.addressof(layer), ctypes.addressof(call)
            machine.launch(_Launch(*records, *sizes, ctypes.addressof(ranges), len(ranges) // 2, stream), (layer, call, ranges))

        return launch


class _Sizes(dict[int, tuple[int, int]]):
    """Bytes of the workspaces of variants, which compile when they are needed."""

    def __init__(self, modules: Mapping[int, Module]) -> None:
        super().__init__()
        self._modules = modules

    def __missing__(self, tokens: int) -> tuple[int, int]:
        module = self._modules[tokens]
        return module.constant("workspace_bytes"), module.constant("filled_bytes")


def kernel_on_cpu(
    kind: type[CudaKernel],
    geometry: Geometry,
    weights: Any,
    blocks: int,
    first_expert: int = 0,
    changed: Mapping[str, str] | None = None,
    main: str = MAIN,
    capacity: int = TOKENS[-1],
) -> CudaKernel:
    """Return a bound kernel whose launches run on the emulator in so many blocks. Call ``stand_in`` before it runs.

    ``changed``: files of the kernel's source by name, in place of the package's. ``main``: see ``library``. ``capacity``: the
    most tokens of a call.
    """
    kernel = kind(Card(blocks, 228 << 10, 90))
    kernel.describe(geometry, capacity, torch.device("cuda"))
    kernel.device = torch.device("cpu")
    modules = {each.tokens: Module({**each.files(), **(changed or {})}, main) for each in kernel.variants()}
    functions: dict[int, Any] = {tokens: Function(module, "layer") for tokens, module in modules.items()}
    kernel._plan = LaunchPlan(functions, _Sizes(modules))
    kernel.bind(weights, first_expert)
    for module in modules.values():
        module.may_read(*kernel._tensors)
    return kernel


def gemm_on_cpu(
    kind: type[GemmKernel],
    geometry: Geometry,
    weights: Any,
    shape: Shape,
    blocks: int,
    first_expert: int = 0,
    changed: Mapping[str, str] | None = None,
) -> GemmKernel:
    """Return a bound kernel of one shape on a card of so many multiprocessors. See ``kernel_on_cpu``.

    Its copies may read the layer's tensors and the scratch memory of ``run``.
    """
    kernel = kind(Card(blocks, 228 << 10, 90))
    kernel.describe(geometry, LARGEST, torch.device("cuda"))
    kernel.device, kernel.held = torch.device("cpu"), shape
    module = Module({**kernel.variant(shape).files(), **(changed or {})}, main_of(gemm.SOURCE, *gemm.KERNELS))
    kernel._plan = GemmPlan({shape: gemm.functions_of(module, Function)}, tested=True)
    kernel.bind(weights, first_expert)
    return kernel


def run(kernel: GemmKernel, call: MoECall) -> torch.Tensor:
    """Run a call in scratch memory of just its size, full of NaN. Nothing else may be copied but the layer's tensors."""
    (functions,), tokens = kernel._plan.functions.values(), call.x.shape[0]
    scratch = torch.full((kernel.scratch_bytes(tokens),), 255, dtype=torch.uint8)
    module: Any = functions["fc1"].module
    module.may_read(*kernel._tensors, scratch)
    try:
        with machine.together():
            return kernel.run(call._replace(scratch=scratch))
    finally:
        module.may_read()


def begin(kernel: CudaKernel, tokens: int) -> None:
    """Begin to compile what a call of so many tokens needs."""
    functions: dict[int, Any] = kernel._plan.functions
    next(function for size, function in functions.items() if size >= tokens).module.begin()


def stand_in(patch: Any) -> None:
    """Replace what a call asks PyTorch about the current stream. ``patch`` is pytest's."""
    patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: machine.stream, raising=False)
    patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
