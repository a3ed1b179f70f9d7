# SPDX-License-Identifier: Apache-2.0
"""Define NVFP4: E2M1 values, E4M3 block scales, packing, and the tensors that its kernels take.

Two torch implementations that stand in for device code use this module: the embedded TensorRT-LLM's operators and the reference
kernels. Both are compared with the strict reference, which deliberately does not use this module.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import constants
from .weights import Weights

BLOCK_SIZE = 16
"""Elements that share one E4M3 block scale."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0

# E2M1: sign, two exponent bits (bias 1), one mantissa bit. OCP Microscaling Formats 1.0, 5.3.3.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Midpoints between neighbors; ties go to the even code.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def round_to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Round to the nearest E2M1 code, ties to even, saturating at +-6 (PTX ``cvt.rn.satfinite.e2m1x2.f32``).

    Args:
        values: any shape, float32. NaN becomes +6, as in the instruction.

    Returns:
        Codes 0..15 of the same shape, uint8. Negative zero keeps its sign.
    """
    magnitude = values.abs().nan_to_num(nan=E2M1_MAX)
    midpoints = torch.tensor(_E2M1_MIDPOINTS, dtype=values.dtype, device=values.device)
    # bucketize(right=False) sends a tie to the lower code, right=True to the upper one. The even code is taken.
    lower = torch.bucketize(magnitude, midpoints, right=False)
    upper = torch.bucketize(magnitude, midpoints, right=True)
    code = torch.where(lower % 2 == 0, lower, upper)
    sign = torch.signbit(values) & ~values.isnan()
    return (code | (sign.to(code.dtype) << 3)).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Decode E2M1 codes 0..15 (any integer dtype) to float32 values of the same shape."""
    table = torch.tensor(_E2M1_MAGNITUDES + tuple(-m for m in _E2M1_MAGNITUDES), dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def pack_fp4(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes ``[..., K]`` into bytes ``[..., K/2]``, uint8. The even column is the low nibble."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes ``[..., K/2]`` (uint8) to codes ``[..., K]``, uint8."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def round_to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to E4M3, ties to even, saturating at +-448 (torch's own cast overflows to NaN)."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize(packed: torch.Tensor, block_scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Multiply FP4 bytes ``[..., K/2]`` by E4M3 block scales ``[..., K/16]``, without a per-tensor scale.

    Returns:
        ``[..., K]`` of ``dtype``: float32, bfloat16 or float16. The result is exact: the product of an E2M1 and an E4M3 value
        has at most 6 significant bits, and its exponent fits float16.
    """
    return dequantize_fp4(packed, block_scales, lambda codes: codes.view(torch.float8_e4m3fn).float(), BLOCK_SIZE, dtype)


def dequantize_fp4(
    packed: torch.Tensor, scales: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor], block: int, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply FP4 bytes ``[..., K/2]`` by one-byte scales ``[..., K/block]``, which ``decode`` converts to float32.

    One gather from a table of all bytes times all scales gives both values of a byte. Decoding and multiplying is slower.
    """
    both = torch.int64 if dtype.itemsize == 4 else torch.int32

    def table() -> torch.Tensor:
        byte = torch.arange(256, dtype=torch.uint8, device=packed.device).unsqueeze(1)
        values = decode_e2m1(unpack_fp4(byte)) * decode(byte).unsqueeze(1)
        return values.to(dtype).view(both).flatten()

    index = packed.unflatten(-1, (-1, block // 2)) + (scales.view(torch.uint8).int() << 8).unsqueeze(-1)
    values = constants.kept(("FP4", block, dtype, packed.device), table, packed.device).index_select(0, index.flatten())
    return values.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


@dataclass(frozen=True)
class InputScales:
    """An engine's parameters for the scales of activations, and the divisors that are derived from them.

    The engine may overwrite the parameters at any time. Each call therefore derives the divisors again, in its route launch.
    """

    fc31_input_scale: torch.Tensor
    """One float32, or ``(E,)``: factor by which the engine multiplies FC1's input."""
    fc2_input_scale: torch.Tensor
    """One float32, or ``(E,)``."""
    fc1_divisor: torch.Tensor
    """``(E,)`` float32, written by ``derive``: ``1 / fc31_input_scale``."""
    fc2_divisor: torch.Tensor
    """``(E,)`` float32, written by ``derive``: ``1 / fc2_input_scale``."""

    def __post_init__(self) -> None:
        for name in ("fc31_input_scale", "fc2_input_scale"):
            tensor = getattr(self, name)
            if tensor.numel() not in (1, self.fc1_divisor.numel()) or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not one float32, nor one of each expert")

    @torch.inference_mode()  # a tensor created in inference mode can only be written in that mode
    def derive(self) -> None:
        """Write the divisors in place, without synchronizing; on a GPU ``kernels.b12x.routes.prepare`` does the same."""
        torch.reciprocal(self.fc31_input_scale.expand_as(self.fc1_divisor), out=self.fc1_divisor)
        torch.reciprocal(self.fc2_input_scale.expand_as(self.fc2_divisor), out=self.fc2_divisor)


@dataclass(frozen=True)
class NVFP4Weights(Weights):
    """Tensors that kernels read besides a call's own tensors. Alphas and block scales are the engine's tensors, so new weights
    that are copied into them take effect at once.

    The divisors are ``input_global_scale`` and ``fc2_input_scale`` of FlashInfer's ``B12xMoEWrapper.run`` (0.7.2, b12x_moe.py),
    which expands a single divisor with one launch per call. The divisors here are per expert.
    E local experts, H hidden size, T intermediate size padded to the tile, r = 2 if gated (rows [up; gate]) else 1.
    """

    fc1_weight: torch.Tensor
    """``(E, r*T, H/2)`` uint8, two FP4 per byte."""
    fc1_weight_sf: torch.Tensor
    """``(32, 4, r*T/128, 4, H/64, E)`` float8_e4m3fn."""
    fc1_alpha: torch.Tensor
    """``(E,)`` float32: FC1's ``weight_scale_2`` times its divisor (FlashInfer's ``_folded_w1_alpha``)."""
    fc2_weight: torch.Tensor
    """``(E, H, T/2)`` uint8."""
    fc2_weight_sf: torch.Tensor
    """``(32, 4, H/128, 4, T/64, E)`` float8_e4m3fn."""
    fc2_alpha: torch.Tensor
    """``(E,)`` float32: FC2's ``weight_scale_2`` times its divisor."""
    fc1_divisor: torch.Tensor
    """``(E,)`` float32, equal for all experts: divisor of FC1's input (ModelOpt's ``input_scale``)."""
    fc2_divisor: torch.Tensor
    """``(E,)`` float32: divisor of FC2's input."""
    input_scales: InputScales | None = None
    """The engine's input scales, from which every call derives the divisors. None if the divisors are constant."""
    fc1_half_alphas: torch.Tensor | None = None
    """``(2, E)`` float32: the alphas of FC1's halves, up and gate, if weight loading has recorded them (``half_alphas``)."""

    code_dtype = torch.uint8
    scale_dtype = torch.float8_e4m3fn
    group_size = BLOCK_SIZE
    packed = 2

    def half_alphas(self, experts: int | slice) -> torch.Tensor:
        """Return the up and gate alphas of local experts: ``(2,)`` for one expert, ``(2, n)`` for several.

        Recorded alphas are used while the larger one equals ``fc1_alpha``. If they differ, ``fc1_alpha`` was replaced after
        loading and applies to both halves, as in TensorRT-LLM.
        """
        alpha = self.fc1_alpha[experts]
        recorded = alpha.expand(2, *alpha.shape) if self.fc1_half_alphas is None else self.fc1_half_alphas[:, experts]
        return torch.where(recorded.amax(0) == alpha, recorded, alpha)

    def typical_input(self) -> float:
        """Return a quarter of the calibrated range, which is 6 * 448 times the input scale."""
        inputs = self.input_scales
        divisor = float(self.fc1_divisor[0]) if inputs is None else 1 / float(inputs.fc31_input_scale.flatten()[0])
        return 672 * divisor if 0 < divisor < math.inf else 1.0

    def derive(self) -> None:
        if self.input_scales is not None:
            self.input_scales.derive()

    def dequantized(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(codes, scales, dtype)


class W4A16NVFP4Weights(NVFP4Weights):
    """Weights with the fields of ``NVFP4Weights``. Activations are not quantized. The input scales cancel and may be missing."""

    def typical_input(self) -> float:
        return 1.0
