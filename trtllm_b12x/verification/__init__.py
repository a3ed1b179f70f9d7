"""Load one MoE layer the way the host does, run it, and measure it against :mod:`trtllm_b12x.strict_reference`."""

from .bounds import Tolerances, relative_l2
from .draw import Case, draw_activations
from .layer import judge, verify_layer
from .layer import kernel_calls as kernel_calls
from .report import BytesReport, CaseReport, LayerReport, Ranks

__all__ = [
    "BytesReport",
    "Case",
    "CaseReport",
    "LayerReport",
    "Ranks",
    "Tolerances",
    "draw_activations",
    "judge",
    "relative_l2",
    "verify_layer",
]
