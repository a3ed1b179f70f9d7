"""NVFP4, from its definition: E2M1 codes, an E4M3 scale per 16 of them, and ``weight_scale_2`` or ``input_scale`` over all."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch

from . import Arithmetic, Judge


class NVFP4(Judge):
    quantized = True

    def matrix(self, expert: int, name: str) -> torch.Tensor:
        tensors = (self.weights[f"{expert}.{name}.{kind}"] for kind in ("weight", "weight_scale", "weight_scale_2"))
        return dequantize_weight(*tensors)

    def input(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        scale = self._fc1_scale.to(x.device)
        return fake_quantize(x, _stored(scale, arithmetic is not Arithmetic.NONE), arithmetic, self.gated)

    def inner(self, values: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        scale = self._fc2_scale.to(values.device)
        return fake_quantize(values, _stored(scale, arithmetic is not Arithmetic.NONE), arithmetic, self.gated)

    def scalars(self, local: Sequence[int]) -> dict[str, torch.Tensor]:
        everyone = range(self.num_experts)
        fc1, fc2 = self._numbers("w1", "input_scale", everyone).max(), self._numbers("w2", "input_scale", everyone).max()
        halves = torch.stack([self._numbers(name, "weight_scale_2", local) for name in reversed(self.names[:-1])]) * fc1
        return {
            "fc1_divisor": fc1.expand(len(local)),
            "fc1_alpha": halves.amax(0),
            "fc2_divisor": fc2.expand(len(local)),
            "fc2_alpha": self._numbers("w2", "weight_scale_2", local) * fc2,
            **({"fc1_half_alphas": halves} if self.gated else {}),
        }

    def largest_input(self) -> float:
        fc1 = torch.stack([self._numbers(name, "input_scale", range(self.num_experts)) for name in self.names[:-1]], dim=1)
        if not torch.allclose(fc1.float(), fc1[:, :1].float()):
            raise ValueError(
                "has experts whose gate and up differ in input_scale, which TensorRT-LLM refuses to load; export the model again"
            )
        fc2 = self._numbers("w2", "input_scale", range(self.num_experts)).max()
        if not float(fc1.max()) or not float(fc2):
            raise ValueError("has an input_scale of 0 in every expert; calibrate and export the model again")
        return float(fc1.max()) * 6 * 448

    def move_off_ties(self, x: torch.Tensor) -> torch.Tensor:
        return move_off_ties(x, float(self._fc1_scale))

    def baked_weight_error(self, experts: Iterable[int], device: torch.device | str = "cpu") -> float:
        return baked_weight_error(self.weights, experts, self.names, device)

    def _numbers(self, name: str, kind: str, experts: Sequence[int]) -> torch.Tensor:
        return torch.tensor([float(self.weights[f"{expert}.{name}.{kind}"]) for expert in experts], dtype=torch.float64)

    @functools.cached_property
    def _fc1_scale(self) -> torch.Tensor:
        return self._input_scale(self.names[:-1])

    @functools.cached_property
    def _fc2_scale(self) -> torch.Tensor:
        return self._input_scale(("w2",))

    def _input_scale(self, names: Sequence[str]) -> torch.Tensor:
        """The layer's scale: the largest of all experts', so that a token is quantized once for all of them."""
        experts = range(self.num_experts)
        return torch.stack([self.weights[f"{e}.{name}.input_scale"].float().reshape(()) for e in experts for name in names]).max()


def _stored(scale: torch.Tensor, as_reciprocal: bool) -> torch.Tensor:
    return 1 / (1 / scale) if as_reciprocal else scale


def decode_fp4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 ``(rows, K/2)`` to float32 ``(rows, K)``: 1 sign, 2 exponent (bias 1), 1 mantissa bit; low nibble first."""
    byte = torch.arange(256, device=packed.device)
    nibbles = torch.stack((byte % 16, byte // 16), dim=1).float()
    sign = torch.where(nibbles >= 8, -1.0, 1.0)
    exponent = (nibbles % 8 / 2).floor()
    mantissa = nibbles % 2
    pairs = sign * torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * torch.exp2(exponent - 1))
    # Both values of a byte in one gather of eight bytes.
    both = pairs.contiguous().view(torch.int64).flatten().index_select(0, packed.reshape(-1).int())
    return both.view(torch.float32).view(*packed.shape[:-1], 2 * packed.shape[-1])


def dequantize_weight(weight: torch.Tensor, weight_scale: torch.Tensor, weight_scale_2: torch.Tensor) -> torch.Tensor:
    """Checkpoint tensors to float32 ``(rows, K)``: FP4 value times block scale times ``weight_scale_2``."""
    scale = weight_scale.to(torch.float32) * weight_scale_2.to(torch.float32).reshape(())
    values = decode_fp4(weight)
    values.view(*weight.shape[:-1], -1, 16).mul_(scale.unsqueeze(-1))
    return values


def fake_quantize(values: torch.Tensor, global_scale: torch.Tensor, arithmetic: Arithmetic, gated: bool) -> torch.Tensor:
    """NVFP4 quantization and back: ``(n, K)`` float32, blocks of 16, divisor-type ``global_scale``."""
    blocks = values.view(values.shape[0], -1, 16)
    amax = blocks.abs().max(dim=-1, keepdim=True).values
    if arithmetic is Arithmetic.KERNEL and gated:
        inverse_global = torch.ones_like(global_scale) / global_scale
        sixth = torch.ones_like(amax) / 6
        block_scale = _nearest_e4m3(inverse_global * (amax * sixth))
        scaled = blocks * ((torch.ones_like(amax) / block_scale) * inverse_global)
    elif arithmetic is Arithmetic.CUTLASS:
        inverse_global = torch.ones_like(global_scale) / global_scale
        block_scale = _nearest_e4m3(inverse_global * (amax * (torch.ones_like(amax) / 6)))
        scaled = blocks * (torch.ones_like(amax) / (block_scale * (torch.ones_like(global_scale) / inverse_global)))
    elif arithmetic is Arithmetic.KERNEL:
        block_scale = _nearest_e4m3(amax / (6 * global_scale))
        scaled = blocks * (torch.ones_like(amax) / (block_scale * global_scale))
    else:
        block_scale = _nearest_e4m3(amax.double() / 6 / global_scale.double())
        scaled = blocks / (block_scale * global_scale)
    scaled = torch.where(block_scale == 0, torch.zeros_like(scaled), scaled)
    return (_nearest_e2m1(scaled) * (block_scale * global_scale)).view(values.shape)


def _nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 value (4 significant bits, smallest step 2**-9, largest value 448), ties to even, as float32."""
    step = _e4m3_step(values)
    return (torch.round(values.double() / step) * step).clamp(max=448).float()


def _e4m3_step(values: torch.Tensor) -> torch.Tensor:
    """Distance of neighboring E4M3 values around non-negative ``values``, float64."""
    _, exponent = torch.frexp(values.double())
    return torch.exp2((exponent - 4).clamp(min=-9).double())


def _nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, ties to the even code, saturating; sign kept."""
    magnitude = values.abs().clamp(max=6)
    step = _e2m1_step(magnitude)
    return torch.copysign(torch.round(magnitude / step) * step, values)


def _e2m1_step(magnitude: torch.Tensor) -> torch.Tensor:
    """Distance of neighboring E2M1 values around ``magnitude`` (0 to 6)."""
    _, exponent = torch.frexp(magnitude)
    return torch.exp2((exponent - 2).clamp(min=-1).to(magnitude.dtype))


def move_off_ties(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Move the bf16 values of ``x (n, K)`` that sit on a rounding tie of their NVFP4 form by one bf16 step.

    Activations and the calibrated amax (``6 * 448 * global_scale``) are both bf16, so exact ties of block scales and of
    codes are common, and there two correct implementations may round apart: reciprocals against divisions.
    """
    blocks = x.view(x.shape[0], -1, 16)
    amax = blocks.abs().amax(-1, keepdim=True)
    wanted = amax.double() / (6 * global_scale)
    blocks = _next_bf16(blocks, _near_half(wanted / _e4m3_step(wanted)) & (blocks.abs() == amax))
    wanted = blocks.abs().amax(-1, keepdim=True).double() / (6 * global_scale)
    codes = blocks.abs().double() / (_nearest_e4m3(wanted).double().clamp(min=2**-9) * global_scale)
    codes = codes.clamp(max=6)
    return _next_bf16(blocks, _near_half(codes / _e2m1_step(codes))).view(x.shape)


def _near_half(steps: torch.Tensor) -> torch.Tensor:
    return (steps.frac() - 0.5).abs() < 1e-3


def _next_bf16(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """The bf16 value next farther from zero, where asked for."""
    return (values.view(torch.int16) + where.to(torch.int16)).view(torch.bfloat16)


def baked_weight_error(
    weights: Mapping[str, torch.Tensor], experts: Iterable[int], projections: Sequence[str], device: torch.device | str = "cpu"
) -> float:
    """Relative L2 change of the weights of ``experts`` if ``weight_scale_2`` were multiplied into the E4M3 block scales.

    That is how peers feed a kernel interface without a separate weight scale (vLLM PR 48536, SGLang PR 32119).
    """
    difference = reference = 0.0
    for expert in experts:
        for name in projections:
            prefix = f"{expert}.{name}."
            values = decode_fp4(weights[prefix + "weight"].to(device)).view(-1, 16).square().sum(1).double()
            exact = weights[prefix + "weight_scale"].to(device).float() * weights[prefix + "weight_scale_2"].to(device).reshape(
                ()
            )
            exact = exact.flatten()
            error = (_nearest_e4m3(exact) - exact).double()
            difference += float((values * error.square()).sum())
            reference += float((values * exact.double().square()).sum())
    return (difference / reference) ** 0.5 if reference else 0.0
