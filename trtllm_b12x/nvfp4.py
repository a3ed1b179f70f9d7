"""NVFP4 number formats in torch: E2M1 values, E4M3 block scales, packing.

One place for the two torch implementations that stand in for device code (the embedded host's operators and
:mod:`trtllm_b12x.kernels.reference`).  :mod:`trtllm_b12x.strict_reference` judges both and deliberately uses none of this.
"""

from __future__ import annotations

import torch

BLOCK_SIZE = 16
"""Elements that share one E4M3 block scale."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

# E2M1: sign, two exponent bits (bias 1), one mantissa bit.  OCP Microscaling Formats 1.0, 5.3.3.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbors; ties go to the even code.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 code, ties to even, saturating at +-6 (PTX ``cvt.rn.satfinite.e2m1x2.f32``).

    Args:
        values: any shape, float32.  NaN becomes +6, as the instruction has it.

    Returns:
        Codes 0..15 of the same shape, uint8.  Negative zero keeps its sign.
    """
    magnitude = values.abs().nan_to_num(nan=E2M1_MAX)
    midpoints = torch.tensor(_E2M1_MIDPOINTS, dtype=values.dtype, device=values.device)
    # bucketize(right=False) sends a tie to the lower code, right=True to the upper one: take whichever is even.
    lower = torch.bucketize(magnitude, midpoints, right=False)
    upper = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(lower % 2 == 0, lower, upper)
    sign = torch.signbit(values) & ~values.isnan()
    return (code | (sign.to(code.dtype) << 3)).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15 (any integer dtype) to float32 values of the same shape."""
    table = torch.tensor(_E2M1_MAGNITUDES + tuple(-m for m in _E2M1_MAGNITUDES), dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[..., K]`` to bytes ``[..., K/2]``, uint8; the even column sits in the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Bytes ``[..., K/2]`` (uint8) to codes ``[..., K]``, uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to E4M3, ties to even, saturating at +-448 (torch's own cast overflows to NaN)."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize(packed: torch.Tensor, block_scales: torch.Tensor) -> torch.Tensor:
    """FP4 bytes ``[..., K/2]`` times E4M3 block scales ``[..., K/16]``, without any per-tensor scale.

    Returns:
        float32 ``[..., K]``.  Exact: the product of an E2M1 and an E4M3 value has at most 6 significant bits.
    """
    pairs = decode_e2m1(unpack_fp4(torch.arange(256, dtype=torch.uint8, device=packed.device).unsqueeze(1)))
    # Both values of a byte in one gather of eight bytes, and no temporary as large as the result.
    both = pairs.view(torch.int64).flatten().index_select(0, packed.flatten().int()).view(torch.float32)
    values = both.view(*packed.shape[:-1], 2 * packed.shape[-1])
    values.unflatten(-1, (-1, BLOCK_SIZE)).mul_(block_scales.float().unsqueeze(-1))
    return values
