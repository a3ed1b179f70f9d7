"""What was found about a layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trtllm_b12x.host import embedded


@dataclass
class CaseReport:
    tokens: int
    outliers: float
    calls: int
    experts: int
    """Experts that received a token."""
    path: str
    """``b12x``, ``cutlass``, or both if calls differed."""
    rel_l2_none: float
    error: float
    """Against the same layer with unquantized activations."""
    reference_error: float
    """The float32 reference's own."""
    rel_l2_kernel: float | None = None
    """Against the rounding points of ``path``; None if calls differed."""
    rounding: float = 0.0
    """What of it the kernel explains (:meth:`trtllm_b12x.kernels.Kernel.rounding`): the bound where that is more."""
    original_error: float | None = None
    """Against the unquantized model."""
    failures: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return self.error / self.reference_error if self.reference_error else math.inf if self.error else 1.0


@dataclass
class BytesReport:
    """Bytes of one layer."""

    checkpoint: int
    """Payload and block scales as the checkpoint has them."""
    padding: int
    """What the module's payload and block scales hold beyond those."""
    extra_payload: int
    """Payload the kernel reads outside the module's parameters."""
    extra_scales: int
    scalars: int
    """Per-expert values beside the host's own."""


@dataclass
class LayerReport:
    name: str
    index: int
    activation: str
    quant_algo: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    served_by: str
    reasons: list[str]
    warnings: list[str] = field(default_factory=list)
    """Hosts that will refuse the layer, split like this."""
    bytes: BytesReport | None = None
    bits_exact: bool | None = None
    """The kernel reads the checkpoint's codes and block scales, every one, and zeros beside them."""
    scale_ratio: float = 1.0
    """Largest ratio of gate's and up's ``weight_scale_2`` of an expert. CUTLASS takes the larger one for both: its calls are
    not compared if they differ."""
    experts_run: int = 0
    """Experts that received a token in any case; the others are compared by their bits and scales."""
    full_blocks: float | None = None
    """Share of the blocks that hold what max calibration leaves, 1 where it did (NVFP4: magnitude 6, by chance 0.88)."""
    reference_error: float | None = None
    """What quantizing calibrated activations costs the float32 reference."""
    baked_weight_error: float | None = None
    weight_error: float | None = None
    """Of the quantized weights against the unquantized model."""
    cases: list[CaseReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be told."""
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures and not any(case.failures for case in self.cases)

    @property
    def compared(self) -> bool:
        """Numbers were computed, by whatever kernel."""
        return bool(self.cases)


@dataclass(frozen=True)
class Ranks:
    """Tensor- and expert-parallel ranks, simulated one after the other; their outputs are summed in float32."""

    tp: int = 1
    ep: int = 1

    def mappings(self) -> Iterator[Any]:
        for rank in range(self.tp * self.ep):
            size = self.tp * self.ep
            yield embedded.Mapping(world_size=size, rank=rank, tp_size=size, moe_tp_size=self.tp, moe_ep_size=self.ep)
