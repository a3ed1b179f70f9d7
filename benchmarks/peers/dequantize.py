# SPDX-License-Identifier: Apache-2.0
"""Dequantize experts to bfloat16 at every call, then multiply, as TensorRT-LLM does for W4A16_NVFP4 under CUTLASS on SM12x.

A Triton kernel writes the experts that the call routes to into memory for all experts, as ``triton_dequant_nvfp4.py`` of
TensorRT-LLM (2026) does. ``torch._grouped_mm`` stands in for TensorRT-LLM's CUTLASS. Sorting the routes is not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from tests.nvfp4_layer import Layer
from trtllm_b12x.kernels import Geometry


def lacks(geometry: Geometry, vllm: Path | None) -> str:
    """Return why the layer cannot be measured, or an empty string."""
    if geometry.format != "W4A16_NVFP4" or geometry.activation != "Swiglu":
        return f"TensorRT-LLM dequantizes W4A16_NVFP4 experts; this is {geometry.format}, {geometry.activation}"
    return "" if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has no _grouped_mm"


@triton.jit
def write_experts(  # type: ignore[no-untyped-def]
    codes, scales, scale_2, counts, out, N, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr  # noqa: N803
):  # fmt: skip
    """Write ``(E, N, K)`` bfloat16 of the experts whose count is not 0. Grid: tiles of columns, tiles of rows, experts."""
    expert = tl.program_id(2)
    if tl.load(counts + expert) == 0:
        return
    row = expert.to(tl.int64) * N + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = (tl.program_id(1) * ROWS + tl.arange(0, ROWS) < N)[:, None]
    byte = tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    code = tl.load(codes + row[:, None] * (K // 2) + byte[None, :], mask=there & (byte < K // 2)[None, :], other=0)
    block = tl.program_id(0) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)
    factor = tl.load(scales + row[:, None] * (K // 16) + block[None, :], mask=there & (block < K // 16)[None, :], other=0)
    factor = factor.to(tl.float8e4nv, bitcast=True).to(tl.float32) * tl.load(scale_2 + expert)
    wide = code.to(tl.int32)
    wide = tl.reshape(tl.join(wide, wide >> 4), (ROWS, COLUMNS // 16, 16))
    value = (((wide & 7) << 22) | ((wide & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37
    value = tl.reshape(value * factor[:, :, None], (ROWS, COLUMNS))
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + row[:, None] * K + column[None, :], value.to(tl.bfloat16), mask=there & (column < K)[None, :])


class DequantizedLayer:
    """One layer's weights. All layers of a run are dequantized into the same memory."""

    def __init__(self, layer: Layer, memory: tuple[torch.Tensor, torch.Tensor]) -> None:
        g = self.geometry = layer.geometry
        self.memory, self.expected = memory, layer.expected
        gate_first = (layer.w1, layer.s1.view(torch.uint8))
        self.first = (*(torch.cat(rows.chunk(2, 1)[::-1], 1).contiguous() for rows in gate_first), layer.scale_1)
        self.second = layer.w2, layer.s2.view(torch.uint8), layer.scale_2
        self.expert_bytes = sum(part.nbytes for part in (*self.first[:2], *self.second[:2])) / g.num_experts

    def prepare(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> tuple[Any, ...]:
        order = ids.flatten().argsort(stable=True)
        counts = torch.bincount(ids.flatten().long(), minlength=self.geometry.num_experts).int()
        weights = router_weights.flatten()[order].to(x.dtype).unsqueeze(1)
        return x, order // ids.shape[1], counts, counts.cumsum(0).int(), weights, order.argsort()

    def output(self, x: torch.Tensor, token: Any, counts: Any, ends: Any, weights: Any, back: Any) -> torch.Tensor:
        first, second = self.memory
        for (codes, scales, scale_2), out in ((self.first, first), (self.second, second)):
            experts, n, k = out.shape
            write_experts[(-(-k // 256), -(-n // 32), experts)](codes, scales, scale_2, counts, out, n, k, ROWS=32, COLUMNS=256)
        inner = torch._grouped_mm(x[token], first.transpose(1, 2), offs=ends)
        gate, up = inner.chunk(2, 1)
        shares = torch._grouped_mm(torch.nn.functional.silu(gate) * up, second.transpose(1, 2), offs=ends) * weights
        return shares[back].view(len(x), -1, x.shape[1]).sum(1)


def layers(geometry: Geometry, ours: Sequence[Layer]) -> list[DequantizedLayer]:
    experts, hidden, size = geometry.num_experts, geometry.hidden_size, geometry.intermediate_size
    like = torch.empty(0, dtype=torch.bfloat16, device=ours[0].w1.device)
    memory = like.new_empty(experts, 2 * size, hidden), like.new_empty(experts, hidden, size)
    return [DequantizedLayer(layer, memory) for layer in ours]
