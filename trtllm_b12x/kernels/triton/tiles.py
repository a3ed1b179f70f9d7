# SPDX-License-Identifier: Apache-2.0
"""Tiles of the decode kernels. Arithmetic proposes two or three sets for each number of tokens; a benchmark picks the fastest.

A program reads a step of its rows while later steps are loading: ``num_stages - 1`` steps of codes, block scales and activations
lie in shared memory. The number of routes per expert decides the proposals. A block of routes reads the expert's weights once
and multiplies them by all columns of the block, used or not.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import Card

_ONE_BLOCK = 3.0
"""Routes per expert below which few experts have more than the 8 routes of a block."""
_FULL_BLOCKS = 8.0
"""Routes per expert from which most experts have more than 8."""
_MANY_ROUTES = 10.0
"""Routes per expert from which steps of half the columns may be faster: a block of 16 has activations as large as codes."""
_TWO_BLOCKS = 12.0
"""Routes per expert from which blocks of 8 read the weights of most experts twice."""
_STEPS = 3
"""Minimum number of a sum's steps for which loads overlap the products of other steps."""
_RESIDENT_WARPS = 10
"""Number of warps on a multiprocessor that suffice to hide each other's waits."""
_STAGES = (3, 2)
"""Numbers of stages, best first. More stages keep more bytes in flight, but fewer programs on a multiprocessor."""
_BLOCK_OVERHEAD = 1 << 10
"""Bytes of shared memory that the driver reserves for each block."""
_PROGRAMS_PER_MULTIPROCESSOR = 0.7
"""Minimum number of programs per multiprocessor, if rows can be divided."""


@dataclass(frozen=True)
class Tile:
    """Sizes of one product: weight rows by columns at a time, times routes."""

    rows: int
    """A power of two up to 128, the rows whose scales are interleaved; with a gate, rows of each half of FC1. A warp has 16 or
    more rows of a product, since a tensor core instruction takes 16."""
    columns: int
    """Columns of the sum at a time, 128 or 256. Each product takes an eighth (MXFP8: a quarter) of them, at least 16."""
    num_warps: int
    num_stages: int = 0

    def scales_by_four(self, group_size: int) -> bool:
        """Return True if a thread loads four bytes of scales or more in a step; fewer are not copied asynchronously."""
        return self.rows * self.columns // group_size >= 128 * self.num_warps

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}w{self.num_warps}"


@dataclass(frozen=True)
class Tiles:
    """Tiles of one call."""

    routes: int
    """Maximum number of one expert's routes in a block: 8, the columns of a tensor core instruction, or 16."""
    fc1: Tile
    fc2: Tile

    def __str__(self) -> str:
        return f"{self.routes} {self.fc1} {self.fc2}"


@dataclass(frozen=True)
class _Product:
    """One product of a layer."""

    rows: int
    """Rows of the matrix, or of one half."""
    inner: int
    """Columns of the sum."""
    halves: int
    code_bits: int
    group_size: int

    def stage_bytes(self, tile: Tile, routes: int) -> int:
        """Return the bytes of a step: codes, block scales and activations in 16 bits."""
        codes = self.halves * tile.rows * tile.columns
        return codes * self.code_bits // 8 + codes // self.group_size + 2 * routes * tile.columns


@functools.lru_cache(8192)
def proposals(g: Geometry, card: Card, code_bits: int, group_size: int, tokens: int) -> tuple[Tiles, ...]:
    """Return the sets for a call of ``tokens``. Without measurements, the first set is used."""
    routes = -(-tokens * g.top_k // g.ranks)  # a rank's share
    programs = _PROGRAMS_PER_MULTIPROCESSOR * card.multiprocessors / min(g.num_experts, routes)
    fc1 = _Product(g.intermediate_size, g.hidden_size, 2 if g.gated else 1, code_bits, group_size)
    fc2 = _Product(g.hidden_size, g.intermediate_size, 1, code_bits, group_size)
    found = [
        Tiles(block, *(_fitted(product, tile, block, card, programs) for product, tile in ((fc1, first), (fc2, second))))
        for block, first, second in _sets(fc1, fc2, card, routes / g.num_experts)
    ]
    return tuple(dict.fromkeys(found))


def _sets(fc1: _Product, fc2: _Product, card: Card, per_expert: float) -> list[tuple[int, Tile, Tile]]:
    """Return the routes of a block and the tiles of both products, before they are fitted."""
    # A warp has 16 rows of each half, or 32 rows of a matrix without halves.
    wide, narrow = Tile(64 if fc1.halves == 2 or fc1.code_bits == 8 else 128, 256, 4), Tile(128, 128, 4)
    slim, many = replace(wide, columns=128), Tile(64, 128, 2) if fc1.halves == 2 else narrow
    first, other = (Tile(128, 256, 4), narrow) if fc2.code_bits == 4 else (Tile(64, 128, 2), narrow)
    if fc2.code_bits == 4 and fc2.inner < _STEPS * first.columns:
        first, other = other, first
    halved = (16, many, first if fc2.code_bits == 8 else narrow)
    if card.capability // 10 == 9:
        sixteen, third = (16, wide, first), (16, wide, other)
    else:  # without wgmma a step's activations are in registers: 64 per thread for 16 routes by 256 columns
        sixteen, third = halved, (16, slim, narrow)
    if per_expert >= _MANY_ROUTES:
        return [halved, sixteen, third if per_expert >= _TWO_BLOCKS else (8, wide, first)]
    if per_expert >= _FULL_BLOCKS:
        return [sixteen, (8, wide, first), third]
    if per_expert >= _ONE_BLOCK:
        return [(8, wide, first), sixteen, third]
    # Little shared memory has room for few programs with wide tiles.
    if _blocks(fc1, wide, 8, _STAGES[0], card) < 3:
        return [(8, wide, first), (8, wide, other), (8, slim, narrow)]
    low = Tile(64, 256, 4) if first.columns == 256 else first  # twice the programs, so the last of them end sooner
    return [(8, wide, first), (8, wide, other), (8, wide, low)]


def _blocks(product: _Product, tile: Tile, routes: int, stages: int, card: Card) -> int:
    """Return the number of programs that fit the shared memory of a multiprocessor."""
    return card.shared_memory // ((stages - 1) * product.stage_bytes(tile, routes) + _BLOCK_OVERHEAD)


def _fitted(product: _Product, tile: Tile, routes: int, card: Card, programs: float) -> Tile:
    """Fit a tile to a matrix and to shared memory.

    Take fewer warps if a thread would load fewer than four bytes of scales in a step. Halve the columns if more than an eighth of
    the products would multiply zeros beyond the last column. Take fewer rows to get at least ``programs`` programs per expert.
    """
    group_size, rows = product.group_size, product.rows
    while tile.num_warps > 1 and not tile.scales_by_four(group_size):
        tile = replace(tile, num_warps=tile.num_warps // 2)
    if 8 * (-product.inner % tile.columns) > product.inner and tile.columns > 128:
        half = replace(tile, columns=128)
        tile = half if half.scales_by_four(group_size) else tile
    while tile.rows > 16 and rows // tile.rows < programs:
        half = replace(tile, rows=tile.rows // 2, num_warps=max(1, tile.num_warps // 2))
        if not half.scales_by_four(group_size):
            break
        tile = half
    resident = math.ceil(_RESIDENT_WARPS / tile.num_warps)
    fits = (stages for stages in _STAGES if _blocks(product, tile, routes, stages, card) >= resident)
    return replace(tile, num_stages=next(fits, _STAGES[-1]))
