# SPDX-License-Identifier: Apache-2.0
"""Define the sizes of a MoE layer, in the model and on one rank. This module imports without torch."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from . import DEFAULT_LAYOUT, FORMATS, WeightLayout

if TYPE_CHECKING:
    import torch

GATED = frozenset({"Swiglu", "SwigluBias", "Geglu"})


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer of a model, before it is split over ranks. None in any field means unknown.

    Algorithms and activations have TensorRT-LLM's names (``NVFP4``, ``Swiglu``, ``Relu2``).
    """

    num_experts: int | None = None
    top_k: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    activation: str | None = None
    quant_algo: str | None = None
    """``"none"`` for an unquantized layer."""
    group_size: int | None = None
    dtype: str | None = None
    """Dtype of activations, by name."""
    activation_constants: bool | None = None
    """True if SwiGLU alpha, beta or limit are set."""
    pre_quant_scale: bool | None = None
    """True if the weights carry AWQ scales."""
    unequal_scales: bool | None = None
    """True if gate and up of an expert differ in ``weight_scale_2``. Known once weights are loaded."""
    dynamic_quantization: bool | None = None
    """True if TensorRT-LLM recomputes the activation scale at every call (``force_dynamic_quantization``)."""
    bias: bool | None = None
    apply_router_weight_on_input: bool | None = None

    @property
    def kernel_activation(self) -> str | None:
        """Return the activation as kernels name it: SwiGLU with constants is ``SwigluBias``."""
        return "SwigluBias" if self.activation_constants else self.activation

    def __str__(self) -> str:
        sizes = f"{self.hidden_size} x {self.intermediate_size}"
        return f"{self.num_experts} experts, top {self.top_k}, {sizes}, {self.kernel_activation}"

    def on_rank(self, tp: int, ep: int, tile: int) -> Geometry:
        """Return the sizes of one of ``tp * ep`` ranks, which must divide them. Sizes, activation and dtype must be known."""
        import torch

        sizes: Any = self
        form = next(row for row in FORMATS if self.quant_algo in (row.name, row.quant_algo))
        return Geometry(
            num_experts=sizes.num_experts // ep,
            top_k=sizes.top_k,
            hidden_size=sizes.hidden_size,
            intermediate_size=-(-(sizes.intermediate_size // tp) // tile) * tile,
            activation=str(self.kernel_activation),
            dtype=getattr(torch, str(self.dtype)),
            ranks=ep,
            bias=getattr(torch, str(self.dtype)) if self.bias else None,
            format=form.name,
            layout=form.layout,
        )


@dataclass(frozen=True)
class Scoring:
    """Rule that maps router logits to experts and router weights in float32. ``kernels.scoring.routes_of`` computes them."""

    kind: str = "softmax"
    """``softmax``, before or after the choice; ``sigmoid``, 1 / (1 + exp(-x)); ``sigmoid_tanh``, 0.5 tanh(0.5 x) + 0.5.

    In TensorRT-LLM and vLLM, DeepSeekV3 uses ``sigmoid_tanh`` and MiniMax2 uses ``sigmoid``.
    """
    renormalize: bool = True
    """True if weights are divided by their sum. If False, softmax divides by the sum over all experts."""
    bias: bool = False
    """True if a float32 per expert is added to its score, only for the choice of experts."""
    factor: float = 1.0
    """Factor of the final weights (``routed_scaling_factor``)."""
    higher_first: bool = False
    """True if the higher expert wins among equal scores. If False, the lower expert wins."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer on one rank as a kernel sees them: local experts, intermediate size padded to the kernel's tile."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    """Name of a member of TensorRT-LLM's ``ActivationType``."""
    dtype: torch.dtype = field(default_factory=lambda: importlib.import_module("torch").bfloat16)
    """Dtype of activations: bfloat16 or float16."""
    ranks: int = 1
    """Number of ranks that share the experts (EP)."""
    bias: torch.dtype | None = None
    """Dtype of FC1's and FC2's bias, or None without one."""
    format: str = "NVFP4"
    """Number format of the weights, a name in ``formats.FORMATS``."""
    layout: WeightLayout = DEFAULT_LAYOUT
    scoring: Scoring | None = None
    """Set if calls have router logits (``MoECall.router_logits``) instead of ids and router weights."""

    @property
    def stored_hidden(self) -> int:
        """Stored number of FC1's columns and FC2's rows, padding included."""
        return self.layout.stored_hidden(self.hidden_size)

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
        """Bound on the relative L2 error of a kernel that adds one bf16 per route and 128 columns to the output in any order.

        The bound is 1.3 times the error predicted from rounding each running sum: 0.0044 at 8 sums, 0.006 at 20, 0.012 at 90,
        0.026 at 462 (docs/sm12x-on-hopper.md).
        """
        sums = self.top_k * -(-self.intermediate_size // 128)
        return float(1.3 * (0.0033**2 + 0.0012**2 * sums) ** 0.5)

    def __str__(self) -> str:
        experts = f"{self.num_experts}{' local' if self.expert_parallel else ''} experts, top {self.top_k}"
        dtype = str(self.dtype).removeprefix("torch.")
        dtype = "" if dtype == "bfloat16" else f", {dtype}"
        extra = ", from logits" * (self.scoring is not None) + ", bias" * (self.bias is not None)
        extra += f", {self.format}" * (self.format != FORMATS[0].name)
        return f"{experts}, {self.hidden_size} x {self.intermediate_size}, {self.activation}{dtype}{extra}"
