# SPDX-License-Identifier: Apache-2.0
"""Every launch of ``layer.cu`` ends on a GPU, with the same bits, whatever multiprocessors it has and whatever routes it gets.

Kernels are compiled to trap after two seconds, so that a launch that waits forever is an error and not a hang. Blocks start late
where another kernel holds multiprocessors.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch

from tests.integration.test_kernels_device import weights_of
from tests.nvfp4_layer import random_call
from trtllm_b12x.formats import GATE_UP, ROWS, TILES, UP_GATE, WeightLayout
from trtllm_b12x.kernels import Geometry, MoECall, driver
from trtllm_b12x.kernels.cards import card_of
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.cuda import nvrtc, variant

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs a GPU of capability 9.0 or newer"
)
CUDA = torch.device("cuda", 0)
TOKENS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 64)
MULTIPROCESSORS = {"large": (8, 20, 36, 48, 84, 0), "small": (2, 3, 8, 20, 36, 48, 84, 0)}
"""0: all."""
HELD = {"large": (66, 124, 128), "small": (66, 124, 128, 131)}
"""Of 132. On another GPU as many are left as on that one."""
LAUNCHES = 100
FORMATS = {"NVFP4": (TILES, UP_GATE)} | dict.fromkeys(("W4A16_NVFP4", "MXFP4", "MXFP8"), (ROWS, GATE_UP))
SIZES = {"large": (32, 8, 2048, 384), "small": (8, 3, 384, 192)}
LAYERS = {
    f"{form} {name}": Geometry(*sizes, "Swiglu", format=form, layout=WeightLayout(scales, order))
    for form, (scales, order) in FORMATS.items()
    for name, sizes in SIZES.items()
}


class Case(NamedTuple):
    call: MoECall
    expected: torch.Tensor


class Routes(NamedTuple):
    ranks: int = 1
    kept: str = "all"
    """Which routes are of an expert: all, one of the call, or those of some tokens."""


ROUTES = (Routes(), Routes(kept="one"), Routes(ranks=2), Routes(ranks=4), Routes(kept="some tokens"))


@pytest.fixture(autouse=True, scope="module")
def _traps_after_two_seconds() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant, "SPIN_SECONDS", 2)
        yield


def draw(geometry: Geometry, routes: Routes, tokens: int, seed: int) -> MoECall:
    """Draw a call. The rank's experts are the second ``num_experts`` of all if there are several ranks."""
    experts, drawn = geometry.num_experts * routes.ranks, random.Random(seed)
    x, ids, router_weights = random_call(geometry, tokens, experts, "cuda", seed=seed)
    if routes.kept != "all":
        kept = torch.zeros(ids.shape, dtype=torch.bool)
        if routes.kept == "one":
            kept[drawn.randrange(tokens), drawn.randrange(geometry.top_k)] = True
        else:
            kept[drawn.sample(range(tokens), drawn.randint(0, tokens - 1))] = True
        ids = torch.where(kept.to(CUDA), ids, -1)
    return MoECall(x, ids, router_weights, out=torch.empty_like(x))


class Layer:
    """Weights of a geometry, and kernels for any number of ranks and multiprocessors."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry, self.weights = geometry, weights_of(geometry)
        self.plans: dict[int, Any] = {}

    def kernel(self, multiprocessors: int = 0, ranks: int = 1) -> Any:
        card = card_of(CUDA)
        kind: Any = KERNELS["cuda", self.geometry.format][0]
        kernel = kind(replace(card, multiprocessors=multiprocessors or card.multiprocessors))
        kernel.plan(replace(self.geometry, ranks=ranks), TOKENS[-1], CUDA)
        self.plans[ranks] = kernel  # the next kernel shares its plan
        kernel.bind(self.weights, self.geometry.num_experts if ranks > 1 else 0)
        return kernel


HOLD = """
extern "C" __device__ const int shared_bytes = 200 << 10, threads = 32;
struct Nothing { int unused; };
struct Flags { volatile int *end, *begun; };
extern "C" __global__ void hold(const __grid_constant__ Nothing, const __grid_constant__ Flags flags) {
  flags.begun[blockIdx.x] = 1;
  while (!*flags.end) __nanosleep(1000);
}
"""


class Nothing(ctypes.Structure):
    _fields_ = [("unused", ctypes.c_int)]


@functools.cache
def hold() -> driver.Function:
    cubin, _ = nvrtc.compiled("hold.cu", {"hold.cu": HOLD}, f"sm_{card_of(CUDA).capability}a")
    return driver.Function(driver.Module(cubin), "hold")


@contextmanager
def held(blocks: int) -> Iterator[Any]:
    """Hold so many multiprocessors with a kernel that leaves no shared memory for others. Yield a function that ends it."""
    flags, stream = torch.zeros(1 + blocks, dtype=torch.int32, pin_memory=True), torch.cuda.Stream()
    at = flags.data_ptr()
    hold().launcher(blocks, Nothing(), struct.Struct("2P"))(stream.cuda_stream, at, at + 4)
    while int(flags[1:].sum()) < blocks:
        pass
    try:
        yield lambda: flags[0].fill_(1)
    finally:
        flags[0] = 1
        stream.synchronize()


def count_wrong(kernel: Any, calls: list[Case], launches: int) -> torch.Tensor:
    """Launch the calls in turns. Return on how many launches a bit differs."""
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    for number in range(launches):
        call, expected = calls[number % len(calls)]
        wrong += torch.ne(kernel.run(call), expected).any()
    return wrong


def with_results(layer: Layer, routes: Routes, tokens: int, count: int) -> list[Case]:
    """Draw calls, and run each twice undisturbed.

    That loads each of torch's kernels that ``count_wrong`` launches. Loading one waits for all running kernels, so beside
    ``held`` it would wait forever.
    """
    kernel, calls = layer.kernel(ranks=routes.ranks), [draw(layer.geometry, routes, tokens, seed) for seed in range(count)]
    found = [Case(call, kernel.run(call._replace(out=None))) for call in calls]
    assert not int(count_wrong(kernel, found, count))
    return found


def cases(layer: Layer, routes: Routes) -> dict[int, list[Case]]:
    return {tokens: with_results(layer, routes, tokens, 4) for tokens in TOKENS}


IDLE = Geometry(32, 8, 2048, 768, "Swiglu", format="MXFP8")
HUNG = {
    **{
        f"FC2 of an idle warp, {tokens} tokens, {count} multiprocessors": (IDLE, tokens, count, 4, 0)
        for tokens, count in ((8, 20), (8, 36), (8, 48), (7, 48))
    },
    "one route": (Geometry(4, 4, 640, 160, "Silu", layout=WeightLayout(ROWS)), 8, 3, 0, 0),
    "a slow adder": (Geometry(8, 3, 384, 192, "Swiglu", format="MXFP8"), 64, 0, 1, 124),
    "entries of late blocks": (Geometry(16, 4, 384, 1536, "Swiglu", format="MXFP8"), 8, 0, 1, 100),
}
"""Geometry, tokens, multiprocessors (0: all), ranks (0: one route in all), and multiprocessors that are held."""


@pytest.mark.parametrize("name", HUNG)
def test_layers_that_hung(name: str) -> None:
    geometry, tokens, multiprocessors, ranks, count = HUNG[name]
    routes = Routes(ranks or 1, "all" if ranks else "one")
    layer = Layer(geometry)
    calls = with_results(layer, routes, tokens, 40)
    kernel = layer.kernel(multiprocessors, routes.ranks)
    torch.cuda.synchronize()
    if not count:
        assert not int(count_wrong(kernel, calls, 2000))
        return
    for _ in range(20):
        with held(card_of(CUDA).multiprocessors - 132 + count):
            assert not int(count_wrong(kernel, calls, 100))


BROKEN = """
import sys, torch
from tests.integration import test_cuda_ends_device as ends
from tests.unittest.test_cuda_emulated import IDLE_WARPS_MOVE_ON
from trtllm_b12x.core import log
from trtllm_b12x.kernels.cuda import variant
log.configure()
variant.SPIN_SECONDS, sources = 2, variant.sources("layer.cu")
file, rule, by = IDLE_WARPS_MOVE_ON
sources[file] = sources[file].replace(rule, by)
variant.sources = lambda name: sources
geometry, tokens, multiprocessors, ranks, _ = next(iter(ends.HUNG.values()))
layer = ends.Layer(geometry)
kernel = layer.kernel(multiprocessors, ranks)
for seed in range(200):
    kernel.run(ends.draw(geometry, ends.Routes(ranks), tokens, seed))
torch.cuda.synchronize()
"""


def test_a_launch_that_does_not_end() -> None:
    """The kernel without the rule for idle warps hangs. It is stopped, and the error names the layer and how to go on."""
    run = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode, run.stderr
    assert "8 tokens of 32 local experts, top 8, 2048 x 768" in run.stderr
    assert "Restart with TRTLLM_B12X_KERNELS=b12x,triton,gemm,grouped" in run.stderr


@pytest.mark.parametrize("routes", ROUTES, ids=lambda routes: f"{routes.ranks} ranks, {routes.kept}")
@pytest.mark.parametrize("name", LAYERS)
def test_any_multiprocessors(name: str, routes: Routes) -> None:
    layer = Layer(LAYERS[name])
    calls = cases(layer, routes)
    for multiprocessors in MULTIPROCESSORS[name.split()[1]]:
        kernel = layer.kernel(multiprocessors, routes.ranks)
        wrong = {tokens: count_wrong(kernel, each, LAUNCHES) for tokens, each in calls.items()}
        assert not {tokens: int(count) for tokens, count in wrong.items() if count}, multiprocessors


@pytest.mark.parametrize("routes", ROUTES, ids=lambda routes: f"{routes.ranks} ranks, {routes.kept}")
@pytest.mark.parametrize("name", LAYERS)
def test_held_multiprocessors(name: str, routes: Routes) -> None:
    """Launches end while the others are held, and when they are released in the middle."""
    layer, multiprocessors = Layer(LAYERS[name]), card_of(CUDA).multiprocessors
    calls, kernel = cases(layer, routes), layer.kernel(ranks=routes.ranks)
    torch.cuda.synchronize()
    for count in HELD[name.split()[1]]:
        for tokens, each in calls.items():
            # Few launches at a time: beside a kernel that runs on, the driver blocked after 2,000 of them.
            with held(multiprocessors - 132 + count) as release:
                wrong = count_wrong(kernel, each, LAUNCHES // 2)
                torch.cuda.current_stream().synchronize()
                wrong += count_wrong(kernel, each, LAUNCHES // 4)
                release()
                wrong += count_wrong(kernel, each, LAUNCHES // 4)
            assert not int(wrong), (count, tokens)
