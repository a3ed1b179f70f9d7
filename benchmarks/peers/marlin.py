# SPDX-License-Identifier: Apache-2.0
"""vLLM's Marlin on NVFP4 and MXFP4 experts, W4A16: its libraries' operators, called as vLLM calls them for a whole layer.

A call sorts routes and runs FC1, the activation, FC2 with the router weights, and the sum over routes. Sizes that Marlin's
tiles do not divide are padded as vLLM pads gpt-oss (hidden size to 256, intermediate size to 128), and a call then pads x.

Read in vLLM 0.22.1: ``fused_moe/experts/marlin_moe.py`` (calls and block sizes), ``fused_moe/activation.py``,
``quantization/utils/marlin_utils_fp4.py`` (scales), ``marlin_utils.py`` (order of scales and bias), ``marlin_utils_test.py``
(order of codes), ``fused_moe/oracle/mxfp4.py`` (padding), ``scalar_type.py`` (type numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.peers import parts
from benchmarks.peers.layers import LIMIT
from tests.nvfp4_layer import Layer
from trtllm_b12x.kernels import Geometry

FLOAT4_E2M1F = 2 | 1 << 8 | 1 << 16 | 1 << 49
"""Number of the type: 2 exponent bits, 1 mantissa bit, signed, finite values only."""
_OPERATORS = ("moe_wna16_marlin_gemm", "moe_align_block_size", "moe_sum")
_EARLIER = {"g_idx_or_none": None, "perm_or_none": None, "is_full_k": True}
"""Arguments that the product has in vLLM 0.22.1 and does not have in 0.33.0."""
_BLOCKS_PER_SM = 4
"""Entries per SM in the workspace of a layer of experts."""


def lacks(geometry: Geometry, vllm: Path | None) -> str:
    """Return why the layer cannot be measured, or an empty string."""
    if geometry.format not in ("NVFP4", "W4A16_NVFP4", "MXFP4") or geometry.activation not in ("Swiglu", "SwigluBias", "Relu2"):
        return f"this comparison has no {geometry.format} layer with {geometry.activation}"
    if vllm is None:
        return parts.MISSING
    error = parts.load_operators(vllm)
    absent = [name for name in _OPERATORS if not hasattr(torch.ops._moe_C, name)]
    return error or (f"{vllm} registers no {', '.join(absent)}; vLLM 0.22.1 does" if absent else "")


class Matrix(NamedTuple):
    """Weights of one product for all experts, K inputs and N outputs, in Marlin's order."""

    codes: torch.Tensor
    """``(E, K / 16, 2 * N)`` int32."""
    scales: torch.Tensor
    """``(E, K / 16, N)`` float8_e4m3fn that holds 5 exponent and 3 mantissa bits; in MXFP4 ``(E, K / 32, N)`` float8_e8m0fnu."""
    global_scales: torch.Tensor | None
    """``(E,)`` float32."""
    bias: torch.Tensor | None
    """``(E, N)`` bfloat16."""


def codes_in_tiles(weight: torch.Tensor) -> torch.Tensor:
    """Reorder codes ``(E, N, K / 2)`` uint8, low nibble first, into tiles of 16 inputs and 64 outputs.

    An int32 holds eight codes of one thread's ``mma`` fragments: input ``8 * half + 2 * quad + pair``, output ``16 * part +
    8 * block + column``. The word's nibbles are (pair, block, half), the tile's words (column, quad, part).
    """
    experts, n, packed = weight.shape
    k = 2 * packed
    codes = torch.stack((weight & 15, weight >> 4), dim=-1)
    codes = codes.view(experts, n // 64, 4, 2, 8, k // 16, 2, 4, 2).permute(0, 5, 1, 4, 7, 2, 8, 3, 6)
    low, high = codes.reshape(experts, k // 16, 8 * n, 2).unbind(-1)
    return (low | high << 4).view(torch.int32)


def scales_in_order(scales: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Reorder nonnegative scales ``(E, N, K / 16)`` float8_e4m3fn; return ``(E, K / 16, N)`` and the factor in them.

    The kernel reads 5 exponent and 3 mantissa bits, the upper ones of ``scale * factor * 2**7`` in float16 without its sign. The
    factor, a power of two, uses the range of E4M3.
    """
    largest = float(scales.float().max())
    factor = float(2.0 ** torch.tensor(448.0 / largest).log2().floor()) if 0 < largest < 448 else 1.0
    half = (scales.float() * (factor * 2**7)).half().transpose(1, 2)
    half = _of_threads(half)
    bits = torch.where(half < 2, 0, half).view(torch.int16) << 1
    return bits.view(torch.uint8)[..., 1::2].contiguous().view(torch.float8_e4m3fn), factor


def _of_threads(scales: torch.Tensor) -> torch.Tensor:
    """Reorder ``(E, groups, N)`` as threads read them."""
    experts, groups, n = scales.shape
    return scales.reshape(experts, groups, n // 64, 2, 2, 2, 8).permute(0, 1, 2, 6, 3, 5, 4).reshape(experts, groups, n)


def bias_in_order(bias: torch.Tensor) -> torch.Tensor:
    """Reorder bias ``(E, N)`` within groups of 32 outputs."""
    return bias.view(len(bias), -1, 4, 4, 2).transpose(2, 3).reshape(bias.shape).contiguous()


def padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def pad(values: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Append zeros to the last dimensions, up to ``sizes``."""
    missing = [(0, new - old) for new, old in zip(sizes, values.shape[-len(sizes) :], strict=True)]
    return torch.nn.functional.pad(values, [n for pair in reversed(missing) for n in pair])


def rows(geometry: Geometry, values: torch.Tensor, intermediate: int) -> torch.Tensor:
    """Reorder FC1's rows ``(E, r * I, ...)``, padded to ``intermediate``: [up; gate] to [gate; up], alternating for gpt-oss."""
    if values.ndim == 2:
        return rows(geometry, values.unsqueeze(-1), intermediate).squeeze(-1)
    if not geometry.gated:
        return pad(values, intermediate, values.shape[-1])
    halves = pad(values.unflatten(1, (2, -1)), intermediate, values.shape[-1]).flip(1)
    if geometry.activation == "SwigluBias":
        halves = halves.transpose(1, 2)
    return halves.flatten(1, 2)


def matrix(
    codes: torch.Tensor, scales: torch.Tensor, scale_2: torch.Tensor, bias: torch.Tensor | None, weighted: bool = False
) -> Matrix:
    """Convert one product's tensors to Marlin's order.

    ``weighted``: the call multiplies by router weights. The kernel of vLLM 0.22.1 then multiplies by the global scale after it
    adds the bias, so the bias is divided by that scale.
    """
    if scales.shape[2] * 16 == codes.shape[2]:  # MXFP4: one scale per 32 codes, two codes per byte
        powers = _of_threads(scales.transpose(1, 2)).contiguous().view(torch.float8_e8m0fnu)
        return Matrix(codes_in_tiles(codes), powers, None, None if bias is None else bias_in_order(bias.bfloat16()))
    ordered, factor = scales_in_order(scales.view(torch.float8_e4m3fn))
    # exponent bias of bfloat16 minus that of E2M1, minus 7 for the 2**7 in the block scales
    global_scales = scale_2.float() * 2.0 ** (126 - 7) / factor
    if bias is not None and weighted:
        bias = bias.float() / global_scales.unsqueeze(1)
    return Matrix(codes_in_tiles(codes), ordered, global_scales, None if bias is None else bias_in_order(bias.bfloat16()))


class MarlinLayer:
    """One layer's weights for Marlin, converted from our layer."""

    def __init__(self, layer: Layer, workspace: torch.Tensor) -> None:
        g = self.geometry = layer.geometry
        self.layer, self.workspace = layer, workspace
        self.hidden, self.inner = hidden, inner = padded(g.hidden_size, 256), padded(g.intermediate_size, 128)
        bias_1, bias_2 = layer.epilogue.fc1_bias, layer.epilogue.fc2_bias
        group = 32 if g.format == "MXFP4" else 16
        self.quantization = f"W4A16 {'MXFP4' if g.format == 'MXFP4' else 'NVFP4'}"

        def first(values: torch.Tensor, width: int) -> torch.Tensor:
            return pad(rows(g, values.view(torch.uint8), inner), width)

        self.first = matrix(
            first(layer.w1, hidden // 2),
            first(layer.s1, hidden // group),
            layer.scale_1,
            None if bias_1 is None else rows(g, bias_1, inner),
        )
        self.second = matrix(
            pad(layer.w2, hidden, inner // 2),
            pad(layer.s2.view(torch.uint8), hidden, inner // group),
            layer.scale_2,
            None if bias_2 is None else pad(bias_2, hidden),
            weighted=True,
        )
        stored = (self.first.codes, self.first.scales, self.second.codes, self.second.scales)
        self.expert_bytes = sum(part.nbytes for part in stored) / g.num_experts
        self.expected = layer.expected

    def prepare(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> tuple[Any, ...]:
        return x, ids, router_weights.float()

    def sort(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Return the sorted routes, the expert of each block, the number of padded routes, and the rows of a block."""
        experts, count = self.geometry.num_experts, ids.numel()
        block = next((size for size in (8, 16, 32, 48) if count / experts / size < 0.9), 64)
        length = count + experts * (block - 1)
        if count < experts:
            length = min(count * block, length)
        sizes = (length, -(-length // block), 1)
        order, blocks, total = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
        torch.ops._moe_C.moe_align_block_size(ids, experts, block, order, blocks, total, None)
        return order, blocks, total, block

    def output(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
        (tokens, top_k), order = ids.shape, self.sort(ids)
        if self.hidden != x.shape[1]:
            x = pad(x, self.hidden)
        inner = self.gemm(x, self.first, router_weights, order, tokens, top_k, False)
        outer = self.gemm(self.activated(inner), self.second, router_weights, order, tokens * top_k, 1, True)
        result = torch.empty(tokens, self.hidden, dtype=x.dtype, device=x.device)
        torch.ops._moe_C.moe_sum(outer.view(tokens, top_k, self.hidden), result)
        return result[:, : self.geometry.hidden_size]

    def activated(self, inner: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(inner), self.inner, dtype=inner.dtype, device=inner.device)
        if self.geometry.activation == "Swiglu":
            torch.ops._C.silu_and_mul(out, inner)
        elif self.geometry.activation == "SwigluBias":
            torch.ops._C.swigluoai_and_mul(out, inner, 1.702, LIMIT)
        else:
            torch.square(torch.relu_(inner), out=out)
        return out

    def gemm(
        self, a: torch.Tensor, b: Matrix, router_weights: torch.Tensor, order: Any, m: int, top_k: int, weighted: bool
    ) -> torch.Tensor:
        """Multiply ``a (m, K)`` by the experts' matrices; return ``(m * top_k, N)``."""
        sorted_ids, experts, total, block = order
        n, k = b.scales.shape[2], 16 * b.codes.shape[1]
        operator = torch.ops._moe_C.moe_wna16_marlin_gemm
        known = {argument.name for argument in operator.default._schema.arguments}
        result: torch.Tensor = operator(
            a=a,
            c_or_none=torch.empty(m * top_k, n, dtype=a.dtype, device=a.device),
            b_q_weight=b.codes,
            b_bias_or_none=b.bias,
            b_scales=b.scales,
            a_scales=None,
            global_scale=b.global_scales,
            b_zeros_or_none=None,
            workspace=self.workspace,
            sorted_token_ids=sorted_ids,
            expert_ids=experts,
            num_tokens_past_padded=total,
            topk_weights=router_weights,
            moe_block_size=block,
            top_k=top_k,
            mul_topk_weights=weighted,
            b_type_id=FLOAT4_E2M1F,
            size_m=m,
            size_n=n,
            size_k=k,
            use_atomic_add=False,
            use_fp32_reduce=True,
            is_zp_float=False,
            thread_k=-1,
            thread_n=-1,
            blocks_per_sm=-1,
            **{name: value for name, value in _EARLIER.items() if name in known},
        )
        return result


def layers(geometry: Geometry, ours: Sequence[Layer]) -> list[MarlinLayer]:
    units = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    workspace = torch.zeros(_BLOCKS_PER_SM * units, dtype=torch.int32, device="cuda")
    return [MarlinLayer(layer, workspace) for layer in ours]
