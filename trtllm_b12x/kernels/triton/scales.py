"""Addresses of block scales: the 128x4 layout of weights, and rows of whole words of four for activations.

Row ``r`` and block ``b`` of a matrix of ``B`` blocks is at ``(r // 128 * ceil(B / 4) + b // 4) * 512 + r % 32 * 16 +
r % 128 // 32 * 4 + b % 4``.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import E2M1


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
    """Bytes from the expert's first scale to where ``scale_offsets`` begin."""
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
    """Return offsets to the scales of rows ``half * N + rows_of(tile)``, ``(COPIES * BN, BK / block)``.

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
def first_words(rows, groups: tl.constexpr):
    """Return the offset of the weight scales of ``rows``, in words of four."""
    return rows // 128 * (groups * 128) + rows % 32 * 4 + rows % 128 // 32


@triton.jit
def scales_of(
    words, k, STRIDE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr, FORMAT: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """The scales of columns ``k`` to ``k + BK``, uint8 ``(ROWS, blocks)``; 0 beyond ``K``, where anything may lie.

    Four blocks are a word, STRIDE words from the next. What is less than four bytes a thread is not copied asynchronously, so
    words are read, and bytes where they are enough: Triton 3.9 makes twice the loop of NVFP4's words.
    """
    size: tl.constexpr = 16 if FORMAT == E2M1 else 32
    blocks: tl.constexpr = BK // size
    block = (k // size + tl.arange(0, blocks))[None, :]
    if FORMAT == E2M1 and ROWS * blocks >= 128 * WARPS:
        place = words.to(tl.pointer_type(tl.uint8), bitcast=True) + (block // 4 * (4 * STRIDE) + block % 4)
        if K % BK != 0:
            there = tl.max_constancy(tl.broadcast_to(block // 4 * (4 * size) < K, (ROWS, blocks)), (1, 4))
            scales = tl.load(place, mask=there, other=0)
        else:
            scales = tl.load(place)
    else:
        count: tl.constexpr = (blocks + 3) // 4
        word = (k // (4 * size) + tl.arange(0, count))[None, :]
        if K % BK != 0:
            found = tl.load(words + word * STRIDE, mask=tl.broadcast_to(word * (4 * size) < K, (ROWS, count)), other=0)
        else:
            found = tl.load(words + word * STRIDE)
        shift = 8 * (k // size % 4 + tl.arange(0, blocks // count))
        scales = tl.reshape((found[:, :, None] >> shift[None, None, :]) & 255, (ROWS, blocks)).to(tl.uint8)
    if K // size % 4 != 0:
        scales = tl.where(block < K // size, scales, 0)
    return scales
