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

from .epilogues import activate, along, half_alphas, share_of_one, shares_of_block
from .numerics import rounded
from .operands import FP4, NVFP4_GROUP, SCALE, added, dot, loaded, matrix, own_columns, places, split_inputs
from .routing import listed_block, localized, own_block, route_kernel, start_token
from .scales import first_scale, rows_of, scale_bytes, scale_offsets

_SIZES = ["tokens", "blocks", "first", "experts", "step"]
_ANYWHERE = ["ids", "router_weights", "bias", "alpha", "input_scale", "half_alpha", "swiglu_alpha", "swiglu_beta", "swiglu_limit"]
"""Arguments at addresses that need not be multiples of 16."""


UP_GATE = tl.constexpr(0)
GATE_UP = tl.constexpr(1)
BY_TURNS = tl.constexpr(2)
"""Orders of FC1's rows, as ``trtllm_b12x.formats`` names them."""


@triton.jit
def _products(
    x, weight, weight_sf, e, tile, row, one, n, X: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HEIGHT: tl.constexpr,
    HALVES: tl.constexpr, ORDER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    WORD: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """``BN`` rows of expert ``e``'s matrix, of each of its HALVES, times inputs: ``(BN, routes)``, or ``(BN,)`` where BM is 1.

    A tensor core instruction has eight columns, whether they are used or not. Where a block is one route (BM 1), K is cut into
    SPLIT stretches: the rows of the product are the tile's, once for each stretch, its columns the input's stretches, of which
    each row keeps its own. So more warps read at a time.

    Args:
        x: rows of X columns, at most K.
        row: of ``x``, for each of the ``n`` routes; ``one``: for the only one.
        N: rows of a half.
        K: columns of the matrix, padding included, of HEIGHT rows.
        ORDER: of the halves' rows.
    """
    width: tl.constexpr = row.shape[0]
    stretch: tl.constexpr = (K + SPLIT * BK - 1) // (SPLIT * BK) * BK
    whole: tl.constexpr = K % (SPLIT * BK) == 0
    step: tl.constexpr = 2 if HALVES == 2 and ORDER == BY_TURNS else 1
    second: tl.constexpr = 1 if ORDER == BY_TURNS else N
    up_row: tl.constexpr = second if HALVES == 2 and ORDER != UP_GATE else 0
    gate_row: tl.constexpr = second - up_row
    rows = rows_of(tile, BN, N, SPLIT, LINEAR)
    inside = rows < N
    part = tl.arange(0, SPLIT * BN) // BN
    weight += e * (HEIGHT * (K // WORD))
    weight_sf += e * scale_bytes(HEIGHT, K, GROUP, LINEAR)
    words = rows[:, None] * (step * (K // WORD)) + tl.arange(0, BK // WORD)[None, :]
    up_sf_offsets = scale_offsets(tile, up_row, BN, BK, N, K, SPLIT, GROUP, LINEAR, step)
    gate_sf_offsets = scale_offsets(tile, gate_row, BN, BK, N, K, SPLIT, GROUP, LINEAR, step)
    up_sf = weight_sf + first_scale(tile, up_row, BN, N, K, GROUP, LINEAR, step)
    gate_sf = weight_sf + first_scale(tile, gate_row, BN, N, K, GROUP, LINEAR, step)
    if SPLIT > 1:
        words += (part * (stretch // WORD))[:, None]
        length: tl.constexpr = stretch // GROUP if LINEAR else stretch * 128 // GROUP
        up_sf_offsets += (part * length)[:, None]
        gate_sf_offsets += (part * length)[:, None]
    if BM == 1:
        x += one * X
        offsets, present, column = places(tl.arange(0, width) * stretch, SPLIT, width, BK, WORD)
        column = offsets
    else:
        offsets, present, column = places(row * X, n, width, BK, WORD)
    up = tl.zeros((SPLIT * BN, width), tl.float32)
    gate = tl.zeros((SPLIT * BN, width), tl.float32)
    for k in range(0, stretch, BK):
        operands = split_inputs(loaded(x, offsets, present, column, k, X, whole and X == K), width, BK, WORD)
        w = matrix(
            weight + up_row * (K // WORD), up_sf, words, up_sf_offsets, k, part, inside, SPLIT, stretch, SPLIT * BN, BK, K,
            N % BN == 0, whole, WORD, GROUP, LINEAR, dtype, PTX,
        )  # fmt: skip
        up = dot(w, operands, up, WORD)
        if HALVES == 2:
            w = matrix(
                weight + gate_row * (K // WORD), gate_sf, words, gate_sf_offsets, k, part, inside, SPLIT, stretch, SPLIT * BN, BK,
                K, N % BN == 0, whole, WORD, GROUP, LINEAR, dtype, PTX,
            )  # fmt: skip
            gate = dot(w, operands, gate, WORD)
    if BM == 1:
        up = added(own_columns(up, SPLIT, BN), SPLIT, BN)
        gate = added(own_columns(gate, SPLIT, BN), SPLIT, BN)
    return up, gate


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def fc1_kernel(
    x, weight, weight_sf, alpha, input_scale, half_alpha, bias, swiglu_alpha, swiglu_beta, swiglu_limit, ids, router_weights, out,
    h, workspace, tokens, blocks, first, experts, step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    SORTED: tl.constexpr, ROUTES: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, ORDER: tl.constexpr,
    WORD: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of ``BN`` columns of the intermediate size, by blocks of routes (SORTED) or routes (at most ``ROUTES``).

    ``h (routes, SIZE)`` bfloat16 whatever x is: float16 has no room for every product of gate and up.

    Args:
        x: ``(tokens, H)`` bfloat16 or float16.
        weight: int32 words of ``(E, r * SIZE, PADDED)`` codes, WORD in each, r = 2 with GATED (rows in ORDER).
        alpha: ``(E,)`` float32, ``weight_scale_2`` times input scale; like the next two of NVFP4 alone.
        input_scale: float32, the reciprocal of that scale, of expert ``e`` at ``e * step``; 1 where x is in units of it.
        half_alpha: with GATED, ``(2, E)`` float32, the alphas of up and gate (``half_alphas``).
        bias: with BIAS, ``(E, r * SIZE)``.
        ids, router_weights: without SORTED, ``(tokens, TOP_K)`` int32 global ids and float32; with it the workspace's.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    routes = tokens * TOP_K
    width: tl.constexpr = BM if BM > 8 else 8
    m = tl.arange(0, width)
    if SORTED:
        expert, n, route, one = listed_block(workspace, tokens, routes, blocks, slot, TILES, BM, width)
    else:
        if (tile == 0) & (slot % TOP_K == 0):
            start_token(slot // TOP_K, tokens, ids, out, workspace, first, experts, H, TOP_K, SLOTS, TILES, BLOCK)
        expert, n, route = own_block(ids, slot, routes, first, experts, BM, width, ROUTES)
        one = slot
    if expert < 0:
        return
    e = expert.to(tl.int64)
    own_alpha = 1.0
    if GROUP == NVFP4_GROUP:
        own_alpha = tl.load(alpha + e)  # of the end; asked for there, ptxas spills at gemma-4's sizes
    halves: tl.constexpr = 2 if GATED else 1
    up, gate = _products(
        x, weight, weight_sf, e, tile, route // TOP_K, one // TOP_K, n, H, SIZE, PADDED, halves * SIZE, halves, ORDER, BM, BN, BK,
        SPLIT, WORD, GROUP, LINEAR, x.dtype.element_ty, PTX,
    )  # fmt: skip
    rows = rows_of(tile, BN, SIZE, 1, LINEAR)
    there = rows < SIZE
    if GROUP == NVFP4_GROUP:
        scale = tl.load(input_scale + e * step)
        if GATED:
            up_alpha, gate_alpha = half_alphas(half_alpha, own_alpha, e, experts)
            up *= up_alpha * SCALE * scale
            gate *= gate_alpha * SCALE * scale
        else:
            up *= own_alpha * SCALE * scale
    elif WORD == FP4:
        up *= SCALE
        gate *= SCALE
    if BIAS:
        turns: tl.constexpr = 2 if GATED and ORDER == BY_TURNS else 1
        second: tl.constexpr = 1 if ORDER == BY_TURNS else SIZE
        up_row: tl.constexpr = second if GATED and ORDER != UP_GATE else 0
        bias += e * (halves * SIZE) + rows * turns
        up += along(tl.load(bias + up_row, mask=there, other=0).to(tl.float32), BM)
        if GATED:
            gate += along(tl.load(bias + (second - up_row), mask=there, other=0).to(tl.float32), BM)
    result = activate(up, gate, swiglu_alpha + e, swiglu_beta + e, swiglu_limit + e, ACTIVATION)
    result = rounded(result, tl.bfloat16)
    if BM == 1:
        tl.store(h + one * SIZE + rows, result, mask=there)
    else:
        tl.store(h + route[None, :] * SIZE + rows[:, None], result, mask=there[:, None] & (m < n)[None, :])


_FIRST = tl.constexpr(512)
"""Programs that begin at once, on a card of some 130 multiprocessors."""


@triton.jit
def _prefetch(rows, SIZE: tl.constexpr, WORD: tl.constexpr):
    """Rows of ``SIZE`` codes, by pointers to their first words, into L2 in lines of 128 bytes."""
    lines: tl.constexpr = triton.next_power_of_2((SIZE + 32 * WORD - 1) // (32 * WORD))
    addresses = rows[:, None] + tl.minimum(tl.arange(0, lines) * 32, SIZE // WORD - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def fc2_kernel(
    h, weight, weight_sf, alpha, input_scale, bias, ids, router_weights, out, partial, workspace, tokens, blocks, first, experts,
    step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, ROUTES: tl.constexpr, PADDED: tl.constexpr,
    WORD: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: ``TILES`` tiles of ``BN`` columns of the hidden size, by blocks or routes as ``fc1_kernel``; so is SPLIT.

    ``partial (routes, H)`` float32: each route's share. Programs that finish a token's columns count; the last adds them up.

    Args:
        h: ``(routes, SIZE)`` bfloat16.
        weight: int32 words of ``(E, PADDED, SIZE)`` codes.
        alpha, input_scale: as ``fc1_kernel``.
        bias: with BIAS, ``(E, PADDED)``.
        out: ``(tokens, H)``.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    routes = tokens * TOP_K
    width: tl.constexpr = BM if BM > 8 else 8
    m = tl.arange(0, width)
    # The routes are an earlier kernel's than the one before, which has waited for it: they are there already.
    if SORTED:
        router_weights = workspace + tokens * (TILES + 2)
        expert, n, route, one = listed_block(workspace, tokens, routes, blocks, slot, TILES, BM, width)
    else:
        expert, n, route = own_block(ids, slot, routes, first, experts, BM, width, ROUTES)
        one = slot
    rows = rows_of(tile, BN, H, 1, LINEAR)
    e = tl.maximum(expert, 0).to(tl.int64)
    if PDL:
        # Of use to programs that begin beside FC1's; for others a second look for each line.
        if not SORTED and (expert >= 0) & (slot * TILES + tile < _FIRST):
            _prefetch(weight + e * (PADDED * (SIZE // WORD)) + rows * (SIZE // WORD), SIZE, WORD)
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if expert < 0:
        return
    sums, _ = _products(
        h, weight, weight_sf, e, tile, route, one, n, SIZE, H, SIZE, PADDED, 1, UP_GATE, BM, BN, BK, SPLIT, WORD, GROUP, LINEAR,
        tl.bfloat16, PTX,
    )  # fmt: skip
    if GROUP == NVFP4_GROUP:
        sums *= tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
    elif WORD == FP4:
        sums *= SCALE
    if BIAS:
        sums += along(tl.load(bias + e * PADDED + rows, mask=rows < H, other=0).to(tl.float32), BM)
    if BM == 1:
        share_of_one(sums, router_weights, out, partial, workspace, tokens, one, tile, rows, H, TOP_K, TILES, SORTED)
    else:
        shares_of_block(sums, router_weights, out, partial, workspace, tokens, route, m < n, tile, rows, H, TOP_K, TILES, SORTED)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def fc2_token_kernel(
    h, weight, weight_sf, alpha, input_scale, bias, ids, router_weights, out, partial, workspace, tokens, blocks, first, experts,
    step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
    PADDED: tl.constexpr, WORD: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All routes of a token, at most eight, each with its own expert; arguments as ``fc2_kernel``.

    Grid: tiles of ``BN`` columns of the hidden size, by tokens. The rows of eight experts are one product's rows and the routes
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
    rows = rows_of(tile, BN, H, 8, LINEAR)
    there = (rows < H) & (expert >= 0)
    starts = e * (PADDED * (SIZE // WORD)) + rows * (SIZE // WORD)
    if PDL:
        _prefetch(weight + starts, SIZE, WORD)
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    words = starts[:, None] + tl.arange(0, BK // WORD)[None, :]
    factors = e * scale_bytes(PADDED, SIZE, GROUP, LINEAR) + first_scale(tile, 0, BN, H, SIZE, GROUP, LINEAR)
    factors = factors[:, None] + scale_offsets(tile, 0, BN, BK, H, SIZE, 8, GROUP, LINEAR)
    inputs, given, column = places((token * TOP_K + m) * SIZE, TOP_K, 8, BK, WORD)
    sums = tl.zeros((8 * BN, 8), tl.float32)
    whole: tl.constexpr = SIZE % BK == 0
    for k in range(0, SIZE, BK):
        hs = split_inputs(loaded(h, inputs, given, column, k, SIZE, whole), 8, BK, WORD)
        w = matrix(
            weight, weight_sf, words, factors, k, part, there, 1, SIZE, 8 * BN, BK, SIZE, False, whole, WORD, GROUP, LINEAR,
            tl.bfloat16, PTX,
        )  # fmt: skip
        sums = dot(w, hs, sums, WORD)
    shares = own_columns(sums, 8, BN)
    if GROUP == NVFP4_GROUP:
        shares *= tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
    elif WORD == FP4:
        shares *= SCALE
    if BIAS:
        shares += tl.load(bias + e * PADDED + rows, mask=there, other=0).to(tl.float32)
    shares *= tl.load(router_weights + route, mask=routed, other=0.0)
    total = added(tl.where(there, shares, 0.0), 8, BN)
    rows = rows_of(tile, BN, H, 1, LINEAR)
    tl.store(out + token * H + rows, rounded(total, out.dtype.element_ty), mask=rows < H)


for _kernel in (route_kernel, fc1_kernel, fc2_kernel, fc2_token_kernel):
    # Triton before 3.8 makes other keys of its cache for kernels that are hashed in another order (``DependenciesFinder``).
    getattr(_kernel, "cache_key", None)
