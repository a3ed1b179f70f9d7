# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels' numbers, in Triton's interpreter, against the layer in float32; ``test_triton_device.py`` has a GPU's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from tests import forks
from tests.nvfp4_layer import INPUT_SCALE, Layer, distance, interleaved, random_call, random_layer
from trtllm_b12x.formats.nvfp4 import pack_fp4
from trtllm_b12x.kernels import Geometry, MoECall, PlanError
from trtllm_b12x.kernels.layer_tensors import ACTIVATIONS
from trtllm_b12x.kernels.reference import UnquantizedReferenceKernel
from trtllm_b12x.kernels.triton.decode import Tile, Tiles, TritonKernel
from trtllm_b12x.kernels.triton.jit import CompiledPlan

BOUND = 0.004
"""Relative L2 of bfloat16's rounding of the activation's result and of the output; seen: 0.0026."""
LARGE = Tiles(8, Tile(128, 128, 4, 2), Tile(128, 128, 4, 2))
"""The interpreter takes as long for a small tile as for a large one."""

CASES: dict[str, Callable[[], dict[str, Any]]] = {}
LONG = ("more routes than a word has bits", "quantized input, scales in rows", "self-test")
"""Nine tenths of the time of all cases; ``make test-all`` runs them."""


def case(name: str, *arguments: Any) -> Callable[[Callable[..., dict[str, Any]]], Callable[..., dict[str, Any]]]:
    def add(function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        CASES[name] = functools.partial(function, *arguments)
        return function

    return add


def bound(layer: Layer, first: int = 0, found: Tiles = LARGE, tokens: int = 24) -> TritonKernel:
    kernel = TritonKernel()
    kernel.plan(layer.geometry, tokens, torch.device("cpu"))
    kernel._plan = CompiledPlan(None)
    kernel.tiles = lambda tokens: found  # type: ignore[method-assign]
    kernel.bind(layer.kernel_weights(), first)
    return kernel


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` at its worst: bytes that are not a number in any type."""
    fill = torch.nan if dtype.is_floating_point else 0xFF
    return torch.full(shape, fill, dtype=dtype, device=device)


def drawn(layer: Layer, tokens: int, **options: Any) -> MoECall:
    return MoECall(*random_call(layer.geometry, tokens, **options))


def error(layer: Layer, found: torch.Tensor, call: MoECall, first: int = 0) -> float:
    return distance(found, layer.expected(*call[:3], first))


def on_activation(activation: str) -> dict[str, Any]:
    bias = {"SwigluBias": torch.float32, "Relu2": torch.bfloat16}.get(activation)
    layer = random_layer(Geometry(3, 2, 128, 128, activation, bias=bias), ratio=True)
    call = drawn(layer, 2)
    return {"error": error(layer, bound(layer).run(call), call)}


for _activation in ACTIVATIONS:
    case(_activation, _activation)(on_activation)


@case("an input scale of each expert")
def _() -> dict[str, Any]:
    layer = random_layer(Geometry(3, 2, 128, 128, "Relu2"))
    kernel, call = bound(layer), drawn(layer, 2)
    kernel.bind(layer.kernel_weights(one_for_all=False))
    return {"error": error(layer, kernel.run(call), call)}


@case("off every tile, expert parallel")
def _() -> dict[str, Any]:
    """H and I multiples of 16 alone; int64 ids of which most are not this rank's, bfloat16 scales, a token without a route."""
    layer = random_layer(Geometry(3, 3, 144, 80, "Swiglu", ranks=2), ratio=True)
    kernel = bound(layer, first=4, found=Tiles(8, Tile(32, 128, 2, 2), Tile(64, 128, 4, 2)))
    x, ids, router_weights, *_ = drawn(layer, 4, experts=9)
    call = MoECall(x, ids.long(), router_weights.bfloat16(), out=torch.full((4, 144), torch.nan, dtype=torch.bfloat16))
    call.ids[0, 1], call.ids[2], call.ids[3, 0] = -1, torch.tensor([-1, 2**40 + 4, 7]), 4
    out = kernel.run(call)
    return {"error": error(layer, out, call, 4), "zeros": not out[2].any().item(), "given": out is call.out}


@case("more routes than a word has bits")
def _() -> dict[str, Any]:
    """Of one token the 1st and the 32nd are not this rank's, of the other the 33rd: what is not written is NaN here."""
    layer = random_layer(Geometry(36, 34, 16, 16, "Silu"))
    tile = Tile(16, 128, 1, 2)
    kernel, call = bound(layer, found=Tiles(8, tile, tile), tokens=2), drawn(layer, 2)
    call.ids[0, 0] = call.ids[0, 31] = call.ids[1, 32] = -1
    return {"error": error(layer, kernel.run(call), call)}


@case("several blocks of one expert")
def _() -> dict[str, Any]:
    """All of 20 tokens take the same two experts."""
    layer = random_layer(Geometry(3, 2, 128, 128, "Relu2"))
    kernel, call = bound(layer), drawn(layer, 20)
    call.ids[:] = torch.tensor([2, 0])
    return {"error": error(layer, kernel.run(call), call)}


@case("float16")
def _() -> dict[str, Any]:
    """Products of gate and up beyond what float16 holds, and outputs that it does."""
    layer = random_layer(Geometry(2, 1, 128, 128, "Swiglu", torch.float16))
    layer.scale_1 *= 1024
    layer.scale_2 *= 2.0**-20
    call = drawn(layer, 2, dtype=torch.float16)
    found = bound(layer).run(call)
    return {"error": error(layer, found, call), "dtype": str(found.dtype)}


@case("quantized input", True)
@case("quantized input, scales in rows", False)
def _(swizzled: bool) -> dict[str, Any]:
    layer = random_layer(Geometry(3, 2, 144, 128, "Swiglu"))
    _, ids, router_weights, *_ = drawn(layer, 2)
    codes = torch.randint(0, 16, (2, 144), dtype=torch.uint8)
    sf = (torch.rand(2, 9) * 200 - 100).to(torch.float8_e4m3fn)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    x = magnitude * sf.float().repeat_interleave(16, 1) * INPUT_SCALE[0]
    given = interleaved(sf.unsqueeze(0)).permute(5, 2, 4, 0, 1, 3).contiguous() if swizzled else sf
    call = MoECall(pack_fp4(codes), ids, router_weights, given, swizzled)
    yardstick = UnquantizedReferenceKernel()
    yardstick.plan(layer.geometry, 2, torch.device("cpu"))
    yardstick.bind(layer.kernel_weights())
    outputs = [kernel.run(call) for kernel in (bound(layer), yardstick)]
    errors = [error(layer, output, call._replace(x=x)) for output in outputs]
    return {"error": max(errors), "dtypes": all(output.dtype is torch.bfloat16 for output in outputs)}


@case("tokens apart")
def _() -> dict[str, Any]:
    """Not a number in one token, whatever it shares a block with, leaves the others' bits alone."""
    layer = random_layer(Geometry(3, 2, 128, 128, "Swiglu"))
    kernel, call = bound(layer), drawn(layer, 3)
    before = kernel.run(call)
    call.x[1, 5], call.router_weights[2, 0] = torch.nan, torch.inf
    after = kernel.run(call)
    same = torch.equal(before[0], after[0])
    return {"error": 0.0, "same": same, "marked": bool(after[1].isnan().all() and not after[2].isfinite().any())}


@case("self-test")
def _() -> dict[str, Any]:
    """Right kernels pass it; an alpha that they were not told of, and a token that is off, do not."""
    layer = random_layer(Geometry(2, 2, 128, 128, "SwigluBias", bias=torch.float32), ratio=True)
    layer.s1 = (layer.s1.float() / 16).to(torch.float8_e4m3fn)
    kernel = bound(layer, tokens=2)
    kernel._plan.tested = False
    silent = not kernel.serves(1)
    kernel.self_test()
    passed = kernel.serves(2)
    kernel._plan.tested = False
    kernel.weights.fc1_alpha[1] *= 1.1  # the kernels follow, what they are compared with too
    kernel.self_test()
    inputs = kernel.weights.input_scales
    assert inputs is not None
    inputs.fc31_input_scale.mul_(1.1)
    inputs.fc2_input_scale[0] *= 1.1
    kernel._plan.tested = False
    kernel.self_test()
    for quantized, said in (
        (False, r"^triton, 1 tokens: error 0\.02.*2 tokens: error"),
        (True, r"^triton on quantized input, 2 tokens: error 0\.01"),
    ):
        kept = kernel._layers[quantized]
        tensors, addresses = kept
        fc2 = (*tensors.fc2[:2], tensors.fc2[2] * 1.03, *tensors.fc2[3:])
        kernel._layers[quantized] = tensors._replace(fc2=fc2), addresses
        kernel._plan.tested = False
        with pytest.raises(PlanError, match=said):
            kernel.self_test()
        kernel._layers[quantized] = kept
    return {"error": 0.0, "silent": silent, "passed": passed}


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    with mock.patch("torch.empty", poisoned):
        for name in names:
            torch.manual_seed(0)
            found[name] = CASES[name]()
    return found


@pytest.fixture(scope="module")
def results(selected: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = forks.in_the_interpreter(f"{__name__}:run", selected)
    return found


@pytest.mark.all(*LONG)
@pytest.mark.parametrize("name", CASES)
def test_against_the_layer_in_float32(name: str, results: dict[str, dict[str, Any]]) -> None:
    found = results[name]
    assert found.pop("error") < BOUND
    assert found.pop("dtype", "torch.float16") == "torch.float16"
    assert all(found.values()), found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_and_the_interpreter_it_does_not_run() -> None:
    cpu = torch.device("cpu")
    assert not TritonKernel.runs_on(cpu)
    with pytest.raises(RuntimeError, match="do not run on cpu"):
        TritonKernel().plan(Geometry(4, 2, 128, 128, "Swiglu"), 8, cpu)
    with pytest.raises(ValueError, match="Identity"):
        TritonKernel().plan(Geometry(4, 2, 128, 128, "Identity"), 8, cpu)
    with pytest.raises(ValueError, match="multiples of 16"):
        TritonKernel().plan(Geometry(4, 2, 128, 136, "Swiglu"), 8, cpu)
