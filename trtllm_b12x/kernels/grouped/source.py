"""Block-scaled products of whole calls, MXFP8 by MXFP8: what serves where there are many tokens for an expert.

Four launches after the routes are sorted: the tokens quantized, FC1 with its activation and the quantization of its result, FC2
with the router's weight, the sum over a token's routes.  ``tl.dot_scaled`` is one instruction on SM120 from Triton 3.6 on and on
SM121 from 3.8 on (``mma.sync ... kind::mxf8f6f4.block_scale``); elsewhere Triton multiplies bfloat16, with the same operands
(it takes a scale of 2**-127 for zero there).

Activations are quantized as OCP Microscaling Formats 1.0 has it (6.3): a block of 32 gets the power of two
``floor(log2(amax)) - 8``, 8 being E4M3's largest exponent, and its values are rounded to nearest even and saturate at 448.  A
block that holds NaN or infinity gets the scale NaN.  FC1's result is rounded to bfloat16 before that; each route's share of a
token is rounded to bfloat16.

Weights are the host's bytes: row-major E4M3, and E8M0 scales of 32 columns in the 128x4 layout (row ``r`` and block ``b`` of a
K-column matrix at ``(r // 128 * ceil(K / 128) + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4``); activations' scales
are row-major.

Sums are float32 in a fixed order, and a route's results depend on nothing but its own token.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtllm_b12x.kernels.triton.operands import INTERPRETED
from trtllm_b12x.kernels.triton.products import activate, rounded

BLOCK_SIZE = tl.constexpr(32)
_LARGEST_EXPONENT = tl.constexpr(8)
_NAN = tl.constexpr(255)


@triton.jit
def _e4m3(values):
    """float32 up to 448 to E4M3, to nearest even; Triton's interpreter cuts off what does not fit."""
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        subnormal = (values + 24576.0) - 24576.0  # float32's steps there are 2**-9
        values = tl.where(tl.abs(values) < 0.015625, subnormal, normal)
    return values.to(tl.float8e4nv)


@triton.jit
def _quantized(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 ``(ROWS, COLUMNS)`` to E4M3 of that shape and E8M0 bytes ``(ROWS, COLUMNS / 32)``."""
    blocks = tl.reshape(values, (ROWS, COLUMNS // BLOCK_SIZE, BLOCK_SIZE))
    amax = tl.max(tl.abs(blocks), axis=2)
    exponent = (amax.to(tl.int32, bitcast=True) >> 23) & 255
    unusable = (exponent == 255) | (tl.max((blocks != blocks).to(tl.int32), axis=2) != 0)  # a maximum may lose NaN
    scale = tl.where(unusable, _NAN, tl.maximum(exponent - _LARGEST_EXPONENT, 0))
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(blocks * inverse[:, :, None], -448.0), 448.0)
    return _e4m3(tl.reshape(scaled, (ROWS, COLUMNS))), scale.to(tl.uint8)


@triton.jit(do_not_specialize=["tokens"])
def quantize_kernel(x, codes, codes_sf, tokens, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid: ``ROWS`` tokens by ``COLUMNS`` columns.

    Args:
        x: ``(tokens, H)`` bfloat16 or float16.
        codes: ``(tokens, H)`` E4M3, written.
        codes_sf: ``(tokens, H / 32)`` bytes, written.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    block = tl.program_id(1) * (COLUMNS // BLOCK_SIZE) + tl.arange(0, COLUMNS // BLOCK_SIZE)
    inside = (row < tokens)[:, None]
    there = inside & (column < H)[None, :]
    at = row.to(tl.int64)[:, None]
    values = tl.load(x + at * H + column[None, :], mask=there, other=0.0).to(tl.float32)
    code, scale = _quantized(values, ROWS, COLUMNS)
    tl.store(codes + at * H + column[None, :], code, mask=there)
    tl.store(codes_sf + at * (H // BLOCK_SIZE) + block[None, :], scale, mask=inside & (block < H // BLOCK_SIZE)[None, :])


@triton.jit
def _block_of(starts, slot, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Expert of block ``slot`` (EXPERTS: there is none), place of its first route, number of routes."""
    e = tl.arange(0, PADDED_EXPERTS)
    start = tl.load(starts + e, mask=e < EXPERTS, other=0)
    count = tl.load(starts + e + 1, mask=e < EXPERTS, other=0) - start
    own = (count + (BM - 1)) // BM
    end = tl.cumsum(own, axis=0)
    expert = tl.sum(((end <= slot) & (e < EXPERTS)).to(tl.int32), axis=0)
    before = (slot - end + own) * BM
    first = tl.sum(tl.where(e == expert, start + before, 0), axis=0)
    return expert, first, tl.sum(tl.where(e == expert, tl.minimum(count - before, BM), 0), axis=0)


@triton.jit
def _sf_offsets(rows, block, K: tl.constexpr):
    """Offsets of the weights' scales, ``(rows, blocks)``."""
    groups: tl.constexpr = (K + 127) // 128
    of_row = rows // 128 * (groups * 512) + rows % 32 * 16 + rows % 128 // 32 * 4
    return of_row[:, None] + (block // 4 * 512 + block % 4)[None, :]


@triton.jit
def _product(
    sums, a, a_sf, a_there, w, w_sf, rows, rows_there, k, K: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """``sums (BM, BN)`` plus columns ``k`` to ``k + BK``.

    Args:
        a, a_sf: pointers to rows, ``(BM, 1)``; ``a_there`` (BM,) of those that are.
        w, w_sf: of the expert's matrix; ``rows (BN,)`` of it.
    """
    column = k + tl.arange(0, BK)
    block = k // BLOCK_SIZE + tl.arange(0, BK // BLOCK_SIZE)
    if K % BK != 0:
        inside, whole = column < K, block < K // BLOCK_SIZE
        x = tl.load(a + column[None, :], mask=a_there[:, None] & inside[None, :], other=0.0)
        x_sf = tl.load(a_sf + block[None, :], mask=a_there[:, None] & whole[None, :], other=0)
        codes = tl.load(w + rows[None, :] * K + column[:, None], mask=rows_there[None, :] & inside[:, None], other=0.0)
        factors = tl.load(w_sf + _sf_offsets(rows, block, K), mask=rows_there[:, None] & whole[None, :], other=0)
    else:
        x = tl.load(a + column[None, :])
        x_sf = tl.load(a_sf + block[None, :])
        codes = tl.load(w + rows[None, :] * K + column[:, None])
        factors = tl.load(w_sf + _sf_offsets(rows, block, K))
    return tl.dot_scaled(x, x_sf, "e4m3", codes, factors, "e4m3", sums)


@triton.jit
def fc1_kernel(
    x, x_sf, weight, weight_sf, order, starts, h, h_sf,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of ``BN`` columns of the intermediate size, by blocks of up to ``BM`` routes.

    Args:
        x, x_sf: of :func:`quantize_kernel`.
        weight: ``(E, r * SIZE, H)`` E4M3, r = 2 with GATED (rows [up; gate]).
        order: ``(routes,)`` int32, by expert.
        starts: ``(E + 1,)`` int32, places in ``order``.
        h, h_sf: ``(routes, SIZE)`` E4M3 and ``(routes, SIZE / 32)`` bytes, by place, written.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    expert, first, n = _block_of(starts, slot, EXPERTS, PADDED_EXPERTS, BM)
    if expert >= EXPERTS:
        return
    m = tl.arange(0, BM)
    there = m < n
    token = (tl.load(order + first + m, mask=there, other=0) // TOP_K).to(tl.int64)
    rows = tile * BN + tl.arange(0, BN)
    inside = rows < SIZE
    halves: tl.constexpr = 2 if GATED else 1
    weight += expert.to(tl.int64) * (halves * SIZE * H)
    weight_sf += expert.to(tl.int64) * ((halves * SIZE + 127) // 128 * ((H + 127) // 128) * 512)
    if SIZE % BN != 0:
        rows = tl.minimum(rows, SIZE - 1)
    a, a_sf = x + token[:, None] * H, x_sf + token[:, None] * (H // BLOCK_SIZE)
    up = tl.zeros((BM, BN), tl.float32)
    gate = tl.zeros((BM, BN), tl.float32)
    for k in range(0, H, BK):
        up = _product(up, a, a_sf, there, weight, weight_sf, rows, inside, k, H, BK)
        if GATED:
            gate = _product(gate, a, a_sf, there, weight, weight_sf, rows + SIZE, inside, k, H, BK)
    result = rounded(activate(up, gate, 1.0, 0.0, 0.0, ACTIVATION), tl.bfloat16).to(tl.float32)
    code, scale = _quantized(result, BM, BN)
    column = tile * BN + tl.arange(0, BN)
    block = tile * (BN // BLOCK_SIZE) + tl.arange(0, BN // BLOCK_SIZE)
    place = (first + m).to(tl.int64)[:, None]
    tl.store(h + place * SIZE + column[None, :], code, mask=there[:, None] & inside[None, :])
    whole = there[:, None] & (block < SIZE // BLOCK_SIZE)[None, :]
    tl.store(h_sf + place * (SIZE // BLOCK_SIZE) + block[None, :], scale, mask=whole)


@triton.jit(do_not_specialize_on_alignment=["router_weights"])
def fc2_kernel(
    h, h_sf, weight, weight_sf, order, starts, router_weights, shares,
    H: tl.constexpr, SIZE: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of ``BN`` columns of the hidden size, by blocks as :func:`fc1_kernel`.

    Args:
        weight: ``(E, H, SIZE)`` E4M3.
        router_weights: ``(routes,)`` float32.
        shares: ``(routes, H)`` bfloat16, by route, written.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    expert, first, n = _block_of(starts, slot, EXPERTS, PADDED_EXPERTS, BM)
    if expert >= EXPERTS:
        return
    m = tl.arange(0, BM)
    there = m < n
    route = tl.load(order + first + m, mask=there, other=0).to(tl.int64)
    rows = tile * BN + tl.arange(0, BN)
    inside = rows < H
    weight += expert.to(tl.int64) * (H * SIZE)
    weight_sf += expert.to(tl.int64) * ((H + 127) // 128 * ((SIZE + 127) // 128) * 512)
    if H % BN != 0:
        rows = tl.minimum(rows, H - 1)
    place = (first + tl.minimum(m, n - 1)).to(tl.int64)[:, None]
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, SIZE, BK):
        sums = _product(
            sums,
            h + place * SIZE,
            h_sf + place * (SIZE // BLOCK_SIZE),
            there,
            weight,
            weight_sf,
            rows,
            inside,
            k,
            SIZE,
            BK,
        )
    sums *= tl.load(router_weights + route, mask=there, other=0.0)[:, None]
    column = tile * BN + tl.arange(0, BN)
    tl.store(shares + route[:, None] * H + column[None, :], rounded(sums, tl.bfloat16), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["ids"])
def sum_kernel(
    shares, ids, out, first, H: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Grid: tokens by tiles of ``COLUMNS``; a token's routes to this rank's experts are added up in the order of ``top_k``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(TOP_K):
        local = tl.load(ids + token * TOP_K + k).to(tl.int64) - first + tl.zeros((COLUMNS,), tl.int64)
        held = (local >= 0) & (local < EXPERTS)
        share = tl.load(shares + (token * TOP_K + k) * H + column, mask=(column < H) & held, other=0.0)
        total += share.to(tl.float32)
    tl.store(out + token * H + column, rounded(total, out.dtype.element_ty), mask=column < H)


for _kernel in (quantize_kernel, fc1_kernel, fc2_kernel, sum_kernel):
    getattr(_kernel, "cache_key", None)  # in one order, as products.py
