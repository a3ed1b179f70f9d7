# SPDX-License-Identifier: Apache-2.0
"""MoE layers that are measured."""

from __future__ import annotations

from dataclasses import replace

import torch

from trtllm_b12x.formats import ROWS, WeightLayout
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
W4A16 = {
    name: replace(GEOMETRIES[name], format="W4A16_NVFP4", layout=WeightLayout(scales=ROWS))
    for name in ("Qwen3.6-35B-A3B", "Qwen3-30B-A3B")
}
MXFP4 = {
    "gpt-oss-120b": replace(
        GEOMETRIES["gpt-oss-120b-like"], intermediate_size=2944, format="MXFP4", layout=WeightLayout(hidden_multiple=128)
    ),
}
"""Layers as TensorRT-LLM stores them: intermediate size 2880 is padded to 2944."""
