# SPDX-License-Identifier: Apache-2.0
"""Block-scaled products for calls with many tokens per expert. Both operands have the same number format.

A call has five launches. They quantize the tokens, sort the routes (``routing.py``), compute FC1 with its activation and quantize
its result, compute FC2 with router weights, and sum over a token's routes. ``tl.dot_scaled`` is one instruction on SM120 from
Triton 3.6 on and on SM121 from 3.8 on. FC1's result is rounded to bfloat16 before it is quantized. Each route's share of a token
is rounded to bfloat16.

``FORMAT`` names the elements, ``GROUP`` the columns of a scale:

``e4m3``, 32: MXFP8
    32 columns share an E8M0 scale (``mma.sync ... kind::mxf8f6f4.block_scale``). Activations are quantized as in OCP Microscaling
    Formats 1.0 (6.3). A block's exponent is ``floor(log2(amax)) - 8``, where 8 is E4M3's largest exponent. Values are rounded
    to nearest even and saturate at 448. A block that holds NaN or infinity gets the scale NaN.

``e2m1``, 16: NVFP4
    A byte has two codes, the even column in the low nibble. 16 columns share an E4M3 scale (``kind::mxf4nvf4``). Sums are
    multiplied by the scale of the whole matrix. Activations are quantized by a static scale, with b12x's rounding points
    (reciprocals with a gate, divisions without). Larger values saturate, and a block that holds NaN gets the scale NaN.
    The engine's own quantization differs only in exact ties.

Without NATIVE, products are bfloat16, in which every code times its scale is exact. Checkpoints that hold an E4M3 code of NaN are
refused. A NaN block scale makes NaN. A negative block scale works only without NATIVE, whose instruction has unsigned scales:
checkpoints that hold negative scales are refused too.

Weights are the engine's bytes: row-major codes, FC1's rows in any ORDER, scales in the 128x4 layout or in rows (``scales.py``).

Sums are float32 in a fixed order, and a route's results depend only on its own token.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .decode_kernels import BY_TURNS, UP_GATE, activate, half_alphas  # its kernels are hashed first, as its end explains
from .grouped_products import block_product
from .numerics import E2M1, quantized, rounded
from .operands import NVFP4_GROUP
from .routing import sort_kernel
from .scales import first_scales


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["factor"])
def quantize_kernel(
    x, factor, codes, codes_sf, tokens, H: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr,
    FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantize the tokens. Grid: ``ROWS`` tokens by ``COLUMNS`` columns.

    Args:
        x: ``(tokens, H)`` bfloat16 or float16.
        factor: for NVFP4, one float32, by which the engine multiplies FC1's input.
        codes: ``(tokens, H)`` E4M3, or ``(tokens, H / 2)`` bytes of two E2M1, written.
        codes_sf: ``(tokens, H / 32)`` bytes, or ``(tokens, H / 16)``, written; rows are padded to int32 words of four.
    """
    size: tl.constexpr = 16 if FORMAT == E2M1 else 32
    packed: tl.constexpr = 2 if FORMAT == E2M1 else 1
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.program_id(1) * (COLUMNS // packed) + tl.arange(0, COLUMNS // packed)
    block = tl.program_id(1) * (COLUMNS // size) + tl.arange(0, COLUMNS // size)
    inside = (row < tokens)[:, None]
    at = row.to(tl.int64)[:, None]
    values = tl.load(x + at * H + column[None, :], mask=inside & (column < H)[None, :], other=0.0).to(tl.float32)
    code, scale = quantized(values, tl.div_rn(1.0, tl.load(factor)), ROWS, COLUMNS, GATED, FORMAT, NATIVE)
    tl.store(codes + at * (H // packed) + place[None, :], code, mask=inside & (place < H // packed)[None, :])
    places = codes_sf.to(tl.pointer_type(tl.uint8), bitcast=True) + at * ((H // size + 3) // 4 * 4) + block[None, :]
    tl.store(places, scale, mask=inside & (block < H // size)[None, :])


@triton.jit
def _block_of(starts, slot, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, BM: tl.constexpr):
    """Return the expert of block ``slot`` (EXPERTS for no block), the place of its first route, and its number of routes."""
    e = tl.arange(0, PADDED_EXPERTS)
    start = tl.load(starts + e, mask=e < EXPERTS, other=0)
    count = tl.load(starts + e + 1, mask=e < EXPERTS, other=0) - start
    own = (count + (BM - 1)) // BM
    end = tl.cumsum(own, axis=0)
    expert = tl.sum(((end <= slot) & (e < EXPERTS)).to(tl.int32), axis=0)
    before = (slot - end + own) * BM
    first = tl.sum(tl.where(e == expert, start + before, 0), axis=0)
    return expert, first, tl.sum(tl.where(e == expert, tl.minimum(count - before, BM), 0), axis=0)


@triton.jit(
    do_not_specialize=["step"],
    do_not_specialize_on_alignment=["alpha", "factor", "half_alpha", "bias", "swiglu_alpha", "swiglu_beta", "swiglu_limit"],
)
def fc1_kernel(
    x, x_sf, weight, weight_sf, alpha, factor, half_alpha, bias, swiglu_alpha, swiglu_beta, swiglu_limit, order, starts, h, h_sf,
    step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, ORDER: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Compute and quantize FC1. Grid: tiles of ``BN`` columns of the intermediate size, by blocks of up to ``BM`` routes.

    Args:
        x, x_sf: codes and scales from ``quantize_kernel``. Scales, also of weights, are int32 words of four.
        weight: ``(E, r * SIZE, H)`` codes, r = 2 with GATED (rows in ORDER).
        alpha: for NVFP4, ``(E,)`` float32: ``weight_scale_2`` times input scale, the larger one of up and gate.
        half_alpha: for NVFP4 with GATED, ``(2, E)`` float32, the alphas of up and gate (``half_alphas``).
        factor: for NVFP4, float32, by which the engine multiplies FC2's input; expert ``e``'s is at ``e * step``.
        bias: with BIAS, ``(E, r * SIZE)``, in the order of the rows.
        swiglu_alpha, swiglu_beta, swiglu_limit: for SwigluBias, ``(E,)`` float32.
        order: ``(routes,)`` int32, routes sorted by expert.
        starts: ``(E + 1,)`` int32, the place in ``order`` where each expert's routes begin.
        h, h_sf: ``(routes, SIZE)`` codes and their scales, by place, written.
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
    packed: tl.constexpr = 2 if FORMAT == E2M1 else 1
    halves: tl.constexpr = 2 if GATED else 1
    weight += expert.to(tl.int64) * (halves * SIZE * (H // packed))
    groups: tl.constexpr = (H // GROUP + 3) // 4
    if SIZE % BN != 0:
        rows = tl.minimum(rows, SIZE - 1)
    a = x + token[:, None] * (H // packed)
    a_sf = x_sf + token[:, None] * groups
    turns: tl.constexpr = 2 if GATED and ORDER == BY_TURNS else 1
    second: tl.constexpr = 1 if ORDER == BY_TURNS else SIZE
    up_row: tl.constexpr = second if GATED and ORDER != UP_GATE else 0
    up_rows, gate_rows = rows * turns + up_row, rows * turns + (second - up_row)
    up_sf = first_scales(weight_sf, expert, up_rows, halves * SIZE, H, GROUP, LINEAR)
    gate_sf = first_scales(weight_sf, expert, gate_rows, halves * SIZE, H, GROUP, LINEAR)
    up = tl.zeros((BM, BN), tl.float32)
    gate = tl.zeros((BM, BN), tl.float32)
    for k in range(0, H, BK):
        up = block_product(
            up, a, a_sf, there, weight, up_sf, up_rows, inside, k, H, BM, BN, BK, FORMAT, GROUP, LINEAR, NATIVE, WARPS
        )
        if GATED:
            gate = block_product(
                gate, a, a_sf, there, weight, gate_sf, gate_rows, inside, k, H, BM, BN, BK, FORMAT, GROUP, LINEAR, NATIVE, WARPS
            )
    divisor = 1.0
    if GROUP == NVFP4_GROUP:
        own_alpha = tl.load(alpha + expert)
        divisor = tl.div_rn(1.0, tl.load(factor + expert * step))
        if GATED:
            up_alpha, gate_alpha = half_alphas(half_alpha, own_alpha, expert, EXPERTS)
            up, gate = up * up_alpha, gate * gate_alpha
        else:
            up *= own_alpha
    if BIAS:
        bias += expert.to(tl.int64) * (halves * SIZE)
        up += tl.load(bias + up_rows).to(tl.float32)[None, :]
        if GATED:
            gate += tl.load(bias + gate_rows).to(tl.float32)[None, :]
    result = activate(up, gate, swiglu_alpha + expert, swiglu_beta + expert, swiglu_limit + expert, ACTIVATION)
    place = (first + m).to(tl.int64)[:, None]
    result = rounded(result, tl.bfloat16).to(tl.float32)
    code, scale = quantized(result, divisor, BM, BN, GATED, FORMAT, NATIVE)
    column = tile * (BN // packed) + tl.arange(0, BN // packed)
    block = tile * (BN // GROUP) + tl.arange(0, BN // GROUP)
    written = there[:, None] & (column < SIZE // packed)[None, :]
    tl.store(h + place * (SIZE // packed) + column[None, :], code, mask=written)
    whole = there[:, None] & (block < SIZE // GROUP)[None, :]
    places = h_sf.to(tl.pointer_type(tl.uint8), bitcast=True) + place * ((SIZE // GROUP + 3) // 4 * 4) + block[None, :]
    tl.store(places, scale, mask=whole)


@triton.jit(do_not_specialize_on_alignment=["alpha", "bias"])
def fc2_kernel(
    h, h_sf, weight, weight_sf, alpha, bias, order, starts, router_weights, shares,
    H: tl.constexpr, SIZE: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, BIAS: tl.constexpr,
    NATIVE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute each route's share. Grid: tiles of ``BN`` columns of the hidden size, by blocks as in ``fc1_kernel``.

    Args:
        weight: ``(E, H, SIZE)`` codes.
        alpha: for NVFP4, ``(E,)`` float32: ``weight_scale_2`` times input scale.
        bias: with BIAS, ``(E, H)``.
        router_weights: ``(routes,)`` float32, by place.
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
    packed: tl.constexpr = 2 if FORMAT == E2M1 else 1
    weight += expert.to(tl.int64) * (H * (SIZE // packed))
    groups: tl.constexpr = (SIZE // GROUP + 3) // 4
    if H % BN != 0:
        rows = tl.minimum(rows, H - 1)
    place = (first + tl.minimum(m, n - 1)).to(tl.int64)[:, None]
    a = h + place * (SIZE // packed)
    a_sf = h_sf + place * groups
    weight_sf = first_scales(weight_sf, expert, rows, H, SIZE, GROUP, LINEAR)
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, SIZE, BK):
        sums = block_product(
            sums, a, a_sf, there, weight, weight_sf, rows, inside, k, SIZE, BM, BN, BK, FORMAT, GROUP, LINEAR, NATIVE, WARPS
        )
    if GROUP == NVFP4_GROUP:
        sums *= tl.load(alpha + expert)
    if BIAS:
        sums += tl.load(bias + expert.to(tl.int64) * H + rows).to(tl.float32)[None, :]
    sums *= tl.load(router_weights + first + m, mask=there, other=0.0)[:, None]
    column = tile * BN + tl.arange(0, BN)
    tl.store(shares + route[:, None] * H + column[None, :], rounded(sums, tl.bfloat16), mask=there[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["first"], do_not_specialize_on_alignment=["ids"])
def sum_kernel(
    shares, ids, out, first, H: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Sum a token's shares from this rank's experts, in the order of ``top_k``. Grid: tokens by tiles of ``COLUMNS``.

    Args:
        ids: ``(routes,)`` int32 or int64, global expert ids; this rank's are ``first`` to ``first + EXPERTS``.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(TOP_K):
        local = tl.load(ids + token * TOP_K + k).to(tl.int64) - first + tl.zeros((COLUMNS,), tl.int64)
        held = (local >= 0) & (local < EXPERTS)
        share = tl.load(shares + (token * TOP_K + k) * H + column, mask=(column < H) & held, other=0.0)
        total += share.to(tl.float32)
    tl.store(out + token * H + column, rounded(total, out.dtype.element_ty), mask=column < H)


for _kernel in (quantize_kernel, fc1_kernel, fc2_kernel, sum_kernel, sort_kernel):
    getattr(_kernel, "cache_key", None)  # hash in a fixed order, as in decode_kernels.py
