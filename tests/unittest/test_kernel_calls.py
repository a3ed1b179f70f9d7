# SPDX-License-Identifier: Apache-2.0
"""Shapes of a call's tensors: every kernel refuses what it would read or write beyond; ids and router weights of any type."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from tests import forks, mxfp8
from tests.nvfp4_layer import elsewhere, random_call, random_layer
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.formats.nvfp4 import InputScales
from trtllm_b12x.kernels import Geometry, Kernel, MoECall
from trtllm_b12x.kernels.b12x import routes
from trtllm_b12x.kernels.b12x.kernel import B12xKernel
from trtllm_b12x.kernels.call import of_logits
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.reference import (
    MXFP8ReferenceKernel,
    MXFP8UnquantizedReferenceKernel,
    QuantizedReferenceKernel,
    ReferenceKernel,
    UnquantizedReferenceKernel,
)
from trtllm_b12x.kernels.routes import ID_TYPES, ExpertRange, of_known_types
from trtllm_b12x.kernels.triton.decode import TritonKernel, TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel
from trtllm_b12x.kernels.triton.jit import JitKernel

GEOMETRY = Geometry(3, 2, 128, 128, "Swiglu")
TOKENS = 4
OF_MXFP8: tuple[type[Kernel], ...] = (TritonMXFP8Kernel, GroupedKernel, MXFP8ReferenceKernel, MXFP8UnquantizedReferenceKernel)
TAKE_QUANTIZED: tuple[type[Kernel], ...] = (
    TritonKernel,
    GroupedNVFP4Kernel,
    UnquantizedReferenceKernel,
    QuantizedReferenceKernel,
)
KINDS: tuple[type[Kernel], ...] = (*OF_MXFP8, *TAKE_QUANTIZED, ReferenceKernel, B12xKernel)
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "x": [(TOKENS, 112), (TOKENS, 144), (TOKENS, 8, 16)],
    "ids": [(3, 2), (5, 2), (TOKENS, 1), (TOKENS, 3), (8,)],
    "router_weights": [(3, 2), (5, 2), (TOKENS, 1), (TOKENS, 3), (8,)],
    "out": [(3, 128), (5, 128), (TOKENS, 112), (TOKENS, 256), (512,)],
}


def kernel_of(kind: type[Kernel]) -> Any:
    """Bound, compiled for nothing: a call that got past the check would fail otherwise."""
    if issubclass(kind, JitKernel):
        kernel: Any = kind(Card(132, 228 << 10, 90))
        kernel.describe(GEOMETRY, 63, torch.device("cuda"))
    else:
        kernel = kind()
        if kind is B12xKernel:
            kernel.geometry, kernel._plan = GEOMETRY, types.SimpleNamespace(candidates={TOKENS: [None]})
            kernel.weights = random_layer(GEOMETRY).kernel_weights()
            return kernel
        kernel.plan(GEOMETRY, 63, torch.device("cpu"))
    kernel.bind(mxfp8.random_weights(GEOMETRY) if kind in OF_MXFP8 else random_layer(GEOMETRY).kernel_weights())
    return kernel


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_another_shape_is_named(kind: type[Kernel]) -> None:
    kernel = kernel_of(kind)
    call = MoECall(*random_call(GEOMETRY, TOKENS), out=torch.empty(TOKENS, 128, dtype=torch.bfloat16))
    for name, shapes in SHAPES.items():
        for shape in shapes:
            other = torch.zeros(shape, dtype=getattr(call, name).dtype)
            with pytest.raises(ValueError, match=rf"^{name} has shape \({', '.join(map(str, shape))},?\), expected \(4, "):
                kernel.run(call._replace(**{name: other}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        *(("ids", lambda ids, to=to: ids.to(to), f"is {to}, expected integers") for to in (torch.float32, torch.bool)),
        ("router_weights", torch.Tensor.int, "is torch.int32, expected floats"),
        ("out", torch.Tensor.int, "is torch.int32, expected torch.bfloat16"),
        ("scratch", lambda memory: memory[8:], "is at address .*8, expected a multiple of 16"),
        *((name, elsewhere, "is on cuda:1, expected cpu") for name in ("x", "ids", "router_weights", "out", "scratch")),
    ],
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if not issubclass(kind, ReferenceKernel)])
def test_a_tensor_of_another_kind_is_named(kind: type[Kernel], name: str, change: Any, message: str) -> None:
    memory = torch.empty(32, dtype=torch.uint8)
    call = MoECall(*random_call(GEOMETRY, TOKENS), out=torch.empty(TOKENS, 128, dtype=torch.bfloat16))
    call = call._replace(scratch=memory[-memory.data_ptr() % 16 :])
    with pytest.raises(ValueError, match=f"^{name} {message}"):
        kernel_of(kind).run(call._replace(**{name: change(getattr(call, name))}))


def test_scales_at_any_address_are_taken() -> None:
    codes, scales = torch.zeros(TOKENS, 64, dtype=torch.uint8), torch.arange(33, dtype=torch.uint8)[1:]
    call = MoECall(codes, *random_call(GEOMETRY, TOKENS)[1:], scales).prepared(GEOMETRY, True, -1)
    assert call.x_sf is not None
    assert call.x_sf.data_ptr() % 16 == 0
    assert torch.equal(call.x_sf, scales)


@pytest.mark.parametrize("kind", TAKE_QUANTIZED)
def test_quantized_input_of_another_shape_is_named(kind: type[Kernel]) -> None:
    kernel = kernel_of(kind)
    _, ids, router_weights = random_call(GEOMETRY, TOKENS)
    x, x_sf = (torch.zeros(TOKENS, columns, dtype=torch.uint8) for columns in (64, 8))
    call = MoECall(x, ids, router_weights, x_sf, out=torch.empty(TOKENS, 128, dtype=torch.bfloat16))
    for name, shape in (("x", (TOKENS, 56)), ("ids", (3, 2)), ("router_weights", (TOKENS, 1)), ("out", (3, 128))):
        other = torch.zeros(shape, dtype=getattr(call, name).dtype)
        with pytest.raises(ValueError, match=f"^{name} has shape "):
            kernel.run(call._replace(**{name: other}))  # type: ignore[arg-type]
    for name, dtype in (("x", torch.bfloat16), ("x_sf", torch.float32)):
        with pytest.raises(ValueError, match=f"{name} (is )?{dtype}"):
            kernel.run(call._replace(**{name: getattr(call, name).to(dtype)}))
    for swizzled, needed in ((False, 32), (True, 1024)):
        few = torch.zeros(needed - 8, dtype=torch.uint8)
        with pytest.raises(ValueError, match=f"^x_sf has {needed - 8} scales, expected {needed} for 4 tokens"):
            kernel.run(call._replace(x_sf=few, swizzled=swizzled))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if issubclass(kind, JitKernel)])
def test_scratch_memory_suffices_for_fewer_tokens_too(kind: Any) -> None:
    kernel = kind(Card(188, 100 << 10, 120))
    kernel.describe(Geometry(128, 8, 2048, 768, "Swiglu"), 256, torch.device("cuda"))
    sizes = [kernel.scratch_bytes(tokens) for tokens in range(1, 300)]
    assert sizes == sorted(sizes)
    assert sizes[255] == sizes[-1]  # the largest call that is planned
    needed = [kernel._workspace(tokens, False, kernel.tiles(tokens)).nbytes for tokens in range(1, 257)]
    assert all(size >= least for size, least in zip(sizes, needed, strict=False))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in TAKE_QUANTIZED])
def test_other_kernels_refuse_quantized_input(kind: type[Kernel]) -> None:
    with pytest.raises(ValueError, match="x_sf is given, but the kernel takes unquantized x"):
        kernel_of(kind).run(MoECall(*random_call(GEOMETRY, TOKENS), x_sf=torch.zeros(32, dtype=torch.uint8)))


def test_a_router_bias_becomes_float32() -> None:
    call = of_logits(torch.zeros(1, 128).bfloat16(), torch.zeros(1, 3).half(), torch.zeros(3).bfloat16())
    prepared = call.prepared(dataclasses.replace(GEOMETRY, scoring=Scoring("sigmoid", bias=True)), False, -1)
    assert prepared.router_logits is not None
    assert prepared.router_bias is not None
    assert prepared.router_logits.dtype is prepared.router_bias.dtype is torch.float32


# ---- the launch that makes a host's routes a kernel's: on a GPU as it is, without one in Triton's interpreter -------------


EXPERTS, FIRST = 16, 32
IDS = [32, 47, 33, 31, 48, -1, 2**31 - 1, -(2**31), 32, 33]
"""Of ten routes four are not of experts 32 to 47."""
HELD = [True, True, True, False, False, False, False, False, True, True]


def on(device: str) -> dict[str, list[list[float]]]:
    """Both kernels on :data:`IDS`, for every pair of types, and once on an id that 32 bits would make another's."""
    found: dict[str, list[list[float]]] = {}
    router_weights = torch.arange(1, len(IDS) + 1, device=device) / 8
    for unrouted in (-1, 0):
        table = ExpertRange(FIRST, EXPERTS, unrouted)
        for ids_type in (torch.int32, torch.int64):
            for scales_type in (torch.float32, torch.bfloat16, torch.float16):
                ids = torch.tensor(IDS, device=device, dtype=ids_type)
                if ids_type is torch.int64:
                    ids[3] = FIRST + 2**32
                out = torch.full((4, len(IDS)), -7, dtype=torch.int32, device=device)
                floats = out[1].view(torch.float32)
                routes.prepare(table, ids, router_weights.to(scales_type), (out[0], floats))
                prepared = [out[0].tolist(), floats.tolist(), table.local(ids).tolist()]
                found[f"{unrouted} {ids_type} {scales_type}"] = prepared
    return found


def divisors_on(device: str) -> dict[str, list[list[float]]]:
    """Divisors of more experts than a block has, and what torch makes of the same input scales."""
    experts, found = 1100, {}
    ids, router_weights = torch.zeros(8, dtype=torch.int32, device=device), torch.ones(8, device=device)
    for fc2 in (torch.tensor(3.7, device=device), torch.rand(experts, device=device) + 0.1):
        derived = InputScales(torch.tensor(0.037, device=device), fc2, *torch.zeros(2, experts, device=device))
        given = (derived.fc1_divisor, derived.fc2_divisor)
        table, out = ExpertRange(0, experts), torch.empty(3, 8, dtype=torch.int32, device=device)
        floats = torch.empty(8, device=device)
        results = []
        for launch in (
            lambda: routes.prepare(table, ids, router_weights, (out[0], floats), derived),  # noqa: B023
            derived.derive,
        ):
            for divisor in given:
                divisor.zero_()
            launch()
            results.append([*given[0].tolist(), *given[1].tolist()])
        found[str(fc2.numel())] = results
    return found


def in_triton(function: str) -> Any:
    """``function(device)``, with Triton's interpreter where there is no GPU."""
    if torch.cuda.is_available():
        return globals()[function]("cuda")
    return forks.in_the_interpreter(f"{__name__}:{function}", "cpu")


def test_divisors_are_derived_in_the_same_launch() -> None:
    for prepared, in_torch in in_triton("divisors_on").values():
        assert prepared == in_torch
        assert 0 not in in_torch


def test_routes_outside_the_table_become_unrouted_ones() -> None:
    found = in_triton("on")
    assert len(found) == 12
    for name, (ids, router_weights, in_torch) in found.items():
        unrouted = int(name.split()[0])
        expected = [i - FIRST if held else unrouted for i, held in zip(IDS, HELD, strict=True)]
        assert ids == in_torch == expected, name
        assert router_weights == [(at + 1) / 8 if held else 0 for at, held in enumerate(HELD)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64])
def test_ids_of_every_integer_type_keep_their_value(dtype: torch.dtype) -> None:
    """An id beyond 32 bits is no expert, though its lower half is one."""
    ids = torch.tensor([[4, 3], [7, 2]]).to(dtype)
    expected = [[0, -1], [3, -1]]
    if dtype in (torch.int64, torch.uint64):
        ids[0, 0] = 2**32 + 5
        expected[0][0] = -1
    if dtype == torch.uint32:
        ids[0, 0] = 2**32 - 1
        expected[0][0] = -1
    known, router_weights = of_known_types(ids, torch.ones(2, 2, dtype=torch.float16))
    assert known.dtype in ID_TYPES
    assert router_weights.dtype is torch.float32
    local = ExpertRange(4, 4).local(known)
    assert (local.dtype, local.tolist()) == (torch.int32, expected)
