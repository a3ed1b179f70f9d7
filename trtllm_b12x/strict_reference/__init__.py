"""The judge: an MoE layer in float32, from the checkpoint's own tensors.

It shares no code with :mod:`trtllm_b12x.kernels`, :mod:`trtllm_b12x.host` or the modules of :mod:`trtllm_b12x.formats`; formats
are computed here from their definitions, each in a :class:`Judge`.  Rounding points are a parameter (:class:`Arithmetic`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from trtllm_b12x import formats


class Arithmetic(Enum):
    """Where the reference rounds."""

    NONE = "none"
    """float32 throughout, the format where the format is prescribed, scales by division."""

    KERNEL = "kernel"
    """The points that all b12x kernels share (FlashInfer 0.7.2.post1, below ``flashinfer/``):

    * scalars as the host stores them: input scales as float32 reciprocals (``NVFP4FusedMoEMethod.load_quant_scales``);
    * block scales and values by reciprocals for SwiGLU (``cute_dsl/fp4_common.py:2655-2674``), by divisions for ReLU2
      (``:2629-2651``);
    * the activation's result in bf16 before it is quantized (``moe_static_kernel.py:2260``, ``moe_micro_kernel.py:1943``,
      ``_moe_dynamic/generic.py:2224``, ``moe_direct_micro_kernel.py:4470``);
    * the output in bf16.

    What differs between the kernels (how FC2's partial sums are rounded and added) is not here: it is the tolerance.
    """

    CUTLASS = "cutlass"
    """The points of TensorRT-LLM's CUTLASS path (``cpp/tensorrt_llm/kernels/quantization.cuh``, ``cvt_warp_fp16_to_fp4``;
    ``kernels/cutlass_kernels/moe_gemm/moe_kernels.cu``): scalars as the host stores them, block scales and values by reciprocals,
    FC1's result, the activation's and FC2's each in bf16, the sum over the routes in float32, the output in bf16."""

    UNQUANTIZED = "unquantized"
    """The format's weights, activations in float32: what quantizing activations costs is measured against this."""


@dataclass(frozen=True)
class Call:
    """One call of the layer: ``x (T, H)`` bf16, ids ``(T, k)`` integer, weights ``(T, k)`` float32, as the router gave them."""

    x: torch.Tensor
    token_selected_experts: torch.Tensor
    token_final_scales: torch.Tensor


class Judge:
    """One layer's tensors in their format; this one takes matrices as they are.

    Args:
        weights: the checkpoint's tensors, ``"{expert}.w1.weight"`` and so on: w1 is the gate (or the only FC1 half), w3
            up, w2 down.
        gated: there is a w3.
    """

    quantized = False
    """Activations are quantized, where an :class:`Arithmetic` does not say otherwise."""

    def __init__(self, weights: Mapping[str, torch.Tensor], num_experts: int, gated: bool) -> None:
        self.weights, self.num_experts, self.gated = weights, num_experts, gated
        self.names = ("w1", "w3", "w2") if gated else ("w1", "w2")

    def matrix(self, expert: int, name: str) -> torch.Tensor:
        """float32 ``(rows, K)``, where the tensors are."""
        return self.weights[f"{expert}.{name}.weight"].float()

    def input(self, x: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        """Float32 ``(n, H)`` to what FC1 takes of it."""
        return x

    def inner(self, values: torch.Tensor, arithmetic: Arithmetic) -> torch.Tensor:
        """Float32 ``(n, I)`` to what FC2 takes of it."""
        return values

    def scalars(self, local: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the kernels' numbers per expert must be, float64 ``(..., local experts)`` by the field of their weights."""
        return {}

    def largest_input(self) -> float:
        """Of the activations that the layer was calibrated for; 1 where it was not.

        Raises:
            ValueError: the calibration cannot be used; the message goes on from the layer's name.
        """
        return 1.0

    def move_off_ties(self, x: torch.Tensor) -> torch.Tensor:
        """Move the bf16 values of ``x (n, K)`` that two correct implementations may round apart by one bf16 step."""
        return x

    def baked_weight_error(self, experts: Iterable[int], device: torch.device | str = "cpu") -> float | None:
        """Relative L2 change of the weights of ``experts`` for kernels without a scale per matrix; None: they have none."""
        return None


def judge(weights: Mapping[str, torch.Tensor], num_experts: int, gated: bool, quant_algo: str = "NVFP4") -> Judge:
    """For a layer quantized so; tensors without ``weight_scale`` are plain weights."""
    row = formats.find(quant_algo) if "0.w1.weight_scale" in weights else None
    found: type[Judge] = Judge if row is None else formats.load(row.judge)
    return found(weights, num_experts, gated)


def outputs(
    weights: Mapping[str, torch.Tensor],
    num_experts: int,
    gated: bool,
    calls: Sequence[Call],
    arithmetics: Sequence[Arithmetic],
    device: torch.device | str = "cpu",
    on_expert: Callable[[], None] = lambda: None,
    quant_algo: str = "NVFP4",
    activation: str = "Swiglu",
    swiglu: tuple[float, float, float] | None = None,
) -> list[list[torch.Tensor]]:
    """Outputs of one layer.

    Args:
        weights: as of :class:`Judge`.  Without ``weight_scale`` they are taken as plain weights and activations stay unquantized.
        gated: ``activation`` if true, else squared ReLU.
        calls: ids are global, negative ids unrouted.
        arithmetics: one output for each.
        on_expert: called after each expert that a token chose; the others are not read.
        quant_algo: the weights' format.
        activation: ``Swiglu``, or ``Geglu`` with the GELU by tanh of the models that have it (gemma-4).
        swiglu: alpha, beta and limit, for SwiGLU with them (MiniMax-M3): ``g * sigmoid(alpha * g) * (u + beta)``, g being gate,
            at most the limit, and u up, between it and its negative.

    Returns:
        ``result[call][arithmetic]``, float32 ``(T, H)``.
    """
    form = judge(weights, num_experts, gated, quant_algo)
    names = form.names
    x = torch.cat([call.x for call in calls]).to(device).float()
    ids = torch.cat([call.token_selected_experts for call in calls]).to(device)
    router_weights = torch.cat([call.token_final_scales for call in calls]).to(device).float()
    rounded = [a if form.quantized else Arithmetic.UNQUANTIZED for a in arithmetics]
    inputs = [x if a is Arithmetic.UNQUANTIZED else form.input(x, a) for a in rounded]
    sums = [torch.zeros_like(x) for _ in rounded]
    for expert in range(num_experts):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        if token.numel() == 0:
            continue
        matrices = {name: form.matrix(expert, name).to(device) for name in names}
        router_weight = router_weights[token, slot].unsqueeze(1)
        # One product for all arithmetics: a matrix of this size is read from memory each time.
        rows = torch.cat([values[token] for values in inputs])
        fc1 = [(rows @ matrices[name].T).chunk(len(rounded)) for name in names[:-1]]
        inner = []
        for position, arithmetic in enumerate(rounded):
            as_stored = arithmetic in (Arithmetic.KERNEL, Arithmetic.CUTLASS)
            each_in_bf16 = arithmetic is Arithmetic.CUTLASS
            hidden = _bf16(fc1[0][position], each_in_bf16)
            if gated:
                up = _bf16(fc1[1][position], each_in_bf16)
                hidden = _GATES[activation](hidden) * up if swiglu is None else _swiglu(hidden, up, *swiglu)
            else:
                hidden = hidden.clamp(min=0).square()
            hidden = _bf16(hidden, as_stored)
            if arithmetic is not Arithmetic.UNQUANTIZED:
                hidden = form.inner(hidden, arithmetic)
            inner.append(hidden)
        fc2 = (torch.cat(inner) @ matrices["w2"].T).chunk(len(rounded))
        for arithmetic, result, total in zip(rounded, fc2, sums, strict=True):
            total.index_add_(0, token, router_weight * _bf16(result, arithmetic is Arithmetic.CUTLASS))
        on_expert()
    sums = [_bf16(total, a in (Arithmetic.KERNEL, Arithmetic.CUTLASS)) for a, total in zip(arithmetics, sums, strict=True)]
    per_call = zip(*(total.split([call.x.shape[0] for call in calls]) for total in sums), strict=True)
    return [list(call) for call in per_call]


_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Swiglu": lambda gate: gate / (1 + torch.exp(-gate)),
    "Geglu": lambda gate: 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))),
}


def _swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, beta: float, limit: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    return gate / (1 + torch.exp(-alpha * gate)) * (up.clamp(-limit, limit) + beta)


def _bf16(values: torch.Tensor, rounds: bool) -> torch.Tensor:
    return values.to(torch.bfloat16).float() if rounds else values


def weight_error(
    weights: Judge, original: Mapping[str, torch.Tensor], expert: int, name: str, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """L2 distance of one matrix from the ``original`` one (keys ``"{expert}.w1.weight"``), and the latter's norm."""
    plain = original[f"{expert}.{name}.weight"].to(device).float()
    return float((weights.matrix(expert, name).to(device) - plain).norm()), float(plain.norm())
