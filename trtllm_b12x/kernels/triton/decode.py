# SPDX-License-Identifier: Apache-2.0
"""Decode kernels in Triton on 16-bit activations and the engine's tensors: experts in NVFP4, W4A16_NVFP4, MXFP4 and MXFP8.

A call has three launches: sorting by expert, FC1 with its activation, and FC2 with the weighted sum. Launches do not depend
on values, and calls share nothing. Scratch memory belongs to the call, or torch's allocator provides it call by call. So streams
and replaying graphs do not conflict.

Activations are not quantized. NVFP4 sums are multiplied only by ``weight_scale_2``: the engine's alpha times its input scale,
whose reciprocal the alpha contains. Every call reads both, since the engine may overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, ClassVar

import torch

from trtllm_b12x.decision import Environment, families
from trtllm_b12x.formats import ROWS
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels import reference as in_torch
from trtllm_b12x.kernels.layer_tensors import ACTIVATIONS, ORDERS, scalars_of, scales_in_memory
from trtllm_b12x.kernels.routes import ID_TYPES, ROUTER_WEIGHT_TYPES

from .jit import JitKernel
from .launcher import LaunchPlan, LayerTensors, WorkspaceLayout
from .tiles import Tile, Tiles, proposals
from .variant import Variant

_MAX_TOP_K = 64
_MAX_EXPERTS = 2048
_LAST_INDEX = 2**31 - 1
_BLOCK = 1024
"""Elements that a program sets or sorts at a time."""


def blocks(geometry: Geometry, tokens: int, routes: int) -> int:
    """Return the maximum number of blocks of ``routes`` that a call needs."""
    total = tokens * geometry.top_k
    return min(total, geometry.num_experts + total // routes)


class TritonKernel(JitKernel):
    """Decode of NVFP4 layers."""

    features = families.triton(Environment())
    reference: ClassVar[type[in_torch.ReferenceKernel]] = in_torch.UnquantizedReferenceKernel
    registers = 0
    """Maximum registers per thread; 0: ptxas chooses. For W4A16_NVFP4 ptxas chooses 96, and spills."""

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        # 32-bit offsets reach every route's row.
        largest = _LAST_INDEX // (geometry.top_k * max(geometry.hidden_size, geometry.intermediate_size))
        super().describe(geometry, min(capacity, largest), device)
        if geometry.top_k > _MAX_TOP_K or geometry.num_experts > _MAX_EXPERTS:
            raise ValueError(f"top {geometry.top_k} of {geometry.num_experts} experts: at most {_MAX_TOP_K} of {_MAX_EXPERTS}")
        self._overlap = device.type == "cuda" and self.card.capability >= 90
        """True if a launch begins before the previous one has ended (programmatic dependent launch)."""

    def _identity(self) -> tuple[Any, ...]:
        return self.geometry, self.capacity, self.card

    def proposals(self, tokens: int) -> tuple[Tiles, ...]:
        form = self.number_format()
        return proposals(self.geometry, self.card, form.code_bits, form.group_size, tokens)

    def _counts(self) -> Iterable[int]:
        return range(1, self.capacity + 1)

    def variants(self) -> Iterator[Variant]:
        quantized = (False, True) if self.features.quantized_input else (False,)
        for chosen, types in product(self.sets(), product(quantized, ID_TYPES, ROUTER_WEIGHT_TYPES)):
            yield from self.variants_of_call(chosen, *types)

    def variants_of_call(
        self,
        chosen: Tiles,
        quantized: bool = False,
        ids: torch.dtype = ID_TYPES[0],
        router_weights: torch.dtype = ROUTER_WEIGHT_TYPES[0],
    ) -> tuple[Variant, Variant, Variant]:
        """Return the kernels of a call, in the order of their launches. ``quantized``: NVFP4 input."""
        g, form = self.geometry, self.number_format()
        x, byte, f, i = g.dtype, torch.uint8, torch.float32, torch.int32
        slots, padded = 1 << max(g.top_k - 1, 1).bit_length(), 1 << (g.num_experts - 1).bit_length()
        common = {"H": g.hidden_size, "TOP_K": g.top_k, "PDL": self._overlap}
        route = {"SLOTS": slots, "EXPERTS": g.num_experts, "PADDED_EXPERTS": padded, "BLOCK": _BLOCK, "QUANTIZED": quantized}
        both = {"SIZE": g.intermediate_size, "BM": chosen.routes, "BIAS": g.bias is not None, "WORD": 32 // form.code_bits}
        both |= {"GROUP": form.group_size, "LINEAR": g.layout.scales == ROWS, "PADDED": g.stored_hidden}
        both |= {"PTX": self.card.capability if self.device.type == "cuda" else 0}
        first = {"ORDER": ORDERS.index(g.layout.fc1), "ACTIVATION": ACTIVATIONS.index(g.activation), "GATED": g.gated}
        bias = g.bias or f
        route_types = byte if quantized else x, byte, ids, router_weights, x, x, i, 1, 1, 0, 1, 1, 0
        fc1_types = x, i, byte, f, f, f, bias, f, f, f, torch.bfloat16, i, 1, 1, 0
        fc2_types = torch.bfloat16, i, byte, f, f, bias, x, f, i, 1, 1, 0
        return (
            self._variant("route_kernel", route_types, common | route),
            self._variant("fc1_kernel", fc1_types, common | both | first, chosen.fc1),
            self._variant("fc2_kernel", fc2_types, common | both, chosen.fc2),
        )

    def _variant(self, name: str, types: tuple[Any, ...], constants: dict[str, Any], tile: Tile | None = None) -> Variant:
        options: dict[str, Any] = {"num_warps": tile.num_warps if tile else 4, "num_stages": tile.num_stages if tile else 1}
        options["enable_fp_fusion"] = True  # the default until Triton 3.10
        if tile:
            constants = {**constants, "BN": tile.rows, "BK": tile.columns}
        if self.device.type == "cuda":
            options["launch_pdl"] = self._overlap
            if tile and self.registers:
                options["maxnreg"] = self.registers
        return Variant("triton.decode_kernels", name, types, constants, options)

    def _layer_tensors(self, weights: Any, first_expert: int) -> dict[bool, LayerTensors]:
        s = scalars_of(self.geometry, weights)
        head = weights.fc1_weight.view(torch.int32), scales_in_memory(weights, "fc1_weight_sf"), s.fc1_alpha
        tail = s.fc1_half_alphas, s.biases[0], *s.swiglu
        codes, scales = weights.fc2_weight.view(torch.int32), scales_in_memory(weights, "fc2_weight_sf")
        fc2 = codes, scales, s.fc2_alpha, s.fc2_input, s.biases[1]
        return {
            False: LayerTensors((*head, s.fc1_input, *tail), fc2, first_expert, s.steps),
            True: LayerTensors((*head, s.one, *tail), fc2, first_expert, (0, s.steps[1])),
        }

    def summary(self) -> tuple[str, ...]:
        return (*super().summary(), *self._pending())

    def _launch_plan(
        self, tokens: int, quantized: bool, ids: torch.dtype, router_weights: torch.dtype, direct: bool
    ) -> LaunchPlan:
        g, chosen = self.geometry, self.tiles(tokens)
        count = blocks(g, tokens, chosen.routes)
        columns = -(-g.hidden_size // chosen.fc2.rows)
        grids = (1 + tokens, 1), (-(-g.intermediate_size // chosen.fc1.rows), count), (columns, count)
        variants = self.variants_of_call(chosen, quantized, ids, router_weights)
        route, fc1, fc2 = self._launchers(variants, grids, direct)

        def launch(stream: int, layer: LayerTensors, call: Any, parts: Any) -> None:
            (x, ids, router_weights, x_sf, swizzled, out), (staged, h, partial, workspace) = call, parts
            sizes = tokens, count, layer.first_expert, columns, chosen.routes
            route(stream, x, x_sf, ids, router_weights, staged, out, workspace, *sizes, swizzled)
            fc1(stream, staged if quantized else x, *layer.fc1, h, workspace, count, g.num_experts, layer.steps[0])
            fc2(stream, h, *layer.fc2, out, partial, workspace, tokens, count, layer.steps[1])

        return LaunchPlan(self._workspace(tokens, quantized, chosen), direct, launch)

    def _workspace(self, tokens: int, quantized: bool, tiles: Tiles) -> WorkspaceLayout:
        g = self.geometry
        columns = -(-g.hidden_size // tiles.fc2.rows)
        # int32 elements of ``workspace`` in ``routing.route_kernel``
        numbers = (2 + tiles.routes) * blocks(g, tokens, tiles.routes) + tokens * (g.top_k + columns + 2) + g.num_experts
        return WorkspaceLayout.of(
            (2 * tokens * g.hidden_size if quantized else 16, g.dtype),  # FC1's input, if it arrives quantized
            (2 * tokens * g.top_k * g.intermediate_size, torch.bfloat16),  # FC1's result
            (4 * tokens * g.top_k * g.hidden_size, torch.float32),  # shares
            (4 * numbers, torch.int32),
        )

    def scratch_bytes(self, tokens: int) -> int:
        # Fewer tokens may have smaller tiles, and more of them.
        return max(super(TritonKernel, self).scratch_bytes(count) for count in range(1, min(tokens, self.capacity) + 1))


class TritonMXFP8Kernel(TritonKernel):
    features = families.triton_mxfp8(Environment())
    reference = in_torch.MXFP8UnquantizedReferenceKernel


class TritonW4A16Kernel(TritonKernel):
    features = families.triton_w4a16(Environment())
    registers = 168
    reference = in_torch.W4A16UnquantizedReferenceKernel


class TritonMXFP4Kernel(TritonKernel):
    features = families.triton_mxfp4(Environment())
    registers = 168
    reference = in_torch.MXFP4UnquantizedReferenceKernel
