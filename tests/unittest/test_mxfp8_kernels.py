"""The MXFP8 kernels' numbers in Triton's interpreter, against the same layer in torch; ``test_kernels_device.py`` has a GPU's."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from tests import forks, mxfp8
from tests.nvfp4_layer import distance, random_call
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.triton import scales as scale_addresses
from trtllm_b12x.kernels.triton.decode import TritonMXFP8Kernel
from trtllm_b12x.kernels.triton.grouped import GroupedKernel

CASES = {
    "gated": (Geometry(4, 2, 128, 96, "Swiglu"), 3, 0),
    "blocks of 16, squared": (Geometry(4, 2, 256, 160, "Relu2"), 40, 0),
    "alpha, beta and limit": (Geometry(4, 2, 128, 96, "SwigluBias"), 3, 0),
    "alpha, beta and limit, blocks of 16": (Geometry(4, 2, 128, 96, "SwigluBias"), 40, 0),
    "a rank of two": (Geometry(5, 3, 128, 64, "Geglu", ranks=2), 9, 5),
}
SHORT = ("gated", "alpha, beta and limit", "a rank of two")
CPU = torch.device("cpu")


@triton.jit
def read_scales(  # type: ignore[no-untyped-def]
    words, out, k, GROUPS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, WARPS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    r = tl.arange(0, ROWS)[:, None]
    b = tl.arange(0, BLOCKS)[None, :]
    tl.store(out + r * BLOCKS + b, scale_addresses.scales_of(words + r * GROUPS, k, 1, K, ROWS, BK, GROUP, WARPS))


def wrong_scales() -> float:
    """How many of the bytes that a step reads are not the matrix's, or zero beyond it, where NaN lies: by words and by bytes."""
    wrong = 0
    for (block, warps), size, width in product(((32, 4), (16, 4), (16, 1)), (96, 160, 256), (64, 128)):
        groups, blocks, step = -(-size // (4 * block)), size // block, width // block
        given = torch.full((16, 4 * groups), 255, dtype=torch.uint8)
        given[:, :blocks] = torch.arange(16 * blocks).view(16, blocks)
        expected = torch.zeros(16, -(-size // width) * step, dtype=torch.uint8)
        expected[:, :blocks] = given[:, :blocks]
        for k in range(0, size, width):
            out = torch.empty(16, step, dtype=torch.uint8)
            read_scales[(1,)](given.view(torch.int32), out, k, groups, size, 16, width, step, block, warps)
            wrong += int((out != expected[:, k // block :][:, :step]).sum())
    return float(wrong)


def in_the_interpreter(names: list[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in CASES if name in names}
    for name, distances in found.items():
        geometry, tokens, first = CASES[name]
        weights = mxfp8.random_weights(geometry)
        call = random_call(geometry, tokens, geometry.num_experts * geometry.ranks)
        for kind in (TritonMXFP8Kernel, GroupedKernel):
            kernel, yardstick = kind(), kind.reference()
            for one in (kernel, yardstick):
                one.plan(geometry, tokens, CPU)
                one.bind(weights, first)
            expected = yardstick.run(MoECall(*call, out=torch.zeros(call[0].shape)))
            distances.append(distance(kernel.run(MoECall(*call)), expected))
    geometry = Geometry(2, 1, 128, 64, "Swiglu")
    kernel, weights = GroupedKernel(), mxfp8.random_weights(geometry)
    for tensor in weights.tensors().values():
        tensor.view(torch.uint8).zero_()
    kernel.plan(geometry, 4, CPU)
    kernel.bind(weights)
    kernel.self_test()
    call = random_call(geometry, 2)
    untested = kernel.serves(2) and not kernel.settled
    zeros = float(kernel.run(MoECall(*call)).abs().max()) if untested else 1.0
    return {**found, "scales": [wrong_scales()], "zeros are served untested": [zeros]}


@pytest.fixture(scope="module")
def results(selected: list[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = forks.in_the_interpreter(f"{__name__}:in_the_interpreter", selected)
    return found


@pytest.mark.embedded
@pytest.mark.all(*({*CASES} - {*SHORT}))
@pytest.mark.parametrize("name", [*CASES, "scales", "zeros are served untested"])
def test_numbers(name: str, results: dict[str, list[float]]) -> None:
    assert max(results[name]) < 0.003, results[name]
