"""The grouped products with codes decoded by their bits, instead of as ``tl.dot_scaled`` does it where a card has no block-scaled
products: for ``python -m benchmarks.grouped_tiles --bits``.

Triton converts each E4M3 code by itself there (``F2FP.F16.E4M3``, then ``F2F.BF16.F16``) and stores weights for the tensor cores
two bytes at a time.  Here four codes become four bfloat16 in eight instructions, the values times 2**-120, and are stored by 16
bytes.  All steps are exact.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtllm_b12x.kernels.grouped import source
from trtllm_b12x.kernels.grouped.source import _sf_offsets

_UNIT = tl.constexpr(2.0**120)
_DECODE = tl.constexpr("""{
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
"""Codes in the upper bytes of halves; sign, and exponent and mantissa at the bottom of bfloat16's."""


@triton.jit
def _decoded(codes, scales, ROWS: tl.constexpr, BK: tl.constexpr):
    """E4M3 ``(ROWS, BK)`` and E8M0 bytes ``(ROWS, BK / 32)`` to bfloat16."""
    bytes_ = codes.to(tl.uint8, bitcast=True)
    values = tl.inline_asm_elementwise(_DECODE, "=r,=r,r", [bytes_], dtype=tl.bfloat16, is_pure=True, pack=4) * _UNIT
    scale = scales.to(tl.int16)
    power = tl.where(scale == 0, 0x40, tl.where(scale == 255, 0x7FC0, scale << 7)).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.reshape(values.to(tl.bfloat16), (ROWS, BK // 32, 32)) * power[:, :, None], (ROWS, BK))


@triton.jit
def _product(
    sums, a, a_sf, a_there, w, w_sf, rows, rows_there, k, K: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """As :func:`trtllm_b12x.kernels.grouped.source._product`."""
    column = k + tl.arange(0, BK)
    block = k // 32 + tl.arange(0, BK // 32)
    inside, whole = (column < K)[None, :], (block < K // 32)[None, :]
    if K % BK != 0:
        x = tl.load(a + column[None, :], mask=a_there[:, None] & inside, other=0.0)
        x_sf = tl.load(a_sf + block[None, :], mask=a_there[:, None] & whole, other=0)
        codes = tl.load(w + rows[:, None] * K + column[None, :], mask=rows_there[:, None] & inside, other=0.0)
        factors = tl.load(w_sf + _sf_offsets(rows, block, K), mask=rows_there[:, None] & whole, other=0)
    else:
        x = tl.load(a + column[None, :])
        x_sf = tl.load(a_sf + block[None, :])
        codes = tl.load(w + rows[:, None] * K + column[None, :])
        factors = tl.load(w_sf + _sf_offsets(rows, block, K))
    return tl.dot(_decoded(x, x_sf, x.shape[0], BK), tl.trans(_decoded(codes, factors, codes.shape[0], BK)), sums)


def install() -> None:
    """In this process, before the kernels are launched."""
    source._product = _product
    for kernel in (source.fc1_kernel, source.fc2_kernel):
        kernel.hash = None  # what it calls is part of its key
        kernel.used_global_vals.clear()
