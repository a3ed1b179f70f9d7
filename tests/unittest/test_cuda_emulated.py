# SPDX-License-Identifier: Apache-2.0
"""The one launch on a CPU, its own source (:mod:`tests.emulator`): numbers, every order of threads, and hangs that are found."""

from __future__ import annotations

import ctypes
import functools
import math
import random
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch

from tests import emulator, mxfp8
from tests.emulator import FaultError, HangError, Order, machine
from tests.nvfp4_layer import distance, interleaved, random_call, random_layer
from trtllm_b12x.formats import BY_TURNS, GATE_UP, ROWS, WeightLayout
from trtllm_b12x.formats.mxfp4 import LARGEST_SCALE
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.catalog import KERNELS
from trtllm_b12x.kernels.cuda import decode, variant
from trtllm_b12x.kernels.cuda.decode import CudaKernel
from trtllm_b12x.kernels.cuda.probe import PROBE, right

FLUSHES = """#include "ptx.cuh"
inline u32 flushed(u32 pair) { return pair & ((pair & 0x7f80 ? 0xffff : 0) | (pair & 0x7f800000 ? 0xffff0000 : 0)); }
template <bool float16> void flushing(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma<float16>(c, flushed(a0), flushed(a1), flushed(a2), flushed(a3), b0, b1);
}
#define mma flushing
"""

BOUND = 0.004
"""Relative L2 of bfloat16's rounding of the activation's result and of the output."""
TOKENS = (1, 3, 8, 9)
"""Of four variants; the last one gathers."""
W4A16: dict[str, Any] = {"format": "W4A16_NVFP4"}
MXFP4: dict[str, Any] = {"format": "MXFP4"}
MXFP8: dict[str, Any] = {"format": "MXFP8"}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LAYERS = {
    "NVFP4": Geometry(8, 2, 256, 128, "Swiglu"),
    "NVFP4 of two ranks": Geometry(4, 4, 256, 128, "Swiglu", ranks=2),
    "NVFP4 in rows": Geometry(4, 3, 384, 192, "Relu2", bias=BF16, layout=WeightLayout(ROWS)),
    "NVFP4 in uneven rows": Geometry(6, 2, 320, 160, "Geglu", bias=F32, layout=WeightLayout(ROWS, BY_TURNS)),
    "NVFP4 float16": Geometry(6, 4, 256, 128, "SwigluBias", F16, bias=F16),
    "W4A16": Geometry(8, 2, 256, 192, "Swiglu", layout=WeightLayout(ROWS, GATE_UP), **W4A16),
    "W4A16 in tiles": Geometry(4, 2, 384, 128, "Silu", F16, **W4A16),
    "MXFP4": Geometry(6, 4, 320, 192, "SwigluBias", bias=BF16, layout=WeightLayout(ROWS, BY_TURNS), **MXFP4),
    "MXFP4 in odd rows": Geometry(6, 4, 320, 160, "SwigluBias", bias=BF16, layout=WeightLayout(ROWS, BY_TURNS), **MXFP4),
    "MXFP4 in tiles": Geometry(4, 2, 192, 128, "Swiglu", layout=WeightLayout(hidden_multiple=128), **MXFP4),
    "MXFP8": Geometry(8, 2, 256, 192, "Swiglu", layout=WeightLayout(ROWS, GATE_UP), **MXFP8),
    "MXFP8 in odd rows": Geometry(6, 3, 384, 160, "Swiglu", layout=WeightLayout(ROWS, GATE_UP), **MXFP8),
    "MXFP8 in tiles": Geometry(4, 3, 384, 128, "Gelu", **MXFP8),
}
ONE_TOKEN = LAYERS | {
    "few tasks": Geometry(6, 1, 384, 64, "Swiglu", layout=WeightLayout(ROWS, GATE_UP), **W4A16),
    "many units": Geometry(4, 4, 256, 1216, "Silu", layout=WeightLayout(ROWS), **MXFP4),
    "many units of MXFP8": Geometry(4, 4, 256, 1216, "Silu", layout=WeightLayout(ROWS), **MXFP8),
}
"""Layers, and those for calls of few tokens. "many units" has units of 256 columns of which the last has fewer (one token), and
stages of 32 and 16 rows in one ring (2 tokens)."""
QUICK = [(name, TOKENS[(place + number) % 4]) for number, name in enumerate(LAYERS) for place in (0, 1)]
QUICK += [("many units", 1), ("many units", 2)]
EVERY = {(name, tokens) for name in LAYERS for tokens in TOKENS} | {("NVFP4", 2), ("MXFP4", 2)}
EVERY |= {(name, 64) for name in ("NVFP4 of two ranks", "W4A16", "MXFP4", "MXFP8 in tiles")}
"""Pairs of a layer and a number of tokens; those that are not quick are marked ``all``."""


@functools.cache
def weights_of(geometry: Geometry) -> Any:
    return mxfp8.random_weights(geometry) if geometry.format == "MXFP8" else random_layer(geometry, ratio=True).kernel_weights()


def first_expert(geometry: Geometry) -> int:
    return geometry.num_experts if geometry.ranks > 1 else 0


@functools.cache
def planned(geometry: Geometry, blocks: int = 5, file: str = "", rule: str = "", by: str = "") -> CudaKernel:
    """Return a bound kernel. With ``file``, its source has ``by`` in place of ``rule``."""
    kind: Any = KERNELS["cuda", geometry.format][0]
    changed = {}
    if file:
        source = variant.sources()[file]
        assert source.count(rule) == 1, rule
        changed[file] = source.replace(rule, by)
    return emulator.kernel_on_cpu(kind, geometry, weights_of(geometry), blocks, first_expert(geometry), changed)


def one_token(geometry: Geometry, blocks: int = 5, subnormals: bool = True, weights: Any = None) -> CudaKernel:
    """Return a kernel that takes a call of one token as it takes that of layers of 1,920 columns or more."""
    kind: Any = KERNELS["cuda", geometry.format][0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant, "_TASKS", 8)
        patch.setattr(decode, "variants", functools.partial(variant.variants, subnormals=subnormals))
        main = emulator.MAIN if subnormals else FLUSHES + emulator.MAIN
        given = weights_of(geometry) if weights is None else weights
        return emulator.kernel_on_cpu(kind, geometry, given, blocks, first_expert(geometry), main=main)


def reference_of(geometry: Geometry, weights: Any = None, tokens: int = 1) -> Any:
    kind: Any = KERNELS["cuda", geometry.format][0]
    reference = kind.reference()
    reference.plan(geometry, tokens, torch.device("cpu"))
    reference.bind(weights_of(geometry) if weights is None else weights, first_expert(geometry))
    return reference


def draw(geometry: Geometry, tokens: int, seed: int = 0) -> MoECall:
    """Draw a call. Experts of other ranks are among its ids, some ids are -1, and the first of several tokens has one route."""
    call = MoECall(*random_call(geometry, tokens, geometry.num_experts * geometry.ranks, seed=seed, dtype=geometry.dtype))
    if tokens > 1:
        call.ids[0, 1:] = call.ids[-1, -1] = -1
    return call


def expected(geometry: Geometry, tokens: int) -> torch.Tensor:
    result: torch.Tensor = reference_of(geometry, tokens=tokens).run(draw(geometry, tokens)).float()
    return result


def in_any_order(kernel_of: Callable[[int], CudaKernel], call: MoECall, orders: int) -> torch.Tensor:
    """Return the output, which has the same bits with few blocks, blocks that start late, and blocks that start after others.

    ``kernel_of``: from a number of blocks.
    """
    first = kernel_of(5).run(call)
    for seed in range(1, 1 + orders):
        blocks, resident = random.Random(seed).choice(((1, 1), (2, 1), (2, 2), (5, 1), (5, 2), (5, 5)))
        machine.order = Order.drawn(seed, resident)
        assert torch.equal(kernel_of(blocks).run(call), first), machine.order
    return first


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    emulator.stand_in(monkeypatch)
    monkeypatch.setattr(machine, "order", Order())


@pytest.fixture(autouse=True, scope="module")
def _compiles_ahead(request: pytest.FixtureRequest) -> None:
    """Compile on all cores what this run needs."""
    for item in request.session.items:
        params: dict[str, Any] = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if item.path == request.path and {"name", "tokens"} <= params.keys():
            emulator.begin(planned(ONE_TOKEN[params["name"]]), params["tokens"])
        elif item.path == request.path and "case" in params:
            geometry, tokens, blocks, _, rule = HANGS[params["case"]]
            emulator.begin(planned(geometry, blocks, *rule), tokens)
            emulator.begin(planned(geometry, blocks), tokens)
        elif item.path == request.path and "missing" in params:
            emulator.begin(planned(SMALL, 3, *MISSING[params["missing"]][0]), tokens_without(params["missing"]))


@pytest.mark.parametrize(
    ("name", "tokens"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.all) for pair in sorted(EVERY - set(QUICK)))]
)
def test_numbers(name: str, tokens: int) -> None:
    geometry = ONE_TOKEN[name]
    found = in_any_order(functools.partial(planned, geometry), draw(geometry, tokens), 6)
    assert found.dtype is geometry.dtype
    assert distance(found, expected(geometry, tokens)) < BOUND


def test_layers_are_what_their_names_say() -> None:
    """FC2's tasks of one token have 8 rows; stages of 2 tokens have 32 rows in FC1 and 16 in FC2."""
    sizes = {each.tokens: dict(each.sizes) for each in planned(ONE_TOKEN["many units"]).variants()}
    assert sizes[1]["NARROW"]
    assert (sizes[2]["HALVES1"], sizes[2]["HALVES2"]) == (2, 1)


OFTEN = ("NVFP4 of two ranks", "NVFP4 in uneven rows", "W4A16", "MXFP4 in odd rows", "MXFP8 in odd rows", "MXFP8 in tiles")


@pytest.mark.parametrize(
    ("layer", "tokens", "subnormals"),
    [
        *((name, 1, True) for name in ONE_TOKEN if name in OFTEN or name not in LAYERS),
        *(pytest.param(name, 1, True, marks=pytest.mark.all) for name in LAYERS if name not in OFTEN),
        *((name, 1, False) for name in ("NVFP4 float16", "MXFP4", "MXFP8")),
        *(("many units", 2, True), ("many units", 8, True), ("many units of MXFP8", 3, True)),
        *(("MXFP8", 2, False), ("NVFP4", 8, False), ("NVFP4 float16", 8, False)),
    ],
)
def test_few_tokens(layer: str, tokens: int, subnormals: bool) -> None:
    """Calls of few tokens as wide layers take them, also on tensor cores that take subnormals as zeros."""
    geometry = ONE_TOKEN[layer]
    found = in_any_order(
        lambda blocks: one_token(geometry, blocks, subnormals), draw(geometry, tokens), 4 if tokens == 1 and subnormals else 2
    )
    assert distance(found, expected(geometry, tokens)) < BOUND


@pytest.mark.parametrize("capacity", [1, 6])
def test_a_layer_for_few_tokens(capacity: int) -> None:
    """Its self-test is that of the calls that it may get."""
    geometry = LAYERS["NVFP4"]
    kind: Any = KERNELS["cuda", geometry.format][0]
    kernel = emulator.kernel_on_cpu(kind, geometry, weights_of(geometry), 5, capacity=capacity)
    results = kernel._test()
    assert results
    assert all(result.passed for result in results), results
    assert max(result.case.tokens for result in results if result.case.kernel == "cuda") == capacity


@pytest.mark.parametrize(("tokens", "size"), [(1, 2.0**58), (1, 2.0**68), (8, 2.0**58), (8, 2.0**80)])
def test_values_that_are_very_large(tokens: int, size: float) -> None:
    """x (one token) and h are multiplied by 2**60. From 2**68 on a token's sums are not finite; those of others are right."""
    geometry = ONE_TOKEN["many units"]
    call = draw(geometry, tokens)
    call.x[-1, 5] = size
    found, right = one_token(geometry).run(call).float(), reference_of(geometry, tokens=tokens).run(call).float()
    assert right.isfinite().all()
    if size < 2.0**67:
        assert distance(found[-1], right[-1]) < BOUND
    else:
        assert not found[-1].isfinite().any()
    assert tokens == 1 or distance(found[:-1], right[:-1]) < BOUND


@pytest.mark.parametrize(
    ("layer", "tokens", "byte"),
    [
        *((layer, 1, byte) for layer in ("many units", "many units of MXFP8") for byte in (0, 255)),
        *(("many units", 8, 255), ("many units of MXFP8", 3, 0), ("many units", 8, 0), ("many units of MXFP8", 3, 255)),
        *(("W4A16", tokens, 0x7F) for tokens in (1, 8, 9)),
        *(("W4A16", tokens, byte) for tokens, byte in ((8, 0xFF), (9, 0x80), (1, 0x81), (9, 0xB8), (8, 0xB8))),
    ],
)
def test_special_block_scales(layer: str, tokens: int, byte: int) -> None:
    """E8M0's smallest, 2**-127, and its NaN, in FC2 by slices; E4M3 that is NaN, minus zero or negative."""
    geometry = ONE_TOKEN[layer]
    call, scales = draw(geometry, tokens), weights_of(geometry).fc2_weight_sf.clone()
    rows = scales.view(torch.uint8).view(geometry.num_experts, geometry.hidden_size, -1)[int(call.ids[0, 0]), ::3]
    (rows[:, 5] if layer == "W4A16" else rows).fill_(byte)
    weights = replace(weights_of(geometry), fc2_weight_sf=scales)
    found, right = (
        each.run(call).float() for each in (one_token(geometry, weights=weights), reference_of(geometry, weights, tokens))
    )
    assert torch.equal(found.isnan(), right.isnan())
    assert found.isnan().any() == (byte & 0x7F == 0x7F)
    assert distance(found.nan_to_num(), right.nan_to_num()) < BOUND


@pytest.mark.parametrize("name", ["NVFP4", "MXFP8"])
def test_launches_of_two_streams(name: str) -> None:
    """A launch begins before the one ahead of it in its stream has ended. Others run beside it with workspaces of their own."""
    geometry = LAYERS[name]
    calls = {tokens: draw(geometry, tokens) for tokens in TOKENS}
    for seed in range(3):
        drawn, kernel, found = random.Random(seed), planned(geometry, 1 + seed % 3), []
        machine.order = Order.drawn(seed, drawn.choice((1, 3, 8)))
        with pytest.MonkeyPatch.context() as patch, machine.together():
            for stream in (1, 2):
                patch.setattr(machine, "stream", stream)
                for tokens in drawn.choices((*TOKENS, 9), k=4):
                    found.append((tokens, kernel.run(calls[tokens])))
        for tokens, result in found:
            assert distance(result, expected(geometry, tokens)) < BOUND, (machine.order, tokens)


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_routes_of_other_types(tokens: int) -> None:
    """Ids of 64 bits and router weights in bfloat16."""
    geometry = LAYERS["NVFP4 of two ranks"]
    call = draw(geometry, tokens)
    rounded = call._replace(router_weights=call.router_weights.bfloat16())
    first = planned(geometry).run(rounded._replace(router_weights=rounded.router_weights.float()))
    assert torch.equal(planned(geometry).run(rounded._replace(ids=call.ids.long())), first)


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4 float16"])
def test_input_that_arrives_quantized(name: str) -> None:
    geometry = LAYERS[name]
    kernel, reference = planned(geometry), reference_of(geometry, tokens=9)
    for tokens, swizzled in product((1, 3, 9), (True, False)):
        codes = torch.randint(256, (tokens, geometry.hidden_size // 2), dtype=torch.uint8)
        scales = torch.randint(0x28, 0x68, (tokens, geometry.hidden_size // 16), dtype=torch.uint8)
        tiles = interleaved(scales.unsqueeze(0)).permute(5, 2, 4, 0, 1, 3).contiguous() if swizzled else scales
        call = draw(geometry, tokens)._replace(x=codes, x_sf=tiles, swizzled=swizzled)
        for each in (kernel, one_token(geometry)) if tokens == 1 else (kernel,):
            assert distance(each.run(call), reference.run(call).float()) < BOUND, (tokens, swizzled)


@pytest.mark.parametrize("tokens", [3, 9])
def test_a_token_that_is_not_a_number(tokens: int) -> None:
    """Its own output is none, and the others have the bits that they have beside a number."""
    geometry = LAYERS["NVFP4"]
    call = draw(geometry, tokens)
    first = planned(geometry).run(call)
    call.x[1, 5] = torch.nan
    found = planned(geometry).run(call)
    others = [token for token in range(tokens) if token != 1]
    assert found[1].isnan().all()
    assert torch.equal(found[others], first[others])


# ---- faults are found ----------------------------------------------------------------------------------------------------


SMALL = Geometry(4, 4, 256, 128, "Silu", layout=WeightLayout(ROWS))
IDLE_WARPS_MOVE_ON = "slices.cuh", "if (units <= 0) stages.pass(number);", ""
ENTRIES_WAIT_FOR_READERS = "schedule.cuh", "if (task < ENTRIES) return;", "return;"
HANGS = {
    "a warp has no unit of FC2": (Geometry(4, 4, 640, 160, "Silu", layout=WeightLayout(ROWS)), 8, 3, 3, IDLE_WARPS_MOVE_ON),
    "one block has all tasks": (Geometry(8, 4, 128, 512, "Swiglu", layout=WeightLayout(ROWS)), 8, 8, 1, ENTRIES_WAIT_FOR_READERS),
}
"""Geometry, tokens, blocks, those that run at once, and the rule without which some order hangs."""


def one_route(geometry: Geometry, tokens: int, seed: int) -> MoECall:
    call, drawn = draw(geometry, tokens, seed), random.Random(seed)
    kept = torch.zeros(call.ids.shape, dtype=torch.bool)
    kept[drawn.randrange(tokens), drawn.randrange(geometry.top_k)] = True
    return call._replace(ids=torch.where(kept, call.ids, -1))


def hang(name: str, kernel: CudaKernel, orders: Sequence[int], clock_runs: bool = False) -> tuple[int, FaultError] | None:
    """Return the first order in which a launch hangs, or warps lose each other, and the error."""
    geometry, tokens, _, resident, rule = HANGS[name]
    for seed in orders:
        machine.order = replace(Order.drawn(seed, resident), races=False, clock_runs=clock_runs)
        try:
            kernel.run((one_route if rule is IDLE_WARPS_MOVE_ON else draw)(geometry, tokens, seed))
        except FaultError as error:
            kernel._plan.workspaces.clear()
            return seed, error
    return None


@pytest.mark.parametrize("case", HANGS)
def test_a_hang_is_found(case: str) -> None:
    """The source without a rule hangs in some order, again in the same one, and with the rule in none.

    If time passes, the kernel says how many tokens the launch had that did not end, and traps.
    """
    geometry, tokens, blocks, _, rule = HANGS[case]
    kernel = planned(geometry, blocks, *rule)
    found = hang(case, kernel, range(60))
    assert found is not None
    assert "(schedule.cuh:" in str(found[1]) or rule is ENTRIES_WAIT_FOR_READERS
    again = hang(case, kernel, [found[0]])
    assert again is not None
    assert str(again[1]) == str(found[1])
    assert hang(case, planned(geometry, blocks), range(found[0], found[0] + 6)) is None
    if rule is IDLE_WARPS_MOVE_ON:
        stopped = hang(case, kernel, [found[0]], clock_runs=True)
        assert stopped is not None
        assert isinstance(stopped[1], HangError)
        assert re.search(r"trap at .*schedule\.cuh", str(stopped[1]))
        assert kernel._plan.stuck.tolist() == [tokens]


BITS = "other bits"
MISSING = {
    "wait for copies": (("pipeline.cuh", "copy_wait<least - 1>();", ";"), "a thread ends before its copies have arrived"),
    "warp is together before copies": (("pipeline.cuh", "__syncwarp();\n    waiting--;", "waiting--;"), BITS),
    "warp is together behind copies": (("pipeline.cuh", "<1>();\n    __syncwarp();", "<1>();"), BITS),
    "copies end at the last column": (
        ("matrix.cuh", "BLOCKS1 = (STORED_HIDDEN + 127) / 128,", "BLOCKS1 = (STORED_HIDDEN + 127) / 128 + 64,"),
        "copy from outside of the layer's tensors at stage.cuh",
    ),
    "wait for products": (("sums.cuh", "barrier_wait(b.shared.full(buffer), parity);", ""), "a race: store_shared_float"),
    "wait for h": (("slices.cuh", "if (most != ~0u) break;", "break;"), BITS),
    "wait for h of a group": (("inputs.cuh", "if (most != ~0u) break;", "break;"), BITS),
    "wait for shares": (
        ("sums.cuh", "while (acquire_global(added) < (u32)(__popc(local) * TASKS2 * HALVES2)) __nanosleep(20);", ""),
        BITS,
    ),
    "barrier of factors": (("products.cuh", "named_barrier<1, WARPS * 32>();", ""), "a race: load_shared_float .*slices.cuh"),
    "wait for the launch ahead": (("layer.cu", "wait_for_launch_ahead();", ""), "nothing changes any more"),
    "next epoch": (("schedule.cuh", "b.workspace.epoch()[0] = epoch + 1;", ""), BITS),
}
"""What is taken out of the source, and how it shows in some order of three launches."""


def tokens_without(missing: str) -> int:
    return 9 if any(word in missing for word in ("shares", "ahead", "group")) else 8


@pytest.mark.parametrize("missing", MISSING)
def test_what_is_missing_shows(missing: str) -> None:
    rule, shows = MISSING[missing]
    blocks = 24 if "factors" in missing else 3  # with few tasks a block nothing else orders them
    tokens, kernel, seen = tokens_without(missing), planned(SMALL, blocks, *rule), set()
    calls = [draw(SMALL, tokens, seed) for seed in range(3)]
    right = [planned(SMALL, 3).run(call) for call in calls]
    for seed in range(40):
        machine.order = Order.drawn(seed, blocks)
        try:
            with machine.together():
                found = [kernel.run(call) for call in calls]
            seen.add("" if all(map(torch.equal, found, right)) else BITS)
        except FaultError as error:
            kernel._plan.workspaces.clear()
            seen.add(str(error))
        if any(re.search(shows, each) for each in seen):
            return
    pytest.fail(f"{shows} in no order of 40, but {seen}")


# ---- numbers -------------------------------------------------------------------------------------------------------------


DECODE = """#include "numbers.cuh"
extern "C" void decode(const u32* words, u32 scales, u32* pairs) {
  Rows rows;
  for (int i = 0; i < 4 * LOADS; i++) (&rows.codes[i / 4].x)[i % 4] = words[i];
  rows.scales = scales;
  for (int i = 0; i < 4; i++) decode_part<FLOAT16>(rows, i, pairs + 4 * i);
}
"""
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@functools.cache
def decoder(geometry: Geometry) -> Any:
    return emulator.loaded(emulator.library(planned(geometry).variants()[0].files(), DECODE)).decode


def decoded(geometry: Geometry, codes: list[int], byte: int) -> torch.Tensor:
    """Decode 32 codes with one block scale, to float64 in the order of the columns."""
    bits, columns = (8, 4) if geometry.format == "MXFP8" else (4, 8)  # of a code; columns of a word
    words = [sum(codes[i + j] << bits * j for j in range(columns)) for i in range(0, 32, columns)]
    given, pairs = (ctypes.c_uint32 * 8)(*words), (ctypes.c_uint32 * 16)()
    decoder(geometry)(given, byte | byte << 8 if geometry.format != "MXFP4" else byte, pairs)
    halves = torch.tensor([pair >> shift & 0xFFFF for pair in pairs for shift in (0, 16)]).to(torch.uint16)
    # Pair i of a word has columns i and i + half.
    order = [
        columns * word + place for word in range(32 // columns) for i in range(columns // 2) for place in (i, i + columns // 2)
    ]
    result = torch.empty(32, dtype=torch.float64)
    result[order] = halves.view(geometry.dtype).double()
    return result


def value_of_e4m3(byte: int) -> float:
    return float(torch.tensor([byte], dtype=torch.uint8).view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", ["NVFP4", "NVFP4 float16", "MXFP4"])
def test_every_code_and_scale_of_fp4(name: str) -> None:
    """The value, 2**-8 times as large; of E4M3 scales exactly, negative ones and NaN too.

    E8M0 scales above ``LARGEST_SCALE`` are not finite, and 255 is NaN.
    """
    signed = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)] * 2, dtype=torch.float64)
    for byte in range(256):
        found = decoded(LAYERS[name], [*range(16)] * 2, byte)
        if name != "MXFP4":
            assert torch.equal(found.nan_to_num(1e9), (signed * value_of_e4m3(byte) / 256).nan_to_num(1e9)), byte
        elif byte <= LARGEST_SCALE:
            assert torch.equal(found, (signed * 2.0 ** (byte - 127 - 8)).float().bfloat16().double()), byte
        else:
            assert not found.isfinite().any(), byte
            assert byte < 255 or found.isnan().all()


def test_every_code_and_scale_of_mxfp8() -> None:
    """The value in bfloat16; 255 is NaN. No weight is E4M3's NaN: checkpoints that hold one are refused."""
    for first in range(0, 256, 32):
        codes = [*range(first, first + 32)]
        values = torch.tensor([value_of_e4m3(code) for code in codes], dtype=torch.float64)
        usable = ~values.isnan()
        for byte in range(256):
            found = decoded(LAYERS["MXFP8"], codes, byte)
            exact = (values * 2.0 ** (byte - 127)).float().bfloat16().double()
            assert found.isnan().all() if byte == 255 else torch.equal(found[usable], exact[usable]), byte


ARITHMETIC = """#include "ptx.cuh"
extern "C" void arithmetic(const u32* a, u32* results) {
  results[0] = fma_bf16x2(a[0], a[1], a[2]);
  results[1] = mul_f16x2(a[0], a[1]);
  results[2] = to_bf16x2(bits_of<float>(a[0]));
  results[3] = to_bf16(bits_of<float>(a[0])) | (u32)to_f16(bits_of<float>(a[0])) << 16;
}
"""


def test_arithmetic_of_the_emulator() -> None:
    """Pairs of 16-bit numbers, subnormal ones and those of any size, against fractions; conversions against PyTorch."""
    arithmetic = emulator.loaded(emulator.library({"ptx.cuh": ""}, ARITHMETIC)).arithmetic
    drawn, results = random.Random(0), (ctypes.c_uint32 * 4)()

    def value(bits: int, dtype: torch.dtype) -> float:
        return float(torch.tensor([bits], dtype=torch.uint16).view(dtype))

    def nearest(exact: Fraction, dtype: torch.dtype) -> set[int]:
        """Return the bits of the nearest number that is even, found among neighbors. Both zeros are alike."""
        close = torch.tensor([float(exact)], dtype=torch.float64).to(dtype).view(torch.int16).tolist()[0] & 0xFFFF
        near = [bits for bits in (close - 1, close, close + 1) if 0 <= bits < 0x10000 and math.isfinite(value(bits, dtype))]
        found = min(near, key=lambda bits: (abs(Fraction(value(bits, dtype)) - exact), bits & 1))
        return {found, found ^ 0x8000} if found & 0x7FFF == 0 else {found}

    checked = 0
    for number in range(3000):
        small = number % 2  # exponents close to each other, or any
        a, b, c = (drawn.getrandbits(16) & (0x8FFF if small else 0xFFFF) | (0x3000 if small else 0) for _ in range(3))
        arithmetic((ctypes.c_uint32 * 3)(a, b, c), results)
        x, y, z = (value(bits, BF16) for bits in (a, b, c))
        if all(map(math.isfinite, (x, y, z))) and abs(x * y + z) < 3e38:
            assert results[0] & 0xFFFF in nearest(Fraction(x) * Fraction(y) + Fraction(z), BF16), (a, b, c)
            checked += 1
        x, y = value(a, F16), value(b, F16)
        if math.isfinite(x) and math.isfinite(y):
            exact = Fraction(x) * Fraction(y)
            if abs(exact) < 65504:
                assert results[1] & 0xFFFF in nearest(exact, F16), (a, b)
    assert checked > 1500
    for value_ in (0.0, -0.0, 1 / 3, 1e-7, -6e-8, 65519.9, 65520.0, 3.4e38, 1e-40, math.inf, math.nan):
        arithmetic((ctypes.c_uint32 * 3)(*struct.unpack("I", struct.pack("f", value_)), 0, 0), results)
        for dtype, bits in (
            (BF16, results[2] & 0xFFFF),
            (BF16, results[2] >> 16),
            (BF16, results[3] & 0xFFFF),
            (F16, results[3] >> 16),
        ):
            expected_ = torch.tensor([value_]).to(dtype).view(torch.int16).tolist()[0] & 0xFFFF
            assert bits == (0x7FFF if math.isnan(value_) else expected_), (value_, dtype)


@pytest.mark.parametrize("before", ["", FLUSHES])
def test_the_probe_of_subnormals(before: str) -> None:
    """The emulator keeps them, as Hopper does; without them the probe says so."""
    module = emulator.Module(PROBE.files(), before + emulator.main_of("probe.cu", "probe"))
    function: Any = emulator.Function(module, "probe")
    assert right(function, torch.device("cpu"), machine.stream) == (before == "")


def test_every_instruction_is_emulated() -> None:
    """The two files have the same functions."""
    names = re.compile(r"^(?:(?:DEVICE|inline) [\w ]+?[ &*]+|(?:LOAD|LOAD_16|STORE|CONVERT|TEST)\()(\w+)[(,)]", re.M)
    kernel, emulated = (
        set(names.findall(text)) for text in (variant.sources()["ptx.cuh"], (emulator.FOLDER / "ptx.cuh").read_text())
    )
    assert len(kernel) > 35
    assert kernel - emulated - {"time_in_ms"} == set()


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match="needs a C\\+\\+ compiler: no-such-compiler is not installed"):
        emulator.compiler()
