# SPDX-License-Identifier: Apache-2.0
"""Grouped products (``gemm.cu``) on a CPU (:mod:`tests.emulator`): numbers, groups, every order of threads, what is missing."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import emulator
from tests.allocations import Allocations
from tests.emulator import FaultError, Order, machine
from tests.nvfp4_layer import INPUT_SCALE, distance, interleaved, random_call, random_layer
from tests.unittest.test_cuda_emulated import LAYERS, draw, first_expert, reference_of, weights_of
from trtllm_b12x.formats.nvfp4 import pack_fp4
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.cuda import gemm, variant
from trtllm_b12x.kernels.cuda.gemm import GemmKernel, Shape

BOUND = 0.0028
"""Relative L2 of bfloat16's rounding of the activation's result and of the output, and of float16's of the shares."""
SMALL, TALL = Shape(16, 2, 1), Shape(40, 5, 2)
"""Groups of 16 routes; and of 40, with a number of warps that divides nothing, in twice as many blocks."""


@functools.cache
def planned(geometry: Geometry, shape: Shape = SMALL, blocks: int = 5) -> GemmKernel:
    kind: Any = KERNELS["gemm", geometry.format][0]
    return emulator.gemm_on_cpu(kind, geometry, weights_of(geometry), shape, blocks, first_expert(geometry))


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch)
    monkeypatch.setattr(machine, "order", Order())


def expected(geometry: Geometry, call: MoECall) -> torch.Tensor:
    result: torch.Tensor = reference_of(geometry, tokens=call.x.shape[0]).run(call).float()
    return result


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=pytest.mark.all if (number + place) % 2 else ())
        for number, name in enumerate(LAYERS)
        for place, shape in enumerate((SMALL, TALL))
    ],
    ids=str,
)
def test_numbers(name: str, shape: Shape) -> None:
    geometry = LAYERS[name]
    for tokens in (1, 9, 45):
        call = draw(geometry, tokens)
        found = emulator.run(planned(geometry, shape), call)
        assert found.dtype is geometry.dtype
        assert distance(found, expected(geometry, call)) < BOUND, tokens


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4 in odd rows", "MXFP8 in tiles"])
def test_any_order(name: str) -> None:
    """The same bits in every order, by any number of blocks, and whether or not FC2's columns are halved."""
    geometry, call = LAYERS[name], draw(LAYERS[name], 23)
    whole = emulator.run(planned(geometry), call)
    for seed in range(1, 5):
        drawn = random.Random(seed)
        resident = drawn.choice((1, 2, 9))
        machine.order = Order.drawn(seed, resident)
        assert torch.equal(emulator.run(planned(geometry), call), whole), machine.order
        # Another number of blocks may halve the columns, and adds in another order then.
        other = emulator.run(planned(geometry, SMALL, drawn.choice((1, 2, 40))), call)
        assert distance(other, whole.float()) < BOUND, machine.order


def groups_of(kernel: GemmKernel, call: MoECall) -> torch.Tensor:
    """Return the groups that the kernel has made: expert; first group of the expert and their number; first place; routes."""
    scratch = torch.zeros(kernel.scratch_bytes(len(call.x)), dtype=torch.uint8)
    kernel.run(call._replace(scratch=scratch))
    words = scratch[: 4 * (64 + 4 * (kernel.geometry.num_experts + call.ids.numel()))].view(torch.int32)
    return words[64 : 64 + 4 * int(words[0])].view(-1, 4)


@pytest.mark.parametrize(
    ("routes", "groups"),
    [((8, 0, 0), [8]), ((1, 16, 0), [16, 1]), ((17, 9, 0), [16, 1, 9]), ((33, 32, 1), [16, 16, 1, 16, 16, 1])],
)
def test_groups(routes: tuple[int, ...], groups: list[int]) -> None:
    """An expert's are of one size, in products of 8 columns, but the last; experts of the largest come first."""
    geometry = Geometry(3, 1, 256, 128, "Swiglu")
    ids = torch.arange(3).repeat_interleave(torch.tensor(routes)).int()
    x = torch.randn(len(ids), 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    call = MoECall(
        x, ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))].view(-1, 1), torch.ones(len(ids), 1)
    )
    found = groups_of(planned(geometry), call)
    assert sorted(found[:, 3].tolist()) == sorted(groups)
    sizes = [8 * -(-int(found[found[:, 0] == expert, 3].max()) // 8) for expert in found[:, 0]]
    assert sizes == sorted(sizes, reverse=True)
    for expert, all_of_it in enumerate(routes):
        of_expert = found[found[:, 0] == expert]
        assert of_expert[:, 3].sum() == all_of_it
        assert (of_expert[:, 2] == sum(routes[:expert]) + of_expert[:, 3].cumsum(0) - of_expert[:, 3]).all()
        assert (of_expert[:, 1] & 65535 == len(of_expert)).all()
    assert distance(emulator.run(planned(geometry), call), expected(geometry, call)) < BOUND


def test_no_route_is_here() -> None:
    geometry = LAYERS["NVFP4 of two ranks"]
    x, ids, router_weights = random_call(geometry, 3)
    assert not emulator.run(planned(geometry), MoECall(x, ids, router_weights)).any()  # this rank's experts are the second half


def test_a_long_call_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have the same bits as the whole call."""
    geometry, call = LAYERS["NVFP4"], draw(LAYERS["NVFP4"], 300)
    whole = emulator.run(planned(geometry), call)
    monkeypatch.setattr(gemm, "MOST_ROUTES", 128 * geometry.top_k)
    assert torch.equal(emulator.run(planned(geometry), call), whole)


def test_the_self_test() -> None:
    """It calls experts with more routes than a group has, and refuses a call of no tokens."""
    kernel = planned(LAYERS["NVFP4"])
    results = kernel._test()
    assert results is not None
    assert [result.case.tokens for result in results if "quantized" not in result.case.kernel] == [1, 200]
    assert all(result.passed for result in results), results
    with pytest.raises(ValueError, match="planned for 0 tokens"):
        kernel.run(draw(LAYERS["NVFP4"], 1).of_tokens(0, 0))


def test_scratch_memory_suffices_for_fewer_tokens() -> None:
    """Also where fewer tokens have two shares a route, and more have one."""
    kernel = planned(LAYERS["NVFP4"])
    sizes = [kernel.scratch_bytes(tokens) for tokens in (1, 2047, 2048, 2049, 2500, 4096, 8192, 9000)]
    assert sizes == sorted(sizes)
    assert sizes[2] > kernel._plan.bytes_of(SMALL, 2049, 2)


def test_a_call_allocates_nothing_but_scratch_memory() -> None:
    kernel, call = planned(LAYERS["MXFP4"]), draw(LAYERS["MXFP4"], 9)
    out = torch.empty_like(call.x)
    for scratch, count in ((None, 1), (torch.zeros(kernel.scratch_bytes(9), dtype=torch.uint8), 0)):
        with Allocations() as made:
            kernel.run(call._replace(out=out, scratch=scratch))
        assert len(made.names) == count


def test_routes_of_other_types() -> None:
    geometry = LAYERS["NVFP4"]
    x, ids, router_weights = random_call(geometry, 20)
    call = MoECall(x, ids.long(), router_weights.bfloat16())
    plain = MoECall(x, ids.int(), router_weights.bfloat16().float())
    assert torch.equal(emulator.run(planned(geometry), call), emulator.run(planned(geometry), plain))


@pytest.mark.parametrize(("name", "swizzled"), [("NVFP4", True), ("NVFP4 float16", False)])
def test_input_that_arrives_quantized(name: str, swizzled: bool) -> None:
    geometry, tokens = LAYERS[name], 20
    layer = random_layer(geometry, ratio=True)
    kernel = emulator.gemm_on_cpu(GemmKernel, geometry, layer.kernel_weights(), SMALL, 5)
    _, ids, router_weights = random_call(geometry, tokens)
    codes = torch.randint(0, 16, (tokens, geometry.hidden_size), dtype=torch.uint8)
    scales = (torch.rand(tokens, geometry.hidden_size // 16) * 100).to(torch.float8_e4m3fn)
    magnitude = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).long()]
    values = torch.where(codes >= 8, -magnitude, magnitude) * scales.float().repeat_interleave(16, 1) * INPUT_SCALE[0]
    given = interleaved(scales.unsqueeze(0)).permute(5, 2, 4, 0, 1, 3).contiguous() if swizzled else scales
    found = emulator.run(kernel, MoECall(pack_fp4(codes), ids, router_weights, x_sf=given, swizzled=swizzled))
    assert distance(found, layer.expected(values, ids, router_weights)) < BOUND


@pytest.mark.parametrize("size", [2.0**-100, 2.0**40])
def test_values_of_any_size(size: float) -> None:
    """A share has its own exponent, so that router weights may be as small or large."""
    geometry = LAYERS["MXFP4 in tiles"]
    x, ids, router_weights = random_call(geometry, 9)
    large = emulator.run(planned(geometry), MoECall(x, ids, router_weights * size)).float()
    plain = emulator.run(planned(geometry), MoECall(x, ids, router_weights)).float()
    assert distance(large / size, plain) < BOUND


@pytest.mark.parametrize(("name", "power"), [("MXFP4 in tiles", 15), ("MXFP8", -30)])
def test_block_scales_far_from_one(name: str, power: int) -> None:
    """Of MXFP4 the one launch takes none above 2**9."""
    geometry, weights = LAYERS[name], weights_of(LAYERS[name])
    fc1, fc2 = (
        torch.where(sf > 0, sf + step, sf) for sf, step in ((weights.fc1_weight_sf, power), (weights.fc2_weight_sf, -power))
    )
    moved = replace(weights, fc1_weight_sf=fc1, fc2_weight_sf=fc2)  # the scales of padding stay 0
    kind: Any = KERNELS["gemm", geometry.format][0]
    kernel = emulator.gemm_on_cpu(kind, geometry, moved, SMALL, 5, first_expert(geometry))
    call = draw(geometry, 9)
    wanted = reference_of(geometry, moved, 9).run(call).float()
    assert distance(emulator.run(kernel, call), wanted) < BOUND


@pytest.mark.parametrize(("byte", "usable"), [(0, True), (97, True), (194, True), (195, False), (254, False), (255, False)])
def test_extremes_of_mxfp4s_scales(byte: int, usable: bool) -> None:
    """One row of FC2 from 0 (below 2**-126) to 2**67; what is larger is NaN, as 255."""
    geometry = LAYERS["MXFP4 in odd rows"]
    weights = weights_of(geometry)
    moved = weights.fc2_weight_sf.clone()
    moved[:, 3] = byte
    changed = replace(weights, fc2_weight_sf=moved)
    kind: Any = KERNELS["gemm", "MXFP4"][0]
    kernel = emulator.gemm_on_cpu(kind, geometry, changed, SMALL, 5, first_expert(geometry))
    call = draw(geometry, 9)
    found, wanted = emulator.run(kernel, call).float(), reference_of(geometry, changed, 9).run(call).float()
    others = torch.arange(found.shape[1]) >= 64  # shares of 32 columns have one exponent
    assert distance(found[:, others], wanted[:, others]) < BOUND
    routed = wanted[:, others].any(1)
    if usable:
        assert torch.allclose(found[:, 3], wanted[:, 3], rtol=0.02, atol=1e-15)
    else:
        assert not found[routed, 3].isfinite().any()


@pytest.mark.parametrize(("name", "value"), [("W4A16", float("inf")), ("MXFP4 in tiles", float("nan"))])
def test_a_token_that_is_not_a_number(name: str, value: float) -> None:
    """It leaves the others as they are, also where stored rows are longer than a token."""
    geometry, call = LAYERS[name], draw(LAYERS[name], 20)
    plain = emulator.run(planned(geometry), call)
    call.x[4, 3] = value
    found = emulator.run(planned(geometry), call)
    assert not found[4].isfinite().all()
    assert torch.equal(found[torch.arange(20) != 4], plain[torch.arange(20) != 4])


def test_launches_of_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of two streams at once, and two of one stream behind each other in one scratch memory."""
    geometry, kernel = LAYERS["NVFP4"], planned(LAYERS["NVFP4"])
    calls = [draw(geometry, tokens, seed) for seed, tokens in enumerate((1, 20, 9, 33))]
    alone = [kernel.run(call) for call in calls]
    scratch = [torch.full((kernel.scratch_bytes(33),), 255, dtype=torch.uint8) for _ in range(2)]
    for seed in range(1, 6):
        machine.order = Order.drawn(seed, random.Random(seed).choice((1, 3, 9)))
        found = []
        with machine.together():
            for number, call in enumerate(calls):
                monkeypatch.setattr(machine, "stream", 1 + number % 2)
                found.append(kernel.run(call._replace(scratch=scratch[number % 2])))
        assert all(map(torch.equal, found, alone)), machine.order


BITS = "other bits"
MISSING: dict[str, tuple[tuple[str, str, str], str]] = {
    "a stage is waited for": (("gemm_products.cuh", "copy_wait<2 * STAGES - 3>();", ";"), "a copy"),
    "a stage is there for all": (
        ("gemm_products.cuh", "__syncthreads();\n      ask_for_routes();", "ask_for_routes();"),
        "a race|other bits",
    ),
    "the list is there for all": (("gemm_products.cuh", "    __syncthreads();\n  }", "  }"), "a copy|a race"),
    "FC2 waits for h": (("gemm_products.cuh", "if (phase == FC2) wait_for_launch_ahead();", ""), BITS),
    "the sum waits for shares": (("gemm.cu", "w(call);\n  wait_for_launch_ahead();", "w(call);"), BITS),
    "columns beyond the last are zeros": (("gemm_products.cuh", "bool there = WHOLE ||", "bool there = true ||"), BITS),
    "routes beyond the last are not written": (("gemm_products.cuh", "if (8 * n + 2 * t + j < (int)of.routes())", ""), BITS),
    "tokens of the next tile": (
        ("gemm_products.cuh", "const Tile next = tile_at(of_routes.tile + 1);", "const Tile next = tile_at(of_routes.tile);"),
        BITS,
    ),
}
UNEVEN = Geometry(6, 4, 320, 160, "SwigluBias", bias=torch.bfloat16, format="MXFP4")
"""In 128x4 tiles: rows and columns of neither matrix fill them."""


@pytest.mark.parametrize("missing", MISSING)
def test_what_is_missing_shows(missing: str) -> None:
    """Each rule of the kernel is needed: without it some order of some call differs, or the emulator finds a fault."""
    (file, rule, by), sign = MISSING[missing]
    source = variant.sources(gemm.SOURCE)[file]
    assert source.count(rule) == 1, rule
    geometry = replace(UNEVEN, intermediate_size=192)
    kind: Any = KERNELS["gemm", geometry.format][0]
    weights = weights_of(geometry)
    changed = emulator.gemm_on_cpu(kind, geometry, weights, SMALL, 2, changed={file: source.replace(rule, by)})
    whole, call = planned(geometry, SMALL, 2), draw(geometry, 33)
    first = emulator.run(whole, call)
    found = set()
    for seed in range(12):
        machine.order = replace(Order.drawn(seed, 4), races=seed % 2 == 0)
        try:
            text = "" if torch.equal(emulator.run(changed, call), first) else BITS
        except FaultError as fault:
            text = str(fault).split(": ", 1)[1]
        if text.startswith(tuple(sign.split("|"))):
            return
        found.add(text)
    pytest.fail(f"{sign} in no order of 12, but {found}")
