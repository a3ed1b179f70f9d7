"""Choose the kernels that a decode call launches, and their constants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.cards import Card
from trtllm_b12x.kernels.routes import ID_TYPES, ROUTER_WEIGHT_TYPES

from .decode_tiles import INLINE_ROUTES, Tile, Tiles, blocks, tiles
from .jit import ACTIVATIONS
from .variant import Variant

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


@dataclass(frozen=True)
class KernelSpec:
    """The constants that kernels are compiled for."""

    geometry: Geometry
    card: Card
    overlap: bool
    """A launch begins before the one ahead of it has ended (programmatic dependent launch)."""
    gpu: bool
    """False in Triton's interpreter."""
    codes_per_int32: int = 8
    tiles: Tiles | None = None
    """Tiles of every call, in place of the rule's."""

    def config(self, tokens: int) -> LaunchConfig:
        g = self.geometry
        chosen = self.tiles or tiles(g, tokens, self.card, g.ranks, self.codes_per_int32)
        inline = chosen.routes == 1 or tokens * g.top_k <= INLINE_ROUTES
        return LaunchConfig(tokens, chosen, blocks(g, tokens, chosen.routes), inline)

    def columns(self, config: LaunchConfig) -> int:
        """Return the number of tiles of the hidden size."""
        return -(-self.geometry.hidden_size // config.tiles.fc2.rows)

    def variants(
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
        common = {"TOP_K": g.top_k, "PDL": self.overlap}
        both = {"H": g.hidden_size, "SIZE": g.intermediate_size, "TILES": self.columns(config), "BM": chosen.routes}
        both |= {"BIAS": g.bias is not None, "SORTED": not inline, "ROUTES": INLINE_ROUTES, "WORD": self.codes_per_int32}
        both |= {"PTX": self.card.capability if self.gpu else 0}
        first = {"BN": chosen.fc1.rows, "BK": chosen.fc1.columns, "SPLIT": chosen.fc1.split}
        first |= {"ACTIVATION": ACTIVATIONS.index(g.activation), "GATED": g.gated, "SLOTS": slots, "BLOCK": _BLOCK}
        second = {"BN": chosen.fc2.rows, "BK": chosen.fc2.columns, "SPLIT": chosen.fc2.split}
        bias, call = g.bias or f, (i, config.tokens, 1, 0, 1, 0)
        types: tuple[Any, ...] = (x, i, byte, f, f, f, bias, f, f, f, i, f, x, torch.bfloat16, *call)
        made = [self._variant("fc1_kernel", types, common | both | first, chosen.fc1)]
        types = (torch.bfloat16, i, byte, f, f, bias, i, f, x, f, *call)
        if inline and chosen.token is not None:
            constants = {name: both[name] for name in ("H", "SIZE", "BIAS", "WORD", "PTX")}
            constants |= {"BN": chosen.token.rows, "BK": chosen.token.columns}
            made.append(self._variant("fc2_token_kernel", types, common | constants, chosen.token))
        else:
            made.append(self._variant("fc2_kernel", types, common | both | second, chosen.fc2))
        if not inline:
            constants = {"H": g.hidden_size, "SLOTS": slots, "EXPERTS": g.num_experts, "BLOCK": _BLOCK, "QUANTIZED": quantized}
            constants |= {"PADDED_EXPERTS": 1 << (g.num_experts - 1).bit_length()}
            types = (byte if quantized else x, byte, ids, router_weights, x, x, i, config.tokens, 1, 0, 1, 1, 0)
            made.insert(0, self._variant("route_kernel", types, common | constants, None))
        return tuple(made)

    def _variant(self, name: str, types: tuple[Any, ...], constants: dict[str, Any], tile: Tile | None) -> Variant:
        options: dict[str, Any] = {"num_warps": tile.num_warps if tile else 4, "num_stages": tile.num_stages if tile else 1}
        options["enable_fp_fusion"] = True  # the default until Triton 3.10
        if self.gpu:
            options["launch_pdl"] = self.overlap
        return Variant("triton.decode_kernels", name, types, constants, options)

    def every(self, capacity: int) -> Iterator[Variant]:
        """Yield every kernel that calls of 1 to ``capacity`` tokens may launch, in every form."""
        seen: dict[tuple[Any, ...], Variant] = {}
        quantized = (False, True) if self.codes_per_int32 == 8 else (False,)
        for config in map(self.config, range(1, capacity + 1)):
            forms = [self.variants(config, True)] * config.inline
            forms += [self.variants(config, False, *types) for types in product(quantized, ID_TYPES, ROUTER_WEIGHT_TYPES)]
            for variant in (variant for form in forms for variant in form):
                seen.setdefault(variant.key, variant)
        yield from seen.values()
