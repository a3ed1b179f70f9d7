# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts without an exporter, as checkpoints have them, and the layer in float32 with unquantized activations."""

from __future__ import annotations

import math

import torch

from trtllm_b12x.formats.nvfp4 import pack_fp4, round_to_e2m1
from trtllm_b12x.tools.verify.reference import Arithmetic, MoECall, outputs

GPT_OSS = (1.702, 1.0, 7.0)
"""alpha, beta and limit."""


def quantize_weight(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """float32 ``(rows, K)`` to ``weight (rows, K/2)`` and E8M0 ``weight_scale (rows, K/32)``, both uint8."""
    blocks = weight.view(weight.shape[0], -1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1) / 6))
    values = (blocks / torch.exp2(exponent).unsqueeze(-1)).view(weight.shape)
    return {"weight": pack_fp4(round_to_e2m1(values)), "weight_scale": (exponent + 127).to(torch.uint8)}


def random_experts(
    num_experts: int, hidden_size: int, intermediate_size: int, bias: bool = False, seed: int = 0
) -> dict[str, torch.Tensor]:
    """One layer by the host's names; products of about one, and biases that tell."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for expert in range(num_experts):
        for name in ("w1", "w3", "w2"):
            rows, columns = (hidden_size, intermediate_size) if name == "w2" else (intermediate_size, hidden_size)
            weight = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
            for kind, tensor in quantize_weight(weight).items():
                tensors[f"{expert}.{name}.{kind}"] = tensor
            if bias:
                tensors[f"{expert}.{name}.bias"] = torch.randn(rows, generator=generator).to(torch.bfloat16)
    return tensors


def expected(
    tensors: dict[str, torch.Tensor],
    x: torch.Tensor,
    routes: tuple[torch.Tensor, torch.Tensor],
    swiglu: tuple[float, float, float] | None = None,
) -> torch.Tensor:
    """float32 ``(tokens, H)``: SwiGLU, with alpha, beta and limit if given."""
    experts, call = 1 + max(int(name.partition(".")[0]) for name in tensors), MoECall(x, *routes)
    points = [Arithmetic.UNQUANTIZED]
    ((found,),) = outputs(tensors, experts, True, [call], points, quant_algo="W4A8_MXFP4_MXFP8", swiglu=swiglu)
    return found
