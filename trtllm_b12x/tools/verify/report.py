# SPDX-License-Identifier: Apache-2.0
"""Records of a verified layer; the JSON report has the same fields."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trtllm_b12x.tools.checkpoint import MoELayer


@dataclass
class CaseReport:
    tokens: int
    outliers: float
    calls: int
    experts: int
    """Experts that received a token."""
    path: str
    """Families that served the calls, or ``cutlass``; joined by + if they differed."""
    rel_l2_none: float
    error: float
    """Error against the same layer with unquantized activations."""
    reference_error: float | None
    """The same error of the float32 reference. None if the format leaves activations unquantized."""
    rel_l2_kernel: float | None = None
    """Error against the reference with the rounding points of ``path``; None if a call did not run on one of our kernels."""
    rounding: float = 0.0
    """Error that rounding explains (``Kernel.rounding``)."""
    bound: float = 0.0
    """Bound of ``rel_l2_kernel``: the tolerance, or ``rounding`` if it is larger."""
    original_error: float | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """``error`` over ``reference_error``, or None without a reference error."""
        if self.reference_error is None:
            return None
        return self.error / self.reference_error if self.reference_error else math.inf if self.error else 1.0


@dataclass
class BytesReport:
    checkpoint: int
    """Bytes of payload and block scales in the checkpoint."""
    padding: int
    """Bytes of payload and block scales in the module beyond those in the checkpoint."""
    extra: int
    """Bytes of payload and block scales that the kernel reads from outside the module's parameters."""
    scalars: int
    """Bytes of per-expert values that TensorRT-LLM does not have."""


@dataclass
class LayerReport:
    layer: MoELayer
    """The JSON report holds the layer's fields next to the others."""
    served_by: str
    reasons: list[str]
    warnings: list[str] = field(default_factory=list)
    """TensorRT-LLM versions that will refuse the layer with this split."""
    bytes: BytesReport | None = None
    bits_exact: bool | None = None
    """The kernel reads the checkpoint's codes and block scales, and zeros in the padding."""
    scale_ratio: float = 1.0
    """Largest ratio of gate's and up's ``weight_scale_2`` of an expert. CUTLASS takes the larger one for both."""
    cutlass_error: float | None = None
    """CUTLASS's error against float32 with the larger scale; None if the scales are equal."""
    experts_run: int = 0
    """Experts that received a token in any case. The others are compared by their bits and scales only."""
    reference_error: float | None = None
    """Cost of quantizing calibrated activations, in the float32 reference."""
    weight_error: float | None = None
    """Distance of the quantized weights from the unquantized model's weights."""
    cases: list[CaseReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures and not any(case.failures for case in self.cases)

    @property
    def compared(self) -> bool:
        """A kernel ran, and its numbers were compared."""
        return bool(self.cases)
