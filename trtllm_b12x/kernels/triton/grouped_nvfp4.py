"""``GroupedNVFP4Kernel``: NVFP4 by NVFP4 (W4A4) for many tokens, beside the host's CUTLASS.

It serves a count where the card has measured it to be quicker than the host, and nothing before.  Scratch memory is torch's, call
by call: for a route the codes of FC1's result and a share of ``H`` bfloat16, 300 MB for 8192 tokens with 8 experts each and a
hidden size of 2048.
"""

from __future__ import annotations

from typing import Any

import torch

from trtllm_b12x.decision import Environment, families
from trtllm_b12x.formats.layouts import scales_of_tokens
from trtllm_b12x.kernels import MoECall
from trtllm_b12x.kernels.call import aligned16
from trtllm_b12x.kernels.reference import QuantizedReferenceKernel

from .decode import half_alphas
from .grouped import Elements, GroupedKernel, Row, Scalars, Tile

NVFP4 = Elements("e2m1", torch.uint8, 2, 16)
TABLE = (
    Row(8, Tile(16, 64, 128, 4, 4), Tile(16, 128, 128, 4, 4)),
    Row(24, Tile(32, 64, 128, 4, 4), Tile(32, 128, 128, 4, 4)),
    Row(96, Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 4)),
    Row(float("inf"), Tile(128, 64, 128, 4, 3), Tile(128, 128, 128, 8, 3)),
)
"""Not measured on a card that has these products.  Compiled for one: no spills, at most 42 of its 99 KB, and where there are many
routes a third to half of a loop's instructions are products."""


class GroupedNVFP4Kernel(GroupedKernel):
    """On one layer."""

    features = families.grouped_nvfp4(Environment())
    reference = QuantizedReferenceKernel
    instruction = "kind::mxf4nvf4.block_scale"
    elements = NVFP4
    table = TABLE

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        return super(GroupedKernel, cls).runs_on(device)

    def _scalars_of(self, weights: Any) -> Scalars:
        """
        Raises:
            ValueError: input scales are given as divisors alone, or FC1's differ between experts: a token is quantized once.
        """
        given = weights.input_scales
        if given is None or given.fc31_input_scale.numel() != 1:
            raise ValueError("the kernels take the host's input scales, and of FC1 one for all experts")
        return Scalars(
            fc1_factor=given.fc31_input_scale,
            fc1_alpha=weights.fc1_alpha,
            fc1_half_alpha=half_alphas(weights),
            fc2_factor=given.fc2_input_scale,
            fc2_alpha=weights.fc2_alpha,
            step=int(given.fc2_input_scale.numel() > 1),
        )

    def serves(self, tokens: int) -> bool:
        return self._plan.tested and super().serves(tokens)

    def _launch(self, call: MoECall) -> None:
        if call.x_sf is not None:
            rows = scales_of_tokens(call.x_sf, call.x.shape[0], self.geometry.hidden_size // 16, call.swizzled)
            rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % 4))
            call = call._replace(x_sf=aligned16(rows).view(torch.int32))
        super()._launch(call)
