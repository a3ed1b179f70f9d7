"""``GroupedKernel``: block-scaled products in Triton for any number of tokens (``source.py``).

Of MXFP8, which the host has no path for, whatever the count; of NVFP4 (``nvfp4.py``) beside the host's own.  From few routes
of an expert on it is the tensor cores that bound it, and not the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch

from trtllm_b12x.core import log
from trtllm_b12x.decision import Environment, families, version_tuple
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats import constants
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels.reference import MXFP8ReferenceKernel, ReferenceKernel
from trtllm_b12x.kernels.routes import ID_TYPES, ROUTER_WEIGHT_TYPES

from . import launcher
from .decode import addresses, check, matrices, swiglu
from .decode_variants import ACTIVATIONS
from .jit import JitKernel
from .scratch import Scratch
from .variant import Variant

_COLUMNS = 1024
"""Number of a token's columns that one program quantizes or adds up."""
_ROWS = 4
_SORTED = 4096
"""Routes that a program looks at at a time."""
_INTERPRETED_FROM = (3, 8)
"""Triton whose interpreter has ``tl.dot_scaled``."""


@dataclass(frozen=True)
class Tile:
    """Sizes of one product: routes by weight rows by columns at a time."""

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

    def scales(self, columns: int) -> int:
        """Count the bytes of a row's scales, whole words of four."""
        return -(-columns // (4 * self.block)) * 4


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
    """Scales of a layer beside its block scales, float32. Where the format has none, addresses that are not read."""

    fc1_factor: torch.Tensor
    fc1_alpha: torch.Tensor
    fc1_half_alpha: torch.Tensor
    fc2_factor: torch.Tensor
    fc2_alpha: torch.Tensor
    step: int = 0
    """From one expert's ``fc2_factor`` to the next's."""


class Layer(NamedTuple):
    """The tensors of a layer that calls read, or their addresses, in the order of the kernels' arguments."""

    factor: tuple[Any, ...]
    fc1: tuple[Any, ...]
    fc2: tuple[Any, ...]
    first_expert: int
    step: int


@dataclass(frozen=True)
class Call:
    """The state that calls of one token count and form share."""

    tokens: int
    routes: int
    scratch: Scratch
    """Parts: codes, scales, and scales as words of the tokens; order, starts and router weights of the sorted routes; codes,
    scales, and scales as words of FC1's result; shares."""
    quantized: bool
    """Input arrives so."""
    launches: tuple[tuple[launcher.Launch, tuple[int, int]], ...]
    """With their grids."""
    direct: bool
    """Launches take addresses and a stream."""

    def launch(self, stream: int, layer: Layer, call: Any, parts: Any) -> None:
        x, ids, router_weights, x_sf, _, out = call
        codes, scales, words, order, starts, weights, h, h_scales, h_words, shares = parts
        (quantize, by_tokens), (sort, by_expert), (fc1, grid1), (fc2, grid2), (add, by_columns) = self.launches
        if self.quantized:
            codes, words = x, x_sf
        else:
            quantize(by_tokens, stream, x, *layer.factor, codes, scales, self.tokens)
        sort(by_expert, stream, ids, router_weights, order, starts, weights, self.routes, layer.first_expert)
        fc1(grid1, stream, codes, words, *layer.fc1, order, starts, h, h_scales, layer.step)
        fc2(grid2, stream, h, h_words, *layer.fc2, order, starts, weights, shares)
        add(by_columns, stream, shares, ids, out, layer.first_expert)


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
        return "grouped", self.elements.name, self.geometry, self._native

    @property
    def _native(self) -> bool:
        """Triton has an instruction for block-scaled products here; elsewhere it may have none, or a slow one of bfloat16."""
        return self._device.type == "cuda" and toolchain.block_scaled(self.card.capability)

    def variants(self) -> Iterator[Variant]:
        """Yield those of every row of the table."""
        yield self._quantize()
        for ids, router_weights in product(ID_TYPES, ROUTER_WEIGHT_TYPES):
            yield self._sort(ids, router_weights)
        yield from map(self._fc1, dict.fromkeys(row.fc1 for row in self.table))
        yield from map(self._fc2, dict.fromkeys(row.fc2 for row in self.table))
        yield from map(self._sum, ID_TYPES)

    def _quantize(self) -> Variant:
        types = self.geometry.dtype, torch.float32, self.elements.codes, torch.uint8, 2
        return Variant("triton.grouped_kernels", "quantize_kernel", types, self._of_tokens(), {})

    def _sort(self, ids: torch.dtype, router_weights: torch.dtype) -> Variant:
        i, constants = torch.int32, {"EXPERTS": self.geometry.num_experts, "BLOCK": _SORTED}
        types = ids, router_weights, i, i, torch.float32, 2, 1
        return Variant("triton.grouped_sorting", "sort_kernel", types, constants, {"num_warps": 8})

    def _fc1(self, tile: Tile) -> Variant:
        codes, i = self.elements.codes, torch.int32  # scales in words of four
        types = (codes, i, codes, i, *[torch.float32] * 6, i, i, codes, torch.uint8, 1)
        return Variant("triton.grouped_kernels", "fc1_kernel", types, self._of_fc1(tile), _options(tile))

    def _fc2(self, tile: Tile) -> Variant:
        codes, i, f = self.elements.codes, torch.int32, torch.float32
        types = codes, i, codes, i, f, i, i, f, torch.bfloat16
        return Variant("triton.grouped_kernels", "fc2_kernel", types, self._of_product(tile), _options(tile))

    def _sum(self, ids: torch.dtype) -> Variant:
        g = self.geometry
        constants = {"H": g.hidden_size, "TOP_K": g.top_k, "EXPERTS": g.num_experts, "COLUMNS": _COLUMNS}
        return Variant("triton.grouped_kernels", "sum_kernel", (torch.bfloat16, ids, g.dtype, 1), constants, {})

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

    # ---- bind --------------------------------------------------------------------------------------------------------

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        check(self.geometry, weights)
        scalars = self._scalars_of(weights)
        constants = swiglu(self.geometry, weights, scalars.fc1_alpha)
        (_, s1), (_, s2) = matrices(weights)
        fc1 = weights.fc1_weight, s1.view(torch.int32), scalars.fc1_alpha, scalars.fc2_factor, scalars.fc1_half_alpha, *constants
        fc2 = weights.fc2_weight, s2.view(torch.int32), scalars.fc2_alpha
        layer = Layer((scalars.fc1_factor,), fc1, fc2, first_expert, scalars.step)
        self._layer = layer, layer._replace(factor=addresses(layer.factor), fc1=addresses(fc1), fc2=addresses(fc2))
        self.weights, self.first_expert = weights, first_expert

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

    def _launch(self, call: MoECall) -> None:
        tokens = call.x.shape[0]
        if not 0 < tokens <= self.capacity:
            raise ValueError(f"no kernel is planned for {tokens} tokens, only for 1 to {self.capacity}")
        launch = self._call(tokens, call.x_sf is not None, call.ids.dtype, call.router_weights.dtype)
        launcher.start(launch, self.geometry, self._layer, call)

    def _call(self, tokens: int, quantized: bool, ids: torch.dtype, router_weights: torch.dtype) -> Call:
        plan = self._plan
        key = (tokens, quantized, ids, router_weights, plan.compiled is not None and not launcher.watched())
        if key not in plan.calls:
            plan.calls[key] = self._prepared(*key)
        call: Call = plan.calls[key]
        return call

    def _prepared(self, tokens: int, quantized: bool, ids: torch.dtype, router_weights: torch.dtype, direct: bool) -> Call:
        g, e, row = self.geometry, self.elements, self.row(tokens)
        routes, hidden, size = tokens * g.top_k, g.hidden_size, g.intermediate_size
        variants = (self._quantize(), self._sort(ids, router_weights), self._fc1(row.fc1), self._fc2(row.fc2), self._sum(ids))
        direct = direct and all(variant.key in self._plan.compiled for variant in variants)
        grids = (
            (-(-tokens // _ROWS), -(-hidden // _COLUMNS)),
            (g.num_experts, 1),
            (-(-size // row.fc1.rows), self._blocks(routes, row.fc1)),
            (-(-hidden // row.fc2.rows), self._blocks(routes, row.fc2)),
            (tokens, -(-hidden // _COLUMNS)),
        )
        launches = [launcher.launcher(v, self._plan.compiled[v.key] if direct else None) for v in variants]
        byte, i = torch.uint8, torch.int32
        rows = 0 if quantized else tokens
        scratch = Scratch.of(
            (rows * hidden // e.packed, e.codes), (rows * e.scales(hidden), byte), (-1, i),
            (4 * routes, i), (4 * (g.num_experts + 1), i), (4 * routes, torch.float32),
            (routes * size // e.packed, e.codes), (routes * e.scales(size), byte), (-1, i),
            (2 * routes * hidden, torch.bfloat16),
        )  # fmt: skip
        return Call(tokens, routes, scratch, quantized, tuple(zip(launches, grids, strict=True)), direct)

    def _blocks(self, routes: int, tile: Tile) -> int:
        """The most that the routes can fall into."""
        return min(routes, self.geometry.num_experts + routes // tile.routes)


def _options(tile: Tile) -> dict[str, Any]:
    return {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
