# SPDX-License-Identifier: Apache-2.0
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
from unittest import mock

import pytest
import torch
from triton import knobs

from tests import mxfp8, warm_start
from tests.nvfp4_layer import random_call, random_layer
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.triton import compile_pool, launcher
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel
from trtllm_b12x.kernels.triton.jit import CompiledPlan
from trtllm_b12x.kernels.triton.variant import Variant

ROOT = Path(__file__).parents[2]
_HEAD = 7 * 4 + 8 + 8
"""Bytes of a launch's shape, stream and function."""


def recorded(cuda: Any, start: Any, variant: Variant, launches: dict[str, str]) -> Any:
    """Launch as ``start``, and keep everything that the driver gets, hexadecimal."""
    sizes = [8 if isinstance(kind, torch.dtype) else 4 for kind in variant.types]

    def launch(stream: int, *arguments: Any) -> None:
        buffer = ctypes.create_string_buffer(65536)
        cuda.expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        start(stream, *arguments)
        size = cuda.taken(buffer)
        launches[variant.name] = buffer.raw[:size].hex()

    return launch


FORMS = {"blocks of 8": (2, False), "blocks of 32": (40, False), "quantized": (2, True)}
"""Decode calls: tokens, whether their input is quantized."""
GROUPED = {"MXFP8": (GroupedKernel, False), "NVFP4": (GroupedNVFP4Kernel, True)}


def main(*names: str) -> None:
    """Launch calls of the forms ``names`` by both ways, and print what the driver got."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_LIBCUDA_PATH"] = folder
        cuda = ctypes.CDLL(str(warm_start.driver(Path(folder))), mode=ctypes.RTLD_GLOBAL)
        warm_start.activate(90)
        knobs.cache.dir = os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")
        layer = random_layer(Geometry(4, 2, 128, 128, "Swiglu"), ratio=True)
        kernel = TritonKernel(Card(132, 228 << 10, 90))
        kernel.describe(layer.geometry, 40, torch.device("cuda"))
        kernel.bind(layer.kernel_weights(), 3)
        found: dict[str, Any] = {"known": launcher.known()}
        forms = [(name, *form) for name, form in FORMS.items() if name in names]
        called = [kernel.variants_of_call(kernel.tiles(tokens), quantized) for _, tokens, quantized in forms]
        every = {variant.key: variant for variants in called for variant in variants}
        compile_pool.fill(list(every.values()), 90, workers=2)
        for (name, tokens, quantized), variants in zip(forms, called, strict=True):
            kernel._plan = CompiledPlan({v.key: v.warm_up() for v in variants})
            found[name] = {way: told(cuda, kernel, tokens, quantized, way) for way in ("jit", "direct")}
        found |= {name: grouped(cuda, *form) for name, form in GROUPED.items() if name in names}
        cuda.expect(0, None)
        print(json.dumps({**found, "late": late_compiles() if "late" in names else {}}))


def told(cuda: Any, kernel: Any, tokens: int, quantized: bool, way: str) -> dict[str, str]:
    """What the driver gets of a call; all calls of a form are on the same memory."""
    geometry = kernel.geometry
    launches: dict[str, str] = {}
    real = launcher.launcher

    def watched(variant: Variant, grid: tuple[int, int], compiled: Any) -> Any:
        return recorded(cuda, real(variant, grid, compiled), variant, launches)

    with mock.patch.object(launcher, "launcher", watched):
        plan = kernel._launch_plan(tokens, quantized, torch.int32, torch.float32, way == "direct")
    x, ids, router_weights = random_call(geometry, tokens)
    if quantized:
        x = torch.zeros(tokens, geometry.hidden_size // 2, dtype=torch.uint8)
    x_sf = torch.zeros(512, dtype=torch.int32 if isinstance(kernel, GroupedKernel) else torch.uint8) if quantized else None
    out = torch.zeros(tokens, geometry.hidden_size, dtype=torch.bfloat16)
    buffers = MoECall(x, ids, router_weights, x_sf, True, out), torch.zeros(plan.workspace.nbytes, dtype=torch.uint8)
    call, memory = BUFFERS.setdefault((tokens, quantized, type(kernel)), buffers)
    with (
        mock.patch.object(torch, "empty", return_value=memory),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", return_value=0, create=True),
    ):
        plan.start(kernel._layers[quantized], call)
    return launches


BUFFERS: dict[Any, tuple[MoECall, torch.Tensor]] = {}


def grouped(cuda: Any, kind: type[GroupedKernel], quantized: bool) -> dict[str, dict[str, str]]:
    """Every launch of a call, by both ways."""
    geometry = Geometry(4, 2, 128, 128, "Swiglu", format="NVFP4" if quantized else "MXFP8")
    kernel: Any = kind(Card(132, 228 << 10, 90))
    kernel.table = kernel.table[:1]
    kernel.describe(geometry, 1, torch.device("cuda"))
    kernel.bind(random_layer(geometry).kernel_weights() if quantized else mxfp8.random_weights(geometry), 3)
    kernel._plan = CompiledPlan({variant.key: variant.warm_up() for variant in kernel.variants()})
    return {way: told(cuda, kernel, 1, quantized, way) for way in ("jit", "direct")}


def shifted(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    """The same values, as many elements behind an address that 16 divides."""
    memory = torch.zeros(tensor.numel() + elements, dtype=tensor.dtype)[elements:].view(tensor.shape)
    return memory.copy_(tensor)


def late_compiles() -> dict[str, list[str]]:
    """Family to what its calls compile where Triton's JIT launches them, though its plan has compiled every variant."""
    found, card = {}, Card(132, 228 << 10, 90)
    for kind in (TritonKernel, TritonMXFP8Kernel, GroupedKernel, GroupedNVFP4Kernel):
        kernel: Any = kind(card)
        nvfp4 = kind in (TritonKernel, GroupedNVFP4Kernel)
        geometry = Geometry(4, 2, 128, 128, "Swiglu", format="NVFP4" if nvfp4 else "MXFP8")
        if issubclass(kind, GroupedKernel):
            kernel.table = kernel.table[:1]
        kernel.describe(geometry, 1, torch.device("cuda"))
        for variant in kernel.variants():
            variant.warm_up()
        kernel._plan = CompiledPlan(None)
        kernel.bind(random_layer(geometry).kernel_weights() if nvfp4 else mxfp8.random_weights(geometry), 3)
        x, ids, router_weights = random_call(geometry, 1)
        with warm_start.compiles() as names:
            for shift in (0, 1):  # of everything that a host hands on, from where 16 bytes begin
                for given in ids, ids.long(), ids.short():
                    for weights in router_weights, router_weights.bfloat16(), router_weights.half():
                        routes = shifted(given, shift), shifted(weights, shift)
                        kernel.run(MoECall(shifted(x, shift), *routes))
                        if nvfp4:
                            codes, scales = (torch.zeros(1, size, dtype=torch.uint8) for size in (64, 8))
                            kernel.run(MoECall(shifted(codes, shift), *routes, x_sf=shifted(scales, shift), swizzled=False))
        found[kind.__name__] = names
    return found


@pytest.fixture(scope="module")
def found(selected: list[str]) -> dict[str, Any]:
    names = ["blocks of 8", *selected] + ["late"] * (len(selected) > 1)
    code = f"from tests.unittest.test_triton_launch import main; main(*{names})"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


@pytest.mark.all("[!b]*", "blocks of 32*")
@pytest.mark.parametrize(("name", "kernels"), [*dict.fromkeys(FORMS, 3).items(), ("MXFP8", 5), ("NVFP4", 4)])
def test_the_driver_gets_the_same(found: dict[str, Any], name: str, kernels: int) -> None:
    assert found["known"]
    told = found[name]
    assert len(told["jit"]) == kernels
    assert told["direct"] == told["jit"]
    assert all(len(launch) > 2 * (_HEAD + 3 * 8) for launch in told["jit"].values())


@pytest.mark.all
def test_a_call_through_the_jit_compiles_nothing(found: dict[str, Any]) -> None:
    """Of every family, for every type of ids and router weights, with and without quantized input."""
    assert len(found["late"]) == 4
    assert not any(found["late"].values()), found["late"]
