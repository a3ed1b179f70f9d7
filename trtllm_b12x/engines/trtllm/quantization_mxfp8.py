# SPDX-License-Identifier: Apache-2.0
"""Define ``MXFP8Sm12xFusedMoEMethod``: TensorRT-LLM's MXFP8 parameters, and the kernels' view of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch

from trtllm_b12x.formats.mxfp8 import BLOCK_SIZE

from .host import load
from .quantization import PaddedMethod

MXFP8CutlassFusedMoEMethod: Any = load().methods.get("MXFP8", object)

_TILE = 128
"""Rows per tile of interleaved scales, and also columns per tile (four blocks)."""


class MXFP8Sm12xFusedMoEMethod(PaddedMethod, MXFP8CutlassFusedMoEMethod):
    """MXFP8 method for our kernels. TensorRT-LLM's method is for SM100: we keep its parameters and never call its operator.

    With E local experts, T the intermediate size of this rank on the tile, and r = 2 if gated: ``w3_w1_weight (E, r*T, H)`` and
    ``w2_weight (E, H, T)`` float8_e4m3fn; ``w3_w1_weight_scale (E, round_up(r*T, 128), H/128)`` and ``w2_weight_scale (E, H,
    round_up(T, 128)/128)`` int32, four E8M0 each, 128x4-interleaved per expert as they are loaded. This is the layout of
    ``MXFP8CutlassFusedMoEMethod`` in ``quantization.py`` (C2), which requires multiples of 128 and thus pads nothing.
    """

    format = "MXFP8"
    read_by_kernels = itemgetter(*PaddedMethod.stored)

    def create_weights(self, module: Any) -> None:
        """Raise ValueError if the hidden size is not a multiple of 128."""
        experts, hidden = module.expert_size_per_partition, module.hidden_size
        if hidden % _TILE:
            raise ValueError(f"hidden size {hidden} is not a multiple of {_TILE}")
        size = -(-module.intermediate_size_per_partition // self.tile) * self.tile
        rows = size * (2 if module.is_gated_activation else 1)
        module.scaling_vector_size = BLOCK_SIZE
        # Skip TensorRT-LLM's own method, which asserts sizes that its operator needs.
        super(MXFP8CutlassFusedMoEMethod, self).create_weights(
            module, torch.float8_e4m3fn, (experts, rows, hidden), (experts, hidden, size)
        )
        shapes = {"w3_w1_weight_scale": (_tiles(rows) * _TILE, _tiles(hidden)), "w2_weight_scale": (hidden, _tiles(size))}
        for name, shape in shapes.items():
            # Scales are NaN until they are loaded, so that missing checkpoint tensors show up.
            scales = torch.nn.Parameter(torch.full((experts, *shape), -1, dtype=torch.int32), requires_grad=False)
            module.register_parameter(name, scales)
        self.setup_quant_scales(module)

    def load_quant_scales(self, module: Any, weights: Mapping[str, torch.Tensor]) -> None:
        """Load E8M0 bytes of each local expert from ``weight_scale`` or, as some producers name it, ``weight_scale_inv``.

        Missing scales stay unchanged (partial loading). Raise ValueError if the blocks of stacked scales do not lie along the
        inner dimension.
        """
        height = module.w3_w1_weight.shape[1]
        for slot, expert in enumerate(module.initial_local_expert_ids):
            gate, up, down = _scales(module, weights, expert)

            def place_fc1(rows: torch.Tensor, gate: Any = gate, up: Any = up) -> None:
                self.load_expert_w3_w1_weight(module, gate, up, rows[:height])

            self._place_scales(module.w3_w1_weight_scale.data[slot], place_fc1)
            place_fc2 = functools.partial(self.load_expert_w2_weight, module, down)
            self._place_scales(module.w2_weight_scale.data[slot], place_fc2)

    def process_weights_after_loading(self, module: Any) -> None:
        """Skip TensorRT-LLM's method, which interleaves scales that it staged. We stage nothing."""
        super(MXFP8CutlassFusedMoEMethod, self).process_weights_after_loading(module)


def _tiles(size: int) -> int:
    return -(-size // _TILE)


def _scales(module: Any, weights: Mapping[str, torch.Tensor], expert: int) -> tuple[torch.Tensor | None, ...]:
    """Return the scales of w1, w3 and w2, rows first."""
    if module.weight_loading_mode.name != "FUSED_GATE_UP_PROJ":
        return tuple(_scale(weights, f"{expert}.{name}.") for name in ("w1", "w3", "w2"))
    # Scales are stacked as in ``MXFP4WeightFusedMoEMethod``: inner dimension first, gate before up.
    scales = [_scale(weights, f"{name}_") for name in ("gate_up_proj", "down_proj")]
    for stacked, inner in zip(scales, (module.hidden_size, module.intermediate_size), strict=True):
        if stacked is not None and stacked.shape[1] != inner // BLOCK_SIZE:
            raise ValueError(
                f"stacked scales {tuple(stacked.shape)}: blocks of {BLOCK_SIZE} along the inner dimension are meant, "
                f"{inner // BLOCK_SIZE} of them; nvidia-modelopt's MXFP8 exports of Llama 4 and gpt-oss have them along the rows"
            )
    fc1, fc2 = (None if stacked is None else stacked[expert].T for stacked in scales)
    return *((None, None) if fc1 is None else fc1.chunk(2)), fc2


def _scale(weights: Mapping[str, torch.Tensor], matrix: str) -> torch.Tensor | None:
    return next((weights[matrix + name] for name in ("weight_scale_inv", "weight_scale") if matrix + name in weights), None)
