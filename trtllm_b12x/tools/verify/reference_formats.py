# SPDX-License-Identifier: Apache-2.0
"""Decode and quantize each number format from its definition, without the package's kernels or formats."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch

_MX_BLOCK = 32


class _Number(NamedTuple):
    """A floating-point format: significant bits, exponent of the smallest step, largest value."""

    bits: int
    least: int
    largest: float


_E4M3, _E2M1 = _Number(4, -9, 448.0), _Number(2, -1, 6.0)


class Arithmetic(Enum):
    """Rounding points of the reference."""

    NONE = "none"
    """Compute in float32 throughout. Quantize activations where the format prescribes it, and compute scales by division."""

    KERNEL = "kernel"
    """The rounding points that all b12x kernels share (FlashInfer 0.7.2.post1, below ``flashinfer/``):

    * scalars as TensorRT-LLM stores them: input scales as float32 reciprocals (``NVFP4FusedMoEMethod.load_quant_scales``);
    * block scales and values by reciprocals for SwiGLU (``cute_dsl/fp4_common.py:2655-2674``), by divisions for ReLU2
      (``:2629-2651``);
    * the activation's result in bf16 before it is quantized (``moe_static_kernel.py:2260``, ``moe_micro_kernel.py:1943``,
      ``_moe_dynamic/generic.py:2224``, ``moe_direct_micro_kernel.py:4470``), and the output in bf16.

    The kernels round and add FC2's partial sums in different ways. The tolerance covers that difference."""

    CUTLASS = "cutlass"
    """The rounding points of TensorRT-LLM's CUTLASS path (``cpp/tensorrt_llm/kernels/quantization.cuh``,
    ``cvt_warp_fp16_to_fp4``; ``kernels/cutlass_kernels/moe_gemm/moe_kernels.cu``): scalars as TensorRT-LLM stores them, block
    scales and values by reciprocals; FC1, the activation and FC2 each in bf16; the route sum in float32, the output in bf16."""

    UNQUANTIZED = "unquantized"
    """The format's weights with float32 activations, to measure what quantizing activations costs."""


class ReferenceDequantizer:
    """One layer's tensors in their format. This base class reads plain weights.

    ``weights`` are the checkpoint's tensors, ``"{expert}.w1.weight"`` and so on: w1 is the gate (or the only FC1 half), w3 up,
    w2 down. With ``gated`` the layer has w3.
    """

    quantized = False
    """The format quantizes activations. If not, every ``Arithmetic`` keeps them as they are."""

    def __init__(self, weights: Mapping[str, torch.Tensor], num_experts: int, gated: bool) -> None:
        self.weights, self.num_experts, self.gated = weights, num_experts, gated
        self.names = ("w1", "w3", "w2") if gated else ("w1", "w2")

    def matrix(self, expert: int, name: str) -> torch.Tensor:
        """Return a float32 matrix ``(rows, K)`` on the device of the tensors."""
        return self.weights[f"{expert}.{name}.weight"].float()

    def bias(self, expert: int, name: str) -> torch.Tensor | None:
        """Return the bias of a matrix, float32 ``(rows,)``, or None."""
        tensor = self.weights.get(f"{expert}.{name}.bias")
        return None if tensor is None else tensor.float()

    def quantize(self, values: torch.Tensor, fc: int, arithmetic: Arithmetic) -> torch.Tensor:
        """Quantize and dequantize float32 ``(n, K)``, the input of FC1 or FC2 (``fc`` 1 or 2)."""
        return values

    def scalars(self, local: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the expected per-expert scales of the kernels' weights, float64 ``(..., local experts)``, by field name."""
        return {}

    def largest_input(self) -> float:
        """Return the largest activation that the layer was calibrated for; 1 for formats without calibration.

        Raise ValueError, whose message follows the layer's name in a sentence, if the calibration cannot be used.
        """
        return 1.0

    def move_off_ties(self, x: torch.Tensor) -> torch.Tensor:
        """Move by one bf16 step the values of ``x (n, K)`` that two correct implementations may round differently."""
        return x


class _NVFP4(ReferenceDequantizer):
    """E2M1 codes, an E4M3 scale per 16 codes, and a float32 scale per matrix and per input."""

    quantized = True

    def _tensors(self, expert: int, name: str) -> list[torch.Tensor]:
        return [self.weights[f"{expert}.{name}.{kind}"] for kind in ("weight", "weight_scale", "weight_scale_2")]

    def matrix(self, expert: int, name: str) -> torch.Tensor:
        return dequantize_nvfp4(*self._tensors(expert, name))

    def quantize(self, values: torch.Tensor, fc: int, arithmetic: Arithmetic) -> torch.Tensor:
        scale = self._input_scales[fc - 1].to(values.device)
        if arithmetic is not Arithmetic.NONE:
            scale = 1 / (1 / scale)
        return fake_quantize_nvfp4(values, scale, arithmetic, self.gated)

    def scalars(self, local: Sequence[int]) -> dict[str, torch.Tensor]:
        fc1, fc2 = (scale.double() for scale in self._input_scales)
        halves = torch.stack([self._numbers(name, "weight_scale_2", local) for name in reversed(self.names[:-1])]) * fc1
        return {
            "fc1_divisor": fc1.expand(len(local)),
            "fc1_alpha": halves.amax(0),
            "fc2_divisor": fc2.expand(len(local)),
            "fc2_alpha": self._numbers("w2", "weight_scale_2", local) * fc2,
            **({"fc1_half_alphas": halves} if self.gated else {}),
        }

    def largest_input(self) -> float:
        halves = [self._numbers(name, "input_scale", range(self.num_experts)).float() for name in self.names[:-1]]
        if not torch.allclose(halves[0], halves[-1]):
            raise ValueError("has experts whose gate and up differ in input_scale, which TensorRT-LLM refuses to load")
        if not all(float(scale) for scale in self._input_scales):
            raise ValueError("has an input_scale of 0 in every expert")
        return float(self._input_scales[0]) * _E2M1.largest * _E4M3.largest

    def move_off_ties(self, x: torch.Tensor) -> torch.Tensor:
        return move_off_ties(x, float(self._input_scales[0]))

    def _numbers(self, name: str, kind: str, experts: Sequence[int]) -> torch.Tensor:
        return torch.tensor([float(self.weights[f"{expert}.{name}.{kind}"]) for expert in experts], dtype=torch.float64)

    @functools.cached_property
    def _input_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Input scales of FC1 and FC2, float32: the maximum over all experts, so that each token is quantized once."""
        largest = {name: self._numbers(name, "input_scale", range(self.num_experts)).max().float() for name in self.names}
        return torch.stack([largest[name] for name in self.names[:-1]]).max(), largest["w2"]


class _W4A16NVFP4(_NVFP4):
    """NVFP4 only for weights. Input scales, which a checkpoint may lack, cancel and have no effect on a result."""

    quantized = False

    def largest_input(self) -> float:
        return super().largest_input() if "0.w1.input_scale" in self.weights else 1.0

    def move_off_ties(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @functools.cached_property
    def _input_scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return super()._input_scales if "0.w1.input_scale" in self.weights else (torch.ones(()), torch.ones(()))


class _MXFP4(ReferenceDequantizer):
    """E2M1 codes and a power of two per 32 codes (OCP Microscaling Formats 1.0). Checkpoints prescribe only weights.
    TensorRT-LLM's CUTLASS also quantizes activations, to MXFP8, by its own choice."""

    def matrix(self, expert: int, name: str) -> torch.Tensor:
        return _scaled(decode_fp4(self.weights[f"{expert}.{name}.weight"]), self.weights[f"{expert}.{name}.weight_scale"])


class _MXFP8(ReferenceDequantizer):
    """E4M3 elements and a power of two per 32 elements (OCP Microscaling Formats 1.0)."""

    quantized = True

    def matrix(self, expert: int, name: str) -> torch.Tensor:
        codes = self.weights[f"{expert}.{name}.weight"].view(torch.float8_e4m3fn)
        return _scaled(codes, self.weights[f"{expert}.{name}.weight_scale"])

    def quantize(self, values: torch.Tensor, fc: int, arithmetic: Arithmetic) -> torch.Tensor:
        return fake_quantize_mxfp8(values)


DEQUANTIZERS: dict[str, type[ReferenceDequantizer]] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _W4A16NVFP4,
    "W4A8_MXFP4_MXFP8": _MXFP4,
    "MXFP8": _MXFP8,
}


def reference_for(
    weights: Mapping[str, torch.Tensor], num_experts: int, gated: bool, quant_algo: str = "NVFP4"
) -> ReferenceDequantizer:
    """Return the dequantizer of a layer. Tensors without ``weight_scale`` are plain weights."""
    plain = "0.w1.weight_scale" not in weights
    return (ReferenceDequantizer if plain else DEQUANTIZERS[quant_algo])(weights, num_experts, gated)


def decode_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Decode uint8 ``(rows, K/2)`` to float32 ``(rows, K)``: 1 sign, 2 exponent (bias 1), 1 mantissa bit; low nibble first."""
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=packed.device)
    values, byte = torch.cat((magnitudes, -magnitudes)), torch.arange(256, device=packed.device)
    # Gather both values of a byte at once, as eight bytes.
    pairs = torch.stack((values[byte % 16], values[byte // 16]), dim=1).view(torch.int64).flatten()
    return pairs.index_select(0, packed.reshape(-1).int()).view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def dequantize_nvfp4(weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor) -> torch.Tensor:
    """Return float32 ``(rows, K)``: FP4 value times block scale times ``weight_scale_2``."""
    scale = weight_scale.to(torch.float32) * weight_scale_2.to(torch.float32).reshape(())
    values = decode_fp4(weight)
    values.view(*weight.shape[:-1], -1, 16).mul_(scale.unsqueeze(-1))
    return values


def _scaled(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply ``(rows, K)`` by E8M0 bytes ``(rows, K / 32)``: two to the power of the byte minus 127, NaN for 255. float32."""
    exponents = scales.view(torch.uint8).to(torch.int32)
    powers = torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64, device=scales.device), exponents - 127)
    factors = torch.where(exponents == 255, torch.nan, powers)
    return (values.double() * factors.repeat_interleave(_MX_BLOCK, dim=1)).float()


def fake_quantize_nvfp4(values: torch.Tensor, global_scale: torch.Tensor, arithmetic: Arithmetic, gated: bool) -> torch.Tensor:
    """Quantize float32 ``(n, K)`` to NVFP4 and back. ``global_scale`` divides the values, which reach 2688 times that scale."""
    blocks = values.view(values.shape[0], -1, 16)
    amax = blocks.abs().max(dim=-1, keepdim=True).values
    inverse_global = global_scale.reciprocal()
    if arithmetic is Arithmetic.CUTLASS or (arithmetic is Arithmetic.KERNEL and gated):
        block_scale = _nearest(inverse_global * (amax * (1 / 6)), _E4M3).float()
        if arithmetic is Arithmetic.KERNEL:
            scaled = blocks * (block_scale.reciprocal() * inverse_global)
        else:
            scaled = blocks * (block_scale * inverse_global.reciprocal()).reciprocal()
    elif arithmetic is Arithmetic.KERNEL:
        block_scale = _nearest(amax / (6 * global_scale), _E4M3).float()
        scaled = blocks * (block_scale * global_scale).reciprocal()
    else:
        block_scale = _nearest(amax.double() / 6 / global_scale.double(), _E4M3).float()
        scaled = blocks / (block_scale * global_scale)
    scaled = torch.where(block_scale == 0, torch.zeros_like(scaled), scaled)
    return (_nearest(scaled, _E2M1).float() * (block_scale * global_scale)).view(values.shape)


def fake_quantize_mxfp8(values: torch.Tensor) -> torch.Tensor:
    """Quantize float32 ``(n, K)`` to MXFP8 and back.

    The block's scale follows from its largest magnitude's power of two (6.3 of the specification). Values up to 512 times the
    scale occur, and saturate at 448.
    """
    blocks = values.double().unflatten(-1, (-1, _MX_BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    exponent = (torch.frexp(largest).exponent - 9).clamp(min=-127)
    scale = torch.ldexp(torch.ones_like(largest), torch.where(largest > 0, exponent, -127))
    rounded = _nearest(blocks / scale, _E4M3) * scale
    return torch.where(blocks.isfinite().all(-1, keepdim=True), rounded, torch.nan).flatten(-2).float()


def _step(values: torch.Tensor, number: _Number) -> torch.Tensor:
    """Return the distance between neighboring numbers around ``values``, float64."""
    _, exponent = torch.frexp(values.double())
    return torch.exp2((exponent - number.bits).clamp(min=number.least).double())


def _nearest(values: torch.Tensor, number: _Number) -> torch.Tensor:
    """Round to nearest, ties to even, saturating; keep the sign. float64."""
    values = values.double().clamp(-number.largest, number.largest)
    step = _step(values, number)
    return torch.round(values / step) * step


def move_off_ties(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Move by one bf16 step the bf16 values of ``x (n, K)`` that sit on a rounding tie of NVFP4.

    Activations and the calibrated amax (``6 * 448 * global_scale``) are both bf16, so exact ties of block scales and codes are
    common. Two correct implementations may round ties differently: one uses reciprocals, the other divisions.
    """
    blocks = x.view(x.shape[0], -1, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    exact = amax.double() / (6 * global_scale)
    blocks = _next_bf16(blocks, _near_half(exact / _step(exact, _E4M3)) & (blocks.abs() == amax))
    exact = blocks.abs().amax(-1, keepdim=True).double() / (6 * global_scale)
    codes = blocks.abs().double() / (_nearest(exact, _E4M3).clamp(min=2**-9) * global_scale)
    codes = codes.clamp(max=6)
    return _next_bf16(blocks, _near_half(codes / _step(codes, _E2M1))).view(x.shape)


def _near_half(steps: torch.Tensor) -> torch.Tensor:
    return (steps.frac() - 0.5).abs() < 1e-3


def _next_bf16(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the next bf16 value farther from zero where ``mask`` is set."""
    return (values.view(torch.int16) + mask.to(torch.int16)).view(torch.bfloat16)
