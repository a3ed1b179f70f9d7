"""Tile sizes by rule: how many routes an expert gets, how many programs there are, and what shared memory holds."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_b12x.kernels import Geometry

INLINE_ROUTES = 64
"""Up to so many routes every program finds its own block of them, and no launch sorts them."""


@dataclass(frozen=True)
class Card:
    """What the rule knows of a GPU."""

    multiprocessors: int
    shared_memory: int
    """Bytes per multiprocessor."""
    capability: int
    """90, 120, ..."""


@dataclass(frozen=True)
class Tile:
    """Of one product: weight rows by columns at a time, times routes."""

    rows: int
    """A power of two from 16 to 128: 16 per warp, since a tensor core instruction takes 16."""
    columns: int
    """Of the sum, 128 or 256: eight products of an eighth each (``source.py``), of at least 16."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tiles:
    """What a call is launched with."""

    routes: int
    """Of one expert in a block: 8, 16, 32 or 64."""
    fc1: Tile
    fc2: Tile


@dataclass(frozen=True)
class _Row:
    most: float
    """Routes per expert up to which the row holds."""
    routes: int
    fc1: tuple[int, int, int]
    """Rows, warps, stages."""
    fc2: tuple[int, int, int]


# ``python -m benchmarks.moe_tiles`` searches them on a GPU and prints them so.  Keyed by whether a multiprocessor has shared
# memory for 256 columns a stage (8.0, 9.0, 10.0: 164 KB and more) or for 128 (8.6, 8.9, 12.x: about 100 KB).
TABLE: dict[int, tuple[_Row, ...]] = {
    256: (
        _Row(5.0, 8, fc1=(32, 2, 4), fc2=(32, 2, 4)),
        _Row(11.0, 16, fc1=(32, 2, 3), fc2=(32, 2, 3)),
        _Row(24.0, 32, fc1=(64, 4, 3), fc2=(64, 4, 3)),
        _Row(float("inf"), 64, fc1=(64, 4, 2), fc2=(64, 4, 2)),
    ),
    128: (
        _Row(5.0, 8, fc1=(32, 2, 4), fc2=(32, 2, 4)),
        _Row(11.0, 16, fc1=(32, 2, 4), fc2=(32, 2, 4)),
        _Row(24.0, 32, fc1=(64, 4, 3), fc2=(64, 4, 3)),
        _Row(float("inf"), 64, fc1=(64, 4, 2), fc2=(64, 4, 2)),
    ),
}
_LARGE_SHARED_MEMORY = 160 << 10
_PROGRAMS_PER_MULTIPROCESSOR = 1.4
"""At least, where rows can be divided; one program of 32 rows keeps about 30 KB on their way."""


def tiles(geometry: Geometry, tokens: int, card: Card, ranks: int = 1) -> Tiles:
    """The tiles of a call.

    Args:
        ranks: that share the experts; so many times fewer routes are this one's.
    """
    columns = 256 if card.shared_memory >= _LARGE_SHARED_MEMORY else 128
    routes = -(-tokens * geometry.top_k // ranks)
    experts = min(geometry.num_experts, routes)
    row = next(row for row in TABLE[columns] if routes <= row.most * experts)

    def tile(given: tuple[int, int, int], rows: int, inner: int) -> Tile:
        height, warps, stages = given
        while height > 16 and (rows // height) * experts < _PROGRAMS_PER_MULTIPROCESSOR * card.multiprocessors:
            height, warps = height // 2, max(1, warps // 2)
        # An inner dimension that ends in half a stage would be multiplied as zeros.
        half = columns == 256 and 0 < inner % 256 <= 128 and inner < 1024
        return Tile(height, 128 if half else columns, warps, stages)

    return Tiles(
        row.routes,
        tile(row.fc1, geometry.intermediate_size, geometry.hidden_size),
        tile(row.fc2, geometry.hidden_size, geometry.intermediate_size),
    )


def blocks(geometry: Geometry, tokens: int, routes: int) -> int:
    """The most blocks of ``routes`` that a call's routes can fall into."""
    total = tokens * geometry.top_k
    return min(total, geometry.num_experts + total // routes)
