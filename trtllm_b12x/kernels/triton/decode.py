"""Decode kernels in Triton on 16-bit activations, on the host's own tensors: experts in NVFP4, W4A16_NVFP4, MXFP4 and MXFP8.

A call of few routes is two launches: FC1 with its activation, and FC2 with the weighted sum. A call of more routes, or of input
that arrives quantized, has a third one first, which sorts routes by expert. Nothing depends on values and nothing is shared
between calls: scratch memory is the call's, or comes from torch's allocator call by call, so streams and graphs that replay do
not meet.

Activations are not quantized. NVFP4 sums are multiplied by ``weight_scale_2`` alone: the host's alpha times the host's input
scale, which is the reciprocal of what that alpha contains. Every call reads both, since anybody may overwrite them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from trtllm_b12x.decision import Environment, families
from trtllm_b12x.formats import ROWS, constants
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.layer_tensors import ACTIVATIONS, ORDERS, scalars_of, scales_in_memory, swiglu
from trtllm_b12x.kernels.reference import (
    MXFP4UnquantizedReferenceKernel,
    MXFP8UnquantizedReferenceKernel,
    ReferenceKernel,
    UnquantizedReferenceKernel,
    W4A16UnquantizedReferenceKernel,
)
from trtllm_b12x.kernels.routes import ID_TYPES, ROUTER_WEIGHT_TYPES

from .decode_tiles import INLINE_ROUTES, Tile, Tiles, blocks, tiles
from .jit import JitKernel
from .launcher import LaunchPlan, LayerTensors, WorkspaceLayout
from .variant import Variant

_MAX_TOP_K = 64
_MAX_EXPERTS = 2048
_LAST_INDEX = 2**31 - 1
_REGISTERS = 168
"""Limit of a thread where its kernel has few programs, or many routes in each."""
_BLOCK = 1024
"""Elements a program sets or sorts at a time."""


@dataclass(frozen=True)
class LaunchConfig:
    """How calls of one token count are launched."""

    tokens: int
    tiles: Tiles
    blocks: int
    """Programs along routes, if those are sorted."""
    inline: bool
    """Routes need not be sorted."""
    columns: int
    """Number of tiles of the hidden size."""


class TritonKernel(JitKernel):
    """Decode of NVFP4 layers."""

    features = families.triton(Environment())
    reference: type[ReferenceKernel] = UnquantizedReferenceKernel
    codes_per_int32 = 8
    registers = 0
    """Limit of a thread where several programs of few routes share a multiprocessor; 0: ptxas chooses everywhere, for W4A16_NVFP4
    96, with which it spills."""

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        # 32-bit offsets reach every route's row.
        largest = _LAST_INDEX // (geometry.top_k * max(geometry.hidden_size, geometry.intermediate_size))
        super().describe(geometry, min(capacity, largest), device)
        if geometry.top_k > _MAX_TOP_K or geometry.num_experts > _MAX_EXPERTS:
            raise ValueError(f"top {geometry.top_k} of {geometry.num_experts} experts: at most {_MAX_TOP_K} of {_MAX_EXPERTS}")
        self._overlap = device.type == "cuda" and self.card.capability >= 90
        """A launch begins before the one ahead of it has ended (programmatic dependent launch)."""

    def _identity(self) -> tuple[Any, ...]:
        return self.geometry, self.capacity, self.card

    def tiles(self, tokens: int) -> Tiles:
        return tiles(self.geometry, tokens, self.card, self.geometry.ranks, self.codes_per_int32, self.features.group_size)

    def config(self, tokens: int) -> LaunchConfig:
        g, chosen = self.geometry, self.tiles(tokens)
        inline = chosen.routes == 1 or tokens * g.top_k <= INLINE_ROUTES
        columns = -(-g.hidden_size // chosen.fc2.rows)
        return LaunchConfig(tokens, chosen, blocks(g, tokens, chosen.routes), inline, columns)

    def variants(self) -> Iterator[Variant]:
        quantized = (False, True) if self.features.quantized_input else (False,)
        for config in map(self.config, range(1, self.capacity + 1)):
            if config.inline:
                yield from self.variants_of_call(config, True)
            for types in product(quantized, ID_TYPES, ROUTER_WEIGHT_TYPES):
                yield from self.variants_of_call(config, False, *types)

    def variants_of_call(
        self,
        config: LaunchConfig,
        inline: bool,
        quantized: bool = False,
        ids: torch.dtype = ID_TYPES[0],
        router_weights: torch.dtype = ROUTER_WEIGHT_TYPES[0],
    ) -> tuple[Variant, ...]:
        """Return the kernels of a call, in the order of their launches.

        Args:
            inline: programs find their routes by themselves.
            quantized: NVFP4 input; never inline.
            ids, router_weights: types of the routes; always the first if ``inline``.
        """
        g, chosen = self.geometry, config.tiles
        x, byte, f, i = g.dtype, torch.uint8, torch.float32, torch.int32
        slots = 1 << max(g.top_k - 1, 1).bit_length()
        # Constants that a variant does not use do not make another.
        common = {"TOP_K": g.top_k, "PDL": self._overlap}
        both = {"H": g.hidden_size, "SIZE": g.intermediate_size, "TILES": config.columns, "BM": chosen.routes}
        both |= {"BIAS": g.bias is not None, "SORTED": not inline, "ROUTES": INLINE_ROUTES, "WORD": self.codes_per_int32}
        both |= {"GROUP": self.features.group_size, "LINEAR": g.layout.scales == ROWS, "PADDED": g.stored_hidden}
        both |= {"PTX": self.card.capability if self.device.type == "cuda" else 0}
        first = {"BN": chosen.fc1.rows, "BK": chosen.fc1.columns, "SPLIT": chosen.fc1.split}
        first |= {"ORDER": ORDERS.index(g.layout.fc1)}
        first |= {"ACTIVATION": ACTIVATIONS.index(g.activation), "GATED": g.gated, "SLOTS": slots, "BLOCK": _BLOCK}
        second = {"BN": chosen.fc2.rows, "BK": chosen.fc2.columns, "SPLIT": chosen.fc2.split}
        bias, call = g.bias or f, (i, config.tokens, 1, 0, 1, 0)
        programs = config.tokens * g.top_k * g.intermediate_size // chosen.fc1.rows
        crowded = chosen.routes <= 8 and programs > self.card.multiprocessors
        types: tuple[Any, ...] = (x, i, byte, f, f, f, bias, f, f, f, i, f, x, torch.bfloat16, *call)
        made = [self._variant("fc1_kernel", types, common | both | first, chosen.fc1, crowded)]
        types = (torch.bfloat16, i, byte, f, f, bias, i, f, x, f, *call)
        if inline and chosen.token is not None:
            constants = {name: both[name] for name in ("H", "SIZE", "BIAS", "PADDED", "WORD", "GROUP", "LINEAR", "PTX")}
            constants |= {"BN": chosen.token.rows, "BK": chosen.token.columns}
            made.append(self._variant("fc2_token_kernel", types, common | constants, chosen.token))
        else:
            made.append(self._variant("fc2_kernel", types, common | both | second, chosen.fc2, crowded))
        if not inline:
            constants = {"H": g.hidden_size, "SLOTS": slots, "EXPERTS": g.num_experts, "BLOCK": _BLOCK, "QUANTIZED": quantized}
            constants |= {"PADDED_EXPERTS": 1 << (g.num_experts - 1).bit_length()}
            types = (byte if quantized else x, byte, ids, router_weights, x, x, i, config.tokens, 1, 0, 1, 1, 0)
            made.insert(0, self._variant("route_kernel", types, common | constants, None))
        return tuple(made)

    def _variant(
        self, name: str, types: tuple[Any, ...], constants: dict[str, Any], tile: Tile | None, crowded: bool = False
    ) -> Variant:
        options: dict[str, Any] = {"num_warps": tile.num_warps if tile else 4, "num_stages": tile.num_stages if tile else 1}
        options["enable_fp_fusion"] = True  # the default until Triton 3.10
        if self.device.type == "cuda":
            options["launch_pdl"] = self._overlap
            if tile and tile.num_warps <= 4 and self.registers:
                options["maxnreg"] = self.registers if crowded else _REGISTERS
        return Variant("triton.decode_kernels", name, types, constants, options)

    def _layer_tensors(self, weights: Any, first_expert: int) -> dict[bool, LayerTensors]:
        s, extra = scalars_of(weights), weights.epilogue
        none = s.fc2_alpha  # an address for what is not read
        bias1, bias2 = (none if bias is None else bias for bias in (extra.fc1_bias, extra.fc2_bias))
        head = weights.fc1_weight.view(torch.int32), scales_in_memory(weights, "fc1_weight_sf"), s.fc1_alpha
        tail = s.fc1_half_alphas, bias1, *swiglu(self.geometry, weights, none)
        fc2 = weights.fc2_weight.view(torch.int32), scales_in_memory(weights, "fc2_weight_sf"), s.fc2_alpha, s.fc2_input, bias2
        # Input that arrives quantized is in units of the input scale, which the alpha contains.
        one = constants.filled(1.0, (1,), weights.device)
        return {
            False: LayerTensors((*head, s.fc1_input, *tail), fc2, first_expert, s.steps),
            True: LayerTensors((*head, one, *tail), fc2, first_expert, (0, s.steps[1])),
        }

    def _tested_sizes(self) -> list[int]:
        """Return the smallest and the largest token count of each set of tiles."""
        sizes: dict[tuple[Tiles, bool], list[int]] = {}
        for config in map(self.config, range(1, self.capacity + 1)):
            sizes.setdefault((config.tiles, config.inline), []).append(config.tokens)
        return sorted({tokens for same in sizes.values() for tokens in (same[0], same[-1])})

    def summary(self) -> tuple[str, ...]:
        return (*super().summary(), *self._pending())

    def _launch_plan(
        self, tokens: int, quantized: bool, ids: torch.dtype, router_weights: torch.dtype, direct: bool
    ) -> LaunchPlan:
        g, config = self.geometry, self.config(tokens)
        inline = config.inline and not quantized and (ids, router_weights) == (ID_TYPES[0], ROUTER_WEIGHT_TYPES[0])
        variants = self.variants_of_call(config, inline, quantized, ids, router_weights)
        across = tokens * g.top_k if inline else config.blocks
        *_, fc1_variant, fc2_variant = variants
        grids = [
            (1 + tokens, 1),
            (-(-g.intermediate_size // fc1_variant.constants["BN"]), across),
            (-(-g.hidden_size // fc2_variant.constants["BN"]), tokens if fc2_variant.name == "fc2_token_kernel" else across),
        ]
        *route, fc1, fc2 = self._launchers(variants, grids[-len(variants) :], direct)

        def launch(stream: int, layer: LayerTensors, call: Any, parts: Any) -> None:
            (x, ids, router_weights, x_sf, swizzled, out), (staged, h, partial, numbers) = call, parts
            sizes, first = (tokens, config.blocks), layer.first_expert
            for sort in route:
                places = config.columns, config.tiles.routes, swizzled
                sort(stream, x, x_sf, ids, router_weights, staged, out, numbers, *sizes, first, *places)
                ids, router_weights, first = numbers, partial, 0
                x = staged if quantized else x
            experts = first, g.num_experts
            fc1(stream, x, *layer.fc1, ids, router_weights, out, h, numbers, *sizes, *experts, layer.steps[0])
            fc2(stream, h, *layer.fc2, ids, router_weights, out, partial, numbers, *sizes, *experts, layer.steps[1])

        return LaunchPlan(self._workspace(tokens, quantized, not inline), direct, launch)

    def _workspace(self, tokens: int, quantized: bool, sorts: bool) -> WorkspaceLayout:
        g, config = self.geometry, self.config(tokens)
        numbers = tokens * (config.columns + 2)  # for ``routing.route_kernel``
        if sorts:
            numbers += tokens * g.top_k + (2 + config.tiles.routes) * config.blocks + g.num_experts
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
    """Decode of MXFP8 layers, by the same launches."""

    features = families.triton_mxfp8(Environment())
    reference = MXFP8UnquantizedReferenceKernel
    codes_per_int32 = 4


class TritonW4A16Kernel(TritonKernel):
    """Decode of W4A16_NVFP4 layers."""

    features = families.triton_w4a16(Environment())
    registers = 128
    reference = W4A16UnquantizedReferenceKernel


class TritonMXFP4Kernel(TritonKernel):
    """Decode of MXFP4 layers."""

    features = families.triton_mxfp4(Environment())
    registers = _REGISTERS
    reference = MXFP4UnquantizedReferenceKernel
