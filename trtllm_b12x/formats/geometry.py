"""Sizes of a MoE layer on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import FORMATS

GATED = frozenset({"Swiglu", "SwigluBias", "Geglu"})


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer on one rank as a kernel sees them: local experts, intermediate size padded to the kernel's tile."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    """Name of a member of TensorRT-LLM's ``ActivationType``."""
    dtype: torch.dtype = torch.bfloat16
    """Dtype of activations: bfloat16 or float16."""
    ranks: int = 1
    """Number of ranks that share the experts (EP)."""
    bias: torch.dtype | None = None
    """Dtype of FC1's and FC2's bias, or None without one."""
    format: str = "NVFP4"
    """Number format of the weights, a name of ``formats.FORMATS``."""

    @property
    def expert_parallel(self) -> bool:
        """True if many ids name experts of other ranks."""
        return self.ranks > 1

    @property
    def gated(self) -> bool:
        """True if FC1 has rows [up; gate], False if it has one half."""
        return self.activation in GATED

    @property
    def atomic_rounding(self) -> float:
        """Relative L2 within which a kernel stays that adds one bf16 per route and 128 columns to the output, in any order.

        1.3 times what rounding each running sum predicts: 0.0044 at 8 sums, 0.006 at 20, 0.012 at 90, 0.026 at 462
        (docs/sm12x-on-hopper-tables.md).
        """
        sums = self.top_k * -(-self.intermediate_size // 128)
        return float(1.3 * (0.0033**2 + 0.0012**2 * sums) ** 0.5)

    def __str__(self) -> str:
        experts = f"{self.num_experts}{' local' if self.expert_parallel else ''} experts, top {self.top_k}"
        dtype = "" if self.dtype is torch.bfloat16 else f", {str(self.dtype).removeprefix('torch.')}"
        extra = ", bias" * (self.bias is not None) + f", {self.format}" * (self.format != FORMATS[0].name)
        return f"{experts}, {self.hidden_size} x {self.intermediate_size}, {self.activation}{dtype}{extra}"
