# SPDX-License-Identifier: Apache-2.0
"""Random experts of four-bit codes (NVFP4, W4A16_NVFP4, MXFP4) in any layout, and the layer in float32 on 16-bit activations.

Every activation, bias and padding that a kernel may be given; :mod:`trtllm_b12x.tools.verify.reference` has the checkpoint's
tensors and two activations only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from trtllm_b12x.formats import BY_TURNS, GATE_UP, ROWS
from trtllm_b12x.formats.mxfp4 import MXFP4Weights
from trtllm_b12x.formats.nvfp4 import InputScales, NVFP4Weights, W4A16NVFP4Weights
from trtllm_b12x.formats.weights import Epilogue
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.tools.verify.reference_formats import decode_fp4

INPUT_SCALE = (0.0123, 0.00045)
"""Of FC1 and FC2: what a kernel that multiplied by one of them would be off by."""


@dataclass
class Layer:
    """E local experts, H hidden size, I intermediate size, r = 2 if gated (rows [up; gate])."""

    geometry: Geometry
    w1: torch.Tensor
    """``(E, r*I, H/2)`` uint8."""
    s1: torch.Tensor
    """``(E, r*I, H/16)`` float8_e4m3fn, in rows; of MXFP4 ``(E, r*I, H/32)`` uint8."""
    w2: torch.Tensor
    """``(E, H, I/2)`` uint8."""
    s2: torch.Tensor
    """``(E, H, I/16)`` float8_e4m3fn, or ``(E, H, I/32)`` uint8."""
    scale_1: torch.Tensor
    """``(E,)`` float32: ``weight_scale_2`` of FC1, the larger one of up and gate."""
    scale_2: torch.Tensor
    shares: torch.Tensor
    """``(2, E)`` float32: up's and gate's own scale over ``scale_1``; one of the two is 1."""
    epilogue: Epilogue

    def kernel_weights(self, one_for_all: bool = True) -> Any:
        """As the layer's format and layout have them.

        Args:
            one_for_all: experts have one input scale of FC1 in common; of FC2 each has its own.
        """
        own = torch.arange(1, len(self.scale_1) + 1, device=self.scale_1.device)
        fc1, fc2 = torch.full_like(self.scale_1, INPUT_SCALE[0]), INPUT_SCALE[1] * own
        if not one_for_all:
            fc1 *= own
        fc31_input_scale, fc2_input_scale = (fc1[0] if one_for_all else fc1).reciprocal(), fc2.reciprocal()
        divisors = torch.empty_like(self.scale_1), torch.empty_like(self.scale_1)
        inputs = InputScales(fc31_input_scale, fc2_input_scale, *divisors)
        inputs.derive()
        layout = self.geometry.layout
        hidden = self.geometry.stored_hidden
        w1, s1, w2, s2 = self.stored(self.w1), self.stored(self.s1), self.w2, self.s2
        if hidden != self.geometry.hidden_size:
            w1, s1 = padded(w1, 2, hidden // 2), padded(s1, 2, hidden * s1.shape[2] // self.geometry.hidden_size)
            w2, s2 = padded(w2, 1, hidden), padded(s2, 1, hidden)
        extra = self.epilogue
        if extra.fc1_bias is not None and extra.fc2_bias is not None:
            extra = replace(extra, fc1_bias=self.stored(extra.fc1_bias), fc2_bias=padded(extra.fc2_bias, 1, hidden))
        s1, s2 = (s.contiguous() if layout.scales == ROWS else interleaved(s) for s in (s1, s2))
        if self.geometry.format == "MXFP4":
            return MXFP4Weights(w1, s1, w2, s2, epilogue=extra, layout=layout)
        kind = W4A16NVFP4Weights if self.geometry.format == "W4A16_NVFP4" else NVFP4Weights
        return kind(
            fc1_weight=w1,
            fc1_weight_sf=s1,
            fc1_alpha=self.scale_1 * fc1,
            fc2_weight=w2,
            fc2_weight_sf=s2,
            fc2_alpha=self.scale_2 * fc2,
            fc2_divisor=inputs.fc2_divisor,
            fc1_divisor=inputs.fc1_divisor,
            input_scales=inputs,
            fc1_half_alphas=self.scale_1 * fc1 * self.shares if self.geometry.gated else None,
            epilogue=extra,
            layout=layout,
        )

    def stored(self, rows: torch.Tensor) -> torch.Tensor:
        """FC1's rows, ``(E, r*I, ...)``, in the order of the layout."""
        if not self.geometry.gated:
            return rows
        up, gate = rows.chunk(2, dim=1)
        if self.geometry.layout.fc1 == GATE_UP:
            return torch.cat((gate, up), dim=1)
        return torch.stack((gate, up), dim=2).flatten(1, 2) if self.geometry.layout.fc1 == BY_TURNS else rows

    def expected(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor, first: int = 0) -> torch.Tensor:
        """float32 ``(tokens, H)``."""
        g, extra = self.geometry, self.epilogue
        result = torch.zeros(x.shape[0], g.hidden_size, device=x.device)
        local = ids.long() - first
        for e in local[(local >= 0) & (local < g.num_experts)].unique().tolist():
            token, slot = (local == e).nonzero(as_tuple=True)
            weight = router_weights[token, slot].float().unsqueeze(1)
            fc1 = x[token].float() @ (dequantized(self.w1[e], self.s1[e]) * self.scale_1[e]).T
            bias = extra.fc1_bias[e].float() if extra.fc1_bias is not None else torch.zeros(fc1.shape[1], device=x.device)
            if g.gated:
                up, gate = fc1.chunk(2, dim=1)
                up, gate = up * self.shares[0, e], gate * self.shares[1, e]
                up_bias, gate_bias = bias.chunk(2)
                inner = self._gated(e, up + up_bias, gate + gate_bias)
            else:
                inner = plain(g.activation, fc1 + bias)
            fc2 = inner @ (dequantized(self.w2[e], self.s2[e]) * self.scale_2[e]).T
            if extra.fc2_bias is not None:
                fc2 = fc2 + extra.fc2_bias[e].float()
            result.index_add_(0, token, fc2 * weight)
        return result

    def _gated(self, e: int, up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.geometry.activation == "Geglu":
            return torch.nn.functional.gelu(gate) * up
        extra = self.epilogue
        alpha, beta, limit = (
            value if tensor is None else float(tensor[e])
            for tensor, value in ((extra.swiglu_alpha, 1.0), (extra.swiglu_beta, 0.0), (extra.swiglu_limit, math.inf))
        )
        gate = gate.clamp(max=limit)
        return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + beta)


def plain(activation: str, values: torch.Tensor) -> torch.Tensor:
    functions = {"Relu2": lambda x: torch.relu(x) ** 2, "Silu": torch.nn.functional.silu, "Gelu": torch.nn.functional.gelu}
    return functions[activation](values)


def dequantized(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """E2M1 times E4M3 of 16 columns, or E8M0 (uint8) of 32."""
    values = decode_fp4(weight)
    if scales.dtype is torch.uint8:
        powers = torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - 127)
        factors, block = torch.where(scales == 255, torch.nan, powers), 32
    else:
        factors, block = scales.float(), 16
    return (values.unflatten(-1, (-1, block)) * factors.unsqueeze(-1)).flatten(-2)


def padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Zeros behind what is there."""
    shape = list(tensor.shape)
    shape[dim] = size
    result = torch.zeros(shape, dtype=torch.uint8, device=tensor.device) if tensor.itemsize == 1 else tensor.new_zeros(shape)
    result.narrow(dim, 0, tensor.shape[dim]).copy_(tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor)
    return result.view(tensor.dtype)


def interleaved(scales: torch.Tensor) -> torch.Tensor:
    """Row-major ``(E, rows, blocks)`` to what the kernels take, tiles of 128 rows and 4 blocks padded with what is no number."""
    experts, rows, blocks = scales.shape
    tall, wide = -(-rows // 128), -(-blocks // 4)
    filled = torch.full((experts, tall * 128, wide * 4), 0xFF, dtype=torch.uint8, device=scales.device)
    filled[:, :rows, :blocks] = scales.view(torch.uint8)
    tiles = filled.view(experts, tall, 4, 32, wide, 4).permute(0, 1, 4, 3, 2, 5).contiguous()
    return tiles.view(scales.dtype).permute(3, 4, 1, 5, 2, 0)


class _Elsewhere(torch.Tensor):
    device = torch.device("cuda", 1)

    def get_device(self) -> int:
        return 1


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as one of another device."""
    return tensor.as_subclass(_Elsewhere)


def random_layer(geometry: Geometry, device: str = "cpu", seed: int = 0, ratio: bool = False) -> Layer:
    """Every code, and block scales of every size, subnormal ones too; products of about one."""
    generator = torch.Generator(device).manual_seed(seed)
    g = geometry
    rows = (2 if g.gated else 1) * g.intermediate_size

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        if g.format == "MXFP4":  # powers of two about a tenth over the root of the row's length
            middle = 127 + round(math.log2(0.2 / math.sqrt(32 * shape[-1])))
            return torch.randint(middle - 2, middle + 3, shape, dtype=torch.uint8, device=device, generator=generator)
        drawn = uniform(*shape) * 2 + 0.1
        small = uniform(*shape)
        return torch.where(small < 0.1, drawn * 2**-8, torch.where(small > 0.98, drawn * 8, drawn)).to(torch.float8_e4m3fn)

    def size(inner: int) -> torch.Tensor:
        """Of weight scales, so that ``inner`` products of unit values sum to about one."""
        return (0.5 + uniform(g.num_experts)) * (0.2 / math.sqrt(inner))

    ratios = 0.5 + uniform(g.num_experts) if ratio and g.gated else torch.ones(g.num_experts, device=device)
    shares = torch.stack((ratios, ratios.reciprocal())).clamp(max=1)
    extra = Epilogue(
        fc1_bias=(uniform(g.num_experts, rows) - 0.5).to(g.bias) if g.bias else None,
        fc2_bias=(uniform(g.num_experts, g.hidden_size) - 0.5).to(g.bias) if g.bias else None,
        **(
            {
                "swiglu_alpha": torch.full((g.num_experts,), 1.702, device=device),
                "swiglu_beta": torch.ones(g.num_experts, device=device),
                "swiglu_limit": 0.7 + uniform(g.num_experts),
            }
            if g.activation == "SwigluBias"
            else {}
        ),
    )
    experts, hidden, inner = g.num_experts, g.hidden_size, g.intermediate_size
    block = 32 if g.format == "MXFP4" else 16
    w1, s1 = codes(experts, rows, hidden // 2), scales(experts, rows, hidden // block)
    w2, s2 = codes(experts, hidden, inner // 2), scales(experts, hidden, inner // block)
    if g.format == "MXFP4":
        one = torch.ones(experts, device=device)
        return Layer(g, w1, s1, w2, s2, one, one, torch.ones(2, experts, device=device), extra)
    return Layer(g, w1, s1, w2, s2, size(hidden), size(inner), shares, extra)


def random_call(
    geometry: Geometry,
    tokens: int,
    experts: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, global ids of ``experts`` (those of the layer), and scales."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, geometry.hidden_size, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts or geometry.num_experts, generator=generator).argsort(1)[:, : geometry.top_k].int()
    router_weights = torch.softmax(torch.randn(tokens, geometry.top_k, generator=generator), 1)
    return x.to(device), ids.contiguous().to(device), router_weights.to(device)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2."""
    return float((found.float().to(expected.device) - expected).norm() / expected.norm())


def worst_token(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest relative L2 of a token; of a token without routes, relative to the mean norm."""
    errors, norms = (found.float().to(expected.device) - expected).norm(dim=1), expected.norm(dim=1)
    return float((errors / torch.where(norms > 0, norms, norms.mean())).max())
