"""The Triton kernels: routes to blocks, FC1 with its activation, FC2 with the weighted sum over a token's routes.

Weights are the host's bytes: row-major FP4, the even column in the low nibble, and E4M3 scales of 16 columns in the 128x4 layout
(row ``r`` and block ``b`` of a K-column matrix at ``(r // 128 * ceil(K / 64) + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4
+ b % 4``).  A program multiplies ``BN`` rows of one expert by up to ``BM`` routes, ``BK`` columns at a time; E2M1 times E4M3 has
at most 6 significant bits, so a weight is exact in bfloat16 and, 2**-8 times as large, in float16.

A row is read in words of eight codes.  Two neighboring words are one scale block, and become eight pairs of 16-bit floats, one
for each of eight products of ``BK / 8`` columns: column ``2 b + p`` of product ``j`` is the row's ``16 b + 8 (j // 4) + 4 p +
j % 4``, so that a pair is the same nibble of a word's two halves and no code changes its lane.  :func:`_operands` permutes
the other side alike.  The sum over columns does not mind the order.

Rows of a program: where rows come in whole tiles of 128, a quarter of each quarter of a tile, because the 128x4 layout puts rows
32 apart beside each other: its scales are then contiguous.

Sums are float32 in a fixed order: no float is added atomically, a route's results depend on nothing but its own token, and the
last program to finish a token's columns adds its routes up in the order of ``top_k``.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies the bits of bfloat16 as integers."""

SWIGLU = tl.constexpr(0)
SWIGLU_BIAS = tl.constexpr(1)
GEGLU = tl.constexpr(2)
RELU2 = tl.constexpr(3)
SILU = tl.constexpr(4)
GELU = tl.constexpr(5)

# Two words and their scale to eight pairs, each the value times 2**-8.  The three bits of a magnitude, moved to the bottom of the
# exponent and the top of the mantissa, are the value times 2**-126 (bfloat16) or 2**-14 (float16), subnormals too; an E4M3 byte
# at bit 4 (7) is the scale times 2**-120 (2**-8), which two constants (one) bring to 2**118 (2**6) times the scale.
_BFLOAT16 = tl.constexpr(
    """{
    .reg .b32 s, m, t, z;
    mov.b32 z, 0x80008000;
    prmt.b32 s, $10, 0, 0x4040;
    shl.b32 s, s, 4;
    mov.b32 t, 0x7b807b80;
    fma.rn.bf16x2 s, s, t, z;
    mov.b32 t, 0x7a807a80;
    fma.rn.bf16x2 s, s, t, z;
    shl.b32 t, $8, 12; shl.b32 m, $8, 6; and.b32 m, m, 0x01c001c0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 $0, t, s, z;
    shl.b32 t, $8, 8; shl.b32 m, $8, 2; and.b32 m, m, 0x01c001c0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 $1, t, s, z;
    shl.b32 t, $8, 4; shr.b32 m, $8, 2; and.b32 m, m, 0x01c001c0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 $2, t, s, z;
    shr.b32 m, $8, 6; and.b32 m, m, 0x01c001c0; lop3.b32 t, $8, z, m, 0xea; fma.rn.bf16x2 $3, t, s, z;
    shl.b32 t, $9, 12; shl.b32 m, $9, 6; and.b32 m, m, 0x01c001c0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 $4, t, s, z;
    shl.b32 t, $9, 8; shl.b32 m, $9, 2; and.b32 m, m, 0x01c001c0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 $5, t, s, z;
    shl.b32 t, $9, 4; shr.b32 m, $9, 2; and.b32 m, m, 0x01c001c0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 $6, t, s, z;
    shr.b32 m, $9, 6; and.b32 m, m, 0x01c001c0; lop3.b32 t, $9, z, m, 0xea; fma.rn.bf16x2 $7, t, s, z;
    }"""
)
_FLOAT16 = tl.constexpr(
    """{
    .reg .b32 s, m, t;
    prmt.b32 s, $10, 0, 0x4040;
    shl.b32 s, s, 7;
    mov.b32 t, 0x74007400;
    mul.rn.f16x2 s, s, t;
    shl.b32 t, $8, 12; shl.b32 m, $8, 9; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $0, t, s;
    shl.b32 t, $8, 8; shl.b32 m, $8, 5; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $1, t, s;
    shl.b32 t, $8, 4; shl.b32 m, $8, 1; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $2, t, s;
    shr.b32 m, $8, 3; and.b32 m, m, 0x0e000e00; lop3.b32 t, $8, 0x80008000, m, 0xea; mul.rn.f16x2 $3, t, s;
    shl.b32 t, $9, 12; shl.b32 m, $9, 9; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $4, t, s;
    shl.b32 t, $9, 8; shl.b32 m, $9, 5; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $5, t, s;
    shl.b32 t, $9, 4; shl.b32 m, $9, 1; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $6, t, s;
    shr.b32 m, $9, 3; and.b32 m, m, 0x0e000e00; lop3.b32 t, $9, 0x80008000, m, 0xea; mul.rn.f16x2 $7, t, s;
    }"""
)
_REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")
_SCALE = tl.constexpr(256.0)
"""Of the weights as they are multiplied."""


@triton.jit
def _e2m1(code):
    """Integer code of any width, its lowest four bits, to float32."""
    magnitude = (code & 7).to(tl.float32)
    value = tl.where(magnitude < 4, magnitude * 0.5, tl.where(magnitude < 6, magnitude - 2, magnitude * 2 - 8))
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def _e4m3(byte):
    """int32 of a non-negative E4M3 byte to float32."""
    exponent = (byte >> 3) & 15
    power = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
    return tl.where(exponent == 0, byte & 7, (byte & 7) + 8).to(tl.float32) * power


@triton.jit
def _pairs(
    words, scales, first: tl.constexpr, second: tl.constexpr, rows: tl.constexpr, blocks: tl.constexpr, dtype: tl.constexpr
):
    """Two nibbles of each word, beside each other, times their scale and 2**-8: ``(rows, 2 * blocks)``."""
    low = _e2m1(words >> (4 * first)) * scales
    high = _e2m1(words >> (4 * second)) * scales
    return tl.reshape(tl.join(low, high), (rows, 2 * blocks)).to(dtype)


@triton.jit
def _weights(words, scales, rows: tl.constexpr, columns: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """int32 words ``(rows, columns / 8)`` and E4M3 bytes ``(rows, columns / 16)`` to eight ``(rows, columns / 8)`` of ``dtype``.

    With or without PTX the same bits.
    """
    blocks: tl.constexpr = columns // 16
    if PTX:
        wide = tl.broadcast_to(scales.to(tl.int32)[:, :, None], (rows, blocks, 2))
        wide = tl.reshape(wide, (rows, 2 * blocks))
        if dtype == tl.float16:
            w = tl.inline_asm_elementwise(_FLOAT16, _REGISTERS, [words, wide], (tl.float16,) * 8, is_pure=True, pack=2)
        else:
            w = tl.inline_asm_elementwise(_BFLOAT16, _REGISTERS, [words, wide], (tl.bfloat16,) * 8, is_pure=True, pack=2)
        return w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
    s = _e4m3(scales.to(tl.int32)) * 0.00390625
    even, odd = tl.split(tl.reshape(words, (rows, blocks, 2)))
    p0 = _pairs(even, s, 0, 4, rows, blocks, dtype)
    p1 = _pairs(even, s, 1, 5, rows, blocks, dtype)
    p2 = _pairs(even, s, 2, 6, rows, blocks, dtype)
    p3 = _pairs(even, s, 3, 7, rows, blocks, dtype)
    p4 = _pairs(odd, s, 0, 4, rows, blocks, dtype)
    p5 = _pairs(odd, s, 1, 5, rows, blocks, dtype)
    p6 = _pairs(odd, s, 2, 6, rows, blocks, dtype)
    p7 = _pairs(odd, s, 3, 7, rows, blocks, dtype)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def _inputs(starts, n, ROWS: tl.constexpr, BK: tl.constexpr):
    """Where a tile of ``ROWS`` inputs lies, whether each place has a row, and its column.

    A tile of eight is ``(4, 2 * BK)``, two rows in one, so that what eight lanes read at a time (16 bytes each, of four stretches
    of 32 columns in two rows) lies side by side in shared memory: place ``256 a + 64 b + 32 r + 8 c + d`` is column
    ``128 a + 32 c + 8 b + d`` of row ``r``.  Measured on an H200: up to a tenth less time, with more rows as much more.

    Args:
        starts: ``(ROWS,)`` offsets.
        n: how many there are.
    """
    if ROWS <= 8:
        place = tl.arange(0, 2 * BK)
        column = (place // 256 * 128 + place // 8 % 4 * 32 + place // 64 % 4 * 8 + place % 8)[None, :]
        second = (place // 32 % 2)[None, :]
        even, odd = tl.split(tl.reshape(starts, (ROWS // 2, 2)))
        offsets = tl.where(second == 0, even[:, None], odd[:, None]) + column
        there = 2 * tl.arange(0, ROWS // 2)[:, None] + second < n
        offsets = tl.max_contiguous(tl.multiple_of(offsets, (1, 8)), (1, 8))
    else:
        column = tl.arange(0, BK)[None, :]
        offsets = starts[:, None] + column
        there = (tl.arange(0, ROWS) < n)[:, None]
    return offsets, there, column


@triton.jit
def _loaded(x, offsets, there, column, k, BK: tl.constexpr, K: tl.constexpr):
    """Columns from ``k`` on; zeros where there is no row, and beyond the matrix."""
    if K % BK != 0:
        return tl.load(x + offsets + k, mask=tl.max_constancy(there & (k + column < K), (1, 8)), other=0.0)
    return tl.load(x + offsets + k, mask=tl.max_constancy(there, (1, 8)), other=0.0)


@triton.jit
def _operands(x, rows: tl.constexpr, columns: tl.constexpr):
    """A tile of :func:`_inputs` to eight ``(columns / 8, rows)`` in the order of :func:`_weights`."""
    if rows <= 8:
        x = tl.reshape(x, (rows // 2, columns // 128, 4, 2, 4, 8))
        x = tl.reshape(tl.permute(x, (0, 3, 1, 4, 2, 5)), (rows, columns))
    # word of the block, half of the word, bits of the nibble's place in it
    x = tl.permute(tl.reshape(x, (rows, columns // 16, 2, 2, 2, 2)), (0, 1, 3, 5, 4, 2))
    first, second = tl.split(tl.reshape(x, (rows, columns // 8, 2, 2, 2)))
    first_low, first_high = tl.split(first)
    second_low, second_high = tl.split(second)
    x0, x1 = tl.split(first_low)
    x2, x3 = tl.split(first_high)
    x4, x5 = tl.split(second_low)
    x6, x7 = tl.split(second_high)
    return tl.trans(x0), tl.trans(x1), tl.trans(x2), tl.trans(x3), tl.trans(x4), tl.trans(x5), tl.trans(x6), tl.trans(x7)


@triton.jit
def _product(w, x, sums):
    if _INTERPRETED:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), sums)
    return tl.dot(w, x, sums)


@triton.jit
def _dot(w, x, sums):
    sums = _product(w[0], x[0], sums)
    sums = _product(w[1], x[1], sums)
    sums = _product(w[2], x[2], sums)
    sums = _product(w[3], x[3], sums)
    sums = _product(w[4], x[4], sums)
    sums = _product(w[5], x[5], sums)
    sums = _product(w[6], x[6], sums)
    return _product(w[7], x[7], sums)


@triton.jit
def _rows(tile, BN: tl.constexpr, N: tl.constexpr):
    """Rows of program ``tile`` of a matrix (or half) of ``N`` rows."""
    p = tl.arange(0, BN)
    if N % 128 == 0:
        first = tile * BN
        return first // 128 * 128 + first % 128 // 4 + p // 4 + p % 4 * 32
    return tile * BN + p


@triton.jit
def _scale_offsets(tile, half: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Bytes from the expert's first scale to those of rows ``half * N + _rows(tile)``, ``(BN, BK / 16)``."""
    groups: tl.constexpr = (K + 63) // 64
    b = tl.arange(0, BK // 16)
    columns = (b // 4 * 512 + b % 4)[None, :]
    if N % 128 == 0:
        first = tile * BN
        rows = (half * N + first // 128 * 128) * (groups * 4) + first % 128 * 4 + tl.arange(0, BN) * 4
    else:
        r = half * N + _rows(tile, BN, N)
        rows = r // 128 * (groups * 512) + r % 32 * 16 + r % 128 // 32 * 4
    return rows[:, None] + columns


@triton.jit
def _matrix(
    w, s, words, scales, k, there, BN: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    dtype: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Columns ``k`` to ``k + BK`` of a program's rows, as :func:`_weights` gives them; zeros beyond the matrix."""
    if N % BN != 0 or K % BK != 0:
        column = k // 8 + tl.arange(0, BK // 8)
        block = k // 16 + tl.arange(0, BK // 16)
        codes = tl.load(w + words + k // 8, mask=there[:, None] & (column < K // 8)[None, :], other=0)
        factors = tl.load(s + scales + k * 8, mask=there[:, None] & (block < K // 16)[None, :], other=0)
    else:
        codes = tl.load(w + words + k // 8)
        factors = tl.load(s + scales + k * 8)
    return _weights(codes, factors, BN, BK, dtype, PTX)


@triton.jit
def _activate(fc1, gate, alpha, beta, limit, ACTIVATION: tl.constexpr):
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
def _rounded(values, dtype: tl.constexpr):
    """float32 to a 16-bit float, to the nearest; Triton's interpreter cuts bfloat16 off."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        values = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def _local(ids, first, count):
    """Local int32 ids; -1 for what is not in the table."""
    local = ids.to(tl.int64) - first
    return tl.where((local >= 0) & (local < count), local, -1).to(tl.int32)


@triton.jit
def _own_block(ids, slot, routes, first, count, BM: tl.constexpr, WIDTH: tl.constexpr, ROUTES: tl.constexpr):
    """The block that route ``slot`` leads, from the ids of all (at most ``ROUTES``) routes.

    Of the routes to one expert, every ``BM``-th leads a block of those that follow it: where BM is 1, each.

    Returns:
        expert (-1: it leads none), how many routes, and which, ``(WIDTH,)`` int32 (0 beyond).
    """
    if BM == 1:
        return _local(tl.load(ids + slot), first, count), 1, slot + tl.zeros((WIDTH,), tl.int32)
    r = tl.arange(0, ROUTES)
    local = _local(tl.load(ids + r, mask=r < routes, other=-1), first, count)
    local = tl.where(r < routes, local, -1)
    expert = tl.max(tl.where(r == slot, local, -1), axis=0)
    same = (local == expert).to(tl.int32)
    rank = tl.cumsum(same, axis=0) - 1
    own = tl.max(tl.where(r == slot, rank, 0), axis=0)
    m = tl.arange(0, WIDTH)
    listed = (same[None, :] != 0) & (rank[None, :] == own + m[:, None])
    members = tl.sum(tl.where(listed, r[None, :], 0), axis=1)
    return tl.where(own % BM == 0, expert, -1), tl.minimum(tl.sum(same, axis=0) - own, BM), members


@triton.jit
def _start_token(
    token, ids, out, counters, first, count, H: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Counters of a token to zero, and its output, where it has no route to this rank's experts."""
    k = tl.arange(0, SLOTS)
    local = _local(tl.load(ids + token * TOP_K + k, mask=k < TOP_K, other=-1), first, count)
    routed = tl.max(tl.where(k < TOP_K, local, -1), axis=0) >= 0
    at = tl.arange(0, BLOCK)
    for begin in range(0, TILES, BLOCK):
        tl.store(counters + token * TILES + begin + at, at * 0, mask=begin + at < TILES)
    zeros = tl.zeros((BLOCK,), out.dtype.element_ty)
    for begin in range(0, H, BLOCK):
        tl.store(out + token * H + begin + at, zeros, mask=(begin + at < H) & (not routed))


@triton.jit
def _cumulative(values):
    return tl.cumsum(values, axis=0) - values


@triton.jit(do_not_specialize=["tokens", "blocks", "first"], do_not_specialize_on_alignment=["ids", "scales", "x_scales"])
def route_kernel(
    x, x_scales, ids, scales, staged, out, workspace, tokens, blocks, first,
    H: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    TILES: tl.constexpr, BM: tl.constexpr, BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, SWIZZLED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 sorts routes by expert into blocks of at most ``BM``, program ``1 + t`` makes token ``t`` ready.

    ``workspace``, int32: counters ``(tokens, TILES)``; local ids, float32 scales, and routes by expert, ``(tokens, TOP_K)`` each;
    ``(blocks, 3)``: expert, place of its first route, number of routes (0: none); two numbers per expert.

    Which of an expert's routes comes first is left to the order of atomics: a route's results do not depend on its place.

    Args:
        x, x_scales: with QUANTIZED, FP4 ``(tokens, H / 2)`` and E4M3 bytes ``(tokens, H / 16)``, in rows or 128x4-interleaved.
        staged: with QUANTIZED, ``(tokens, H)`` of FC1's input type: code times block scale.
        ids, scales: ``(tokens, TOP_K)`` integers and floats of any type.
        blocks: at least as many as there can be: ``min(routes, EXPERTS + routes / BM)``.
        first: global id of the first of EXPERTS.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    routes = tokens * TOP_K
    local_ids = workspace + tokens * TILES
    if program == 0:
        weights = local_ids + routes
        order = weights + routes
        table = order + routes
        counts = table + blocks * 3
        cursors = counts + EXPERTS
        at = tl.arange(0, BLOCK)
        e = tl.arange(0, PADDED_EXPERTS)
        exists = e < EXPERTS
        tl.store(counts + e, e * 0, mask=exists)
        tl.debug_barrier()
        for begin in range(0, routes, BLOCK):
            r = begin + at
            inside = r < routes
            local = _local(tl.load(ids + r, mask=inside, other=0), first, EXPERTS)
            tl.store(local_ids + r, local, mask=inside)
            scale = tl.load(scales + r, mask=inside, other=0).to(tl.float32)
            tl.store(weights + r, scale.to(tl.int32, bitcast=True), mask=inside)
            tl.atomic_add(counts + local, at * 0 + 1, mask=inside & (local >= 0))
        tl.debug_barrier()
        count = tl.load(counts + e, mask=exists, other=0, cache_modifier=".cg")
        start = _cumulative(count)
        tl.store(cursors + e, start, mask=exists)
        own = (count + (BM - 1)) // BM
        place = _cumulative(own)
        used = tl.sum(own, axis=0)
        for i in range(tl.max(own, axis=0)):
            entry = table + (place + i) * 3
            holds = exists & (i < own)
            tl.store(entry, e, mask=holds)
            tl.store(entry + 1, start + i * BM, mask=holds)
            tl.store(entry + 2, tl.minimum(count - i * BM, BM), mask=holds)
        for begin in range(0, blocks, BLOCK):
            b = begin + at
            tl.store(table + b * 3 + 2, at * 0, mask=(b >= used) & (b < blocks))
        tl.debug_barrier()
        for begin in range(0, routes, BLOCK):
            r = begin + at
            local = _local(tl.load(ids + r, mask=r < routes, other=0), first, EXPERTS)
            held = (r < routes) & (local >= 0)
            place_of = tl.atomic_add(cursors + local, at * 0 + 1, mask=held)
            tl.store(order + place_of, r, mask=held)
    else:
        token = program - 1
        _start_token(token, ids, out, workspace, first, EXPERTS, H, TOP_K, SLOTS, TILES, BLOCK)
        if QUANTIZED:
            groups: tl.constexpr = (H + 63) // 64
            at = tl.arange(0, BLOCK)
            for begin in range(0, H // 2, BLOCK):
                b = begin + at
                inside = b < H // 2
                code = tl.load(x + token * (H // 2) + b, mask=inside, other=0)
                block = b // 8
                if SWIZZLED:
                    row = token // 128 * (groups * 512) + token % 32 * 16 + token % 128 // 32 * 4
                    offset = row + block // 4 * 512 + block % 4
                else:
                    offset = token * (H // 16) + block
                scale = _e4m3(tl.load(x_scales + offset, mask=inside, other=0).to(tl.int32))
                even = (_e2m1(code) * scale).to(staged.dtype.element_ty)
                odd = (_e2m1(code >> 4) * scale).to(staged.dtype.element_ty)
                tl.store(staged + token * H + 2 * b, even, mask=inside)
                tl.store(staged + token * H + 2 * b + 1, odd, mask=inside)


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
    BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    QUANTIZED: tl.constexpr, SCALED_INPUT: tl.constexpr, SORTED: tl.constexpr, ROUTES: tl.constexpr, BLOCK: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of ``BN`` columns of the intermediate size, by blocks of routes (SORTED) or routes (at most ``ROUTES``).

    ``h (routes, SIZE)`` bfloat16 whatever x is: float16 has no room for every product of gate and up.

    Args:
        x: ``(tokens, H)`` bfloat16 or float16; with QUANTIZED in units of its scale, which ``alpha`` holds.
        weight: int32 words of ``(E, r * SIZE, H / 2)`` bytes, r = 2 with GATED (rows [up; gate]).
        alpha: ``(E,)`` float32, ``weight_scale_2`` times input scale.
        input_scale: float32, the reciprocal of that scale; of expert ``e`` at ``e * step``.
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
    else:
        if (tile == 0) & (slot % TOP_K == 0):
            _start_token(slot // TOP_K, ids, out, workspace, first, experts, H, TOP_K, SLOTS, TILES, BLOCK)
        expert, n, route = _own_block(ids, slot, routes, first, experts, BM, width, ROUTES)
        if expert < 0:
            return
    e = expert.to(tl.int64)
    halves: tl.constexpr = 2 if GATED else 1
    dtype: tl.constexpr = x.dtype.element_ty
    rows = _rows(tile, BN, SIZE)
    there = rows < SIZE
    weight += e * (halves * SIZE * (H // 8))
    block_scales += e * ((halves * SIZE + 127) // 128 * ((H + 63) // 64) * 512)
    words = rows[:, None] * (H // 8) + tl.arange(0, BK // 8)[None, :]
    up_scales = _scale_offsets(tile, 0, BN, BK, SIZE, H)
    gate_scales = _scale_offsets(tile, 1, BN, BK, SIZE, H)
    offsets, given, column = _inputs(route // TOP_K * H, n, width, BK)
    up = tl.zeros((BN, width), tl.float32)
    gate = tl.zeros((BN, width), tl.float32)
    for k in range(0, H, BK):
        operands = _operands(_loaded(x, offsets, given, column, k, BK, H), width, BK)
        up = _dot(_matrix(weight, block_scales, words, up_scales, k, there, BN, BK, SIZE, H, dtype, PTX), operands, up)
        if GATED:
            half = weight + SIZE * (H // 8)
            gate = _dot(_matrix(half, block_scales, words, gate_scales, k, there, BN, BK, SIZE, H, dtype, PTX), operands, gate)
    factor = tl.load(alpha + e) * 256.0
    if not QUANTIZED:
        factor *= tl.load(input_scale + e * step)
    scale = tl.full((width,), 1.0, tl.float32)
    if SCALED_INPUT:
        if SORTED:
            held = tl.load(workspace + tokens * TILES + routes + route, mask=m < n, other=0)
            scale = held.to(tl.float32, bitcast=True)
        else:
            scale = tl.load(scales + route, mask=m < n, other=0.0)
    gate = gate * factor * scale[None, :]
    up = up * factor * scale[None, :]
    if GATED:
        up *= tl.load(up_to_gate + e)
    if BIAS:
        up += tl.load(bias + e * (halves * SIZE) + rows, mask=there, other=0).to(tl.float32)[:, None]
        if GATED:
            gate += tl.load(bias + e * (halves * SIZE) + SIZE + rows, mask=there, other=0).to(tl.float32)[:, None]
    if ACTIVATION == SWIGLU_BIAS:
        result = _activate(up, gate, tl.load(swiglu_alpha + e), tl.load(swiglu_beta + e), tl.load(swiglu_limit + e), ACTIVATION)
    else:
        result = _activate(up, gate, 1.0, 0.0, 0.0, ACTIVATION)
    tl.store(h + route[None, :] * SIZE + rows[:, None], _rounded(result, tl.bfloat16), mask=there[:, None] & (m < n)[None, :])


@triton.jit
def _prefetch(addresses):
    """Lines of 128 bytes into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "experts", "step"],
    do_not_specialize_on_alignment=["ids", "scales", "bias", "alpha", "input_scale"],
)
def fc2_kernel(
    h, weight, block_scales, alpha, input_scale, bias, ids, scales, out, partial, workspace, tokens, blocks, first, experts, step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BIAS: tl.constexpr, SCALED_INPUT: tl.constexpr, SORTED: tl.constexpr, ROUTES: tl.constexpr,
    PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: ``TILES`` tiles of ``BN`` columns of the hidden size, by blocks or routes as :func:`fc1_kernel`.

    ``partial (routes, H)`` float32: each route's share.  Programs that finish a token's columns count; the last adds them up.

    Args:
        h: ``(routes, SIZE)`` bfloat16.
        weight: int32 words of ``(E, H, SIZE / 2)`` bytes.
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
        route = tl.load(order + tl.load(entry + 1, mask=n > 0, other=0) + m, mask=m < n, other=0)
    else:
        local_ids = ids
        expert, n, route = _own_block(ids, slot, routes, first, experts, BM, width, ROUTES)
    rows = _rows(tile, BN, H)
    there = rows < H
    e = tl.maximum(expert, 0).to(tl.int64)
    weight += e * (H * (SIZE // 8))
    block_scales += e * ((H + 127) // 128 * ((SIZE + 63) // 64) * 512)
    if PDL:
        if expert >= 0:
            lines: tl.constexpr = triton.next_power_of_2((SIZE + 255) // 256)
            line = tl.arange(0, lines)
            _prefetch(weight + rows[:, None] * (SIZE // 8) + tl.minimum(line * 32, SIZE // 8 - 1)[None, :])
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if expert < 0:
        return
    words = rows[:, None] * (SIZE // 8) + tl.arange(0, BK // 8)[None, :]
    offsets = _scale_offsets(tile, 0, BN, BK, H, SIZE)
    inputs, given, column = _inputs(route * SIZE, n, width, BK)
    sums = tl.zeros((BN, width), tl.float32)
    for k in range(0, SIZE, BK):
        hs = _operands(_loaded(h, inputs, given, column, k, BK, SIZE), width, BK)
        w = _matrix(weight, block_scales, words, offsets, k, there, BN, BK, H, SIZE, tl.bfloat16, PTX)
        sums = _dot(w, hs, sums)
    sums *= tl.load(alpha + e) * 256.0 * tl.load(input_scale + e * step)
    if BIAS:
        sums += tl.load(bias + e * H + rows, mask=there, other=0).to(tl.float32)[:, None]
    if not SCALED_INPUT:
        if SORTED:
            scale = tl.load(local_ids + routes + route, mask=m < n, other=0).to(tl.float32, bitcast=True)
        else:
            scale = tl.load(scales + route, mask=m < n, other=0.0)
        sums *= scale[None, :]
    inside = there[:, None] & (m < n)[None, :]
    tl.store(partial + route[None, :] * H + rows[:, None], sums, mask=inside)
    token = route // TOP_K
    expected = tl.zeros((width,), tl.int32)
    for k in tl.static_range(TOP_K):
        local = tl.load(local_ids + token * TOP_K + k, mask=m < n, other=-1)
        if not SORTED:
            local = _local(local, first, experts)
        expected += tl.where(local >= 0, 1, 0)
    tl.debug_barrier()
    before = tl.atomic_add(workspace + token * TILES + tile, m * 0 + 1, mask=m < n, sem="acq_rel")
    last = (m < n) & (before == expected - 1)
    tl.debug_barrier()
    if tl.max(last.to(tl.int32), axis=0) > 0:
        total = tl.zeros((BN, width), tl.float32)
        for k in tl.static_range(TOP_K):
            local = tl.load(local_ids + token * TOP_K + k, mask=last, other=-1)
            if not SORTED:
                local = _local(local, first, experts)
            share = partial + (token * TOP_K + k)[None, :] * H + rows[:, None]
            held = there[:, None] & (last & (local >= 0))[None, :]
            total += tl.load(share, mask=held, other=0.0, cache_modifier=".cg")
        tl.store(
            out + token[None, :] * H + rows[:, None], _rounded(total, out.dtype.element_ty), mask=there[:, None] & last[None, :]
        )
