"""MXFP8, from its definition (OCP Microscaling Formats 1.0): E4M3 elements, and a power of two for each 32 of them."""

from __future__ import annotations

import torch

from . import Arithmetic, Judge

_BLOCK = 32
_LARGEST = 448.0
_LARGEST_EXPONENT = 8


class MXFP8(Judge):
    quantized = True

    def matrix(self, expert: int, name: str) -> torch.Tensor:
        return dequantize_weight(self.weights[f"{expert}.{name}.weight"], self.weights[f"{expert}.{name}.weight_scale"])

    def input(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        return fake_quantize(x)

    def inner(self, values: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        return fake_quantize(values)


def dequantize_weight(weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """E4M3 ``(rows, K)`` of any 8-bit dtype and E8M0 bytes ``(rows, K / 32)`` to float32."""
    exponents = weight_scale.view(torch.uint8).to(torch.int32)
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents - 127)
    powers = torch.where(exponents == 255, torch.nan, powers).repeat_interleave(_BLOCK, dim=1)
    return (weight.view(torch.float8_e4m3fn).double() * powers).float()


def fake_quantize(values: torch.Tensor) -> torch.Tensor:
    """Float32 ``(n, K)`` to what its MXFP8 form stands for.

    The block's power of two is that of its largest magnitude (6.3 of the specification), so that values up to 512 times it are
    met, and saturate at 448; elements are rounded to nearest, ties to even.
    """
    blocks = values.double().unflatten(-1, (-1, _BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT).clamp(min=-127)
    scale = torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponent, -127))
    scaled = (blocks / scale).clamp(-_LARGEST, _LARGEST)
    # E4M3: three bits behind the leading one, and steps of 2**-9 where that would be smaller.
    step = torch.ldexp(torch.ones_like(scaled), (torch.frexp(scaled).exponent - 4).clamp(min=-9))
    rounded = torch.round(scaled / step) * step * scale
    return torch.where(blocks.isfinite().all(-1, keepdim=True), rounded, torch.nan).flatten(-2).float()
