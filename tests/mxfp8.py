# SPDX-License-Identifier: Apache-2.0
"""MXFP8 experts without ModelOpt: any size, in milliseconds."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.nvfp4_layer import interleaved
from trtllm_b12x.formats import ROWS
from trtllm_b12x.formats.mxfp8 import MXFP8Weights
from trtllm_b12x.formats.weights import Epilogue
from trtllm_b12x.kernels import Geometry


def quantize_weight(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """float32 ``(rows, K)`` to ModelOpt's tensors: the power of two is rounded up, so that nothing saturates."""
    blocks = weight.view(weight.shape[0], -1, 32)
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-100) / 448)).clamp(-127, 127)
    codes = (blocks / torch.exp2(exponent).unsqueeze(-1)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes.view(weight.shape), "weight_scale": (exponent + 127).to(torch.uint8)}


def random_experts(
    num_experts: int, hidden_size: int, intermediate_size: int, gated: bool = True, seed: int = 0
) -> dict[str, torch.Tensor]:
    """One layer by the host's names, ``"{expert}.w1.weight"`` and so on."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for expert in range(num_experts):
        for name in ("w1", "w3", "w2") if gated else ("w1", "w2"):
            shape = (hidden_size, intermediate_size) if name == "w2" else (intermediate_size, hidden_size)
            weight = torch.randn(shape, generator=generator) * 0.03 * (1 + torch.rand((), generator=generator))
            for kind, tensor in quantize_weight(weight).items():
                tensors[f"{expert}.{name}.{kind}"] = tensor
    return tensors


def random_weights(geometry: Geometry, device: torch.device | str = "cpu", seed: int = 0) -> MXFP8Weights:
    """What kernels of ``geometry`` are given: random codes, scales of six neighboring powers of two, and biases that tell.

    Rows of any order are as good as those of another: weights are random.
    """
    experts, hidden, size = geometry.num_experts, geometry.hidden_size, geometry.intermediate_size
    generator = torch.Generator(device).manual_seed(seed)
    rows = (2 if geometry.gated else 1) * size
    found = []
    for height, width in ((rows, hidden), (hidden, size)):
        values = torch.randn(experts, height, width, generator=generator, device=device).mul_(60).clamp_(-448, 448)
        plain = torch.empty(experts, height, width // 32, dtype=torch.uint8, device=device).random_(110, 116, generator=generator)
        found += [values.to(torch.float8_e4m3fn), plain if geometry.layout.scales == ROWS else interleaved(plain)]
    epilogue = constants(experts, device) if geometry.activation == "SwigluBias" else Epilogue()
    if geometry.bias is not None:
        drawn = (torch.randn(experts, height, generator=generator, device=device) * 0.02 for height in (rows, hidden))
        fc1_bias, fc2_bias = (bias.to(geometry.bias) for bias in drawn)
        epilogue = replace(epilogue, fc1_bias=fc1_bias, fc2_bias=fc2_bias)
    return MXFP8Weights(*found, epilogue=epilogue, layout=geometry.layout)


def constants(experts: int, device: torch.device | str = "cpu") -> Epilogue:
    """alpha, beta and limit that tell with such weights, whose products are about 0.02; no two experts have the same."""
    own = 1 + torch.arange(experts, dtype=torch.float32, device=device) / 8
    return Epilogue(swiglu_alpha=60 * own, swiglu_beta=0.02 / own, swiglu_limit=0.02 * own)
