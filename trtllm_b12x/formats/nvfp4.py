"""NVFP4: E2M1 values, E4M3 block scales, packing, and the tensors that its kernels take.

The two torch implementations that stand in for device code use it: the embedded host's operators and the reference kernels. The
strict reference, which both are compared with, deliberately does not.
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
    # bucketize(right=False) sends a tie to the lower code, right=True to the upper one: take whichever is even.
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
    """Multiply FP4 bytes ``[..., K/2]`` by E4M3 block scales ``[..., K/16]``, without any per-tensor scale.

    Returns:
        ``[..., K]`` of ``dtype``: float32, bfloat16 or float16. Exact: the product of an E2M1 and an E4M3 value has at most 6
        significant bits, and an exponent that float16 has.
    """
    return dequantize_fp4(packed, block_scales, lambda codes: codes.view(torch.float8_e4m3fn).float(), BLOCK_SIZE, dtype)


def dequantize_fp4(
    packed: torch.Tensor, scales: torch.Tensor, decode: Callable[[torch.Tensor], torch.Tensor], block: int, dtype: torch.dtype
) -> torch.Tensor:
    """Multiply FP4 bytes ``[..., K/2]`` by scales of a byte each ``[..., K/block]``, which ``decode`` turns to float32.

    Both values of a byte come from one gather, of all bytes times all scales: faster than to decode and multiply.
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
    """TensorRT-LLM's parameters for the scales of activations, and the divisors that are derived from them.

    The host may overwrite the parameters at any time. Each call therefore derives the divisors anew, in its route launch.
    """

    fc31_input_scale: torch.Tensor
    """One float32, or ``(E,)``: what the host multiplies FC1's input by."""
    fc2_input_scale: torch.Tensor
    """One float32, or ``(E,)``."""
    fc1_divisor: torch.Tensor
    """``(E,)`` float32, written: ``1 / fc31_input_scale``."""
    fc2_divisor: torch.Tensor
    """``(E,)`` float32, written: ``1 / fc2_input_scale``."""

    def __post_init__(self) -> None:
        for name in ("fc31_input_scale", "fc2_input_scale"):
            tensor = getattr(self, name)
            if tensor.numel() not in (1, self.fc1_divisor.numel()) or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not one float32, nor one of each expert")

    @torch.inference_mode()  # what is written may come from a load inside it, and then be written nowhere else
    def derive(self) -> None:
        """Write the divisors in place, without synchronizing; ``trtllm_b12x.kernels.routes.prepare`` does the same on a GPU."""
        torch.reciprocal(self.fc31_input_scale.expand_as(self.fc1_divisor), out=self.fc1_divisor)
        torch.reciprocal(self.fc2_input_scale.expand_as(self.fc2_divisor), out=self.fc2_divisor)


@dataclass(frozen=True)
class NVFP4Weights(Weights):
    """The tensors that kernels read besides a call's own. Alphas and block scales are the host's tensors, so weights that are
    copied over them are followed at once.

    The divisors are ``input_global_scale`` and ``fc2_input_scale`` of FlashInfer's ``B12xMoEWrapper.run`` (0.7.2, b12x_moe.py),
    which expands a single one at every call, a launch each: here they are per expert.
    E local experts, H hidden size, T intermediate size on the tile, r = 2 if gated (rows [up; gate]) else 1.
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
    """``(E,)`` float32, the same for all experts: what FC1's input is divided by (ModelOpt's ``input_scale``)."""
    fc2_divisor: torch.Tensor
    """``(E,)`` float32: what FC2's input is divided by."""
    input_scales: InputScales | None = None
    """The host's input scales, from which every call derives the divisors; None if they are constants."""
    fc1_half_alphas: torch.Tensor | None = None
    """``(2, E)`` float32: the alphas of FC1's halves, up and gate, if a load has recorded them (``half_alphas``)."""

    code_dtype = torch.uint8
    scale_dtype = torch.float8_e4m3fn
    group_size = BLOCK_SIZE
    packed = 2

    def half_alphas(self, experts: int | slice) -> torch.Tensor:
        """Return the alphas of up and gate of local experts, ``(2,)`` of one, ``(2, n)`` of several.

        Recorded alphas count while the larger one is ``fc1_alpha``. Otherwise somebody has replaced that parameter since, and
        it holds for both halves, as in TensorRT-LLM.
        """
        alpha = self.fc1_alpha[experts]
        recorded = alpha.expand(2, *alpha.shape) if self.fc1_half_alphas is None else self.fc1_half_alphas[:, experts]
        return torch.where(recorded.amax(0) == alpha, recorded, alpha)

    def typical_input(self) -> float:
        """Return a quarter of the calibrated range, which is 6 * 448 of the input scale."""
        inputs = self.input_scales
        divisor = float(self.fc1_divisor[0]) if inputs is None else 1 / float(inputs.fc31_input_scale.flatten()[0])
        return 672 * divisor if 0 < divisor < math.inf else 1.0

    def derive(self) -> None:
        if self.input_scales is not None:
            self.input_scales.derive()

    def dequantized(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return dequantize(codes, scales, dtype)


class W4A16NVFP4Weights(NVFP4Weights):
    """Fields as ``NVFP4Weights``. The input scales cancel: a checkpoint may have none, and activations are not quantized."""

    def typical_input(self) -> float:
        return 1.0
