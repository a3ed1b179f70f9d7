"""MoE layers that are measured."""

from __future__ import annotations

import torch

from trtllm_b12x.dispatch.timing import router_logits
from trtllm_b12x.kernels import Geometry

GEOMETRIES: dict[str, Geometry] = {
    "Qwen3-30B-A3B": Geometry(128, 8, 2048, 768, "Swiglu"),
    "Nemotron-3-Super": Geometry(512, 22, 1024, 2688, "Relu2"),
    "Qwen3.6-35B-A3B": Geometry(256, 8, 2048, 512, "Swiglu"),
    "gpt-oss-120b-like": Geometry(128, 4, 2880, 2880, "SwigluBias", bias=torch.bfloat16),
    "DeepSeek-like": Geometry(256, 8, 7168, 2048, "Swiglu"),
}
MXFP8 = {
    "Qwen3-30B-A3B": GEOMETRIES["Qwen3-30B-A3B"],
    "gemma-4-26B-A4B": Geometry(128, 8, 2816, 704, "Geglu"),
    "MiniMax-M3, TP 8": Geometry(128, 4, 6144, 384, "SwigluBias"),
}


def routes(geometry: Geometry, tokens: int, seed: int, skewed: bool = False) -> torch.Tensor:
    """Global ids ``(tokens, top_k)`` int32 on the CPU."""
    return router_logits(geometry, tokens, seed, skewed).topk(geometry.top_k, dim=1).indices.int()
