"""The kernels' view of block scales."""

from __future__ import annotations

import torch

from trtllm_b12x.nvfp4 import BLOCK_SIZE


def mma_scale_view(block_scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """128x4-interleaved block scales as the 6-D view FlashInfer takes (``convert_sf_to_mma_layout``): no copy.

    Args:
        block_scales: ``rows * columns / 16`` E4M3 bytes per expert, any dtype, contiguous, experts first.
        rows: of the weight, a multiple of 128.
        columns: of the weight in elements, a multiple of 64.

    Returns:
        float8_e4m3fn ``(32, 4, rows/128, 4, columns/64, E)``: row ``m`` and block ``k`` of expert ``e`` are at
        ``(m % 32, m % 128 // 32, m // 128, k % 4, k // 4, e)``.

    Raises:
        ValueError: the sizes are off the 128x64 tile.
    """
    if rows % 128 or columns % (4 * BLOCK_SIZE):
        raise ValueError(f"scales of a {rows} x {columns} weight do not fill 128 x 64 tiles")
    tiles = block_scales.view(torch.float8_e4m3fn).view(-1, rows // 128, columns // 64, 32, 4, 4)
    return tiles.permute(3, 4, 1, 5, 2, 0)


def interleaved_rows(block_scales: torch.Tensor) -> torch.Tensor:
    """Scales of one matrix in the 128x4 layout, ``(rows, columns/64)`` int32, as uint8 in the order of rows: a view.

    ``(rows/128, 4, 32, columns/64, 4)``: flattened, which copies, it is ``(rows, columns/16)``.
    """
    rows, words = block_scales.shape
    return block_scales.view(torch.uint8).view(rows // 128, words, 32, 4, 4).permute(0, 3, 2, 1, 4)


def plain_scales(mma_scales: torch.Tensor) -> torch.Tensor:
    """The 6-D view back to row-major ``(E, rows, columns/16)`` float8_e4m3fn (a copy)."""
    lanes, quarters, row_tiles, inner, column_tiles, experts = mma_scales.shape
    by_row = mma_scales.view(torch.uint8).permute(5, 2, 1, 0, 4, 3)
    plain = by_row.reshape(experts, row_tiles * quarters * lanes, column_tiles * inner)
    return plain.view(torch.float8_e4m3fn)
