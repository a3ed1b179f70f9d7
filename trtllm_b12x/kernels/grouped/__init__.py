"""``GroupedKernel``: block-scaled products in Triton for any number of tokens (``source.py``).

For layers whose format the host has no path for, whatever the count; from few routes of an expert on it is the tensor cores that
bound it, and not the weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x import families
from trtllm_b12x.decision import Environment, version_tuple
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats.mxfp8 import BLOCK_SIZE, MXFP8Weights
from trtllm_b12x.kernels import Geometry, late
from trtllm_b12x.kernels.jit import JitKernel, aligned
from trtllm_b12x.kernels.jit.variant import Variant
from trtllm_b12x.kernels.mxfp8 import MXFP8ReferenceKernel
from trtllm_b12x.kernels.triton import ACTIVATIONS

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


TABLE = (
    Row(8, Tile(16, 32, 128, 2, 3), Tile(16, 128, 128, 4, 3)),
    Row(40, Tile(32, 64, 64, 4, 4), Tile(64, 128, 64, 4, 3)),
    Row(128, Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
    Row(float("inf"), Tile(128, 64, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
)
"""The quickest of 12 and 8 on an H200, for layers of Qwen3-30B-A3B and gemma-4-26B-A4B at 1 to 4096 tokens, where Triton
multiplies bfloat16.  All fit the 99 KB of SM120; there they are not measured."""


class GroupedKernel(JitKernel):
    """MXFP8 by MXFP8, of one layer."""

    features = families.grouped(Environment())
    reference = MXFP8ReferenceKernel
    weights: MXFP8Weights

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        there = super().runs_on(device)
        return there and (device.type == "cuda" or version_tuple(toolchain.version()) >= _INTERPRETED_FROM)

    # ---- plan --------------------------------------------------------------------------------------------------------

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        super().describe(geometry, capacity, device)
        self._padded = 1 << (geometry.num_experts - 1).bit_length()

    def _identity(self) -> tuple[Any, ...]:
        return "grouped", self.geometry

    def variants(self) -> Iterator[Variant]:
        """Those of every row of :data:`TABLE`."""
        x, e4m3, byte, i, f = self.geometry.dtype, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.float32
        fc1_types, fc2_types = (e4m3, byte, e4m3, byte, i, i, e4m3, byte), (e4m3, byte, e4m3, byte, i, i, f, torch.bfloat16)
        yield Variant("grouped.source", "quantize_kernel", (x, e4m3, byte, 2), self._of_tokens(), {})
        yield Variant("grouped.source", "sum_kernel", (torch.bfloat16, i, x, 2), self._of_sum(), {})
        for tile in dict.fromkeys(row.fc1 for row in TABLE):
            yield Variant("grouped.source", "fc1_kernel", fc1_types, self._of_fc1(tile), _options(tile))
        for tile in dict.fromkeys(row.fc2 for row in TABLE):
            yield Variant("grouped.source", "fc2_kernel", fc2_types, self._of_product(tile), _options(tile))

    def _of_tokens(self) -> dict[str, Any]:
        return {"H": self.geometry.hidden_size, "ROWS": _ROWS, "COLUMNS": _COLUMNS}

    def _of_fc1(self, tile: Tile) -> dict[str, Any]:
        g = self.geometry
        own = {"TOP_K": g.top_k, "ACTIVATION": ACTIVATIONS.index(g.activation), "GATED": g.gated}
        return {**own, **self._of_product(tile)}

    def _of_product(self, tile: Tile) -> dict[str, Any]:
        g = self.geometry
        sizes = {"H": g.hidden_size, "SIZE": g.intermediate_size, "EXPERTS": g.num_experts, "PADDED_EXPERTS": self._padded}
        return {**sizes, "BM": tile.routes, "BN": tile.rows, "BK": tile.columns}

    def _of_sum(self) -> dict[str, Any]:
        g = self.geometry
        return {"H": g.hidden_size, "TOP_K": g.top_k, "EXPERTS": g.num_experts, "COLUMNS": _COLUMNS}

    # ---- bind --------------------------------------------------------------------------------------------------------

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        weights.check(self.geometry)
        self.weights, self.first_expert = weights, first_expert
        self._w1, self._w2 = weights.fc1_weight, weights.fc2_weight
        self._s1, self._s2 = (scales.permute(5, 2, 4, 0, 1, 3) for scales in (weights.fc1_weight_sf, weights.fc2_weight_sf))
        for name, tensor in (("w1", self._w1), ("w1's scales", self._s1), ("w2", self._w2), ("w2's scales", self._s2)):
            if not tensor.is_contiguous():
                raise ValueError(f"{name} is not contiguous")
        experts = torch.arange(self.geometry.num_experts + 1, dtype=torch.int32, device=weights.device)
        self._experts = experts

    def _tested_sizes(self) -> list[int]:
        """One token, and one of each row beyond; no more than the last row needs."""
        per_token = self.geometry.top_k / (self.geometry.num_experts * self.geometry.ranks)
        sizes = {1} | {int(row.most / per_token) + 1 for row in TABLE[:-1]}
        return sorted(size for size in sizes if size <= self.capacity)

    def serves(self, tokens: int) -> bool:
        """Also untested where the weights say nothing, since the host has no path for them."""
        return (self._plan.tested or self._plan.untold) and 0 < tokens <= self.capacity

    def launches(self, tokens: int) -> Hashable:
        return self.row(tokens)

    # ---- run ---------------------------------------------------------------------------------------------------------

    def row(self, tokens: int) -> Row:
        g = self.geometry
        return next(row for row in TABLE if tokens * g.top_k <= row.most * g.num_experts * g.ranks)

    def run(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tokens, g = x.shape[0], self.geometry
        if x.dtype != g.dtype or x.shape[1] != g.hidden_size:
            raise ValueError(f"x is {tuple(x.shape)} {x.dtype}, the kernel takes {g.hidden_size} columns of {g.dtype}")
        if not 0 < tokens <= self.capacity:
            raise ValueError(f"no kernel is planned for {tokens} tokens, only for 1 to {self.capacity}")
        direct = out is not None and out.dtype is g.dtype and out.is_contiguous() and out.data_ptr() % 16 == 0
        result = out if direct else torch.empty(tokens, g.hidden_size, dtype=g.dtype, device=x.device)
        assert result is not None
        ids = token_selected_experts.to(torch.int32).contiguous()
        with late.through_jit(g):
            self._launch(aligned(x), ids, token_final_scales.to(torch.float32).contiguous(), result)
        return result if out is None or direct else out.copy_(result)

    def _launch(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor, result: torch.Tensor) -> None:
        from . import source

        tokens, g = x.shape[0], self.geometry
        hidden, size, device = g.hidden_size, g.intermediate_size, x.device
        routes, row = tokens * g.top_k, self.row(tokens)
        codes = torch.empty(tokens, hidden, dtype=torch.float8_e4m3fn, device=device)
        codes_sf = torch.empty(tokens, hidden // BLOCK_SIZE, dtype=torch.uint8, device=device)
        parts = -(-hidden // _COLUMNS)
        source.quantize_kernel[(-(-tokens // _ROWS), parts)](x, codes, codes_sf, tokens, **self._of_tokens())
        order, starts = self._sorted(ids)
        h = torch.empty(routes, size, dtype=torch.float8_e4m3fn, device=device)
        h_sf = torch.empty(routes, size // BLOCK_SIZE, dtype=torch.uint8, device=device)
        source.fc1_kernel[(-(-size // row.fc1.rows), self._blocks(routes, row.fc1))](
            codes, codes_sf, self._w1, self._s1, order, starts, h, h_sf, **self._of_fc1(row.fc1), **_options(row.fc1)
        )
        shares = torch.empty(routes, hidden, dtype=torch.bfloat16, device=device)
        source.fc2_kernel[(-(-hidden // row.fc2.rows), self._blocks(routes, row.fc2))](
            h, h_sf, self._w2, self._s2, order, starts, router_weights, shares, **self._of_product(row.fc2), **_options(row.fc2)
        )
        source.sum_kernel[(tokens, parts)](shares, ids, result, self.first_expert, **self._of_sum())

    def _sorted(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes by local expert, int32 (those of other ranks last), and where each expert's begin, ``(E + 1,)``."""
        experts = self.geometry.num_experts
        # As unsigned numbers, ids below the first are beyond the last; and 64 bits, since a difference of int32 may wrap.
        local = ids.flatten().long() - self.first_expert
        local = torch.where((local < 0) | (local >= experts), experts, local).int()
        found = torch.sort(local, stable=True)
        return found.indices.int(), torch.searchsorted(found.values, self._experts, out_int32=True)

    def _blocks(self, routes: int, tile: Tile) -> int:
        """The most that the routes can fall into."""
        return min(routes, self.geometry.num_experts + routes // tile.routes)


def _options(tile: Tile) -> dict[str, Any]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
