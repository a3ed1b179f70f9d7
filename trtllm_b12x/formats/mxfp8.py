# SPDX-License-Identifier: Apache-2.0
"""Define MXFP8 in torch: E4M3 elements, and an E8M0 scale for each 32 elements (OCP Microscaling Formats 1.0, 5.2 and 5.4.1).

The torch implementations that stand in for device code use this module. The strict reference does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .weights import Weights

BLOCK_SIZE = 32
"""Elements that share one E8M0 scale."""

E4M3_MAX = 448.0
_LARGEST_EXPONENT = 8
"""Exponent of the largest E4M3 number."""
_NAN = 255
_BEYOND_THE_LARGEST = 0x1FFFFF
"""Addend to a float32's bits. It carries into the exponent if the mantissa is above 1.75, the mantissa of 448."""


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Decode uint8 to float32 powers of two: ``2**(s - 127)``, NaN for 255. ``exp2`` on a GPU is not exact, so bits are set."""
    wide = scales.to(torch.int32)
    bits = torch.where(wide == 0, 1 << 22, wide << 23)  # 2**-127 is subnormal
    return torch.where(wide == _NAN, torch.nan, bits.view(torch.float32))


def quantize(values: torch.Tensor, scale_up: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations ``(..., K)`` as the kernels do: float8_e4m3fn ``(..., K)`` and uint8 ``(..., K / 32)``.

    The scale is ``floor(log2(amax)) - 8``. Values are rounded to nearest even and saturate. A block that is not finite gets NaN.
    With ``scale_up`` the scale is ``ceil(log2(amax / 448))``, so no value saturates (TensorRT-LLM's ``cvt_warp_fp16_to_mxfp8``).
    """
    blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
    bits = blocks.abs().amax(-1).contiguous().view(torch.int32)
    exponent = (bits + (_BEYOND_THE_LARGEST if scale_up else 0) >> 23) & 255
    scales = torch.where(blocks.isfinite().all(-1), (exponent - _LARGEST_EXPONENT).clamp(min=0), _NAN)
    inverse = ((254 - scales) << 23).view(torch.float32)
    codes = (blocks * inverse.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(-2), scales.to(torch.uint8)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply E4M3 ``(..., K)`` by E8M0 bytes ``(..., K / 32)`` to float32, exact except for underflow."""
    blocks = codes.view(torch.float8_e4m3fn).float().unflatten(-1, (-1, BLOCK_SIZE))
    return (blocks * decode_e8m0(scales).unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True)
class MXFP8Weights(Weights):
    """MXFP8 weights: E local experts, H hidden size, T padded intermediate size, r = 2 if gated (rows [up; gate]) else 1."""

    code_dtype = torch.float8_e4m3fn
    scale_dtype = torch.uint8
    group_size = BLOCK_SIZE

    fc1_weight: torch.Tensor
    """``(E, r*T, H)`` float8_e4m3fn."""
    fc1_weight_sf: torch.Tensor
    """``(32, 4, r*T/128, 4, H/128, E)`` uint8, E8M0. The last tile of columns is padded."""
    fc2_weight: torch.Tensor
    """``(E, H, T)`` float8_e4m3fn."""
    fc2_weight_sf: torch.Tensor
    """``(32, 4, H/128, 4, T/128, E)`` uint8."""

    def dequantized(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(codes, scales).to(dtype)
