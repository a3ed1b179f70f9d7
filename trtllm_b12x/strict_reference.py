"""The judge: an NVFP4 MoE layer in float32, from the checkpoint's own tensors.

It shares no code with :mod:`trtllm_b12x.kernels`, :mod:`trtllm_b12x.host` or :mod:`trtllm_b12x.nvfp4`; formats are
computed here from their definitions.  Its rounding points are a parameter (:class:`Arithmetic`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Arithmetic(Enum):
    """Where the reference rounds."""

    NONE = "none"
    """float32 throughout, NVFP4 where NVFP4 is prescribed, scales by division."""

    KERNEL = "kernel"
    """The points that all b12x kernels share (FlashInfer 0.7.2.post1, below ``flashinfer/``):

    * scalars as the host stores them: input scales as float32 reciprocals (``NVFP4FusedMoEMethod.load_quant_scales``);
    * block scales and values by reciprocals for SwiGLU (``cute_dsl/fp4_common.py:2655-2674``), by divisions for ReLU2
      (``:2629-2651``);
    * the activation's result in bf16 before it is quantized (``moe_static_kernel.py:2260``, ``moe_micro_kernel.py:1943``,
      ``_moe_dynamic/generic.py:2224``, ``moe_direct_micro_kernel.py:4470``), in units of up's ``weight_scale_2`` over
      gate's, which the kernels have no place for (:mod:`trtllm_b12x.quantization`);
    * the output in bf16.

    What differs between the kernels (how FC2's partial sums are rounded and added) is not here: it is the tolerance.
    """

    CUTLASS = "cutlass"
    """The points of TensorRT-LLM's CUTLASS path (``cpp/tensorrt_llm/kernels/quantization.cuh``, ``cvt_warp_fp16_to_fp4``;
    ``kernels/cutlass_kernels/moe_gemm/moe_kernels.cu``): scalars as the host stores them, block scales and values by reciprocals,
    FC1's result, the activation's and FC2's each in bf16, the sum over the routes in float32, the output in bf16."""

    UNQUANTIZED = "unquantized"
    """NVFP4 weights, activations in float32: what quantizing activations costs is measured against this."""


@dataclass(frozen=True)
class Call:
    """One call of the layer: ``x (T, H)`` bf16, ids ``(T, k)`` integer, weights ``(T, k)`` float32, as the router gave them."""

    x: torch.Tensor
    token_selected_experts: torch.Tensor
    token_final_scales: torch.Tensor


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


def outputs(
    weights: Mapping[str, torch.Tensor],
    num_experts: int,
    gated: bool,
    calls: Sequence[Call],
    arithmetics: Sequence[Arithmetic],
    device: torch.device | str = "cpu",
    on_expert: Callable[[], None] = lambda: None,
) -> list[list[torch.Tensor]]:
    """Outputs of one layer.

    Args:
        weights: the checkpoint's tensors, ``"{expert}.w1.weight"`` and so on: w1 is the gate (or the only FC1 half), w3
            up, w2 down.  Without ``weight_scale`` they are taken as plain weights and activations stay unquantized.
        gated: SwiGLU if true, else squared ReLU.
        calls: ids are global, negative ids unrouted.
        arithmetics: one output for each.
        on_expert: called after each expert that a token chose; the others are not read.

    Returns:
        ``result[call][arithmetic]``, float32 ``(T, H)``.
    """
    names = ("w1", "w3", "w2") if gated else ("w1", "w2")
    quantized = "0.w1.weight_scale" in weights
    x = torch.cat([call.x for call in calls]).to(device).float()
    ids = torch.cat([call.token_selected_experts for call in calls]).to(device)
    route_weights = torch.cat([call.token_final_scales for call in calls]).to(device).float()
    rounded = [a if quantized else Arithmetic.UNQUANTIZED for a in arithmetics]
    inputs = [x] * len(rounded)
    if quantized:
        fc1_scale, fc2_scale = (_input_scale(weights, num_experts, halves).to(device) for halves in (names[:-1], ("w2",)))
        inputs = [
            x if a is Arithmetic.UNQUANTIZED else fake_quantize(x, _stored(fc1_scale, a is not Arithmetic.NONE), a, gated)
            for a in rounded
        ]
    sums = [torch.zeros_like(x) for _ in rounded]
    for expert in range(num_experts):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        matrices = {name: _matrix(weights, expert, name, quantized).to(device) for name in names}
        up_to_gate = _up_to_gate(weights, expert) if gated and quantized else 1.0
        route_weight = route_weights[token, slot].unsqueeze(1)
        # One product for all arithmetics: a matrix of this size is read from memory each time.
        rows = torch.cat([values[token] for values in inputs])
        fc1 = [(rows @ matrices[name].T).chunk(len(rounded)) for name in names[:-1]]
        inner = []
        for position, arithmetic in enumerate(rounded):
            as_stored = arithmetic in (Arithmetic.KERNEL, Arithmetic.CUTLASS)
            each_in_bf16 = arithmetic is Arithmetic.CUTLASS
            unit = up_to_gate if as_stored else 1.0
            hidden = _bf16(fc1[0][position], each_in_bf16)
            if gated:
                # The kernels compute up in units of its weight_scale_2 over gate's.
                up = _bf16(fc1[1][position] / unit, each_in_bf16)
                hidden = hidden / (1 + torch.exp(-hidden)) * up
            else:
                hidden = hidden.clamp(min=0).square()
            hidden = _bf16(hidden, as_stored)
            if arithmetic is not Arithmetic.UNQUANTIZED:
                hidden = fake_quantize(hidden, _stored(fc2_scale, as_stored) / unit, arithmetic, gated)
            inner.append(hidden * unit)
        fc2 = (torch.cat(inner) @ matrices["w2"].T).chunk(len(rounded))
        for arithmetic, result, total in zip(rounded, fc2, sums, strict=True):
            total.index_add_(0, token, route_weight * _bf16(result, arithmetic is Arithmetic.CUTLASS))
        on_expert()
    sums = [_bf16(total, a in (Arithmetic.KERNEL, Arithmetic.CUTLASS)) for a, total in zip(arithmetics, sums, strict=True)]
    per_call = zip(*(total.split([call.x.shape[0] for call in calls]) for total in sums), strict=True)
    return [list(call) for call in per_call]


def _bf16(values: torch.Tensor, rounds: bool) -> torch.Tensor:
    return values.to(torch.bfloat16).float() if rounds else values


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


def weight_error(
    weights: Mapping[str, torch.Tensor],
    original: Mapping[str, torch.Tensor],
    expert: int,
    name: str,
    device: torch.device | str = "cpu",
) -> tuple[float, float]:
    """L2 distance of one matrix from the ``original`` one (keys ``"{expert}.w1.weight"``), and the latter's norm."""
    plain = original[f"{expert}.{name}.weight"].to(device).float()
    return float((_matrix(weights, expert, name, True).to(device) - plain).norm()), float(plain.norm())


def _matrix(weights: Mapping[str, torch.Tensor], expert: int, name: str, quantized: bool) -> torch.Tensor:
    prefix = f"{expert}.{name}."
    if not quantized:
        return weights[prefix + "weight"].float()
    return dequantize_weight(weights[prefix + "weight"], weights[prefix + "weight_scale"], weights[prefix + "weight_scale_2"])


def _up_to_gate(weights: Mapping[str, torch.Tensor], expert: int) -> float:
    up, gate = (float(weights[f"{expert}.{name}.weight_scale_2"].reshape(())) for name in ("w3", "w1"))
    return 1.0 if 0.0 in (up, gate) else float(torch.tensor(up / gate))


def _input_scale(weights: Mapping[str, torch.Tensor], num_experts: int, names: Sequence[str]) -> torch.Tensor:
    """The layer's scale: the largest of all experts', so that a token is quantized once for all of them."""
    scales = [weights[f"{expert}.{name}.input_scale"].float().reshape(()) for expert in range(num_experts) for name in names]
    return torch.stack(scales).max()


def _stored(scale: torch.Tensor, as_reciprocal: bool) -> torch.Tensor:
    return 1 / (1 / scale) if as_reciprocal else scale
