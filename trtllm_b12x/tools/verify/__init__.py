# SPDX-License-Identifier: Apache-2.0
"""Load one MoE layer as TensorRT-LLM does, run it on our kernels, and compare it with a float32 reference."""

from trtllm_b12x.tools.options import Ranks

from .bounds import Tolerances, relative_l2
from .draw import Case, draw_activations
from .layer import kernel_calls, resolve_on_ranks, verify_layer
from .report import CaseReport, LayerReport

__all__ = [
    "Case",
    "CaseReport",
    "LayerReport",
    "Ranks",
    "Tolerances",
    "draw_activations",
    "kernel_calls",
    "relative_l2",
    "resolve_on_ranks",
    "verify_layer",
]
