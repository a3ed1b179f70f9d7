# SPDX-License-Identifier: Apache-2.0
"""Grouped kernels in Triton: block-scaled products for any number of tokens (``grouped_kernels.py``).

They serve MXFP8 (W8A8), for which the engine has no path, at every token count, and NVFP4 (W4A4) besides CUTLASS, at counts where
they were measured to be faster. Scratch memory belongs to the call, or torch's allocator provides it. Each route needs space for
FC1's result and a share of ``H`` bfloat16: 300 MB for 8192 tokens with 8 experts each and a hidden size of 2048.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch

from trtllm_b12x.core import log
from trtllm_b12x.decision import Environment, families
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.formats import ROWS
from trtllm_b12x.formats.catalog import WEIGHTS
from trtllm_b12x.formats.layouts import scales_of_tokens
from trtllm_b12x.formats.weights import Weights
from trtllm_b12x.kernels import Geometry, MoECall
from trtllm_b12x.kernels import reference as in_torch
from trtllm_b12x.kernels.call import aligned16
from trtllm_b12x.kernels.layer_tensors import ACTIVATIONS, ORDERS, scalars_of, scales_in_memory
from trtllm_b12x.kernels.routes import ID_TYPES, ROUTER_WEIGHT_TYPES

from .decode import blocks
from .jit import JitKernel
from .launcher import LaunchPlan, LayerTensors, WorkspaceLayout
from .variant import Variant

_COLUMNS = 1024
"""Columns of a token that one program quantizes or sums."""
_ROWS = 4
_SORTED = 4096
"""Routes that a program of ``sort_kernel`` reads at a time."""


@dataclass(frozen=True)
class Tile:
    """Sizes of one product: routes by weight rows by columns at a time."""

    routes: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TileRule:
    """Tiles for up to ``max_routes`` routes per expert on average. The tiles of neighboring rules are proposed too."""

    max_routes: float
    fc1: Tile
    fc2: Tile

    def __str__(self) -> str:
        return " ".join(f"{tile.routes}x{tile.rows}x{tile.columns}w{tile.num_warps}" for tile in (self.fc1, self.fc2))


MXFP8_TABLE = (
    TileRule(0.5, Tile(16, 32, 128, 2, 3), Tile(16, 128, 128, 4, 3)),
    TileRule(8, Tile(16, 128, 64, 4, 3), Tile(16, 128, 128, 4, 3)),
    TileRule(128, Tile(64, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
    TileRule(float("inf"), Tile(64, 128, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
)
"""These tiles are among the fastest on an H200, where Triton multiplies bfloat16, for layers of Qwen3-30B-A3B and gemma-4-26B-A4B
at 1 and 64 to 4096 tokens. All fit the 99 KB of SM120, on which they are not measured."""
NVFP4_TABLE = (
    TileRule(8, Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 4)),
    TileRule(24, Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 4)),
    TileRule(96, Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 4)),
    TileRule(float("inf"), Tile(128, 64, 128, 4, 3), Tile(128, 128, 128, 8, 3)),
)
"""These tiles are not measured on a card that has these products. Compiled for one, they do not spill and take at most 42 of its
99 KB. With many routes, a third to half of a loop's instructions are products."""


class GroupedKernel(JitKernel):
    """Grouped kernels that multiply MXFP8 by MXFP8."""

    features = families.grouped(Environment())
    reference: ClassVar[type[in_torch.ReferenceKernel]] = in_torch.MXFP8ReferenceKernel
    instruction = "kind::mxf8f6f4.block_scale"
    table: ClassVar[tuple[TileRule, ...]] = MXFP8_TABLE

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        super().plan(geometry, capacity, device)
        slow = toolchain.upcast(self.card.capability) if device.type == "cuda" else ""
        if slow:
            log.once(f"grouped kernels: {slow}")

    def _identity(self) -> tuple[Any, ...]:
        return self.geometry, self._native

    @property
    def _stored(self) -> type[Weights]:
        return WEIGHTS[self.number_format().name]

    @property
    def _native(self) -> bool:
        """True if Triton has a block-scaled product instruction for this card; else products are bfloat16, which is slow."""
        return self.device.type == "cuda" and toolchain.block_scaled(self.card.capability)

    def variants(self) -> Iterator[Variant]:
        for rule, ids, router_weights in product(self.table, ID_TYPES, ROUTER_WEIGHT_TYPES):
            yield from self.variants_of_call(rule, ids, router_weights)

    def variants_of_call(self, rule: TileRule, ids: torch.dtype, router_weights: torch.dtype) -> tuple[Variant, ...]:
        """Return the kernels of a call in the order of their launches: quantize, sort, FC1, FC2, sum."""
        g, codes, f, i = self.geometry, self._stored.code_dtype, torch.float32, torch.int32
        form = {"FORMAT": "e4m3" if self._stored.packed == 1 else "e2m1", "NATIVE": self._native}
        stored = {"GROUP": self._stored.group_size, "LINEAR": g.layout.scales == ROWS, "BIAS": g.bias is not None}
        experts = {"EXPERTS": g.num_experts}
        sizes = {"H": g.hidden_size, "SIZE": g.intermediate_size, "PADDED_EXPERTS": 1 << (g.num_experts - 1).bit_length()}
        by_token = {"H": g.hidden_size, "COLUMNS": _COLUMNS}

        def product_of(name: str, types: tuple[Any, ...], tile: Tile, **constants: Any) -> Variant:
            constants |= {"BM": tile.routes, "BN": tile.rows, "BK": tile.columns, "WARPS": tile.num_warps}
            options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
            return Variant("triton.grouped_kernels", name, types, constants | sizes | experts | form | stored, options)

        quantize_types, sort_types = (g.dtype, f, codes, i, 2), (ids, router_weights, i, i, f, 2, 1)
        bias = g.bias or f
        fc1_types = (codes, i, codes, i, f, f, f, bias, f, f, f, i, i, codes, i, 1)  # scales in words of four
        constants = {"TOP_K": g.top_k, "ACTIVATION": ACTIVATIONS.index(g.activation), "GATED": g.gated}
        constants["ORDER"] = ORDERS.index(g.layout.fc1)
        quantize = {**by_token, "ROWS": _ROWS, "GATED": g.gated, **form}
        return (
            Variant("triton.grouped_kernels", "quantize_kernel", quantize_types, quantize, {}),
            Variant("triton.routing", "sort_kernel", sort_types, {**experts, "BLOCK": _SORTED}, {"num_warps": 8}),
            product_of("fc1_kernel", fc1_types, rule.fc1, **constants),
            product_of("fc2_kernel", (codes, i, codes, i, f, bias, i, i, f, torch.bfloat16), rule.fc2),
            Variant("triton.grouped_kernels", "sum_kernel", (torch.bfloat16, ids, g.dtype, 1),
                    {**by_token, **experts, "TOP_K": g.top_k}, {}),
        )  # fmt: skip

    def _layer_tensors(self, weights: Any, first_expert: int) -> dict[bool, LayerTensors]:
        s = scalars_of(self.geometry, weights)
        sf1, sf2 = (scales_in_memory(weights, name).flatten().view(torch.int32) for name in ("fc1_weight_sf", "fc2_weight_sf"))
        fc1 = weights.fc1_weight, sf1, s.fc1_alpha, s.fc2_input, s.fc1_half_alphas, s.biases[0], *s.swiglu
        fc2 = weights.fc2_weight, sf2, s.fc2_alpha, s.biases[1]
        layer = LayerTensors(fc1, fc2, first_expert, s.steps, (s.fc1_input,))
        return dict.fromkeys((False, True), layer)

    def _counts(self) -> list[int]:
        """Return 1, and the smallest token count of each rule but the first."""
        per_token = self.geometry.top_k / (self.geometry.num_experts * self.geometry.ranks)
        sizes = {1} | {int(rule.max_routes / per_token) + 1 for rule in self.table[:-1]}
        return sorted(size for size in sizes if size <= self.capacity)

    def proposals(self, tokens: int) -> tuple[TileRule, ...]:
        g = self.geometry
        at = next(i for i, rule in enumerate(self.table) if tokens * g.top_k <= rule.max_routes * g.num_experts * g.ranks)
        return self.table[at], *self.table[at + 1 : at + 2], *self.table[max(at - 1, 0) : at]

    def _launch_plan(
        self, tokens: int, quantized: bool, ids: torch.dtype, router_weights: torch.dtype, direct: bool
    ) -> LaunchPlan:
        g, rule = self.geometry, self.tiles(tokens)
        routes, hidden, size = tokens * g.top_k, g.hidden_size, g.intermediate_size
        grids = (
            (-(-tokens // _ROWS), -(-hidden // _COLUMNS)),
            (g.num_experts, 1),
            (-(-size // rule.fc1.rows), blocks(g, tokens, rule.fc1.routes)),
            (-(-hidden // rule.fc2.rows), blocks(g, tokens, rule.fc2.routes)),
            (tokens, -(-hidden // _COLUMNS)),
        )
        variants = self.variants_of_call(rule, ids, router_weights)
        quantize, sort, fc1, fc2, add = self._launchers(variants, grids, direct)

        def launch(stream: int, layer: LayerTensors, call: Any, parts: Any) -> None:
            x, ids, router_weights, x_sf, _, out = call
            codes, scales, order, starts, weights, h, h_scales, shares = parts
            if quantized:
                codes, scales = x, x_sf
            else:
                quantize(stream, x, *layer.quantize, codes, scales, tokens)
            sort(stream, ids, router_weights, order, starts, weights, routes, layer.first_expert)
            fc1(stream, codes, scales, *layer.fc1, order, starts, h, h_scales, layer.steps[1])
            fc2(stream, h, h_scales, *layer.fc2, order, starts, weights, shares)
            add(stream, shares, ids, out, layer.first_expert)

        return LaunchPlan(self._workspace(tokens, quantized, rule), direct, launch)

    def _workspace(self, tokens: int, quantized: bool, tiles: TileRule) -> WorkspaceLayout:
        g, form, i = self.geometry, self._stored, torch.int32
        routes, hidden, size = tokens * g.top_k, g.hidden_size, g.intermediate_size
        rows = 0 if quantized else tokens
        # Codes and scales of the tokens; order, starts and router weights of the sorted routes; codes and scales of FC1's result;
        # shares.
        return WorkspaceLayout.of(
            (rows * hidden // form.packed, form.code_dtype), (rows * self._scale_bytes(hidden), i),
            (4 * routes, i), (4 * (g.num_experts + 1), i), (4 * routes, torch.float32),
            (routes * size // form.packed, form.code_dtype), (routes * self._scale_bytes(size), i),
            (2 * routes * hidden, torch.bfloat16),
        )  # fmt: skip

    def _scale_bytes(self, columns: int) -> int:
        """Return the bytes of a row's scales, padded to words of four."""
        return -(-columns // (4 * self._stored.group_size)) * 4


class GroupedNVFP4Kernel(GroupedKernel):
    """Grouped kernels that multiply NVFP4 by NVFP4."""

    features = families.grouped_nvfp4(Environment())
    reference = in_torch.QuantizedReferenceKernel
    instruction = "kind::mxf4nvf4.block_scale"
    table = NVFP4_TABLE

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        """Raise ValueError as ``Kernel.bind`` does, and if FC1's input scale differs by expert: a token is quantized once."""
        if weights.input_scales is not None and weights.input_scales.fc31_input_scale.numel() != 1:
            raise ValueError("the kernels take the host's input scales, and of FC1 one for all experts")
        super().bind(weights, first_expert)

    def _launch(self, call: MoECall) -> None:
        if call.x_sf is not None:
            rows = scales_of_tokens(call.x_sf, call.x.shape[0], self.geometry.hidden_size // 16, call.swizzled)
            rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
            call = call._replace(x_sf=aligned16(rows).view(torch.int32))
        super()._launch(call)
