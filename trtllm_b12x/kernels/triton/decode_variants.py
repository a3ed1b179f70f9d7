"""Which kernels a call launches, with what constants, and what makes one a kernel of its own."""

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
from .variant import Variant

ACTIVATIONS = ("Swiglu", "SwigluBias", "Geglu", "Relu2", "Silu", "Gelu")
"""By the host's ``ActivationType``, in the order of ``epilogues.py``'s constants.  GELU is the exact one, alone and in Geglu, as
CUTLASS has it (``moe_kernels.cu``); SwigluBias has alpha, beta and limit (gpt-oss)."""
_BLOCK = 1024
"""Elements a program sets or sorts at a time."""


@dataclass(frozen=True)
class Step:
    """How calls of one token count are launched."""

    tokens: int
    tiles: Tiles
    blocks: int
    """Programs along routes, where they are sorted."""
    inline: bool
    """Routes need not be sorted."""


@dataclass(frozen=True)
class Build:
    """The constants that kernels are compiled for."""

    geometry: Geometry
    card: Card
    overlap: bool
    """A launch begins before the one ahead of it has ended (programmatic dependent launch)."""
    gpu: bool
    """Not Triton's interpreter."""
    word: int = 8
    """Codes in 32 bits: FP4, or 4 of E4M3."""

    def step(self, tokens: int, found: Tiles | None = None) -> Step:
        """How ``tokens`` are launched, by the rule or with other tiles."""
        g = self.geometry
        chosen = found or tiles(g, tokens, self.card, g.ranks, self.word)
        inline = chosen.routes == 1 or tokens * g.top_k <= INLINE_ROUTES
        return Step(tokens, chosen, blocks(g, tokens, chosen.routes), inline)

    def columns(self, step: Step) -> int:
        """Tiles of the hidden size."""
        return -(-self.geometry.hidden_size // step.tiles.fc2.rows)

    def variants(
        self,
        step: Step,
        inline: bool,
        quantized: bool = False,
        ids: torch.dtype = ID_TYPES[0],
        router_weights: torch.dtype = ROUTER_WEIGHT_TYPES[0],
    ) -> tuple[Variant, ...]:
        """Kernels of a call, in the order of their launches.

        Args:
            inline: programs find their routes by themselves.
            quantized: NVFP4 input; never inline.
            ids, router_weights: types of the routes; never others than the first where ``inline``.
        """
        g, found = self.geometry, step.tiles
        x, byte, f, i = g.dtype, torch.uint8, torch.float32, torch.int32
        slots = 1 << max(g.top_k - 1, 1).bit_length()
        # Constants that a variant does not use do not make another.
        common = {"TOP_K": g.top_k, "PDL": self.overlap}
        both = {"H": g.hidden_size, "SIZE": g.intermediate_size, "TILES": self.columns(step), "BM": found.routes}
        both |= {"BIAS": g.bias is not None, "SORTED": not inline, "ROUTES": INLINE_ROUTES, "WORD": self.word}
        both |= {"PTX": self.card.capability if self.gpu else 0}
        first = {"BN": found.fc1.rows, "BK": found.fc1.columns, "SPLIT": found.fc1.split}
        first |= {"ACTIVATION": ACTIVATIONS.index(g.activation), "GATED": g.gated, "SLOTS": slots, "BLOCK": _BLOCK}
        second = {"BN": found.fc2.rows, "BK": found.fc2.columns, "SPLIT": found.fc2.split}
        bias, call = g.bias or f, (i, step.tokens, 1, 0, 1, 0)
        types: tuple[Any, ...] = (x, i, byte, f, f, f, bias, f, f, f, i, f, x, torch.bfloat16, *call)
        made = [self._variant("fc1_kernel", types, common | both | first, found.fc1)]
        types = (torch.bfloat16, i, byte, f, f, bias, i, f, x, f, *call)
        if inline and found.token is not None:
            constants = {name: both[name] for name in ("H", "SIZE", "BIAS", "WORD", "PTX")}
            constants |= {"BN": found.token.rows, "BK": found.token.columns}
            made.append(self._variant("fc2_token_kernel", types, common | constants, found.token))
        else:
            made.append(self._variant("fc2_kernel", types, common | both | second, found.fc2))
        if not inline:
            constants = {"H": g.hidden_size, "SLOTS": slots, "EXPERTS": g.num_experts, "BLOCK": _BLOCK, "QUANTIZED": quantized}
            constants |= {"PADDED_EXPERTS": 1 << (g.num_experts - 1).bit_length()}
            types = (byte if quantized else x, byte, ids, router_weights, x, x, i, step.tokens, 1, 0, 1, 1, 0)
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
        seen = set()
        for tokens in range(1, capacity + 1):
            step = self.step(tokens)
            forms = [self.variants(step, True)] * step.inline
            quantized = (False, True) if self.word == 8 else (False,)
            forms += [self.variants(step, False, *given) for given in product(quantized, ID_TYPES, ROUTER_WEIGHT_TYPES)]
            for variant in (variant for form in forms for variant in form):
                if variant.key not in seen:
                    seen.add(variant.key)
                    yield variant
