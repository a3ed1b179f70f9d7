"""``GroupedKernel``: block-scaled products in Triton for any number of tokens (``source.py``).

Of MXFP8, which the host has no path for, whatever the count; of NVFP4 (``nvfp4.py``) beside the host's own.  From few routes
of an expert on it is the tensor cores that bound it, and not the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from trtllm_b12x import families
from trtllm_b12x.core import log
from trtllm_b12x.decision import Environment, version_tuple
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats import constants
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, aligned, check_call, handed_back, late, output
from trtllm_b12x.kernels.jit import JitKernel
from trtllm_b12x.kernels.jit.variant import Variant
from trtllm_b12x.kernels.mxfp8 import MXFP8ReferenceKernel
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.kernels.routes import of_known_types
from trtllm_b12x.kernels.triton import check, matrices, swiglu
from trtllm_b12x.kernels.triton.variants import ACTIVATIONS

_COLUMNS = 1024
"""Of a token that a program quantizes, or adds up."""
_ROWS = 4
_INTERPRETED_FROM = (3, 8)
"""Triton whose interpreter has ``tl.dot_scaled``."""


@dataclass(frozen=True)
class Tile:
    """Of one product: routes by weight rows by columns at a time."""

    routes: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Row:
    """Tiles, where no more than ``most`` routes go to an expert on average."""

    most: float
    fc1: Tile
    fc2: Tile


@dataclass(frozen=True)
class Elements:
    """A format as the kernels take it; weights and activations have the same."""

    name: str
    """``FORMAT`` of ``source.py``."""
    codes: torch.dtype
    packed: int
    """Codes in one of these."""
    block: int
    """Columns that share a scale."""


MXFP8 = Elements("e4m3", torch.float8_e4m3fn, 1, 32)
TABLE = (
    Row(0.5, Tile(16, 32, 128, 2, 3), Tile(16, 128, 128, 4, 3)),
    Row(8, Tile(16, 128, 64, 4, 3), Tile(16, 128, 128, 4, 3)),
    Row(128, Tile(64, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
    Row(float("inf"), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
)
"""Among the quickest on an H200 (``python -m benchmarks.grouped_tiles``) for layers of Qwen3-30B-A3B and gemma-4-26B-A4B at 1 and
64 to 4096 tokens, where Triton multiplies bfloat16.  All fit the 99 KB of SM120; there they are not measured."""


@dataclass(frozen=True)
class Scalars:
    """Of a layer, float32: what its format scales beside blocks; where it has none of them, addresses of what is not read."""

    fc1_factor: torch.Tensor
    fc1_alpha: torch.Tensor
    fc1_half_alpha: torch.Tensor
    fc2_factor: torch.Tensor
    fc2_alpha: torch.Tensor
    step: int = 0
    """From one expert's ``fc2_factor`` to the next's."""


class GroupedKernel(JitKernel):
    """MXFP8 by MXFP8, of one layer."""

    features = families.grouped(Environment())
    reference: type[ReferenceKernel] = MXFP8ReferenceKernel
    instruction = "kind::mxf8f6f4.block_scale"
    elements: ClassVar[Elements] = MXFP8
    table: ClassVar[tuple[Row, ...]] = TABLE
    weights: Weights

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        there = super().runs_on(device)
        return there and (device.type == "cuda" or version_tuple(toolchain.version()) >= _INTERPRETED_FROM)

    # ---- plan --------------------------------------------------------------------------------------------------------

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        super().plan(geometry, capacity, device)
        slow = toolchain.upcast(self.card.capability) if device.type == "cuda" else ""
        if slow:
            log.once(f"grouped kernels: {slow}")

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        super().describe(geometry, capacity, device)
        self._padded = 1 << (geometry.num_experts - 1).bit_length()

    def _identity(self) -> tuple[Any, ...]:
        return "grouped", self.geometry, self._native

    @property
    def _native(self) -> bool:
        """Triton has an instruction for block-scaled products here; elsewhere it may have none, or a slow one of bfloat16."""
        return self._device.type == "cuda" and toolchain.block_scaled(self.card.capability)

    def variants(self) -> Iterator[Variant]:
        """Those of every row of the table."""
        x, codes, byte, i, f = self.geometry.dtype, self.elements.codes, torch.uint8, torch.int32, torch.float32
        given = (codes, i, codes, i)  # scales in words of four
        fc1_types, fc2_types = (*given, *[f] * 6, i, i, codes, byte, 1), (*given, f, i, i, f, torch.bfloat16)
        yield Variant("grouped.source", "quantize_kernel", (x, f, codes, byte, 2), self._of_tokens(), {})
        yield Variant("grouped.source", "sum_kernel", (torch.bfloat16, i, x), self._of_sum(), {})
        for tile in dict.fromkeys(row.fc1 for row in self.table):
            yield Variant("grouped.source", "fc1_kernel", fc1_types, self._of_fc1(tile), _options(tile))
        for tile in dict.fromkeys(row.fc2 for row in self.table):
            yield Variant("grouped.source", "fc2_kernel", fc2_types, self._of_product(tile), _options(tile))

    def _of_elements(self) -> dict[str, Any]:
        return {"FORMAT": self.elements.name, "NATIVE": self._native}

    def _of_tokens(self) -> dict[str, Any]:
        g = self.geometry
        return {"H": g.hidden_size, "ROWS": _ROWS, "COLUMNS": _COLUMNS, "GATED": g.gated, **self._of_elements()}

    def _of_fc1(self, tile: Tile) -> dict[str, Any]:
        g = self.geometry
        own = {"TOP_K": g.top_k, "ACTIVATION": ACTIVATIONS.index(g.activation), "GATED": g.gated}
        return {**own, **self._of_product(tile)}

    def _of_product(self, tile: Tile) -> dict[str, Any]:
        g = self.geometry
        sizes = {"H": g.hidden_size, "SIZE": g.intermediate_size, "EXPERTS": g.num_experts, "PADDED_EXPERTS": self._padded}
        own = {"BM": tile.routes, "BN": tile.rows, "BK": tile.columns, "WARPS": tile.num_warps}
        return {**sizes, **own, **self._of_elements()}

    def _of_sum(self) -> dict[str, Any]:
        g = self.geometry
        return {"H": g.hidden_size, "TOP_K": g.top_k, "EXPERTS": g.num_experts, "COLUMNS": _COLUMNS}

    # ---- bind --------------------------------------------------------------------------------------------------------

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        check(self.geometry, weights)
        self._scalars = self._scalars_of(weights)
        self._constants = swiglu(self.geometry, weights, self._scalars.fc1_alpha)
        self.weights, self.first_expert = weights, first_expert
        self._w1, self._w2 = weights.fc1_weight, weights.fc2_weight
        (_, s1), (_, s2) = matrices(weights)
        self._s1, self._s2 = s1.view(torch.int32), s2.view(torch.int32)
        self._experts = constants.count(self.geometry.num_experts + 1, weights.device)

    def _scalars_of(self, weights: Any) -> Scalars:
        none = constants.filled(1.0, (1,), weights.device)
        return Scalars(none, none, none, none, none)

    def _tested_sizes(self) -> list[int]:
        """One token, and one of each row beyond; no more than the last row needs."""
        per_token = self.geometry.top_k / (self.geometry.num_experts * self.geometry.ranks)
        sizes = {1} | {int(row.most / per_token) + 1 for row in self.table[:-1]}
        return sorted(size for size in sizes if size <= self.capacity)

    def serves(self, tokens: int) -> bool:
        """Also untested where the weights say nothing, since the host has no path for them."""
        return (self._plan.tested or self._plan.untold) and super().serves(tokens)

    # ---- run ---------------------------------------------------------------------------------------------------------

    def row(self, tokens: int) -> Row:
        g = self.geometry
        return next(row for row in self.table if tokens * g.top_k <= row.most * g.num_experts * g.ranks)

    def run(
        self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        g = self.geometry
        if x.dtype != g.dtype:
            raise ValueError(f"x is {x.dtype}, expected {g.dtype}")
        check_call(g, x, ids, router_weights, out, g.hidden_size)
        return self._run(aligned(x), None, ids, router_weights, out)

    def _run(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        ids: torch.Tensor,
        router_weights: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """``x`` as it is, or its codes with their scales in rows of whole words of four."""
        tokens, g = x.shape[0], self.geometry
        if not 0 < tokens <= self.capacity:
            raise ValueError(f"no kernel is planned for {tokens} tokens, only for 1 to {self.capacity}")
        result = output(out, x, g.dtype, g.hidden_size)
        with late.through_jit(g):
            codes, codes_sf = self._quantize(x) if x_sf is None else (x, x_sf)
            ids, router_weights = of_known_types(ids, router_weights)
            self._launch(codes, codes_sf, ids, router_weights.float(), result)
        return handed_back(out, result)

    def _empty(self, rows: int, columns: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, and their scales in whole words of four."""
        e = self.elements
        codes = torch.empty(rows, columns // e.packed, dtype=e.codes, device=device)
        return codes, torch.empty(rows, -(-columns // (4 * e.block)) * 4, dtype=torch.uint8, device=device)

    def _quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from . import source

        tokens, hidden = x.shape
        codes, scales = self._empty(tokens, hidden, x.device)
        grid = -(-tokens // _ROWS), -(-hidden // _COLUMNS)
        source.quantize_kernel[grid](x, self._scalars.fc1_factor, codes, scales, tokens, **self._of_tokens())
        return codes, scales

    def _launch(
        self, codes: torch.Tensor, codes_sf: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor, result: torch.Tensor
    ) -> None:
        from . import source

        tokens, g, own = result.shape[0], self.geometry, self._scalars
        hidden, size, device = g.hidden_size, g.intermediate_size, result.device
        routes, row = tokens * g.top_k, self.row(tokens)
        order, starts, local = self._sorted(ids)
        h, h_sf = self._empty(routes, size, device)
        scalars = own.fc1_alpha, own.fc2_factor, own.fc1_half_alpha, *self._constants
        given: tuple[Any, ...] = (self._w1, self._s1, *scalars, order, starts)
        source.fc1_kernel[(-(-size // row.fc1.rows), self._blocks(routes, row.fc1))](
            codes, codes_sf.view(torch.int32), *given, h, h_sf, own.step, **self._of_fc1(row.fc1), **_options(row.fc1)
        )
        shares = torch.empty(routes, hidden, dtype=torch.bfloat16, device=device)
        given = self._w2, self._s2, own.fc2_alpha, order, starts
        source.fc2_kernel[(-(-hidden // row.fc2.rows), self._blocks(routes, row.fc2))](
            h, h_sf.view(torch.int32), *given, router_weights, shares, **self._of_product(row.fc2), **_options(row.fc2)
        )
        grid = tokens, -(-hidden // _COLUMNS)
        source.sum_kernel[grid](shares, local, result, **self._of_sum())

    def _sorted(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort routes by local expert, those of other ranks last.

        Returns:
            int32: routes in order, where each expert's begin ``(E + 1,)``, and each route's local expert (E: of another rank).
        """
        experts = self.geometry.num_experts
        # As unsigned numbers, ids below the first are beyond the last; and 64 bits, since a difference of int32 may wrap.
        local = ids.flatten().long() - self.first_expert
        local = torch.where((local < 0) | (local >= experts), experts, local).int()
        found = torch.sort(local, stable=True)
        return found.indices.int(), torch.searchsorted(found.values, self._experts, out_int32=True), local

    def _blocks(self, routes: int, tile: Tile) -> int:
        """The most that the routes can fall into."""
        return min(routes, self.geometry.num_experts + routes // tile.routes)


def _options(tile: Tile) -> dict[str, Any]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
