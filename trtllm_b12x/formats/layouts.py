# SPDX-License-Identifier: Apache-2.0
"""View and convert block scales in the layout of engines and kernels: interleaved tiles of 128 rows by 4 blocks."""

from __future__ import annotations

import torch


def mma_scale_view(
    block_scales: torch.Tensor, rows: int, columns: int, block_size: int = 16, dtype: torch.dtype = torch.float8_e4m3fn
) -> torch.Tensor:
    """View 128x4-interleaved block scales in the 6-D shape that FlashInfer takes (``convert_sf_to_mma_layout``).

    Args:
        block_scales: ``rows * columns / block_size`` bytes per expert, any dtype, contiguous, experts first.
        rows: Rows of the weight. Raise ValueError if they are not a multiple of 128.
        columns: Elements in a row of the weight. Raise ValueError if they are not a multiple of ``4 * block_size``.
        dtype: Dtype of a scale, one byte wide.

    Returns:
        ``dtype`` ``(32, 4, rows/128, 4, columns/(4 * block_size), E)``: row ``m`` and block ``k`` of expert ``e`` are at
        ``(m % 32, m % 128 // 32, m // 128, k % 4, k // 4, e)``.
    """
    width = 4 * block_size
    if rows % 128 or columns % width:
        raise ValueError(f"scales of a {rows} x {columns} weight do not fill 128 x {width} tiles")
    tiles = block_scales.view(dtype).view(-1, rows // 128, columns // width, 32, 4, 4)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def interleaved_rows(block_scales: torch.Tensor) -> torch.Tensor:
    """View 128x4-interleaved scales of one matrix, ``(rows, words)`` int32, as uint8 in row order.

    The view is ``(rows/128, 4, 32, words, 4)``. Flattening copies it to ``(rows, 4 * words)``.
    """
    rows, words = block_scales.shape
    return block_scales.view(torch.uint8).view(rows // 128, words, 32, 4, 4).permute(0, 3, 2, 1, 4)


def scales_of_tokens(x_sf: torch.Tensor, tokens: int, blocks: int, swizzled: bool) -> torch.Tensor:
    """Return block scales of input that TensorRT-LLM quantized, 128x4-interleaved or in rows, as uint8 ``(tokens, blocks)``."""
    flat = x_sf.contiguous().view(torch.uint8).flatten()
    if not swizzled:
        return flat[: tokens * blocks].view(tokens, blocks)
    words = -(-blocks // 4)
    tiles = flat[: -(-tokens // 128) * words * 512].view(torch.int32).view(-1, words)
    return interleaved_rows(tiles).flatten(3).flatten(0, 2)[:tokens, :blocks]


def interleave(rows: torch.Tensor, block_scales: torch.Tensor) -> None:
    """Write row-major uint8 ``(rows, 4 * words)`` in the 128x4 layout into ``block_scales``, ``(rows, words)`` int32."""
    lay = interleaved_rows(block_scales)
    lay.copy_(rows.view(lay.shape))


def plain_scales(mma_scales: torch.Tensor) -> torch.Tensor:
    """Copy the scales of the 6-D view to row-major ``(E, rows, blocks)`` with the same dtype."""
    lanes, quarters, row_tiles, inner, column_tiles, experts = mma_scales.shape
    by_row = mma_scales.view(torch.uint8).permute(5, 2, 1, 0, 4, 3)
    plain = by_row.reshape(experts, row_tiles * quarters * lanes, column_tiles * inner)
    return plain.view(mma_scales.dtype)
