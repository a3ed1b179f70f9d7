# SPDX-License-Identifier: Apache-2.0
"""Weights and 16-bit inputs as the operands of tensor cores, in a column order that keeps every code in its lane.

Weights are the engine's bytes: row-major codes, ``WORD`` in an int32, and scales of ``GROUP`` columns (``scales.py``). A word has
8 E2M1 codes, the even column in the low nibble, or 4 E4M3 codes (MXFP8). Scales of 16 columns are E4M3 (NVFP4), those of 32 E8M0
(MXFP4, MXFP8). A program multiplies ``BN`` rows of one expert by up to ``BM`` routes, ``BK`` columns at a time. E2M1 times E4M3
has at most 6 significant bits, so a weight is exact in bfloat16 and, 2**-8 times as large, in float16. E4M3 times a power of two
is exact in bfloat16 if bfloat16 has the exponent.

A row is read in words. Two neighboring words of E2M1 lie in one block, and become eight pairs of 16-bit floats, one for each of
eight products of ``BK / 8`` columns. Column ``2 b + p`` of product ``j`` is the row's ``16 b + 8 (j // 4) + 4 p + j % 4``. So a
pair is the same nibble of a word's two halves, and every code stays in its lane. In MXFP8 two words become four pairs: column
``2 b + p`` of product ``j`` is the row's ``8 b + 4 (j // 2) + 2 p + j % 2``. ``split_inputs`` permutes the inputs identically.
The sum over columns does not depend on the order.

If rows come in whole tiles of 128, a program takes a quarter of its rows from each quarter of a tile. The 128x4 layout puts rows
32 apart beside each other, so the program's scales are contiguous.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtllm_b12x.formats import mxfp4

from .numerics import INTERPRETED, e2m1, e4m3, e4m3_scales, e8m0

FP4 = tl.constexpr(8)
"""``WORD`` of E2M1; the ``WORD`` of E4M3 is 4."""
NVFP4_GROUP = tl.constexpr(16)
"""``GROUP`` of E4M3 scales, which come with a scale for each expert. E8M0 scales have 32 columns and no scale per expert."""
SCALE = tl.constexpr(256.0)
"""Factor of sums with E2M1 weights, which are multiplied 2**-8 times as large as they are."""
LARGEST_MX_SCALE = tl.constexpr(mxfp4.LARGEST_SCALE)

# E2M1: convert two words and their scale to eight pairs, each value times 2**-8. The three bits of a magnitude, moved to the
# bottom of the exponent and the top of the mantissa, are the value times 2**-126 (bfloat16) or 2**-14 (float16), subnormals too.
# The scale is float32, 2**118 (2**6) times as large.
_E2M1_PAIRS = """
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
"""PTX that multiplies two words by the pair of scales in ``s`` and adds ``z``."""
E2M1_BFLOAT16 = tl.constexpr(
    """{
    .reg .b32 s, m, z, h;
    mov.b32 z, 0x80008000;
    cvt.rn.bf16x2.f32 s, $10, $10;"""
    + _E2M1_PAIRS
)
E2M1_FLOAT16 = tl.constexpr(
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
_E2M1_REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,f,f")
# E2M1 with E8M0 scales: a scale's byte plus 118, at bit 7, is its power of two times 2**118. Scales above 2**9, more than a model
# needs, overflow to infinity, as 255 does. Infinity times zero is the NaN that is added. E8M0's whole range would take a second
# multiplication for each pair, an eighth of the loop.
MX_E2M1_BFLOAT16 = tl.constexpr(
    """{
    .reg .b32 s, m, z, h, n;
    mov.b32 z, 0x80008000;
    add.u32 s, $10, 118;
    min.u32 s, s, 255;
    mul.lo.u32 s, s, 0x00800080;
    fma.rn.bf16x2 n, s, z, z;"""
    + _E2M1_PAIRS.replace("s, z;", "s, n;")
)
_MX_E2M1_REGISTERS = tl.constexpr("=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r")
# E4M3: convert two words and their scale to four pairs. A code's exponent and mantissa at the bottom of bfloat16's exponent are
# the value times 2**-120, subnormals too, and 0x7b80 is 2**120. A scale's byte at bit 7 is its power of two. 0 is 2**-127, which
# is subnormal. 255 is infinity, which times zero is the NaN that is added. (Checkpoints that hold an E4M3 code of NaN are
# refused.)
E4M3_BFLOAT16 = tl.constexpr(
    """{
    .reg .b32 s, m, t, z, n, c;
    mov.b32 z, 0x80008000;
    mov.b32 c, 0x7b807b80;
    mul.lo.u32 s, $6, 0x00800080;
    max.u32 s, s, 0x00400040;
    fma.rn.bf16x2 n, s, z, z;
    shl.b32 t, $4, 8; shl.b32 m, $4, 4; and.b32 m, m, 0x07f007f0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 t, t, c, z;
    fma.rn.bf16x2 $0, t, s, n;
    shr.u32 m, $4, 4; and.b32 m, m, 0x07f007f0; lop3.b32 t, $4, z, m, 0xea; fma.rn.bf16x2 t, t, c, z;
    fma.rn.bf16x2 $1, t, s, n;
    shl.b32 t, $5, 8; shl.b32 m, $5, 4; and.b32 m, m, 0x07f007f0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 t, t, c, z;
    fma.rn.bf16x2 $2, t, s, n;
    shr.u32 m, $5, 4; and.b32 m, m, 0x07f007f0; lop3.b32 t, $5, z, m, 0xea; fma.rn.bf16x2 t, t, c, z;
    fma.rn.bf16x2 $3, t, s, n;
    }"""
)
_E4M3_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r,r,r")


@triton.jit
def _pairs(words, scales, LOW: tl.constexpr, HIGH: tl.constexpr, WORD: tl.constexpr, dtype: tl.constexpr):
    """Return the codes of each word at bits LOW and HIGH, side by side, times their scale: ``(rows, 2 * words)``."""
    if WORD == FP4:
        low, high = e2m1(words >> LOW), e2m1(words >> HIGH)
    else:
        low, high = e4m3(words >> LOW), e4m3(words >> HIGH)
    return tl.reshape(tl.join(low * scales, high * scales), (words.shape[0], 2 * words.shape[1])).to(dtype)


@triton.jit
def _decoded_e2m1(
    words, block_scales, rows: tl.constexpr, columns: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    blocks: tl.constexpr = columns // GROUP
    size: tl.constexpr = GROUP // 8
    if PTX:
        if GROUP == NVFP4_GROUP:
            wide = e4m3_scales(block_scales, PTX >= 89)
            wide *= 64.0 if dtype == tl.float16 else 3.32306998946229e35
        else:
            wide = block_scales.to(tl.int32)
        wide = tl.reshape(tl.broadcast_to(wide[:, :, None], (rows, blocks, size)), (rows, size * blocks))
        if GROUP != NVFP4_GROUP:
            w = tl.inline_asm_elementwise(
                MX_E2M1_BFLOAT16, _MX_E2M1_REGISTERS, [words, wide], (tl.bfloat16,) * 8, is_pure=True, pack=2
            )
        elif dtype == tl.float16:
            w = tl.inline_asm_elementwise(E2M1_FLOAT16, _E2M1_REGISTERS, [words, wide], (tl.float16,) * 8, is_pure=True, pack=2)
        else:
            w = tl.inline_asm_elementwise(E2M1_BFLOAT16, _E2M1_REGISTERS, [words, wide], (tl.bfloat16,) * 8, is_pure=True, pack=2)
        return w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7]
    if GROUP == NVFP4_GROUP:
        s = e4m3_scales(block_scales, False) * 0.00390625
    else:
        s = tl.where(block_scales.to(tl.int32) > LARGEST_MX_SCALE, float("nan"), e8m0(block_scales.to(tl.int32)) * 0.00390625)
    s = tl.reshape(tl.broadcast_to(s[:, :, None], (rows, blocks, GROUP // 16)), (rows, columns // 16))
    even, odd = tl.split(tl.reshape(words, (rows, columns // 16, 2)))
    p0, p1 = _pairs(even, s, 0, 16, FP4, dtype), _pairs(even, s, 4, 20, FP4, dtype)
    p2, p3 = _pairs(even, s, 8, 24, FP4, dtype), _pairs(even, s, 12, 28, FP4, dtype)
    p4, p5 = _pairs(odd, s, 0, 16, FP4, dtype), _pairs(odd, s, 4, 20, FP4, dtype)
    p6, p7 = _pairs(odd, s, 8, 24, FP4, dtype), _pairs(odd, s, 12, 28, FP4, dtype)
    return p0, p1, p2, p3, p4, p5, p6, p7


@triton.jit
def _decoded_e4m3(words, block_scales, rows: tl.constexpr, columns: tl.constexpr, PTX: tl.constexpr):
    blocks: tl.constexpr = columns // 32
    if PTX:
        wide = tl.reshape(tl.broadcast_to(block_scales.to(tl.int32)[:, :, None], (rows, blocks, 8)), (rows, 8 * blocks))
        w = tl.inline_asm_elementwise(E4M3_BFLOAT16, _E4M3_REGISTERS, [words, wide], (tl.bfloat16,) * 4, is_pure=True, pack=2)
        return w[0], w[1], w[2], w[3]
    s = tl.reshape(tl.broadcast_to(e8m0(block_scales.to(tl.int32))[:, :, None], (rows, blocks, 4)), (rows, 4 * blocks))
    even, odd = tl.split(tl.reshape(words, (rows, 4 * blocks, 2)))
    p0, p1 = _pairs(even, s, 0, 16, 4, tl.bfloat16), _pairs(even, s, 8, 24, 4, tl.bfloat16)
    p2, p3 = _pairs(odd, s, 0, 16, 4, tl.bfloat16), _pairs(odd, s, 8, 24, 4, tl.bfloat16)
    return p0, p1, p2, p3


@triton.jit
def decoded(
    words, block_scales, rows: tl.constexpr, columns: tl.constexpr, WORD: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Decode int32 words ``(rows, columns / WORD)`` and scale bytes to WORD tensors ``(rows, columns / WORD)`` of ``dtype``.

    PTX is the card's capability, or 0 in Triton's interpreter. Both give the same bits. A NaN scale gives NaN.
    """
    if WORD == FP4:
        parts = _decoded_e2m1(words, block_scales, rows, columns, GROUP, dtype, PTX)
    else:
        parts = _decoded_e4m3(words, block_scales, rows, columns, PTX)
    return parts


@triton.jit
def places(starts, n, ROWS: tl.constexpr, BK: tl.constexpr, WORD: tl.constexpr):
    """Return where a tile of ``ROWS`` inputs lies, whether each place has a row, and its column.

    A tile of eight rows is ``(4, 2 * BK)``, two rows in one. So the data that eight lanes read at a time (16 bytes each, of four
    times 32 columns in two rows) lies side by side in shared memory. Place ``256 a + 64 b + 32 r + 8 c + d`` is column
    ``128 a + 32 c + 8 b + d`` of row ``r``. On an H200 this takes up to a tenth less time; with more rows it takes as much more.
    For MXFP8, where lanes read 32 columns of each row, place ``64 a + 32 r + d`` is column ``32 a + d``.

    Args:
        starts: ``(ROWS,)`` offsets of the rows.
        n: number of valid rows.
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
    """Load columns from ``k`` on, with zeros for missing rows and, unless ``WHOLE``, beyond the matrix."""
    if not WHOLE:
        return tl.load(x + offsets + k, mask=tl.max_constancy(there & (k + column < K), (1, 8)), other=0.0)
    return tl.load(x + offsets + k, mask=tl.max_constancy(there, (1, 8)), other=0.0)


@triton.jit
def _split_by_8(x, rows: tl.constexpr, columns: tl.constexpr):
    if rows <= 8:
        x = tl.reshape(x, (rows // 2, columns // 128, 4, 2, 4, 8))
        x = tl.reshape(tl.permute(x, (0, 3, 1, 4, 2, 5)), (rows, columns))
    # The axes are the word of the block, the half of the word, and the bits of the nibble's place in the half.
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
def _split_by_4(x, rows: tl.constexpr, columns: tl.constexpr):
    if rows <= 8:
        x = tl.reshape(tl.permute(tl.reshape(x, (rows // 2, columns // 32, 2, 32)), (0, 2, 1, 3)), (rows, columns))
    # The axes are the word and two bits of the column in it. The higher bit is the place in the pair, the rest is the product.
    x = tl.permute(tl.reshape(x, (rows, columns // 8, 2, 2, 2)), (0, 1, 3, 4, 2))
    low, high = tl.split(tl.reshape(x, (rows, columns // 4, 2, 2)))
    x0, x1 = tl.split(low)
    x2, x3 = tl.split(high)
    return tl.trans(x0), tl.trans(x1), tl.trans(x2), tl.trans(x3)


@triton.jit
def split_inputs(x, rows: tl.constexpr, columns: tl.constexpr, WORD: tl.constexpr):
    """Split a tile of ``places`` into ``WORD`` tensors ``(columns / WORD, rows)`` in the order of ``decoded``."""
    if WORD == FP4:
        parts = _split_by_8(x, rows, columns)
    else:
        parts = _split_by_4(x, rows, columns)
    return parts


@triton.jit
def _product(w, x, sums):
    if INTERPRETED:
        return tl.dot(w.to(tl.float32), x.to(tl.float32), sums)
    return tl.dot(w, x, sums)


@triton.jit
def dot(w, x, sums, WORD: tl.constexpr):
    for j in tl.static_range(WORD):
        sums = _product(w[j], x[j], sums)
    return sums


@triton.jit
def matrix(
    weight, weight_sf, words, sf_offsets, k, there, BN: tl.constexpr, BK: tl.constexpr, K: tl.constexpr, EVERY: tl.constexpr,
    WHOLE: tl.constexpr, WORD: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Load and decode columns ``k`` to ``k + BK`` of a program's rows. Missing rows and columns are zero.

    Args:
        there: ``(BN,)``, True for rows that the matrix has.
        EVERY: the matrix has every row.
        WHOLE: the matrix has every column.
        LINEAR: the scales lie in rows.
    """
    if LINEAR:
        beyond = k // GROUP
    else:
        beyond = k * (128 // GROUP)  # 512 bytes for four blocks of columns
    if EVERY and WHOLE:
        codes = tl.load(weight + words + k // WORD)
        factors = tl.load(weight_sf + sf_offsets + beyond)
    elif WHOLE:
        codes = tl.load(weight + words + k // WORD, mask=there[:, None], other=0)
        factors = tl.load(weight_sf + sf_offsets + beyond, mask=there[:, None], other=0)
    else:
        column = (k // WORD + tl.arange(0, BK // WORD))[None, :]  # in words, so that Triton sees which masks neighbors share
        block = (k // GROUP + tl.arange(0, BK // GROUP))[None, :]
        codes = tl.load(weight + words + k // WORD, mask=there[:, None] & (column < K // WORD), other=0)
        # Four scales load at a time, as stored: fewer are not copied asynchronously. Memory beyond them is undefined.
        if LINEAR and K // GROUP % 4 != 0:
            inside = block < K // GROUP
        else:
            inside = tl.max_constancy(block // 4 < (K // GROUP + 3) // 4, (1, 4))
        factors = tl.load(weight_sf + sf_offsets + beyond, mask=there[:, None] & inside, other=0)
        if K // GROUP % 4 != 0:
            factors = tl.where(block < K // GROUP, factors, 0)
    return decoded(codes, factors, BN, BK, WORD, GROUP, dtype, PTX)
