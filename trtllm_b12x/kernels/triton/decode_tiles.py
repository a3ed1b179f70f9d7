"""Choose tile sizes: by routes per expert, number of programs, and shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import Card

INLINE_ROUTES = 64
"""Up to so many routes, every program finds its own block of them, and no launch sorts them."""


@dataclass(frozen=True)
class Tile:
    """Sizes of one product: weight rows by columns at a time, times routes."""

    rows: int
    """A power of two up to 128, as many as have their scales interleaved: of each half where FC1 has a gate, of each of eight
    experts where all routes of a token are one product. Those of a product are 16 a warp or more, since a tensor core
    instruction takes 16."""
    columns: int
    """Columns of the sum at a time, 128 or 256: products of an eighth (MXFP8: a quarter) each, of at least 16."""
    num_warps: int
    num_stages: int
    split: int = 1
    """1, 2, 4 or 8 stretches of the sum side by side, where a block is one route: so many times the rows are a product's."""

    def scales_by_four(self, group_size: int) -> bool:
        """Return True if a thread loads four bytes of scales or more in a step; fewer are not copied asynchronously."""
        return self.split * self.rows * self.columns // group_size >= 128 * self.num_warps


@dataclass(frozen=True)
class Tiles:
    """Tiles that a call is launched with."""

    routes: int
    """Routes of one expert in a block: 1, where experts are seldom shared, 8, 16 or 32."""
    fc1: Tile
    fc2: Tile
    token: Tile | None = None
    """Tile of FC2 for all routes of a token at once, where no launch sorts them."""


@dataclass(frozen=True)
class Rule:
    """Tiles for a number of routes per expert, before they are fitted to a geometry."""

    max_routes: float
    """Most routes per expert of the layer."""
    routes: int
    gated: Tile
    """FC1."""
    plain: Tile
    """FC1 without a gate."""
    short: Tile
    """FC2 of few columns."""
    long: Tile
    """FC2 of more than ``SHORT``: a deeper pipeline."""
    token: Tile | None = None
    """FC2 of few columns and 5 to 8 routes a token, all of them to experts of this rank."""


SHORT = 1024
"""Columns of FC2 that are few: all of them are on their way at once."""
LARGE, SMALL = "large", "small"
"""Shared memory of a multiprocessor: 164 KB and more (8.0, 9.0, 10.0), or about 100 KB (8.6, 8.9, 12.x)."""
_SORTED = (
    Rule(11.0, 16, Tile(64, 128, 2, 3), Tile(128, 128, 4, 3), Tile(128, 128, 4, 3), Tile(128, 128, 4, 4)),
    Rule(float("inf"), 32, *[Tile(64, 128, 4, 3)] * 4),
)
TABLE: dict[str, tuple[Rule, ...]] = {
    LARGE: (
        Rule(
            0.3, 1, Tile(64, 256, 4, 4), Tile(128, 256, 4, 3), Tile(128, 128, 8, 3, 2), Tile(64, 256, 4, 4), Tile(16, 128, 8, 4)
        ),
        Rule(5.0, 8, Tile(64, 256, 4, 3), Tile(128, 256, 4, 3), Tile(128, 128, 4, 3), Tile(64, 256, 4, 4)),
        *_SORTED,
    ),
    SMALL: (
        Rule(0.3, 1, Tile(64, 128, 4, 4), Tile(128, 128, 4, 3), Tile(64, 128, 4, 3), Tile(64, 128, 4, 4), Tile(16, 128, 8, 3)),
        Rule(5.0, 8, Tile(64, 128, 4, 3), Tile(128, 128, 4, 3), Tile(128, 128, 4, 3), Tile(64, 128, 4, 4)),
        *_SORTED,
    ),
}
"""Large: the fastest of a search on an H200 with layers of Qwen3-30B-A3B, Nemotron-3-Super, gpt-oss's and DeepSeek's sizes, 23
November 2026. Small: not measured, those of an earlier search with half of the columns, for shared memory. Blocks of 64 routes
spill."""
_MXFP8_SORTED = Rule(float("inf"), 16, Tile(64, 128, 2, 3), Tile(128, 128, 4, 3), Tile(128, 128, 4, 3), Tile(128, 128, 4, 4))
MXFP8: dict[str, tuple[Rule, ...]] = {
    LARGE: (
        Rule(0.1, 1, Tile(64, 128, 4, 3, 2), Tile(64, 256, 2, 3), Tile(64, 128, 4, 3, 2), Tile(64, 128, 2, 4)),
        Rule(0.15, 1, Tile(16, 128, 4, 3, 8), Tile(64, 256, 2, 3), Tile(64, 128, 4, 3, 2), Tile(64, 128, 2, 4)),
        Rule(0.3, 1, Tile(64, 256, 4, 3), Tile(128, 256, 4, 3), Tile(64, 128, 4, 4, 2), Tile(64, 128, 2, 4), Tile(32, 128, 8, 3)),
        Rule(5.0, 8, Tile(32, 256, 2, 3), Tile(64, 256, 2, 3), Tile(128, 128, 4, 4), Tile(128, 128, 4, 4)),
        _MXFP8_SORTED,
    ),
    SMALL: (
        Rule(0.3, 1, Tile(64, 128, 2, 3), Tile(64, 128, 2, 3), Tile(64, 128, 2, 3), Tile(64, 128, 2, 3), Tile(16, 128, 4, 3)),
        Rule(5.0, 8, Tile(32, 256, 2, 3), Tile(64, 128, 2, 3), Tile(64, 128, 2, 3), Tile(64, 128, 2, 3)),
        replace(_MXFP8_SORTED, long=Tile(128, 128, 4, 3)),
    ),
}
"""Twice the bytes a column. Large: measured on an H200 for layers of Qwen3-30B-A3B and gemma-4-26B-A4B at 1 to 64 tokens;
long ones, those without a gate, and small: not measured."""
MXFP8_UNEVEN = {LARGE: (MXFP8[LARGE][1], replace(MXFP8[LARGE][2], token=None), *MXFP8[LARGE][3:]), SMALL: MXFP8[SMALL]}
"""The same where the last of FC2's columns are half of 128."""
_LARGE_SHARED_MEMORY = 160 << 10
_FEW = 0.1
"""Routes per expert that are so few that each program's time is the call's."""
_PROGRAMS_PER_MULTIPROCESSOR = 0.7
"""At least, where rows can be divided; of one route each, so many more as a row is longer than ``_LONG_ROW``."""
_LONG_ROW = 2048
"""Bytes."""
_IDLE = 1.25
"""So many times its columns a sum may have in stretches side by side."""


def tiles(geometry: Geometry, tokens: int, card: Card, ranks: int = 1, codes_per_int32: int = 8, group_size: int = 16) -> Tiles:
    """Return the tiles of a call.

    Args:
        ranks: number of ranks that share the experts; a rank has so many times fewer routes.
        group_size: columns that share a block scale.
    """
    of_mxfp8 = MXFP8_UNEVEN if geometry.intermediate_size % 128 else MXFP8
    table = (TABLE if codes_per_int32 == 8 else of_mxfp8)[LARGE if card.shared_memory >= _LARGE_SHARED_MEMORY else SMALL]
    routes = -(-tokens * geometry.top_k // ranks)
    experts = min(geometry.num_experts, routes)
    row = next(row for row in table if routes <= row.max_routes * geometry.num_experts)
    hidden, size = geometry.hidden_size, geometry.intermediate_size
    few = routes <= _FEW * geometry.num_experts
    first, second = row.gated if geometry.gated else row.plain, row.short if size <= SHORT else row.long
    fc1 = fitted(_by_four(first, group_size), size, hidden, row.routes, 1 + geometry.gated, few, group_size)
    fc2 = fitted(_by_four(second, group_size), hidden, size, row.routes, few=few, group_size=group_size)
    if row.routes > 16:  # narrower tiles of so many routes spill
        return Tiles(row.routes, fc1, fc2)
    wanted = _PROGRAMS_PER_MULTIPROCESSOR * card.multiprocessors / experts
    longer = max(1, 4 * hidden / codes_per_int32 / _LONG_ROW) if row.routes == 1 else 1
    token = row.token if size <= SHORT and 4 < geometry.top_k <= 8 and ranks == 1 else None
    token = None if token is None else _by_four(token, group_size, 8)
    fc1 = _divided(fc1, size, hidden, wanted * longer, group_size, longer > 1)
    return Tiles(row.routes, fc1, _divided(fc2, hidden, size, wanted, group_size), token)


def _by_four(tile: Tile, group_size: int, experts: int = 1) -> Tile:
    """Take fewer warps where a step of all would load fewer than four bytes of scales each.

    Args:
        experts: whose rows a step takes beside each other.
    """
    while tile.num_warps > 1 and not replace(tile, rows=experts * tile.rows).scales_by_four(group_size):
        tile = replace(tile, num_warps=tile.num_warps // 2)
    return tile


def fitted(tile: Tile, rows: int, inner: int, routes: int = 8, parts: int = 1, few: bool = True, group_size: int = 16) -> Tile:
    """Take half the columns, or fewer stretches, if the last step of the sum would multiply zeros for half of its time.

    Args:
        rows: of the matrix, or of a half of it.
        inner: columns of the sum.
        routes: of a block; where it is one, stretches of the sum side by side make up for what is not on its way.
        parts: of the product's rows, each of the tile's.
        few: the call has at most ``_FEW`` routes per expert.
    """
    while tile.split > 1 and _idles(tile.split * tile.columns, inner):
        wider = tile.rows < 128
        warps = tile.num_warps if wider else tile.num_warps // 2
        tile = replace(tile, rows=tile.rows * (1 + wider), num_warps=warps, split=tile.split // 2)
    if not 0 < inner % 256 <= 128 < tile.columns:
        return tile
    if routes == 1 and few:
        split = 256 // (parts * tile.rows)
        return replace(tile, columns=128, num_warps=min(split * tile.rows // group_size, 8), num_stages=3, split=split)
    if rows % 128 and rows % tile.rows == 0:  # gpt-oss's sizes: half the columns take a seventh more time from 4 tokens on
        return tile
    half = replace(tile, columns=128, num_stages=min(2 * tile.num_stages, 6))
    return half if half.scales_by_four(group_size) else tile


def _idles(columns: int, inner: int) -> bool:
    """Return True if steps of so many columns multiply zeros for too long at the end of a sum of ``inner``."""
    return -(-inner // columns) * columns > _IDLE * inner


def _divided(tile: Tile, rows: int, inner: int, programs: float, group_size: int, stretches: bool = False) -> Tile:
    """Take fewer rows, for at least so many programs per expert; with ``stretches``, more of those side by side too."""
    while tile.rows > 16 and rows // tile.rows < programs:
        split = tile.split < 8 and (stretches or tile.split > 1) and not _idles(2 * tile.split * tile.columns, inner)
        warps = tile.num_warps if split else max(1, tile.num_warps // 2)
        half = replace(tile, rows=tile.rows // 2, num_warps=warps, split=tile.split * (1 + split))
        if not half.scales_by_four(group_size):
            break
        tile = half
    return tile


def blocks(geometry: Geometry, tokens: int, routes: int) -> int:
    """Return the most blocks of ``routes`` that a call's routes can fall into."""
    total = tokens * geometry.top_k
    return min(total, geometry.num_experts + total // routes)
