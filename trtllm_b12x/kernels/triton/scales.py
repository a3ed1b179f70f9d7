# SPDX-License-Identifier: Apache-2.0
"""Addresses of block scales: weights in the 128x4 layout or in rows (LINEAR), activations in rows of whole words of four.

128x4: row ``r`` and block ``b`` in a matrix with ``B`` blocks is at ``(r // 128 * ceil(B / 4) + b // 4) * 512 + r % 32 * 16 +
r % 128 // 32 * 4 + b % 4``.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(tile, BN: tl.constexpr, N: tl.constexpr, LINEAR: tl.constexpr):
    """Return the rows of program ``tile`` in a matrix (or half) with ``N`` rows."""
    tl.static_assert(BN <= 128, "128 rows have their scales beside each other")
    p = tl.arange(0, BN)
    if N % 128 == 0 and not LINEAR:
        first = tile * BN
        return first // 128 * 128 + first % 128 // 4 + p // 4 + p % 4 * 32
    return tile * BN + p


@triton.jit
def first_scale(
    tile, FIRST: tl.constexpr, BN: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Return the bytes from the expert's first scale to the start of ``scale_offsets``."""
    groups: tl.constexpr = (K + 4 * GROUP - 1) // (4 * GROUP)
    if LINEAR:
        start = (FIRST + tile * (BN * STEP)) * (K // GROUP)
    elif N % 128 != 0 and N % BN == 0:
        first = FIRST + tile * BN
        start = first // 128 * (groups * 512) + first % 32 * 16 + first % 128 // 32 * 4
    else:
        start = 0
    return start


@triton.jit
def scale_offsets(
    tile, FIRST: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    LINEAR: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Return offsets to the scales of rows ``FIRST + STEP * rows_of(tile)``, ``(BN, BK / GROUP)``.

    If ``BN`` but not 128 divides the rows, all programs and halves have the same offsets. A program then keeps them once, which
    saves a third of the registers. Scales in rows also have the same offsets.
    """
    tl.static_assert(LINEAR or STEP == 1, "gate and up by turns have their scales in rows")
    groups: tl.constexpr = (K + 4 * GROUP - 1) // (4 * GROUP)
    b = tl.arange(0, BK // GROUP)[None, :]
    p = tl.arange(0, BN)
    if LINEAR:
        rows = p * (STEP * (K // GROUP))
    elif N % 128 == 0:
        first = tile * BN
        rows = (FIRST + first // 128 * 128) * (groups * 4) + first % 128 * 4 + p * 4
    elif N % BN == 0:
        rows = p % 32 * 16 + p // 32 * 4
    else:
        r = FIRST + rows_of(tile, BN, N, LINEAR)
        rows = r // 128 * (groups * 512) + r % 32 * 16 + r % 128 // 32 * 4
    if not LINEAR:
        b = b // 4 * 512 + b % 4
    return rows[:, None] + b


@triton.jit
def scale_bytes(rows: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr):
    """Return the bytes of a matrix's scales."""
    if LINEAR:
        return rows * (K // GROUP)
    return (rows + 127) // 128 * ((K + 4 * GROUP - 1) // (4 * GROUP)) * 512


@triton.jit
def first_scales(words, e, rows, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr):
    """Return pointers ``(rows, 1)`` to the first scales of ``rows`` in expert ``e``'s matrix (N, K).

    They point to words of four, or to bytes if rows (LINEAR) do not fill words.
    """
    blocks: tl.constexpr = K // GROUP
    size, e = scale_bytes(N, K, GROUP, LINEAR), e.to(tl.int64)
    if LINEAR and blocks % 4 != 0:
        return words.to(tl.pointer_type(tl.uint8), bitcast=True) + e * size + rows[:, None] * blocks
    elif LINEAR:  # noqa: RET505 (as in ``numerics.quantized``)
        return words + e * (size // 4) + rows[:, None] * (blocks // 4)
    else:
        tile: tl.constexpr = (blocks + 3) // 4 * 128
        return words + e * (size // 4) + (rows // 128 * tile + rows % 32 * 4 + rows % 128 // 32)[:, None]


@triton.jit
def scales_of(
    words, k, STRIDE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Return the scales of columns ``k`` to ``k + BK``, uint8 ``(ROWS, blocks)``; 0 beyond ``K``, where memory is undefined.

    Four blocks are a word, and words are STRIDE words apart. Loads below four bytes per thread are not asynchronous, so words
    are read. Bytes are read if there are enough of them, since Triton 3.9 doubles the loop for NVFP4's words. With STRIDE 0,
    ``words`` points to bytes in a row.
    """
    blocks: tl.constexpr = BK // GROUP
    block = (k // GROUP + tl.arange(0, blocks))[None, :]
    if STRIDE == 0 and blocks == 2 and K // GROUP % 2 == 0:  # half a word
        first = (words + k // GROUP).to(tl.int64)
        found = tl.load((first & -4).to(tl.pointer_type(tl.int32)))
        scales = (found >> ((first & 2) * 8).to(tl.int32) + 8 * tl.arange(0, 2)[None, :]).to(tl.uint8)
    elif STRIDE == 0:
        scales = tl.load(words + block, mask=tl.broadcast_to(block < K // GROUP, (ROWS, blocks)), other=0)
    elif GROUP == 16 and ROWS * blocks >= 128 * WARPS:
        place = words.to(tl.pointer_type(tl.uint8), bitcast=True) + (block // 4 * (4 * STRIDE) + block % 4)
        if K % BK != 0:
            there = tl.max_constancy(tl.broadcast_to(block // 4 * (4 * GROUP) < K, (ROWS, blocks)), (1, 4))
            scales = tl.load(place, mask=there, other=0)
        else:
            scales = tl.load(place)
    else:
        count: tl.constexpr = (blocks + 3) // 4
        word = (k // (4 * GROUP) + tl.arange(0, count))[None, :]
        if K % BK != 0:
            found = tl.load(words + word * STRIDE, mask=tl.broadcast_to(word * (4 * GROUP) < K, (ROWS, count)), other=0)
        else:
            found = tl.load(words + word * STRIDE)
        shift = 8 * (k // GROUP % 4 + tl.arange(0, blocks // count))
        scales = tl.reshape((found[:, :, None] >> shift[None, None, :]) & 255, (ROWS, blocks)).to(tl.uint8)
    if STRIDE != 0 and K // GROUP % 4 != 0:
        scales = tl.where(block < K // GROUP, scales, 0)
    return scales
