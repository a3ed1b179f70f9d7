"""Weights and 16-bit inputs as the operands of tensor cores, in an order of columns that moves no code from its lane: NVFP4.

MXFP8 (:mod:`.mxfp8_operands`) differs in what a word holds and what a scale covers: ``WORD`` codes, ``128 / WORD`` columns.

Weights are the host's bytes: row-major FP4, the even column in the low nibble, and E4M3 scales of 16 columns in the 128x4 layout
(row ``r`` and block ``b`` of a K-column matrix at ``(r // 128 * ceil(K / 64) + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4
+ b % 4``).  A program multiplies ``BN`` rows of one expert by up to ``BM`` routes, ``BK`` columns at a time; E2M1 times E4M3 has
at most 6 significant bits, so a weight is exact in bfloat16 and, 2**-8 times as large, in float16.

A row is read in words of eight codes.  Two neighboring words are one scale block, and become eight pairs of 16-bit floats, one
for each of eight products of ``BK / 8`` columns: column ``2 b + p`` of product ``j`` is the row's ``16 b + 8 (j // 4) + 4 p +
j % 4``, so that a pair is the same nibble of a word's two halves and no code changes its lane.  :func:`split_inputs` permutes
the other side alike.  The sum over columns does not mind the order.

Rows of a program: where rows come in whole tiles of 128, a quarter of each quarter of a tile, because the 128x4 layout puts rows
32 apart beside each other: its scales are then contiguous.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from . import mxfp8_operands as mxfp8

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies the bits of bfloat16 as integers."""
FP4 = tl.constexpr(8)
"""``WORD`` of NVFP4: codes in 32 bits; MXFP8 has 4."""

# Two words and their scale to eight pairs, each the value times 2**-8.  The three bits of a magnitude, moved to the bottom of the
# exponent and the top of the mantissa, are the value times 2**-126 (bfloat16) or 2**-14 (float16), subnormals too; the scale is
# given as float32, 2**118 (2**6) times as large.
BFLOAT16 = tl.constexpr(
    """{
    .reg .b32 s, m, z, h;
    mov.b32 z, 0x80008000;
    cvt.rn.bf16x2.f32 s, $10, $10;
    shr.u32 h, $8, 8;
    and.b32 m, $8, 0x000f000f; mul.lo.u32 m, m, 0x1040; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 $0, m, s, z;
    and.b32 m, $8, 0x00f000f0; mul.lo.u32 m, m, 0x0104; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 $1, m, s, z;
    and.b32 m, h, 0x000f000f; mul.lo.u32 m, m, 0x1040; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 $2, m, s, z;
    and.b32 m, h, 0x00f000f0; mul.lo.u32 m, m, 0x0104; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 $3, m, s, z;
    shr.u32 h, $9, 8;
    and.b32 m, $9, 0x000f000f; mul.lo.u32 m, m, 0x1040; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 $4, m, s, z;
    and.b32 m, $9, 0x00f000f0; mul.lo.u32 m, m, 0x0104; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 $5, m, s, z;
    and.b32 m, h, 0x000f000f; mul.lo.u32 m, m, 0x1040; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 $6, m, s, z;
    and.b32 m, h, 0x00f000f0; mul.lo.u32 m, m, 0x0104; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 $7, m, s, z;
    }"""
)
FLOAT16 = tl.constexpr(
    """{
    .reg .b32 s, m, t;
    cvt.rn.f16x2.f32 s, $10, $10;
    shl.b32 t, $8, 12; shl.b32 m, $8, 9; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $0, t, s;
    shl.b32 t, $8, 8; shl.b32 m, $8, 5; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $1, t, s;
    shl.b32 t, $8, 4; shl.b32 m, $8, 1; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $2, t, s;
    shr.u32 m, $8, 3; and.b32 m, m, 0x0e000e00; lop3.b32 t, $8, 0x80008000, m, 0xea; mul.rn.f16x2 $3, t, s;
    shl.b32 t, $9, 12; shl.b32 m, $9, 9; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $4, t, s;
    shl.b32 t, $9, 8; shl.b32 m, $9, 5; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $5, t, s;
    shl.b32 t, $9, 4; shl.b32 m, $9, 1; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 $6, t, s;
    shr.u32 m, $9, 3; and.b32 m, m, 0x0e000e00; lop3.b32 t, $9, 0x80008000, m, 0xea; mul.rn.f16x2 $7, t, s;
    }"""
)
_REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,f,f")
SCALE = tl.constexpr(256.0)
"""Factor of the weights as they are multiplied."""


@triton.jit
def e2m1(code):
    """Integer code of any width, its lowest four bits, to float32."""
    magnitude = (code & 7).to(tl.float32)
    value = tl.where(magnitude < 4, magnitude * 0.5, tl.where(magnitude < 6, magnitude - 2, magnitude * 2 - 8))
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def e4m3(byte):
    """Convert int32 E4M3 bytes to float32, on any card and in Triton's interpreter."""
    # Sign, and exponent and mantissa at the bottom of float32's: the value times 2**-120, subnormals too.
    value = (((byte & 128) << 24) | ((byte & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((byte & 127) == 127, float("nan"), value)


@triton.jit
def _pairs(
    words, block_scales, first: tl.constexpr, second: tl.constexpr, rows: tl.constexpr, blocks: tl.constexpr, dtype: tl.constexpr
):
    """Two nibbles of each word, beside each other, times their scale and 2**-8: ``(rows, 2 * blocks)``."""
    low = e2m1(words >> (4 * first)) * block_scales
    high = e2m1(words >> (4 * second)) * block_scales
    return tl.reshape(tl.join(low, high), (rows, 2 * blocks)).to(dtype)


@triton.jit
def decoded(words, block_scales, rows: tl.constexpr, columns: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """int32 words ``(rows, columns / 8)`` and E4M3 bytes ``(rows, columns / 16)`` to eight ``(rows, columns / 8)`` of ``dtype``.

    PTX is the card's capability, or 0 to do without; the bits are the same.  A scale of NaN makes NaN.
    """
    blocks: tl.constexpr = columns // 16
    if PTX:
        if PTX >= 89:
            wide = block_scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            wide = e4m3(block_scales.to(tl.int32))
        wide *= 64.0 if dtype == tl.float16 else 3.32306998946229e35
        wide = tl.reshape(tl.broadcast_to(wide[:, :, None], (rows, blocks, 2)), (rows, 2 * blocks))
        if dtype == tl.float16:
            w = tl.inline_asm_elementwise(FLOAT16, _REGISTERS, [words, wide], (tl.float16,) * 8, is_pure=True, pack=2)
        else:
            w = tl.inline_asm_elementwise(BFLOAT16, _REGISTERS, [words, wide], (tl.bfloat16,) * 8, is_pure=True, pack=2)
        return w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
    s = e4m3(block_scales.to(tl.int32)) * 0.00390625
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
def places(starts, n, ROWS: tl.constexpr, BK: tl.constexpr, WORD: tl.constexpr):
    """Return where a tile of ``ROWS`` inputs lies, whether each place has a row, and its column.

    A tile of eight is ``(4, 2 * BK)``, two rows in one, so that what eight lanes read at a time (16 bytes each, of four stretches
    of 32 columns in two rows) lies side by side in shared memory: place ``256 a + 64 b + 32 r + 8 c + d`` is column
    ``128 a + 32 c + 8 b + d`` of row ``r``.  Measured on an H200: up to a tenth less time, with more rows as much more.  For
    MXFP8, where they read 32 columns of each row, place ``64 a + 32 r + d`` is column ``32 a + d``.

    Args:
        starts: ``(ROWS,)`` offsets.
        n: how many there are.
    """
    if ROWS <= 8:
        place = tl.arange(0, 2 * BK)
        if WORD == FP4:
            column = (place // 256 * 128 + place // 8 % 4 * 32 + place // 64 % 4 * 8 + place % 8)[None, :]
        else:
            column = (place // 64 * 32 + place % 32)[None, :]
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
def loaded(x, offsets, there, column, k, K: tl.constexpr, WHOLE: tl.constexpr):
    """Columns from ``k`` on; zeros where there is no row and, unless ``WHOLE``, beyond the matrix."""
    if not WHOLE:
        return tl.load(x + offsets + k, mask=tl.max_constancy(there & (k + column < K), (1, 8)), other=0.0)
    return tl.load(x + offsets + k, mask=tl.max_constancy(there, (1, 8)), other=0.0)


@triton.jit
def _split_fp4(x, rows: tl.constexpr, columns: tl.constexpr):
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
def split_inputs(x, rows: tl.constexpr, columns: tl.constexpr, WORD: tl.constexpr):
    """A tile of :func:`places` to ``WORD`` tensors ``(columns / WORD, rows)`` in the order of :func:`decoded`."""
    if WORD == FP4:
        parts = _split_fp4(x, rows, columns)
    else:
        parts = mxfp8.split_inputs(x, rows, columns)
    return parts


@triton.jit
def _product(w, x, sums):
    if INTERPRETED:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), sums)
    return tl.dot(w, x, sums)


@triton.jit
def dot(w, x, sums, WORD: tl.constexpr):
    sums = _product(w[0], x[0], sums)
    sums = _product(w[1], x[1], sums)
    sums = _product(w[2], x[2], sums)
    sums = _product(w[3], x[3], sums)
    if WORD == FP4:
        sums = _product(w[4], x[4], sums)
        sums = _product(w[5], x[5], sums)
        sums = _product(w[6], x[6], sums)
        sums = _product(w[7], x[7], sums)
    return sums


@triton.jit
def rows_of(tile, BN: tl.constexpr, N: tl.constexpr, COPIES: tl.constexpr):
    """Rows of program ``tile`` of a matrix (or half) of ``N`` rows, COPIES times."""
    tl.static_assert(BN <= 128, "128 rows have their scales beside each other")
    p = tl.arange(0, COPIES * BN) % BN
    if N % 128 == 0:
        first = tile * BN
        return first // 128 * 128 + first % 128 // 4 + p // 4 + p % 4 * 32
    return tile * BN + p


@triton.jit
def first_scale(tile, half: tl.constexpr, BN: tl.constexpr, N: tl.constexpr, K: tl.constexpr, WORD: tl.constexpr):
    """Bytes from the expert's first scale to where :func:`scale_offsets` begin."""
    groups: tl.constexpr = (K * WORD + 511) // 512
    if N % 128 != 0 and N % BN == 0:
        first = half * N + tile * BN
        start = first // 128 * (groups * 512) + first % 32 * 16 + first % 128 // 32 * 4
    else:
        start = 0
    return start


@triton.jit
def scale_offsets(
    tile, half: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, COPIES: tl.constexpr,
    WORD: tl.constexpr,
):  # fmt: skip
    """From there to the scales of rows ``half * N + rows_of(tile)``, ``(COPIES * BN, BK / block)``.

    Where rows come in whole programs but not in 128 they are those of every program and half, which keeps them once: a third
    fewer registers.
    """
    groups: tl.constexpr = (K * WORD + 511) // 512
    b = tl.arange(0, BK * WORD // 128)
    columns = (b // 4 * 512 + b % 4)[None, :]
    p = tl.arange(0, COPIES * BN) % BN
    if N % 128 == 0:
        first = tile * BN
        rows = (half * N + first // 128 * 128) * (groups * 4) + first % 128 * 4 + p * 4
    elif N % BN == 0:
        rows = p % 32 * 16 + p // 32 * 4
    else:
        r = half * N + rows_of(tile, BN, N, COPIES)
        rows = r // 128 * (groups * 512) + r % 32 * 16 + r % 128 // 32 * 4
    return rows[:, None] + columns


@triton.jit
def matrix(
    weight, weight_sf, words, sf_offsets, k, part, there, SPLIT: tl.constexpr, LENGTH: tl.constexpr, ROWS: tl.constexpr,
    BK: tl.constexpr, K: tl.constexpr, EVERY: tl.constexpr, WHOLE: tl.constexpr, WORD: tl.constexpr, dtype: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Columns ``k`` to ``k + BK`` of a program's ROWS, as :func:`decoded` gives them; zeros where no row or column is ``there``.

    Args:
        part: ``(ROWS,)``, which of the SPLIT stretches of ``LENGTH`` columns a row is in.
        EVERY: each row is there.
        WHOLE: so is each column.
    """
    size: tl.constexpr = 128 // WORD
    beyond = k * WORD  # 512 bytes for four blocks of columns
    if EVERY and WHOLE:
        codes = tl.load(weight + words + k // WORD)
        factors = tl.load(weight_sf + sf_offsets + beyond)
    elif WHOLE:
        codes = tl.load(weight + words + k // WORD, mask=there[:, None], other=0)
        factors = tl.load(weight_sf + sf_offsets + beyond, mask=there[:, None], other=0)
    else:
        column = (k // WORD + tl.arange(0, BK // WORD))[None, :]  # in words, so that Triton sees which masks are of one stretch
        block = (k // size + tl.arange(0, BK // size))[None, :]
        if SPLIT > 1:
            column += (part * (LENGTH // WORD))[:, None]
            block += (part * (LENGTH // size))[:, None]
        codes = tl.load(weight + words + k // WORD, mask=there[:, None] & (column < K // WORD), other=0)
        # Four at a time, as they lie: fewer are not copied asynchronously.  What lies beyond may be anything.
        group = tl.max_constancy(block // 4 < (K // size + 3) // 4, (1, 4))
        factors = tl.load(weight_sf + sf_offsets + beyond, mask=there[:, None] & group, other=0)
        if K // size % 4 != 0:
            factors = tl.where(block < K // size, factors, 0)
    if WORD == FP4:
        parts = decoded(codes, factors, ROWS, BK, dtype, PTX)
    else:
        parts = mxfp8.decoded(codes, factors, ROWS, BK, PTX)
    return parts


@triton.jit
def own_columns(sums, PARTS: tl.constexpr, BN: tl.constexpr):
    """Sum ``(PARTS * BN, 8)``, whose part ``i`` of the rows is for column ``i`` alone: ``(PARTS * BN,)``."""
    part = tl.arange(0, PARTS * BN) // BN
    return tl.sum(tl.where(part[:, None] == tl.arange(0, 8)[None, :], sums, 0.0), axis=1)


@triton.jit
def added(parts, PARTS: tl.constexpr, BN: tl.constexpr):
    """``(PARTS * BN,)`` to ``(BN,)``."""
    if PARTS == 1:
        total = parts
    else:
        total = tl.sum(tl.reshape(parts, (PARTS, BN)), axis=0)
    return total
