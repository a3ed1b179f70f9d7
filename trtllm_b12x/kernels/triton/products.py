"""The two products: FC1 with its activation, FC2 with the weighted sum over a token's routes.

Sums are float32 in a fixed order: no float is added atomically, a route's results depend on nothing but its own token, and the
last program to finish a token's columns adds its routes up in the order of ``top_k``.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from .operands import (
    FP4,
    INTERPRETED,
    SCALE,
    added,
    dot,
    loaded,
    matrix,
    own_columns,
    places,
    rows_of,
    scale_offsets,
    split_inputs,
)
from .routing import localized, own_block, route_kernel, start_token

SWIGLU = tl.constexpr(0)
SWIGLU_BIAS = tl.constexpr(1)
GEGLU = tl.constexpr(2)
RELU2 = tl.constexpr(3)
SILU = tl.constexpr(4)
GELU = tl.constexpr(5)


@triton.jit
def activate(fc1, gate, alpha, beta, limit, ACTIVATION: tl.constexpr):
    """float32; ``fc1`` is up's half where there is a ``gate``."""
    if ACTIVATION == SWIGLU:
        return gate / (1 + tl.exp(-gate)) * fc1
    if ACTIVATION == SWIGLU_BIAS:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        fc1 = tl.where(fc1 > limit, limit, tl.where(fc1 < -limit, -limit, fc1))
        return gate / (1 + tl.exp(-alpha * gate)) * (fc1 + beta)
    if ACTIVATION == GEGLU:
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * fc1
    if ACTIVATION == RELU2:
        positive = tl.where(fc1 < 0, 0.0, fc1)
        return positive * positive
    if ACTIVATION == SILU:
        return fc1 / (1 + tl.exp(-fc1))
    return 0.5 * fc1 * (1 + tl.erf(fc1 * 0.7071067811865476))


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """float32 to a 16-bit float, to the nearest; Triton's interpreter cuts bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "experts", "step"],
    do_not_specialize_on_alignment=[
        "ids",
        "scales",
        "bias",
        "alpha",
        "input_scale",
        "up_to_gate",
        "swiglu_alpha",
        "swiglu_beta",
        "swiglu_limit",
    ],
)
def fc1_kernel(
    x, weight, block_scales, alpha, input_scale, up_to_gate, bias, swiglu_alpha, swiglu_beta, swiglu_limit, ids, scales, out, h,
    workspace, tokens, blocks, first, experts, step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    SORTED: tl.constexpr, ROUTES: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of ``BN`` columns of the intermediate size, by blocks of routes (SORTED) or routes (at most ``ROUTES``).

    ``h (routes, SIZE)`` bfloat16 whatever x is: float16 has no room for every product of gate and up.

    A tensor core instruction has eight columns, whether they are used or not.  Where a block is one route (BM 1), H is cut into
    SPLIT stretches: the rows of the product are the tile's, once for each stretch, its columns the input's stretches, of which
    each row keeps its own.  So more warps read at a time.

    Args:
        x: ``(tokens, H)`` bfloat16 or float16.
        weight: int32 words of ``(E, r * SIZE, H)`` codes, WORD in each, r = 2 with GATED (rows [up; gate]).
        alpha: ``(E,)`` float32, ``weight_scale_2`` times input scale; like the next two of NVFP4 alone.
        input_scale: float32, the reciprocal of that scale, of expert ``e`` at ``e * step``; 1 where x is in units of it.
        up_to_gate: ``(E,)`` float32, up's ``weight_scale_2`` over gate's.
        bias: with BIAS, ``(E, r * SIZE)``.
        ids, scales: without SORTED, ``(tokens, TOP_K)`` int32 global ids and float32; with it the workspace's.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    routes = tokens * TOP_K
    width: tl.constexpr = BM if BM > 8 else 8
    m = tl.arange(0, width)
    if SORTED:
        order = workspace + tokens * TILES + 2 * routes
        entry = order + routes + slot * 3
        n = tl.load(entry + 2)
        if n == 0:
            return
        expert = tl.load(entry)
        route = tl.load(order + tl.load(entry + 1) + m, mask=m < n, other=0)
        one = tl.load(order + tl.load(entry + 1))
    else:
        if (tile == 0) & (slot % TOP_K == 0):
            start_token(slot // TOP_K, ids, out, workspace, first, experts, H, TOP_K, SLOTS, TILES, BLOCK)
        expert, n, route = own_block(ids, slot, routes, first, experts, BM, width, ROUTES)
        one = slot
        if expert < 0:
            return
    e = expert.to(tl.int64)
    columns: tl.constexpr = 512 // WORD
    halves: tl.constexpr = 2 if GATED else 1
    stretch: tl.constexpr = (H + SPLIT * BK - 1) // (SPLIT * BK) * BK
    whole: tl.constexpr = H % (SPLIT * BK) == 0
    dtype: tl.constexpr = x.dtype.element_ty
    rows = rows_of(tile, BN, SIZE, SPLIT)
    there = rows < SIZE
    part = tl.arange(0, SPLIT * BN) // BN
    weight += e * (halves * SIZE * (H // WORD))
    block_scales += e * ((halves * SIZE + 127) // 128 * ((H + columns - 1) // columns) * 512)
    words = rows[:, None] * (H // WORD) + tl.arange(0, BK // WORD)[None, :]
    up_scales = scale_offsets(tile, 0, BN, BK, SIZE, H, SPLIT, WORD)
    gate_scales = scale_offsets(tile, 1, BN, BK, SIZE, H, SPLIT, WORD)
    if SPLIT > 1:
        words += (part * (stretch // WORD))[:, None]
        up_scales += (part * (stretch * WORD))[:, None]
        gate_scales += (part * (stretch * WORD))[:, None]
    if BM == 1:
        x += one // TOP_K * H
        offsets, given, column = places(m * stretch, SPLIT, width, BK, WORD)
        column = offsets
    else:
        offsets, given, column = places(route // TOP_K * H, n, width, BK, WORD)
    up = tl.zeros((SPLIT * BN, width), tl.float32)
    gate = tl.zeros((SPLIT * BN, width), tl.float32)
    for k in range(0, stretch, BK):
        operands = split_inputs(loaded(x, offsets, given, column, k, H, whole), width, BK, WORD)
        w = matrix(
            weight, block_scales, words, up_scales, k, part, there, SPLIT, stretch, SPLIT * BN, BK, H, SIZE % BN == 0, whole,
            WORD, dtype, PTX,
        )  # fmt: skip
        up = dot(w, operands, up, WORD)
        if GATED:
            half = weight + SIZE * (H // WORD)
            w = matrix(
                half, block_scales, words, gate_scales, k, part, there, SPLIT, stretch, SPLIT * BN, BK, H, SIZE % BN == 0, whole,
                WORD, dtype, PTX,
            )  # fmt: skip
            gate = dot(w, operands, gate, WORD)
    rows = rows_of(tile, BN, SIZE, 1)
    there = rows < SIZE
    if BM == 1:
        up = added(own_columns(up, SPLIT, BN), SPLIT, BN)
        gate = added(own_columns(gate, SPLIT, BN), SPLIT, BN)
    if WORD == FP4:
        factor = tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
        gate = gate * factor
        up = up * factor
        if GATED:
            up *= tl.load(up_to_gate + e)
    if BIAS:
        up += _along(tl.load(bias + e * (halves * SIZE) + rows, mask=there, other=0).to(tl.float32), BM)
        if GATED:
            gate += _along(tl.load(bias + e * (halves * SIZE) + SIZE + rows, mask=there, other=0).to(tl.float32), BM)
    if ACTIVATION == SWIGLU_BIAS:
        result = activate(up, gate, tl.load(swiglu_alpha + e), tl.load(swiglu_beta + e), tl.load(swiglu_limit + e), ACTIVATION)
    else:
        result = activate(up, gate, 1.0, 0.0, 0.0, ACTIVATION)
    result = rounded(result, tl.bfloat16)
    if BM == 1:
        tl.store(h + one * SIZE + rows, result, mask=there)
    else:
        tl.store(h + route[None, :] * SIZE + rows[:, None], result, mask=there[:, None] & (m < n)[None, :])


@triton.jit
def _along(values, BM: tl.constexpr):
    """A value of each row, as sums have them: of one route, or of the routes of a block."""
    if BM != 1:
        values = values[:, None]
    return values


@triton.jit
def _prefetch(addresses):
    """Lines of 128 bytes into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _scales_of(scales, local_ids, routes, route, there, SORTED: tl.constexpr):
    if SORTED:
        found = tl.load(local_ids + routes + route, mask=there, other=0).to(tl.float32, bitcast=True)
    else:
        found = tl.load(scales + route, mask=there, other=0.0)
    return found


@triton.jit
def _held(local_ids, at, there, first, experts, SORTED: tl.constexpr):
    """Whether the routes ``at`` are to experts of this rank."""
    local = tl.load(local_ids + at, mask=there, other=-1)
    if not SORTED:
        local = localized(local, first, experts)
    return local >= 0


@triton.jit
def _share_of_one(
    sums, scales, local_ids, out, partial, workspace, route, tile, rows, routes, first, experts, H: tl.constexpr,
    TOP_K: tl.constexpr, TILES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """``sums (BN,)`` of one route to its share, or to the token's result if no other is missing."""
    there = rows < H
    token = route // TOP_K
    sums *= _scales_of(scales, local_ids, routes, route, route >= 0, SORTED)
    tl.store(partial + route * H + rows, sums, mask=there)
    slots: tl.constexpr = triton.next_power_of_2(TOP_K)
    k = tl.arange(0, slots)
    expected = tl.sum(_held(local_ids, token * TOP_K + k, k < TOP_K, first, experts, SORTED).to(tl.int32), axis=0)
    tl.debug_barrier()
    before = tl.atomic_add(workspace + token * TILES + tile, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == expected - 1:
        total = tl.zeros_like(sums)
        for place in tl.static_range(TOP_K):
            other = token * TOP_K + place
            end = tl.where(_held(local_ids, other, other >= 0, first, experts, SORTED), H, 0)
            total += tl.load(partial + other * H + rows, mask=rows < end, other=0.0, cache_modifier=".cg")
        tl.store(out + token * H + rows, rounded(total, out.dtype.element_ty), mask=there)


@triton.jit
def _shares(
    sums, scales, local_ids, out, partial, workspace, route, given, tile, rows, routes, first, experts, H: tl.constexpr,
    TOP_K: tl.constexpr, TILES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """``sums (BN, routes)`` of one expert's to their shares, and to results of tokens of which no other is missing."""
    there = rows < H
    token = route // TOP_K
    sums *= _scales_of(scales, local_ids, routes, route, given, SORTED)[None, :]
    tl.store(partial + route[None, :] * H + rows[:, None], sums, mask=there[:, None] & given[None, :])
    expected = tl.zeros_like(token)
    for k in tl.static_range(TOP_K):
        expected += _held(local_ids, token * TOP_K + k, given, first, experts, SORTED).to(tl.int32)
    tl.debug_barrier()
    before = tl.atomic_add(workspace + token * TILES + tile, token * 0 + 1, mask=given, sem="acq_rel")
    last = given & (before == expected - 1)
    tl.debug_barrier()
    if tl.max(last.to(tl.int32), axis=0) > 0:
        total = tl.zeros_like(sums)
        for k in tl.static_range(TOP_K):
            held = there[:, None] & _held(local_ids, token * TOP_K + k, last, first, experts, SORTED)[None, :]
            share = partial + (token * TOP_K + k)[None, :] * H + rows[:, None]
            total += tl.load(share, mask=held, other=0.0, cache_modifier=".cg")
        tl.store(
            out + token[None, :] * H + rows[:, None], rounded(total, out.dtype.element_ty), mask=there[:, None] & last[None, :]
        )


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "experts", "step"],
    do_not_specialize_on_alignment=["ids", "scales", "bias", "alpha", "input_scale"],
)
def fc2_kernel(
    h, weight, block_scales, alpha, input_scale, bias, ids, scales, out, partial, workspace, tokens, blocks, first, experts, step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, ROUTES: tl.constexpr, WORD: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: ``TILES`` tiles of ``BN`` columns of the hidden size, by blocks or routes as :func:`fc1_kernel`; so is SPLIT.

    ``partial (routes, H)`` float32: each route's share.  Programs that finish a token's columns count; the last adds them up.

    Args:
        h: ``(routes, SIZE)`` bfloat16.
        weight: int32 words of ``(E, H, SIZE)`` codes.
        alpha, input_scale: as :func:`fc1_kernel`.
        bias: with BIAS, ``(E, H)``.
        out: ``(tokens, H)``.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    routes = tokens * TOP_K
    width: tl.constexpr = BM if BM > 8 else 8
    m = tl.arange(0, width)
    # The routes are an earlier kernel's than the one before, which has waited for it: they are there already.
    if SORTED:
        local_ids = workspace + tokens * TILES
        order = local_ids + 2 * routes
        entry = order + routes + slot * 3
        n = tl.load(entry + 2)
        expert = tl.where(n == 0, -1, tl.load(entry, mask=n > 0, other=0))
        place = tl.load(entry + 1, mask=n > 0, other=0)
        route = tl.load(order + place + m, mask=m < n, other=0)
        one = tl.load(order + place, mask=n > 0, other=0)
    else:
        local_ids = ids
        expert, n, route = own_block(ids, slot, routes, first, experts, BM, width, ROUTES)
        one = slot
    rows = rows_of(tile, BN, H, 1)
    there = rows < H
    e = tl.maximum(expert, 0).to(tl.int64)
    columns: tl.constexpr = 512 // WORD
    weight += e * (H * (SIZE // WORD))
    block_scales += e * ((H + 127) // 128 * ((SIZE + columns - 1) // columns) * 512)
    if PDL:
        if expert >= 0:
            lines: tl.constexpr = triton.next_power_of_2((SIZE + 32 * WORD - 1) // (32 * WORD))
            line = tl.arange(0, lines)
            _prefetch(weight + rows[:, None] * (SIZE // WORD) + tl.minimum(line * 32, SIZE // WORD - 1)[None, :])
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if expert < 0:
        return
    stretch: tl.constexpr = (SIZE + SPLIT * BK - 1) // (SPLIT * BK) * BK
    whole: tl.constexpr = SIZE % (SPLIT * BK) == 0
    part = tl.arange(0, SPLIT * BN) // BN
    copies = rows_of(tile, BN, H, SPLIT)
    words = copies[:, None] * (SIZE // WORD) + tl.arange(0, BK // WORD)[None, :]
    offsets = scale_offsets(tile, 0, BN, BK, H, SIZE, SPLIT, WORD)
    if SPLIT > 1:
        words += (part * (stretch // WORD))[:, None]
        offsets += (part * (stretch * WORD))[:, None]
    if BM == 1:
        inputs, given, column = places(m * stretch, SPLIT, width, BK, WORD)
        column = inputs
        h += one * SIZE
    else:
        inputs, given, column = places(route * SIZE, n, width, BK, WORD)
    sums = tl.zeros((SPLIT * BN, width), tl.float32)
    for k in range(0, stretch, BK):
        hs = split_inputs(loaded(h, inputs, given, column, k, SIZE, whole), width, BK, WORD)
        w = matrix(
            weight, block_scales, words, offsets, k, part, copies < H, SPLIT, stretch, SPLIT * BN, BK, SIZE, H % BN == 0, whole,
            WORD, tl.bfloat16, PTX,
        )  # fmt: skip
        sums = dot(w, hs, sums, WORD)
    if BM == 1:
        sums = added(own_columns(sums, SPLIT, BN), SPLIT, BN)
    if WORD == FP4:
        sums *= tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
    if BIAS:
        sums += _along(tl.load(bias + e * H + rows, mask=there, other=0).to(tl.float32), BM)
    if BM == 1:
        _share_of_one(
            sums, scales, local_ids, out, partial, workspace, one, tile, rows, routes, first, experts, H, TOP_K, TILES, SORTED
        )
    else:
        _shares(
            sums, scales, local_ids, out, partial, workspace, route, m < n, tile, rows, routes, first, experts, H, TOP_K, TILES,
            SORTED,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "experts", "step"],
    do_not_specialize_on_alignment=["ids", "scales", "bias", "alpha", "input_scale"],
)
def fc2_token_kernel(
    h, weight, block_scales, alpha, input_scale, bias, ids, scales, out, partial, workspace, tokens, blocks, first, experts, step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
    WORD: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All routes of a token, at most eight, each with its own expert; arguments as :func:`fc2_kernel`.

    Grid: tiles of ``BN`` columns of the hidden size, by tokens.  The rows of eight experts are one product's rows and the routes
    its columns, of which each row keeps its own expert's: a tensor core instruction has eight columns whether they are used or
    not, and nothing is left to add between programs.
    """
    tile, token = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, 8)
    part = tl.arange(0, 8 * BN) // BN
    routed = part < TOP_K
    route = token * TOP_K + part
    expert = localized(tl.load(ids + route, mask=routed, other=-1), first, experts)
    e = tl.maximum(expert, 0).to(tl.int64)
    rows = rows_of(tile, BN, H, 8)
    there = (rows < H) & (expert >= 0)
    columns: tl.constexpr = 512 // WORD
    starts = e * (H * (SIZE // WORD)) + rows * (SIZE // WORD)
    if PDL:
        lines: tl.constexpr = triton.next_power_of_2((SIZE + 32 * WORD - 1) // (32 * WORD))
        line = tl.arange(0, lines)
        _prefetch((weight + starts)[:, None] + tl.minimum(line * 32, SIZE // WORD - 1)[None, :])
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    words = starts[:, None] + tl.arange(0, BK // WORD)[None, :]
    factors = e * ((H + 127) // 128 * ((SIZE + columns - 1) // columns) * 512)
    factors = factors[:, None] + scale_offsets(tile, 0, BN, BK, H, SIZE, 8, WORD)
    inputs, given, column = places((token * TOP_K + m) * SIZE, TOP_K, 8, BK, WORD)
    sums = tl.zeros((8 * BN, 8), tl.float32)
    whole: tl.constexpr = SIZE % BK == 0
    for k in range(0, SIZE, BK):
        hs = split_inputs(loaded(h, inputs, given, column, k, SIZE, whole), 8, BK, WORD)
        w = matrix(
            weight, block_scales, words, factors, k, part, there, 1, SIZE, 8 * BN, BK, SIZE, False, whole, WORD, tl.bfloat16, PTX
        )
        sums = dot(w, hs, sums, WORD)
    shares = own_columns(sums, 8, BN)
    if WORD == FP4:
        shares *= tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
    if BIAS:
        shares += tl.load(bias + e * H + rows, mask=there, other=0).to(tl.float32)
    shares *= tl.load(scales + route, mask=routed, other=0.0)
    total = added(tl.where(there, shares, 0.0), 8, BN)
    rows = rows_of(tile, BN, H, 1)
    tl.store(out + token * H + rows, rounded(total, out.dtype.element_ty), mask=rows < H)


for _kernel in (route_kernel, fc1_kernel, fc2_kernel, fc2_token_kernel):
    # Triton before 3.8 makes other keys of its cache for kernels that are hashed in another order (``DependenciesFinder``).
    getattr(_kernel, "cache_key", None)
