"""Shapes of a call's tensors: every kernel refuses what it would read or write beyond."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from tests import mxfp8
from tests.nvfp4_layer import random_call, random_layer
from trtllm_b12x.kernels import Geometry, Kernel, MoECall
from trtllm_b12x.kernels.b12x.kernel import B12xKernel
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.reference import (
    MXFP8ReferenceKernel,
    MXFP8UnquantizedReferenceKernel,
    QuantizedReferenceKernel,
    ReferenceKernel,
    UnquantizedReferenceKernel,
)
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
