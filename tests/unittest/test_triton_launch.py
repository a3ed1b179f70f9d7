"""Launches past Triton's JIT against the JIT's own: this Triton's launchers, on a driver that keeps what it is given."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import mxfp8
from tests.nvfp4_layer import random_call, random_layer
from trtllm_b12x.kernels import Geometry, late
from trtllm_b12x.kernels.grouped import GroupedKernel
from trtllm_b12x.kernels.grouped.nvfp4 import GroupedNVFP4Kernel
from trtllm_b12x.kernels.jit import compile_pool
from trtllm_b12x.kernels.jit.cards import Card
from trtllm_b12x.kernels.jit.variant import Variant
from trtllm_b12x.kernels.triton import TritonKernel, launch, products
from trtllm_b12x.kernels.triton.mxfp8 import TritonMXFP8Kernel

ROOT = Path(__file__).parents[2]
_HEAD = 7 * 4 + 8 + 8
"""Bytes of a launch's shape, stream and function."""


def stand_in(folder: Path) -> Any:
    """The driver, compiled and loaded as ``libcuda.so.1`` before Triton looks for one."""
    import triton

    library = folder / "libcuda.so.1"
    headers = Path(triton.__file__).parent / "backends/nvidia/include"
    command = ["gcc", "-shared", "-fPIC", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1", str(ROOT / "tests/driver.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    (folder / "libcuda.so").symlink_to(library)  # what Triton 3.5 links with
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def activate() -> None:
    """Triton's own launchers, on a card of 9.0 that is not here."""
    from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
    from triton.runtime import driver

    card: Any = compile_pool.Driver(90)
    card.utils, card.launcher_cls = CudaUtils(), CudaLauncher
    driver.set_active(card)


def launched(cuda: Any, variants: tuple[Variant, ...], start: Any) -> dict[str, str]:
    """Kernel to everything that it was launched with, hexadecimal."""
    buffer, found = ctypes.create_string_buffer(65536), {}
    for variant in variants:
        sizes = [8 if isinstance(kind, torch.dtype) else 4 for kind in variant.types]
        cuda.expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        start(variant.name)
        size = cuda.taken(buffer)
        found[variant.name] = buffer.raw[:size].hex()
    return found


def main() -> None:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        cuda = stand_in(Path(folder))
        activate()
        knobs.cache.dir = os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")
        kept: list[bool] = []
        knobs.compilation.listener = lambda cache_hit, **others: kept.append(bool(cache_hit))
        layer = random_layer(Geometry(4, 2, 128, 128, "Swiglu"), ratio=True)
        kernel = TritonKernel(Card(132, 228 << 10, 90))
        kernel.describe(layer.geometry, 40, torch.device("cuda"))
        kernel.bind(layer.kernel_weights(), 3)
        found: dict[str, Any] = {"known": launch.known()}
        forms = (("inline", 2, True, False), ("sorted", 40, False, False), ("quantized", 2, False, True))
        steps = {tokens: kernel.build.step(tokens) for _, tokens, _, _ in forms}
        every = {
            v.key: v for _, tokens, inline, quantized in forms for v in kernel.build.variants(steps[tokens], inline, quantized)
        }
        found["processes"] = compile_pool.fill(list(every.values()), 90, workers=2)
        for name, tokens, inline, quantized in forms:
            step = steps[tokens]
            assert step.inline is (tokens == 2)
            variants = kernel.build.variants(step, inline, quantized)
            compiled = {v.key: v.warm_up() for v in variants}
            jit = launch.call(kernel.build, step, variants, None)
            direct = launch.call(kernel.build, step, variants, compiled)
            x, ids, router_weights = random_call(layer.geometry, tokens)
            if quantized:
                x = torch.zeros(tokens, 64, dtype=torch.uint8)
            tensors = (
                x,
                torch.zeros(512, dtype=torch.uint8),
                ids,
                router_weights,
                torch.zeros(tokens, 128, dtype=torch.bfloat16),
            )
            memory = torch.zeros(jit.memory.nbytes, dtype=torch.uint8)
            told = {}
            for way, call, layers, own in (
                ("jit", jit, kernel._layers, tensors),
                ("direct", direct, kernel._addresses, tuple(tensor.data_ptr() for tensor in tensors)),
            ):
                given = launch.Given(*own, *call.parts(memory, layer.geometry))
                told[way] = each(cuda, call, variants, layers[quantized], given)
            names = ("route_kernel", "fc1_kernel", "fc2_kernel")
            functions = [getattr(products, name) for name in names]
            caches = [len(next(iter(function.device_caches.values()))[0]) for function in functions if function.device_caches]
            found[name] = {**told, "kernels": sum(caches)}
        cuda.expect(0, None)
        knobs.compilation.listener = None
        print(json.dumps({**found, "kept": kept, "late": late_compiles()}))


def late_compiles() -> dict[str, dict[str, int]]:
    """Family to what its calls compile where Triton's JIT launches them, though its plan has compiled every variant."""
    found, card = {}, Card(132, 228 << 10, 90)
    geometry = Geometry(4, 2, 128, 128, "Swiglu")
    for kind in (TritonKernel, TritonMXFP8Kernel, GroupedKernel, GroupedNVFP4Kernel):
        kernel: Any = kind(card)
        if isinstance(kernel, GroupedKernel):
            kernel.table = kernel.table[:1]
        kernel.describe(geometry, 1, torch.device("cuda"))
        with late.expected():
            for variant in kernel.variants():
                variant.warm_up()
        kernel._plan = kernel._planned(None)
        nvfp4 = kind in (TritonKernel, GroupedNVFP4Kernel)
        kernel.bind(random_layer(geometry).kernel_weights() if nvfp4 else mxfp8.random_weights(geometry), 3)
        x, ids, router_weights = random_call(geometry, 1)
        for given in ids, ids.long(), ids.short():
            for weights in router_weights, router_weights.bfloat16(), router_weights.half():
                kernel.run(x, given, weights)
                if nvfp4:
                    codes, scales = torch.zeros(1, 64, dtype=torch.uint8), torch.zeros(1, 8, dtype=torch.uint8)
                    kernel.run_quantized(codes, scales, False, given, weights)
        found[kind.__name__] = late.compiles()
        late._found.clear()
    return found


def each(cuda: Any, call: launch.Call, variants: tuple[Variant, ...], layer: launch.Layer, given: launch.Given) -> dict[str, str]:
    """One launch of the call at a time, so that each has its own sizes of arguments."""
    import dataclasses

    def silent(*arguments: Any) -> None:
        pass

    def start(name: str) -> None:
        kept: dict[str, Any] = {
            field: silent for field in ("route", "fc1", "fc2") if getattr(call, field) and not name.startswith(field)
        }
        dataclasses.replace(call, **kept).launch(0, layer, given, True)

    return launched(cuda, variants, start)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    code = "from tests.unittest.test_triton_launch import main; main()"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(("form", "kernels"), [("inline", 2), ("sorted", 3), ("quantized", 3)])
def test_the_driver_gets_the_same(found: dict[str, Any], form: str, kernels: int) -> None:
    assert found["known"]
    told = found[form]
    assert len(told["jit"]) == kernels
    assert told["direct"] == told["jit"]
    assert all(len(launch) > 2 * (_HEAD + 4 * 10) for launch in told["jit"].values())


def test_a_call_asks_for_no_kernel_that_was_not_planned(found: dict[str, Any]) -> None:
    """The JIT finds what its warm-up left for each form: alignments and types are as planned."""
    assert [found[form]["kernels"] for form in ("inline", "sorted", "quantized")] == [2, 5, 8]


def test_processes_leave_in_the_cache_what_the_jit_looks_for(found: dict[str, Any]) -> None:
    assert found["processes"] == 2
    assert found["kept"] == [True] * 8


def test_a_call_through_the_jit_compiles_nothing(found: dict[str, Any]) -> None:
    """Of every family, for every type of ids and router weights, with and without quantized input."""
    assert len(found["late"]) == 4
    assert not any(found["late"].values()), found["late"]
