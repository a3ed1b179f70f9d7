# SPDX-License-Identifier: Apache-2.0
"""The kernels' numbers in Triton's interpreter: every format in every layout, and grouped products of NVFP4 and MXFP8.

Each is compared with torch at the same rounding points and, where activations stay in 16 bits, with the layer in float32.
Decode of NVFP4 is in ``test_triton_numbers.py``; ``test_kernels_device.py`` has a GPU's numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests import forks, layers, mxfp8
from tests.checkpoints import random_experts
from tests.nvfp4_layer import INPUT_SCALE, distance, random_call, random_layer
from trtllm_b12x.engines.trtllm.embedded.ops import fp4_quantize
from trtllm_b12x.formats import BY_TURNS, GATE_UP, ROWS, TILES, WeightLayout, nvfp4
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.reference import QuantizedReferenceKernel, ReferenceKernel
from trtllm_b12x.kernels.triton import scales as scale_addresses
from trtllm_b12x.kernels.triton.decode import Tile, Tiles
from trtllm_b12x.kernels.triton.grouped import GroupedKernel, GroupedNVFP4Kernel
from trtllm_b12x.tools.verify import reference
from trtllm_b12x.tools.verify.reference import Arithmetic
from trtllm_b12x.tools.verify.reference_formats import move_off_ties

CPU = torch.device("cpu")
BOUND = 0.004
"""Relative L2 of the rounding of shares and of the output to bfloat16; seen: 0.0029."""
NVFP4, MXFP8 = ("NVFP4", WeightLayout()), ("MXFP8", WeightLayout())
W4A16_ROWS, W4A16_GATE_UP = ("W4A16_NVFP4", WeightLayout(scales=ROWS)), ("W4A16_NVFP4", WeightLayout(ROWS, GATE_UP))
MXFP4_PADDED, MXFP4_TURNS = ("MXFP4", WeightLayout(hidden_multiple=128)), ("MXFP4", WeightLayout(ROWS, BY_TURNS))
MXFP8_GATE_UP, MXFP8_TURNS = ("MXFP8", WeightLayout(ROWS, GATE_UP)), ("MXFP8", WeightLayout(ROWS, BY_TURNS))
GPT_OSS: dict[str, Any] = {"activation": "SwigluBias", "bias": torch.bfloat16}
BLOCKS = Tiles(16, Tile(32, 128, 2, 2), Tile(64, 128, 4, 2))
Answers = dict[str, float | bool]


def weights_of(geometry: Geometry) -> tuple[Any, Any]:
    """A layer, which MXFP8 has none of, and what kernels are given."""
    if geometry.format == "MXFP8":
        return None, mxfp8.random_weights(geometry)
    layer = random_layer(geometry, ratio=geometry.activation != "SwigluBias")
    return layer, layer.kernel_weights()


def planned(kind: Any, geometry: Geometry, tokens: int, weights: Any, first: int = 0, tiles: Tiles | None = None) -> Any:
    kernel = kind()
    kernel.plan(geometry, tokens, CPU)
    if tiles:
        kernel.tiles = lambda tokens: tiles
    kernel.bind(weights, first)
    return kernel


def compared(families: str, geometry: Geometry, tokens: int, tiles: Tiles | None = None) -> Answers:
    """Distances of each family; the last of several tokens has no route, and is not a number."""
    layer, weights = weights_of(geometry)
    first = geometry.num_experts if geometry.expert_parallel else 0
    x, ids, router_weights = random_call(geometry, tokens, geometry.num_experts * geometry.ranks, dtype=geometry.dtype)
    if tokens > 1:
        ids[-1] = -1
    found: Answers = {}
    for family in families.split():
        kinds = KERNELS[family, geometry.format]
        quantizes = kinds[1] is QuantizedReferenceKernel
        given = move_off_ties(x, INPUT_SCALE[0]) if quantizes else x.clone()
        given[1:][-1:] = torch.nan
        call = MoECall(given, ids, router_weights)
        kernel = planned(kinds[0], geometry, tokens, weights, first, tiles)
        wanted = planned(kinds[1], geometry, tokens, weights, first).run(call._replace(out=torch.zeros(x.shape)))
        result = kernel.run(call._replace(out=torch.full_like(x, torch.nan)))
        found[f"{family} from torch"] = distance(result, wanted)
        if layer is not None and not quantizes:
            found[f"{family} from float32"] = distance(result, layer.expected(x, ids, router_weights, first))
        found[f"{family} without a route"] = tokens == 1 or not result[-1].any().item()
    return found


def case(
    families: str, form: tuple[str, WeightLayout], *sizes: int, tokens: int = 3, tiles: Tiles | None = None, **options: Any
) -> Callable[[], Answers]:
    """Args: sizes: experts, top k, hidden size, intermediate size."""
    experts, top_k, hidden, size = sizes
    arguments = {"activation": "Swiglu", "format": form[0], "layout": form[1], **options}
    return functools.partial(compared, families, Geometry(experts, top_k, hidden, size, **arguments), tokens, tiles)


def of_a_checkpoint(gated: bool, ratio: float, tokens: int) -> Answers:
    """A layer that was loaded; with a gate also quantized input, and what a token that is no number does to others."""
    tensors = random_experts(4, 128, 192, gated, up_to_gate=ratio)
    module = layers.load(layers.create(4, 128, 192, gated=gated), tensors)
    backend = module.backend
    x, logits = layers.inputs(module, tokens, tensors)
    call = reference.MoECall(x, *module.routing_method.apply(logits))
    routes = call.token_selected_experts, call.token_final_scales
    ((wanted,),) = reference.outputs(tensors, 4, gated, [call], [Arithmetic.KERNEL])
    kinds = GroupedNVFP4Kernel, QuantizedReferenceKernel
    kernel, yardstick = (planned(kind, backend._geometry(), 100, backend._kernel_weights()) for kind in kinds)
    found = kernel.run(MoECall(x, *routes))
    result: Answers = {
        "from the strict reference": distance(found, wanted),
        "ten times from the reference kernel": 10 * distance(found, yardstick.run(MoECall(x, *routes)).float()),
    }
    ties = torch.randn(100, 128).bfloat16()  # where a division and a reciprocal round apart
    codes = nvfp4.dequantize(*quantized(kernel, ties))
    result["codes"] = torch.equal(codes, yardstick._quantized(ties, backend._kernel_weights().input_scales.fc1_divisor[0]))
    if not gated:
        return result
    for swizzled in (True, False):
        codes, scales = fp4_quantize(x, backend.fc31_input_scale, is_sf_swizzled_layout=swizzled)
        arrived = MoECall(codes, *routes, x_sf=scales, swizzled=swizzled)
        result[f"quantized, {swizzled}"] = torch.equal(kernel.run(arrived), found)
        result[f"quantized in torch, {swizzled}"] = distance(yardstick.run(arrived), wanted)
    x[0], x[1, 3] = torch.inf, torch.nan  # what is too large saturates
    beside = kernel.run(MoECall(x, *routes))
    result["others"] = torch.equal(beside[2:], found[2:])
    result["its own"] = bool(beside[0].isfinite().all() & beside[1].isnan().all())
    return result


def quantized(kernel: GroupedNVFP4Kernel, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales that a call makes of ``x``."""
    hidden = kernel.geometry.hidden_size
    codes, scales = torch.empty(len(x), hidden // 2, dtype=torch.uint8), torch.empty(len(x), hidden // 64, dtype=torch.int32)
    quantize, *_ = kernel.variants_of_call(kernel.tiles(len(x)), torch.int32, torch.float32)
    factor = kernel._layers[False][0].quantize
    quantize.function[(-(-len(x) // 4), 1)](x, *factor, codes, scales, len(x), **quantize.constants)
    return codes, scales.view(torch.float8_e4m3fn)


def of_scales_that_are_no_number(family: str) -> Answers:
    """A third of the block scales negative; NaN of either sign in FC1's of one expert, and in one row of FC2's of another."""
    geometry = Geometry(3, 2, 192, 192, "Geglu")
    layer, generator = random_layer(geometry), torch.Generator().manual_seed(0)
    for scales in (layer.s1.view(torch.uint8), layer.s2.view(torch.uint8)):
        scales |= (torch.rand(scales.shape, generator=generator) < 0.3).to(torch.uint8) << 7
    layer.s1.view(torch.uint8)[1, 7, 3], layer.s2.view(torch.uint8)[2, 5, 0] = 0x7F, 0xFF
    kernel, yardstick = (planned(kind, geometry, 20, layer.kernel_weights()) for kind in KERNELS[family, "NVFP4"])
    x, _, router_weights = random_call(geometry, 3)
    call = MoECall(move_off_ties(x, INPUT_SCALE[0]), torch.tensor([[0, 0], [1, 0], [2, 0]]).int(), router_weights)
    found, wanted = kernel.run(call), yardstick.run(call._replace(out=torch.zeros(x.shape)))
    wrong = wanted.isnan()
    counts = wrong.sum(1).tolist() == [0, geometry.hidden_size, 1]
    return {"distance": distance(found[~wrong], wanted[~wrong]), "NaN": torch.equal(found.isnan(), wrong), "counts": counts}


def of_extreme_scales() -> Answers:
    """E8M0 of 0, of 2**9 and beyond it beside others, and NaN (255) in one row of FC2."""
    layer = random_layer(Geometry(3, 1, 128, 128, "Swiglu", format="MXFP4", layout=MXFP4_PADDED[1]))
    layer.s1[0, ::2], layer.s2[0, ::3, 1] = 0, 0
    layer.w2[2, 7], layer.s2[2, 7], layer.s2[2, 9, 1] = 0x11, 136, 137  # 0.5 each
    layer.s2[1, 5, 0] = 255
    x, ids, router_weights = random_call(layer.geometry, 3)
    ids[:, 0] = torch.tensor([0, 1, 2])
    kernel = planned(KERNELS["triton", "MXFP4"][0], layer.geometry, 3, layer.kernel_weights())
    found, expected = kernel.run(MoECall(x, ids, router_weights)), layer.expected(x, ids, router_weights)
    finite, large = expected.isfinite(), float(expected[2, 7])
    finite[2, 7] = finite[2, 9] = False
    return {
        "finite": distance(found[finite], expected[finite]),
        "NaN": found.isnan().nonzero().tolist() == [[1, 5], [2, 9]],
        "large": abs(float(found[2, 7]) - large) < 0.01 * abs(large),
    }


def of_sorting() -> Answers:
    """More routes than a program looks at at a time, against torch: places, router weights, and what is of no expert here."""
    from trtllm_b12x.kernels.triton.routing import sort_kernel

    experts, first, generator = 5, 3, torch.Generator().manual_seed(0)
    found: Answers = {}
    for dtype, routes in ((torch.int32, 1), (torch.int32, 4096), (torch.int64, 9001)):
        ids = torch.randint(0, 11, (routes,), generator=generator, dtype=dtype)
        ids[::97], ids[::101] = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if dtype is torch.int64:
            ids[::103] = 2**32 + first  # of no expert, though its lower 32 bits are the first's
        router_weights = torch.rand(routes, generator=generator)
        order, starts, by_place = torch.full((routes,), -1).int(), torch.zeros(experts + 1).int(), torch.zeros(routes)
        sort_kernel[(experts, 1)](ids, router_weights, order, starts, by_place, routes, first, EXPERTS=experts, BLOCK=4096)
        wanted = [(ids == first + expert).nonzero()[:, 0] for expert in range(experts)]
        places = torch.cat(wanted)
        count = len(places)
        found[f"{routes} places"] = torch.equal(order[:count].long(), places) and bool((order[count:] == -1).all())
        found[f"{routes} starts"] = starts.tolist() == [sum(map(len, wanted[:e])) for e in range(experts + 1)]
        found[f"{routes} router weights"] = torch.equal(by_place[:count], router_weights[places])
    return found


@triton.jit
def read_scales(  # type: ignore[no-untyped-def]
    words, out, k, GROUPS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, BLOCKS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr, WARPS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    r = tl.arange(0, ROWS)[:, None]
    b = tl.arange(0, BLOCKS)[None, :]
    tl.store(out + r * BLOCKS + b, scale_addresses.scales_of(words + r * GROUPS, k, 1, K, ROWS, BK, GROUP, WARPS))


def of_scale_addresses() -> Answers:
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
    return {"wrong": float(wrong)}


def of_zeros() -> Answers:
    """Weights of zeros are served without a test."""
    geometry = Geometry(2, 1, 128, 64, "Swiglu", format="MXFP8")
    weights = mxfp8.random_weights(geometry)
    for tensor in weights.tensors().values():
        tensor.view(torch.uint8).zero_()
    kernel = planned(GroupedKernel, geometry, 4, weights)
    kernel.self_test()
    untested = kernel.serves(2) and not kernel.settled
    return {"untested": untested, "output": float(kernel.run(MoECall(*random_call(geometry, 2))).abs().max())}


SHORT: dict[str, Callable[[], Answers]] = {
    "W4A16 in rows, off every tile": case("triton", W4A16_ROWS, 3, 2, 192, 80),
    "NVFP4, gate first, tiles": case("triton", ("NVFP4", WeightLayout(TILES, GATE_UP)), 4, 2, 128, 64),
    "W4A16 without a gate": case("triton", W4A16_GATE_UP, 3, 2, 128, 64, activation="Relu2"),
    "MXFP4 padded, bias and limits": case("triton", MXFP4_PADDED, 4, 2, 160, 256, **GPT_OSS),
    "MXFP4 by turns": case("triton", MXFP4_TURNS, 4, 2, 160, 96, **GPT_OSS),
    "grouped MXFP8 by turns": case("grouped", MXFP8_TURNS, 4, 2, 128, 96, tokens=20, **GPT_OSS),
    "grouped MXFP8, halves of words": case("grouped", MXFP8_GATE_UP, 4, 2, 128, 64, tokens=20),
    "grouped NVFP4, alpha, beta and limit": case("grouped", NVFP4, 3, 2, 128, 64, tokens=9, activation="SwigluBias"),
    "grouped NVFP4, a rank of two": case("grouped", NVFP4, 5, 3, 128, 64, tokens=9, activation="Gelu", ranks=2),
    "MXFP8": case("triton grouped", MXFP8, 4, 2, 128, 96),
    "MXFP8, alpha, beta and limit": case("triton grouped", MXFP8, 4, 2, 128, 96, activation="SwigluBias"),
    "MXFP8, a rank of two": case("triton grouped", MXFP8, 5, 3, 128, 64, tokens=9, activation="Geglu", ranks=2),
    "a checkpoint": functools.partial(of_a_checkpoint, True, 0.7, 17),
    "sorting": of_sorting,
    "scales": of_scale_addresses,
    "zeros": of_zeros,
}
"""Cases that ``make test`` runs."""
LONG: dict[str, Callable[[], Answers]] = {
    "W4A16 in rows": case("triton", W4A16_ROWS, 4, 2, 128, 192),
    "W4A16 in rows, blocks of 16": case("triton", W4A16_ROWS, 4, 2, 256, 128, tokens=40, tiles=BLOCKS),
    "W4A16 in rows, squared": case("triton", W4A16_ROWS, 4, 2, 128, 128, activation="Relu2"),
    "W4A16 in rows, float16": case("triton", W4A16_ROWS, 4, 2, 128, 64, dtype=torch.float16),
    "W4A16, gate first": case("triton", W4A16_GATE_UP, 4, 2, 128, 64),
    "MXFP4 padded": case("triton", MXFP4_PADDED, 4, 2, 160, 128),
    "MXFP4 padded, blocks of 16": case("triton", MXFP4_PADDED, 4, 2, 96, 128, tokens=40, tiles=BLOCKS, bias=torch.bfloat16),
    "MXFP4 by turns, blocks of 16": case("triton", MXFP4_TURNS, 4, 2, 128, 96, tokens=40, tiles=BLOCKS, activation="SwigluBias"),
    "MXFP4, a rank of two": case("triton", MXFP4_PADDED, 5, 3, 160, 128, tokens=9, ranks=2),
    "grouped MXFP8 in rows, not gated": case("grouped", MXFP8_GATE_UP, 4, 2, 256, 128, tokens=20, activation="Relu2"),
    "grouped NVFP4, off every tile": case("grouped", NVFP4, 3, 2, 192, 192, tokens=9, activation="Geglu"),
    "grouped NVFP4, not gated": case("grouped", NVFP4, 3, 2, 64, 64, tokens=9, activation="Silu"),
    "MXFP8, sorted, squared": case("triton grouped", MXFP8, 4, 2, 256, 160, tokens=40, activation="Relu2"),
    "MXFP8, one token": case("triton grouped", MXFP8, 40, 3, 256, 160, tokens=1),
    "MXFP8, alpha, beta and limit, sorted": case("triton grouped", MXFP8, 4, 2, 128, 96, tokens=40, activation="SwigluBias"),
    "a checkpoint, squared": functools.partial(of_a_checkpoint, False, 1.0, 3),
    "block scales that are no number": functools.partial(of_scales_that_are_no_number, "triton"),
    "grouped, block scales that are no number": functools.partial(of_scales_that_are_no_number, "grouped"),
    "powers of two that are extreme": of_extreme_scales,
}


def in_the_interpreter(names: list[str]) -> dict[str, Answers]:
    return {name: (SHORT | LONG)[name]() for name in names}


@pytest.fixture(scope="module")
def results(selected: list[str]) -> dict[str, Answers]:
    found: dict[str, Answers] = forks.in_the_interpreter(f"{__name__}:in_the_interpreter", selected, TRTLLM_B12X_LOG="ERROR")
    return found


@pytest.mark.embedded
@pytest.mark.all(*LONG)
@pytest.mark.parametrize("name", SHORT | LONG)
def test_numbers(name: str, results: dict[str, Answers]) -> None:
    answers = results[name]
    assert answers
    assert all(value is not False and float(value) <= (1 if value is True else BOUND) for value in answers.values()), answers


@pytest.mark.embedded
def test_another_layout_than_the_planned_one_is_refused() -> None:
    sizes = Geometry(4, 2, 128, 64, "Swiglu", format="W4A16_NVFP4", layout=W4A16_GATE_UP[1])
    with pytest.raises(ValueError, match="laid out as"):
        planned(KERNELS["triton", sizes.format][1], sizes, 1, weights_of(dataclasses.replace(sizes, layout=W4A16_ROWS[1]))[1])


def test_what_the_grouped_kernels_do_not_take() -> None:
    geometry = Geometry(3, 2, 128, 64, "Swiglu")
    layer = random_layer(geometry)
    kernel = GroupedNVFP4Kernel()
    kernel.describe(geometry, 100, CPU)
    with pytest.raises(ValueError, match="of FC1 one for all experts"):
        kernel.bind(layer.kernel_weights(one_for_all=False))
    with pytest.raises(ValueError, match="the host's input scales"):
        kernel.bind(dataclasses.replace(layer.kernel_weights(), input_scales=None))
    kernel.bind(layer.kernel_weights())
    codes, scales = (torch.zeros(size, dtype=torch.uint8) for size in ((2, 64), (16,)))
    with pytest.raises(ValueError, match="x_sf has 16 scales, expected 1024 for 2 tokens"):
        kernel.run(MoECall(codes, torch.zeros(2, 2).int(), torch.zeros(2, 2), scales, swizzled=True))
    with pytest.raises(ValueError, match="SiTu is not one of"):
        kernel.describe(dataclasses.replace(geometry, activation="SiTu"), 100, CPU)
    with pytest.raises(ValueError, match="must be multiples of 64 and 16"):
        kernel.describe(dataclasses.replace(geometry, hidden_size=96), 100, CPU)


def test_what_stands_in_has_its_own_rounding_points() -> None:
    """b12x's rounding of FC2's partial sums is not among them."""
    layer = random_layer(Geometry(3, 2, 128, 256, "Swiglu"))
    x, ids, router_weights = random_call(layer.geometry, 70)
    call = MoECall(move_off_ties(x, INPUT_SCALE[0]), ids, router_weights)
    kinds = ReferenceKernel, QuantizedReferenceKernel
    other, result = (
        planned(kind, layer.geometry, 100, layer.kernel_weights()).run(call._replace(out=torch.zeros(x.shape))) for kind in kinds
    )
    assert 0.0005 < distance(result, other) < 0.005
    assert distance(result, layer.expected(call.x, ids, router_weights)) > 0.05  # of activations that are not quantized
