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
    """Against the same layer with unquantized activations."""
    reference_error: float | None
    """Same, of the float32 reference. None if the format leaves activations unquantized."""
    rel_l2_kernel: float | None = None
    """Against the rounding points of ``path``; None if a call did not run on one of our kernels."""
    rounding: float = 0.0
    """Error that the kernel itself expects (``Kernel.rounding``)."""
    bound: float = 0.0
    """Of ``rel_l2_kernel``: the format's, or ``rounding`` if it is larger."""
    original_error: float | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        """Error over the reference's own, or None if that has none."""
        if self.reference_error is None:
            return None
        return self.error / self.reference_error if self.reference_error else math.inf if self.error else 1.0


@dataclass
class BytesReport:
    checkpoint: int
    """Payload and block scales in the checkpoint."""
    padding: int
    """Payload and block scales of the module beyond those."""
    extra: int
    """Payload and block scales that the kernel reads from outside the module's parameters."""
    scalars: int
    """Per-expert values that the host does not have."""


@dataclass
class LayerReport:
    layer: MoELayer
    """Its fields stand beside the others in the JSON report."""
    served_by: str
    reasons: list[str]
    warnings: list[str] = field(default_factory=list)
    """Hosts that will refuse the layer with this split."""
    bytes: BytesReport | None = None
    bits_exact: bool | None = None
    """The kernel reads the checkpoint's codes and block scales, and zeros in the padding."""
    scale_ratio: float = 1.0
    """Largest ratio of gate's and up's ``weight_scale_2`` of an expert. CUTLASS takes the larger one for both."""
    cutlass_error: float | None = None
    """Distance of what CUTLASS makes of that from float32; None if the scales are equal."""
    experts_run: int = 0
    """Experts that received a token in any case. The others are compared by their bits and scales only."""
    reference_error: float | None = None
    """Cost of quantizing calibrated activations, in the float32 reference."""
    weight_error: float | None = None
    """Distance of the quantized weights from the unquantized model's."""
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
