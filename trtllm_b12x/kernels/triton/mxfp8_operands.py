"""MXFP8 weights as the operands of tensor cores, and the inputs that go with them; see :mod:`.operands`.

A row is read in words of four E4M3 codes.  Two neighboring words become four pairs of bfloat16, one for each of four products of
``BK / 4`` columns: column ``2 b + p`` of product ``j`` is the row's ``8 b + 2 j + p``.  E8M0 scales of 32 columns lie in the
128x4 layout.  An E4M3 value times a power of two is exact in bfloat16, as far as it has an exponent for it.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

# Two words and their scale to four pairs.  A code's exponent and mantissa at the bottom of bfloat16's exponent are the value
# times 2**-120, subnormals too, and 0x7b80 is 2**120.  A scale's byte at bit 7 is its power of two; 0 is 2**-127, subnormal
# there, and 255 infinity, which times zero is the NaN that is added.  (E4M3's own NaN is no weight: checkpoints that hold one
# are refused.)
BFLOAT16 = tl.constexpr(
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
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r,r,r")


@triton.jit
def _e4m3(code):
    """int32, its lowest eight bits, to float32."""
    exponent = (code >> 3) & 15
    power = ((tl.maximum(exponent, 1) + 117) << 23).to(tl.float32, bitcast=True)
    value = tl.where(exponent == 0, code & 7, (code & 7) + 8).to(tl.float32) * power
    return tl.where((code & 128) != 0, -value, value)


@triton.jit
def _e8m0(byte):
    """int32 to float32."""
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pairs(words, block_scales, first: tl.constexpr, rows: tl.constexpr, blocks: tl.constexpr):
    """Two bytes of each word, one between them, beside each other, times their scale: ``(rows, 8 * blocks)``."""
    low = _e4m3(words >> (8 * first)) * block_scales
    high = _e4m3(words >> (8 * first + 16)) * block_scales
    return tl.reshape(tl.join(low, high), (rows, 8 * blocks)).to(tl.bfloat16)


@triton.jit
def decoded(words, block_scales, rows: tl.constexpr, columns: tl.constexpr, PTX: tl.constexpr):
    """int32 words ``(rows, columns / 4)`` and E8M0 bytes ``(rows, columns / 32)`` to four ``(rows, columns / 4)`` bfloat16.

    With or without PTX the same bits.
    """
    blocks: tl.constexpr = columns // 32
    if PTX:
        wide = tl.reshape(tl.broadcast_to(block_scales.to(tl.int32)[:, :, None], (rows, blocks, 8)), (rows, 8 * blocks))
        w = tl.inline_asm_elementwise(BFLOAT16, _REGISTERS, [words, wide], (tl.bfloat16,) * 4, is_pure=True, pack=2)
        return w[0], w[1], w[2], w[3]
    s = tl.reshape(tl.broadcast_to(_e8m0(block_scales.to(tl.int32))[:, :, None], (rows, blocks, 4)), (rows, 4 * blocks))
    even, odd = tl.split(tl.reshape(words, (rows, 4 * blocks, 2)))
    p0 = _pairs(even, s, 0, rows, blocks)
    p1 = _pairs(even, s, 1, rows, blocks)
    p2 = _pairs(odd, s, 0, rows, blocks)
    p3 = _pairs(odd, s, 1, rows, blocks)
    return p0, p1, p2, p3


@triton.jit
def split_inputs(x, rows: tl.constexpr, columns: tl.constexpr):
    """A tile of :func:`.operands.places` to four ``(columns / 4, rows)`` in the order of :func:`decoded`."""
    if rows <= 8:
        x = tl.reshape(tl.permute(tl.reshape(x, (rows // 2, columns // 32, 2, 32)), (0, 2, 1, 3)), (rows, columns))
    # word of the two, bits of the column in it: the higher one is the pair's, the others the product's number
    x = tl.permute(tl.reshape(x, (rows, columns // 8, 2, 2, 2)), (0, 1, 3, 4, 2))
    low, high = tl.split(tl.reshape(x, (rows, columns // 4, 2, 2)))
    x0, x1 = tl.split(low)
    x2, x3 = tl.split(high)
    return tl.trans(x0), tl.trans(x1), tl.trans(x2), tl.trans(x3)
