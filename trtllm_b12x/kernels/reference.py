# SPDX-License-Identifier: Apache-2.0
"""Compute the kernels in torch, on the CPU and any GPU, for machines without a card and as the reference of the self-test.

They read the real kernels' tensors in the same layout, so that a wrong layout shows as a wrong number. They round where the
family does (class attributes). ``ReferenceKernel`` computes b12x, the static kernel of FlashInfer 0.7.2.post1. Its files are
below ``flashinfer/fused_moe/cute_dsl/blackwell_sm12x`` unless the table names another folder:

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

The last bit of ``rcp.approx`` and ``ex2.approx``, and the order of float32 sums inside a GEMM, are not reproduced. In one of 66
measured cases this shows (2e-5). The other results equal the static kernel bit for bit (docs/sm12x-on-hopper.md).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from trtllm_b12x.decision import Environment, KernelFeatures, families
from trtllm_b12x.formats import mxfp8, nvfp4
from trtllm_b12x.formats.layouts import scales_of_tokens
from trtllm_b12x.formats.nvfp4 import BLOCK_SIZE, E2M1_MAX, NVFP4Weights

from . import Geometry, Kernel, MoECall
from .routes import ExpertRange, of_known_types
from .scoring import routes_of

_ELEMENTS = 1 << 27
"""Weights that ``each_expert`` dequantizes at a time: 256 MB in 16 bits."""


class ReferenceKernel(Kernel):
    """b12x: NVFP4 activations (W4A4), FC2 rounded per 256 columns."""

    features = KernelFeatures(
        name="reference",
        activations=frozenset({"Swiglu", "Relu2"}),
        tile=256,  # FlashInfer 0.7.x pads to 256 below the static cut-over (moe_dispatch.py:3542)
        hidden_size_multiple=128,
        negative_ids=True,
        graph_safe=False,  # the CPU reads which experts have tokens
        deterministic=True,
        most_routes=families.STATIC_ROUTED_ROWS,
    )
    multiple: ClassVar[int] = 128
    """The intermediate size must be a multiple of this."""
    quantizes: ClassVar[bool] = True
    """Activations are rounded to the format of the weights before each product."""
    partial_columns: ClassVar[int] = 256
    """FC2's product is rounded to bf16 per this many columns, before alpha and router weight; 0 for no such rounding."""
    rounds_shares: ClassVar[bool] = True
    """Each route's share is rounded to bf16."""

    rounds_products: ClassVar[bool] = False
    """Products are rounded to the layer's dtype, before biases. Activations are quantized by reciprocals, and MXFP8
    scales are rounded up."""

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        self.check(geometry, (self.features.hidden_size_multiple, self.multiple))
        self.geometry, self.capacity, self.device = geometry, capacity, device

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        weights.check(self.geometry)
        self.weights, self.experts = weights, ExpertRange(first_expert, self.geometry.num_experts)

    def self_test(self) -> None:
        """Do nothing: other kernels are compared with this kernel."""

    def run(self, call: MoECall) -> torch.Tensor:
        g, tokens = self.geometry, call.x.shape[0]
        if tokens > self.capacity:
            raise ValueError(f"{tokens} tokens exceed the planned capacity of {self.capacity}")
        call.check(g, self.features.quantized_input)
        if g.scoring is None or call.router_logits is None:
            ids, router_weights = of_known_types(call.ids, call.router_weights)
        else:
            ids, router_weights = routes_of(g.scoring, g.top_k, call.router_logits, call.router_bias)
            if call.padding is not None:
                ids = ids.masked_fill(call.padding.unsqueeze(1), -1)
        self.weights.derive()
        x, prequantized = call.x, call.x_sf is not None
        if call.x_sf is not None:
            scales = scales_of_tokens(call.x_sf, tokens, g.hidden_size // BLOCK_SIZE, call.swizzled)
            x = nvfp4.dequantize(x.view(torch.uint8), scales.view(torch.float8_e4m3fn))
        result = torch.zeros(tokens, g.hidden_size, dtype=torch.float32, device=x.device)
        local = self.experts.local(ids)
        for expert in local[local >= 0].unique().tolist():
            token, slot = (local == expert).nonzero(as_tuple=True)
            for share in self._shares(expert, x[token], router_weights[token, slot].float().unsqueeze(-1), prequantized):
                result.index_add_(0, token, share)
        return result.to(g.dtype) if call.out is None else call.out.copy_(result)

    def _shares(self, expert: int, x: torch.Tensor, router_weights: torch.Tensor, prequantized: bool) -> Iterator[torch.Tensor]:
        """Yield a local expert's contributions to its tokens, float32 ``(n, H)``.

        Args:
            prequantized: the engine has quantized ``x``, which is in units of the input scale.
        """
        g, w, extra = self.geometry, self.weights, self.weights.epilogue
        scale_1, scale_2, divisor_1, divisor_2 = self._scales(expert)
        if self.quantizes:
            x = x if prequantized else self._quantized(x, divisor_1)
        elif prequantized:
            x = x * w.fc1_divisor[0]  # an engine that quantizes the input has one input scale for all experts
        fc1 = self._rounded(x.float() @ w.matrix(expert, "fc1_weight")[:, : g.hidden_size].T * scale_1)
        if extra.fc1_bias is not None:
            fc1 = fc1 + w.ordered(extra.fc1_bias[expert]).float()
        constants = (float(tensor[expert]) for tensor in extra.swiglu(g.num_experts, fc1.device)) if g.gated else ()
        inner = activate(g.activation, *fc1.split(g.intermediate_size, dim=1), *constants).to(torch.bfloat16)
        inner = self._quantized(inner, divisor_2) if self.quantizes else inner.float()
        fc2 = w.matrix(expert, "fc2_weight")[: g.hidden_size]
        if self.quantizes and self.partial_columns:
            factor = (router_weights * scale_2).to(torch.bfloat16)
            for columns, rows in zip(inner.split(self.partial_columns, 1), fc2.split(self.partial_columns, 1), strict=True):
                yield ((columns @ rows.T).to(torch.bfloat16) * factor).float()
            return
        share = self._rounded(inner @ fc2.T * scale_2)
        if extra.fc2_bias is not None:
            share = share + extra.fc2_bias[expert, : g.hidden_size].float()
        share = share * router_weights
        yield share.to(torch.bfloat16).float() if self.rounds_shares else share

    def each_expert(self, x: torch.Tensor) -> torch.Tensor:
        """Run each of the first n local experts on its own row of ``x (n, H)``. Return float32 ``(n, H)``.

        Several experts run at a time, without synchronizing.
        """
        g, w, extra, count = self.geometry, self.weights, self.weights.epilogue, len(x)
        w.derive()
        alphas: tuple[Any, Any] = (1.0, 1.0)
        divisors: tuple[Any, Any] = (None, None)
        if isinstance(w, NVFP4Weights):
            halves = w.half_alphas(slice(count)).T if g.gated else w.fc1_alpha[:count].unsqueeze(1)
            alphas = halves.repeat_interleave(g.intermediate_size, 1), w.fc2_alpha[:count].unsqueeze(1)
            divisors = w.fc1_divisor[:count].unsqueeze(1), w.fc2_divisor[:count].unsqueeze(1)
            if not self.quantizes:
                alphas, divisors = tuple(a / d for a, d in zip(alphas, divisors, strict=True)), (None, None)  # type: ignore[assignment]

        # 16 bits hold every operand exactly and halve the reads. A GPU sums their products in float32, a CPU does not.
        kind = (torch.bfloat16 if self.quantizes else g.dtype) if x.is_cuda else torch.float32
        multiply: Any = functools.partial(torch.bmm, out_dtype=torch.float32) if x.is_cuda else torch.bmm

        def product(name: str, rows: torch.Tensor, columns: int) -> torch.Tensor:
            per_expert = math.prod(getattr(w, name).shape[1:]) * w.packed
            step = max(1, _ELEMENTS // per_expert)
            slots = (slice(first, min(first + step, count)) for first in range(0, count, step))
            rows = rows.to(kind).unsqueeze(2)
            return torch.cat([multiply(w.matrices(s, name, kind)[:, :, :columns], rows[s]).squeeze(2) for s in slots])

        def inputs(values: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
            if not self.quantizes:
                return values.float()
            return self._quantized(values, None if divisor is None else divisor.unsqueeze(2))

        fc1 = self._rounded(w.ordered(product("fc1_weight", inputs(x, divisors[0]), g.hidden_size), 1) * alphas[0])
        if extra.fc1_bias is not None:
            fc1 = fc1 + w.ordered(extra.fc1_bias[:count], 1).float()
        constants = [tensor[:count].unsqueeze(1) for tensor in extra.swiglu(g.num_experts, fc1.device)] if g.gated else []
        inner = activate(g.activation, *fc1.split(g.intermediate_size, dim=1), *constants).to(g.dtype)
        fc2 = self._rounded(product("fc2_weight", inputs(inner, divisors[1]), g.intermediate_size) * alphas[1])
        if extra.fc2_bias is not None:
            fc2 = fc2 + extra.fc2_bias[:count].float()
        return fc2[:, : g.hidden_size]

    def _rounded(self, product: torch.Tensor) -> torch.Tensor:
        return product.to(self.geometry.dtype).float() if self.rounds_products else product

    def _scales(self, expert: int) -> tuple[Any, Any, Any, Any]:
        """Return a local expert's factors of FC1 (per row) and FC2 sums, and the divisors that quantize its activations."""
        w, g = self.weights, self.geometry
        if not isinstance(w, NVFP4Weights):
            return 1.0, 1.0, None, None
        alpha_1 = w.half_alphas(expert).repeat_interleave(g.intermediate_size) if g.gated else w.fc1_alpha[expert]
        alpha_2, divisor_1, divisor_2 = w.fc2_alpha[expert], w.fc1_divisor[expert], w.fc2_divisor[expert]
        if self.quantizes:
            return alpha_1, alpha_2, divisor_1, divisor_2
        return alpha_1 / divisor_1, alpha_2 / divisor_2, None, None

    def _quantized(self, values: torch.Tensor, divisor: torch.Tensor | None) -> torch.Tensor:
        """Round 16-bit values ``(n, K)`` to the weights' format. Return float32 in units of ``divisor``."""
        if divisor is None:
            return mxfp8.dequantize(*mxfp8.quantize(values, self.rounds_products))
        blocks = values.float().unflatten(-1, (-1, BLOCK_SIZE))
        amax = blocks.abs().amax(-1, keepdim=True)
        if self.geometry.gated or self.rounds_products:
            reciprocal = divisor.reciprocal()
            block_scale = nvfp4.round_to_e4m3(reciprocal * (amax * (1.0 / torch.tensor(E2M1_MAX)))).float()
            inverse = block_scale.reciprocal() * reciprocal
        else:
            block_scale = nvfp4.round_to_e4m3(amax / (E2M1_MAX * divisor)).float()
            inverse = (block_scale * divisor).reciprocal()
        usable = (block_scale > 0) & (divisor != 0)
        codes = nvfp4.round_to_e2m1(torch.where(usable, blocks * inverse, torch.zeros_like(blocks)))
        return (nvfp4.decode_e2m1(codes) * block_scale).flatten(-2)


class UnquantizedReferenceKernel(ReferenceKernel):
    """Reference for the Triton decode kernels for NVFP4 (W4A16). Activations are unquantized, or quantized by the engine."""

    features = dataclasses.replace(families.triton(Environment()), name="reference W4A16", graph_safe=False)
    takes_logits = True
    multiple = 16
    quantizes = rounds_shares = False


class W4A16UnquantizedReferenceKernel(UnquantizedReferenceKernel):
    """Reference for the Triton decode kernels for W4A16_NVFP4."""

    features = dataclasses.replace(families.triton_w4a16(Environment()), name="reference W4A16", graph_safe=False)


class W4A16ReferenceKernel(UnquantizedReferenceKernel):
    """Reference for the gemm kernels for W4A16_NVFP4."""

    features = dataclasses.replace(families.gemm_w4a16(Environment()), name="reference W4A16", graph_safe=False)
    takes_logits = False


class MXFP4UnquantizedReferenceKernel(UnquantizedReferenceKernel):
    """Reference for the Triton decode kernels for MXFP4."""

    features = dataclasses.replace(families.triton_mxfp4(Environment()), name="reference W4A16", graph_safe=False)
    multiple = 32


class MXFP4ReferenceKernel(MXFP4UnquantizedReferenceKernel):
    """Reference for the gemm kernels for MXFP4."""

    features = dataclasses.replace(families.gemm_mxfp4(Environment()), name="reference W4A16", graph_safe=False)
    takes_logits = False


class QuantizedReferenceKernel(ReferenceKernel):
    """Reference for the grouped NVFP4 kernels (W4A4). Each route's share is bf16, the sum is float32."""

    features = dataclasses.replace(families.grouped_nvfp4(Environment()), name="reference W4A4", graph_safe=False)
    multiple = 16
    partial_columns = 0


class CutlassReferenceKernel(QuantizedReferenceKernel):
    """Reference for CUTLASS with NVFP4 (W4A4; ``moe_kernels.cu`` of TensorRT-LLM, which FlashInfer has too)."""

    rounds_products, rounds_shares = True, False


class CutlassW4A16ReferenceKernel(W4A16ReferenceKernel):
    """Reference for TensorRT-LLM's path for W4A16_NVFP4."""

    rounds_products = True


class CutlassMXFP4ReferenceKernel(MXFP4ReferenceKernel):
    """Reference for TensorRT-LLM's path for MXFP4, which quantizes activations to MXFP8."""

    quantizes = rounds_products = True
    partial_columns = 0


CUTLASS: dict[str, type[ReferenceKernel]] = {
    "NVFP4": CutlassReferenceKernel,
    "W4A16_NVFP4": CutlassW4A16ReferenceKernel,
    "MXFP4": CutlassMXFP4ReferenceKernel,
}
"""Reference class of the engine's path by number format."""


class MXFP8ReferenceKernel(ReferenceKernel):
    """Reference for the grouped MXFP8 kernels (W8A8)."""

    features = dataclasses.replace(families.grouped(Environment()), name="reference W8A8", graph_safe=False)
    multiple = 32
    partial_columns = 0


class MXFP8UnquantizedReferenceKernel(MXFP8ReferenceKernel):
    """Reference for the Triton decode kernels for MXFP8 (W8A16)."""

    features = dataclasses.replace(families.triton_mxfp8(Environment()), name="reference W8A16", graph_safe=False)
    takes_logits = True
    quantizes = rounds_shares = False


def activate(
    activation: str,
    fc1: torch.Tensor,
    gate: torch.Tensor | None = None,
    alpha: torch.Tensor | float = 1.0,
    beta: torch.Tensor | float = 0.0,
    limit: Any = math.inf,
) -> torch.Tensor:
    """Convert FC1's product to FC2's input, float32, as CUTLASS does. ``fc1`` is the up half if ``gate`` is given."""
    if gate is None:
        if activation == "Relu2":
            return torch.relu(fc1) ** 2
        return torch.nn.functional.silu(fc1) if activation == "Silu" else torch.nn.functional.gelu(fc1)
    if activation == "Geglu":
        return torch.nn.functional.gelu(gate) * fc1
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (fc1.clamp(-limit, limit) + beta)
