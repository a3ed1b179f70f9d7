# SPDX-License-Identifier: Apache-2.0
"""Compute an MoE layer in float32 from the checkpoint's own tensors, as the reference that kernels are compared with.

It shares no code with the package's kernels, formats or engines. ``reference_formats.py`` decodes each format by definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .reference_formats import Arithmetic, ReferenceDequantizer, reference_for

__all__ = ["Arithmetic", "MoECall", "ReferenceDequantizer", "outputs", "reference_for"]

_ROUNDS_TO_BF16 = (Arithmetic.KERNEL, Arithmetic.CUTLASS)


@dataclass(frozen=True)
class MoECall:
    """One call of the layer: ``x (T, H)`` bf16, and the router's ids ``(T, k)`` integer and weights ``(T, k)`` float32."""

    x: torch.Tensor
    token_selected_experts: torch.Tensor
    token_final_scales: torch.Tensor


def outputs(
    weights: Mapping[str, torch.Tensor],
    num_experts: int,
    gated: bool,
    calls: Sequence[MoECall],
    arithmetics: Sequence[Arithmetic],
    device: torch.device | str = "cpu",
    quant_algo: str = "NVFP4",
    activation: str = "Swiglu",
    swiglu: tuple[float, float, float] | None = None,
) -> list[list[torch.Tensor]]:
    """Compute the outputs of one layer: ``result[call][arithmetic]``, float32 ``(T, H)``.

    Args:
        weights: by the names of ``ReferenceDequantizer``. Without ``weight_scale`` they are plain weights, and activations stay
            unquantized. ``bias`` is added to the product of its matrix. Experts without tokens are not read.
        gated: compute ``activation`` if true, else squared ReLU.
        calls: ids are global; negative ids are not routed.
        activation: ``Swiglu``, or ``Geglu`` (tanh approximation, as gemma-4 has it).
        swiglu: alpha, beta and limit (MiniMax-M3, gpt-oss, DeepSeek-V4): ``g * sigmoid(alpha * g) * (u + beta)``, with
            ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.
    """
    dequantizer = reference_for(weights, num_experts, gated, quant_algo)
    names = dequantizer.names
    x = torch.cat([call.x for call in calls]).to(device).float()
    ids = torch.cat([call.token_selected_experts for call in calls]).to(device)
    router_weights = torch.cat([call.token_final_scales for call in calls]).to(device).float()
    rounded = [a if dequantizer.quantized else Arithmetic.UNQUANTIZED for a in arithmetics]
    inputs = [x if a is Arithmetic.UNQUANTIZED else dequantizer.quantize(x, 1, a) for a in rounded]
    sums = [torch.zeros_like(x) for _ in rounded]
    for expert in range(num_experts):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        matrices = {name: dequantizer.matrix(expert, name).to(device) for name in names}
        biases = {name: _on(device, dequantizer.bias(expert, name)) for name in names}
        router_weight = router_weights[token, slot].unsqueeze(1)
        # One product serves all arithmetics, so that each matrix is read from memory once.
        rows = torch.cat([values[token] for values in inputs])
        fc1 = [(rows @ matrices[name].T + biases[name]).chunk(len(rounded)) for name in names[:-1]]
        inner = []
        for position, arithmetic in enumerate(rounded):
            every_step = arithmetic is Arithmetic.CUTLASS
            hidden = _bf16(fc1[0][position], every_step)
            if gated:
                up = _bf16(fc1[1][position], every_step)
                hidden = _GATES[activation](hidden) * up if swiglu is None else _swiglu(hidden, up, *swiglu)
            else:
                hidden = hidden.clamp(min=0).square()
            hidden = _bf16(hidden, arithmetic in _ROUNDS_TO_BF16)
            if arithmetic is not Arithmetic.UNQUANTIZED:
                hidden = dequantizer.quantize(hidden, 2, arithmetic)
            inner.append(hidden)
        fc2 = (torch.cat(inner) @ matrices["w2"].T + biases["w2"]).chunk(len(rounded))
        for arithmetic, result, total in zip(rounded, fc2, sums, strict=True):
            total.index_add_(0, token, router_weight * _bf16(result, arithmetic is Arithmetic.CUTLASS))
    sums = [_bf16(total, a in _ROUNDS_TO_BF16) for a, total in zip(arithmetics, sums, strict=True)]
    per_call = zip(*(total.split([call.x.shape[0] for call in calls]) for total in sums), strict=True)
    return [list(call) for call in per_call]


_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Swiglu": lambda gate: gate / (1 + torch.exp(-gate)),
    "Geglu": lambda gate: 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
}


def _swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up.clamp(-limit, limit) + beta)


def _on(device: torch.device | str, bias: torch.Tensor | None) -> torch.Tensor | float:
    return 0.0 if bias is None else bias.to(device)


def _bf16(values: torch.Tensor, rounds: bool) -> torch.Tensor:
    return values.to(torch.bfloat16).float() if rounds else values
