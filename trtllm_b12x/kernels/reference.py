"""The kernels in torch, on the CPU and any GPU: Triton's, whose arithmetic needs no table, and b12x.

b12x has FlashInfer's argument contract and the rounding points of its kernels.  It takes the very tensors FlashInfer would get
and reads them the way the kernels do, so that a wrong layout shows as a wrong number.  Rounding follows the static kernel (the
deterministic one), FlashInfer 0.7.2.post1, files below ``flashinfer/fused_moe/cute_dsl/blackwell_sm12x`` unless named:

==========================================================  =========================================================
point                                                       source
==========================================================  =========================================================
block scale and value of an activation, SwiGLU              ``cute_dsl/fp4_common.py:2655-2674`` (reciprocals)
block scale and value of an activation, ReLU2               ``cute_dsl/fp4_common.py:2629-2651`` (divisions)
alpha of FC1 in float32, before the activation              ``moe_static_kernel.py:2239``; fold: ``moe_dispatch.py:3488``
activation in float32, its result to bf16, then quantized   ``moe_static_kernel.py:2260``, ``:599-622``
FC2 partial sums of 256 columns to bf16, without alpha      ``moe_static_kernel.py:2326``, ``:2412-2428``
router weight times ``fc2_alpha`` to bf16, product to bf16   ``moe_static_kernel.py:167-173``
sum over routes and partial sums in float32, one bf16       ``moe_static_kernel.py:2760-2800``
==========================================================  =========================================================

Not reproduced: the last bit of ``rcp.approx`` and ``ex2.approx``, and the order of float32 sums inside a GEMM.  Measured, it
shows in one of 66 cases (2e-5); in the others this equals the static kernel bit for bit (docs/sm12x-on-hopper.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from trtllm_b12x.decision import Environment, KernelFeatures, families
from trtllm_b12x.formats.layouts import plain_scales, scales_of_tokens
from trtllm_b12x.formats.nvfp4 import BLOCK_SIZE, E2M1_MAX, decode_e2m1, dequantize, round_to_e2m1, round_to_e4m3

from . import Geometry, Kernel, MoECall
from .routes import Table, of_known_types

_OFF_TIES = 0.97
_TIE = 5e-4
"""Relative distance from a rounding tie that counts as one. A bf16 step is 8 times as far."""

_PARTIAL_COLUMNS = 256
"""Columns of FC2's inner dimension that the static kernel accumulates before it rounds."""


class ReferenceKernel(Kernel):
    """The kernel of machines without an SM12x GPU, and the yardstick of those with one."""

    features = KernelFeatures(
        name="reference",
        activations=frozenset({"Swiglu", "Relu2"}),
        tile=256,  # what FlashInfer 0.7.x pads to below the static cut-over (moe_dispatch.py:3542)
        hidden_size_multiple=128,
        negative_ids=True,
        graph_safe=False,  # it asks the host which experts have tokens
        deterministic=True,
        most_routes=families.STATIC_ROUTED_ROWS,
    )
    multiple = 128
    """The intermediate size must be a multiple of this."""

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Remember the sizes.

        Raises:
            ValueError: an activation or a size that no kernel of the family takes.
        """
        self.check(geometry, (self.features.hidden_size_multiple, self.multiple))
        self.geometry, self.capacity, self._device = geometry, capacity, device
        self.gated = geometry.gated

    @property
    def device(self) -> torch.device:
        return self._device

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        weights.check(self.geometry)
        self.weights, self.table = weights, Table(first_expert, self.geometry.num_experts)

    def self_test(self) -> None:
        """It is what others are compared with."""

    def run(self, call: MoECall) -> torch.Tensor:
        tokens = call.x.shape[0]
        if tokens > self.capacity:
            raise ValueError(f"{tokens} tokens exceed the planned capacity of {self.capacity}")
        call.check(self.geometry, self.features.quantized_input)
        ids, router_weights = of_known_types(call.ids, call.router_weights)
        self.weights.derive()
        x = self._input(call)
        result = torch.zeros(tokens, self.geometry.hidden_size, dtype=torch.float32, device=x.device)
        local = self.table.local(ids)
        for expert in local[local >= 0].unique().tolist():
            token, slot = (local == expert).nonzero(as_tuple=True)
            self._add(result, expert, token, x[token], router_weights[token, slot].float())
        return result.to(self.geometry.dtype) if call.out is None else call.out.copy_(result)

    def _input(self, call: MoECall) -> torch.Tensor:
        """Return what the experts multiply by, ``(tokens, H)``, before an expert's own rounding."""
        return call.x

    def activations(self, tokens: int, factor: float) -> torch.Tensor:
        """bf16 ``(tokens, H)`` for a self-test: ``factor`` of the weights' calibrated range, off rounding ties."""
        device, scale = self.weights.device, float(self.weights.fc1_divisor[0])
        scale = scale if 0 < scale < float("inf") else 1.0
        x = torch.randn(tokens, self.geometry.hidden_size, device=device, generator=torch.Generator(device).manual_seed(0))
        return _off_ties((x * (_OFF_TIES * factor * scale * 6 * 448 / x.abs().max())).to(torch.bfloat16), scale)

    def _add(self, result: torch.Tensor, expert: int, token: torch.Tensor, x: torch.Tensor, router_weights: torch.Tensor) -> None:
        """Add one local expert's output to the tokens that are routed to it; ``x`` and ``router_weights`` are theirs."""
        w, size = self.weights, self.geometry.intermediate_size
        x_codes = self._quantized(x, w.fc1_divisor[expert])
        fc1 = (x_codes @ dequantized(w.fc1_weight, w.fc1_weight_sf, expert).T) * w.fc1_alpha[expert]
        inner = self._activated(expert, fc1).to(torch.bfloat16)
        inner_codes = self._quantized(inner, w.fc2_divisor[expert])
        fc2 = dequantized(w.fc2_weight, w.fc2_weight_sf, expert)
        factor = (router_weights * w.fc2_alpha[expert]).to(torch.bfloat16).unsqueeze(-1)
        for first in range(0, size, _PARTIAL_COLUMNS):
            columns = slice(first, first + _PARTIAL_COLUMNS)
            partial = (inner_codes[:, columns] @ fc2[:, columns].T).to(torch.bfloat16) * factor
            result.index_add_(0, token, partial.float())

    def _alphas(self, expert: int) -> torch.Tensor:
        """Return the alpha of each row of FC1 of a local expert, or one for all rows if there is no gate."""
        g, w = self.geometry, self.weights
        return w.half_alphas(expert).repeat_interleave(g.intermediate_size) if g.gated else w.fc1_alpha[expert]

    def _activated(self, expert: int, fc1: torch.Tensor) -> torch.Tensor:
        """A local expert's ``fc1 (n, r * I)``, [up; gate], to FC2's input, float32."""
        g = self.geometry
        if not g.gated:
            return activate(g.activation, fc1)
        constants = (float(tensor[expert]) for tensor in self.weights.epilogue.swiglu(g.num_experts, fc1.device))
        return activate(g.activation, *fc1.split(g.intermediate_size, dim=1), *constants)

    def _quantized(self, values: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
        """bf16 ``(n, K)`` to what its NVFP4 form stands for, in float32 and without ``divisor``."""
        blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
        amax = blocks.abs().amax(-1, keepdim=True)
        if self.gated:
            reciprocal = divisor.reciprocal()
            block_scale = round_to_e4m3(reciprocal * (amax * (1.0 / torch.tensor(E2M1_MAX)))).float()
            inverse = block_scale.reciprocal() * reciprocal
        else:
            block_scale = round_to_e4m3(amax / (E2M1_MAX * divisor)).float()
            inverse = (block_scale * divisor).reciprocal()
        usable = (block_scale > 0) & (divisor != 0)
        codes = round_to_e2m1(torch.where(usable, blocks * inverse, torch.zeros_like(blocks)))
        return (decode_e2m1(codes) * block_scale).flatten(-2)


class UnquantizedReferenceKernel(ReferenceKernel):
    """The Triton kernels in torch: activations as they are, or as the host has quantized them, bf16 between the products.

    What they are compared with on a card, too.
    """

    features = dataclasses.replace(families.triton(Environment()), name="reference W4A16", graph_safe=False)
    multiple = 16

    def _input(self, call: MoECall) -> torch.Tensor:
        # The host has one input scale for all experts where it quantizes for them.
        return call.x if call.x_sf is None else _decoded(call) * self.weights.fc1_divisor[0]

    def _add(self, result: torch.Tensor, expert: int, token: torch.Tensor, x: torch.Tensor, router_weights: torch.Tensor) -> None:
        w, extra = self.weights, self.weights.epilogue
        scale_1 = self._alphas(expert) / w.fc1_divisor[expert]  # the divisors are fresh
        scale_2 = w.fc2_alpha[expert] / w.fc2_divisor[expert]
        fc1 = x.float() @ dequantized(w.fc1_weight, w.fc1_weight_sf, expert).T * scale_1
        if extra.fc1_bias is not None:
            fc1 = fc1 + extra.fc1_bias[expert].float()
        inner = self._activated(expert, fc1).to(torch.bfloat16).float()
        fc2 = inner @ dequantized(w.fc2_weight, w.fc2_weight_sf, expert).T * scale_2
        if extra.fc2_bias is not None:
            fc2 = fc2 + extra.fc2_bias[expert].float()
        result.index_add_(0, token, fc2 * router_weights.unsqueeze(-1))


class QuantizedReferenceKernel(ReferenceKernel):
    """The grouped NVFP4 kernels in torch: b12x's quantization, each route's share in bf16, the sum in float32."""

    features = dataclasses.replace(families.grouped_nvfp4(Environment()), name="reference W4A4", graph_safe=False)
    multiple = BLOCK_SIZE

    def _input(self, call: MoECall) -> torch.Tensor:
        return self._quantized(call.x, self.weights.input_scales.fc1_divisor[0]) if call.x_sf is None else _decoded(call)

    def _add(self, result: torch.Tensor, expert: int, token: torch.Tensor, x: torch.Tensor, router_weights: torch.Tensor) -> None:
        w = self.weights
        fc1 = x @ dequantized(w.fc1_weight, w.fc1_weight_sf, expert).T * self._alphas(expert)
        inner = self._activated(expert, fc1).to(torch.bfloat16)
        codes = self._quantized(inner, self.weights.input_scales.fc2_divisor[expert])
        share = codes @ dequantized(w.fc2_weight, w.fc2_weight_sf, expert).T * w.fc2_alpha[expert] * router_weights.unsqueeze(-1)
        result.index_add_(0, token, share.to(torch.bfloat16).float())


def _off_ties(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """Move bf16 values ``(tokens, H)`` whose block scale or code sits on a rounding tie by one bf16 step.

    Kernels that divide and kernels that multiply by a reciprocal round a tie to different codes.
    """
    values = x.unflatten(-1, (-1, BLOCK_SIZE))
    amax = values.abs().amax(-1, keepdim=True)
    values = _next_bf16(values, _tied(amax.float() / (E2M1_MAX * divisor), round_to_e4m3) & (values.abs() == amax))
    block_scale = round_to_e4m3(values.abs().amax(-1, keepdim=True).float() / (E2M1_MAX * divisor)).float()
    return _next_bf16(values, _tied(values.float() / (block_scale * divisor).clamp(min=1e-30), round_to_e2m1)).flatten(-2)


def _tied(values: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    below, above = (rounded(values * factor).view(torch.uint8) for factor in (1 - _TIE, 1 + _TIE))
    return below != above


def _next_bf16(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the bf16 values next farther from zero where ``mask`` is set."""
    return (values.view(torch.int16) + mask.to(torch.int16)).view(torch.bfloat16)


def _decoded(call: MoECall) -> torch.Tensor:
    """Convert input that the host has quantized to float32, in units of the input scale."""
    assert call.x_sf is not None
    x = call.x.view(torch.uint8)
    return dequantize(x, scales_of_tokens(call.x_sf, x.shape[0], x.shape[1] // 8, call.swizzled).view(torch.float8_e4m3fn))


def activate(
    activation: str,
    fc1: torch.Tensor,
    gate: torch.Tensor | None = None,
    alpha: torch.Tensor | float = 1.0,
    beta: torch.Tensor | float = 0.0,
    limit: float = math.inf,
) -> torch.Tensor:
    """FC1's product to FC2's input, float32, as CUTLASS has it; ``fc1`` is up's half where there is a ``gate``."""
    if gate is None:
        if activation == "Relu2":
            return torch.relu(fc1) ** 2
        return torch.nn.functional.silu(fc1) if activation == "Silu" else torch.nn.functional.gelu(fc1)
    if activation == "Geglu":
        return torch.nn.functional.gelu(gate) * fc1
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (fc1.clamp(-limit, limit) + beta)


def dequantized(weight: torch.Tensor, block_scales: torch.Tensor, expert: int) -> torch.Tensor:
    """A local expert's matrix, float32, without ``weight_scale_2``.

    Args:
        weight: ``(E, rows, columns/2)`` uint8.
        block_scales: the kernels' view of its scales.
    """
    rows, halves = weight.shape[1:]
    return dequantize(weight[expert], plain_scales(block_scales[..., expert : expert + 1])[0, :rows, : halves // 8])
