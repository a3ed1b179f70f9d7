# SPDX-License-Identifier: Apache-2.0
"""Products of the grouped kernels: they multiply a block of routes by weight rows, both as codes with scales."""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import E2M1, INTERPRETED, NAN, e2m1, e4m3, e4m3_scales, e8m0
from .scales import scales_of


@triton.jit
def _decoded(codes, scales, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Decode NVFP4 ``(ROWS, BYTES)`` to even and odd columns: bfloat16, or float32 in Triton's interpreter."""
    factor = e4m3_scales(scales, not INTERPRETED)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], (ROWS, BYTES // 8, 8)), (ROWS, BYTES))
    wide = codes.to(tl.int32)
    even, odd = e2m1(wide) * factor, e2m1(wide >> 4) * factor
    if INTERPRETED:
        return even, odd
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


_BITS = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07f007f0;
    and.b32 d, d, 0x07f007f0;
    lop3.b32 $0, a, 0x80008000, c, 0xea;
    lop3.b32 $1, b, 0x80008000, d, 0xea;
}""")
"""PTX that converts four E4M3 codes to bfloat16 times 2**-120. Exponent and mantissa move to the right by four bits. Triton
converts each code by itself and stores two bytes at a time, which takes a quarter more time on an H200."""


@triton.jit
def _decoded_mxfp8(codes, scales, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """Decode MXFP8 ``(ROWS, BYTES)`` exactly to bfloat16, or to float32 in Triton's interpreter."""
    byte = codes.to(tl.uint8, bitcast=True)
    if INTERPRETED:
        values = tl.reshape(e4m3(byte.to(tl.int32)), (ROWS, BYTES // 32, 32))
        return tl.reshape(values * e8m0(scales.to(tl.int32))[:, :, None], (ROWS, BYTES))
    values = tl.inline_asm_elementwise(_BITS, "=r,=r,r", [byte], dtype=tl.bfloat16, is_pure=True, pack=4)
    values = (values * 1.329227995784916e36).to(tl.bfloat16)
    scale = scales.to(tl.int16)
    power = tl.where(scale == 0, 0x40, tl.where(scale == NAN, 0x7FC0, scale << 7)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.reshape(values, (ROWS, BYTES // 32, 32)) * power[:, :, None], (ROWS, BYTES))


@triton.jit
def block_product(
    sums, a, a_sf, a_there, w, w_sf, rows, rows_there, k, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, NATIVE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Add the products of columns ``k`` to ``k + BK`` to ``sums (BM, BN)``.

    Args:
        a: pointers to rows of K columns, ``(BM, 1)``; ``a_there (BM,)`` is True for valid rows.
        a_sf, w_sf: pointers to the first word of rows' scales, ``(BM, 1)`` and ``(BN, 1)``.
        w: pointer to the expert's matrix of K columns; ``rows (BN,)`` are the rows to read.
    """
    stride: tl.constexpr = 128 if not LINEAR else 0 if K // GROUP % 4 != 0 else 1
    packed: tl.constexpr = 2 if FORMAT == E2M1 else 1
    width: tl.constexpr = K // packed
    column = k // packed + tl.arange(0, BK // packed)
    if K % BK != 0:
        inside = column < width
        x = tl.load(a + column[None, :], mask=a_there[:, None] & inside[None, :], other=0.0)
        codes = tl.load(w + rows[None, :] * width + column[:, None], mask=rows_there[None, :] & inside[:, None], other=0.0)
    else:
        x = tl.load(a + column[None, :])
        codes = tl.load(w + rows[None, :] * width + column[:, None])
    x_sf = scales_of(a_sf, k, 1, K, BM, BK, GROUP, WARPS)
    factors = scales_of(w_sf, k, stride, K, BN, BK, GROUP, WARPS)
    if FORMAT != E2M1:
        if NATIVE:
            sums = tl.dot_scaled(x, x_sf, FORMAT, codes, factors, FORMAT, sums)
        else:
            decoded = _decoded_mxfp8(tl.trans(codes), factors, BN, BK // packed)
            sums = tl.dot(_decoded_mxfp8(x, x_sf, BM, BK // packed), tl.trans(decoded), sums)
    elif NATIVE:
        x_sf, factors = x_sf.to(tl.float8e4nv, bitcast=True), factors.to(tl.float8e4nv, bitcast=True)
        sums = tl.dot_scaled(x, x_sf, FORMAT, codes, factors, FORMAT, sums)
    else:
        even, odd = _decoded(x, x_sf, BM, BK // packed)
        w_even, w_odd = _decoded(tl.trans(codes), factors, BN, BK // packed)
        sums = tl.dot(even, tl.trans(w_even), sums)
        sums = tl.dot(odd, tl.trans(w_odd), sums)
    return sums
