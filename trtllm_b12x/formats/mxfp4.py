# SPDX-License-Identifier: Apache-2.0
"""Define MXFP4: E2M1 codes, and an E8M0 scale for each 32 codes (OCP Microscaling Formats 1.0, 5.3 and 5.4.1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import mxfp8, nvfp4
from .weights import Weights

BLOCK_SIZE = 32
"""Elements that share one E8M0 scale."""
LARGEST_SCALE = 136
"""Largest E8M0 byte, 2**9, that the decode kernels ``cuda`` and ``triton`` multiply by. Larger scales give NaN."""
LARGEST_SCALE_OF_GEMM = 194
"""Largest E8M0 byte, 2**67, that the ``gemm`` kernels multiply by."""


def largest_scale(scales: torch.Tensor) -> int:
    """Return the largest E8M0 byte except 255, which is NaN in every kernel. This call synchronizes."""
    codes = scales.view(torch.uint8)
    return int(codes.masked_fill(codes == 255, 0).max())


def dequantize(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiply FP4 bytes ``(..., K / 2)`` by E8M0 bytes ``(..., K / 32)`` to float32 or bfloat16, exact except for underflow."""
    return nvfp4.dequantize_fp4(packed, scales, mxfp8.decode_e8m0, BLOCK_SIZE, dtype)


@dataclass(frozen=True)
class MXFP4Weights(Weights):
    """MXFP4 weights: E local experts, H hidden size as stored, T intermediate size, r = 2 if gated else 1."""

    code_dtype = torch.uint8
    scale_dtype = torch.uint8
    group_size = BLOCK_SIZE
    packed = 2

    fc1_weight: torch.Tensor
    """``(E, r*T, H/2)`` uint8, two FP4 per byte."""
    fc1_weight_sf: torch.Tensor
    """E8M0, uint8: ``(32, 4, r*T/128, 4, H/128, E)``, or ``(E, r*T, H/32)`` in rows."""
    fc2_weight: torch.Tensor
    """``(E, H, T/2)`` uint8."""
    fc2_weight_sf: torch.Tensor
    """``(32, 4, H/128, 4, T/128, E)`` uint8, or ``(E, H, T/32)``."""

    @property
    def largest_scale(self) -> int:
        return max(largest_scale(self.fc1_weight_sf), largest_scale(self.fc2_weight_sf))

    def dequantized(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(codes, scales, dtype)
