"""Sizes of a MoE layer: of the model, and of one rank. Imports without torch."""

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
    """Gate and up of some expert differ in ``weight_scale_2``; known once weights are loaded."""
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
        """Return the sizes of one of ``tp * ep`` ranks. Sizes, activation and dtype must be known, and the ranks divide them."""
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
    """How router logits become a token's experts and router weights, in float32. Computed by ``kernels.scoring.routes_of``."""

    kind: str = "softmax"
    """``softmax``, before or after the choice; ``sigmoid``, 1 / (1 + exp(-x)); ``sigmoid_tanh``, 0.5 tanh(0.5 x) + 0.5.

    TensorRT-LLM's and vLLM's DeepSeekV3 is the last one, their MiniMax2 the second.
    """
    renormalize: bool = True
    """Weights are divided by their sum. Softmax without it: by the sum over all experts."""
    bias: bool = False
    """A float32 for each expert is added to scores, for the choice alone."""
    factor: float = 1.0
    """Weights are multiplied by this at last (``routed_scaling_factor``)."""
    higher_first: bool = False
    """Of equal scores the higher expert is chosen, not the lower one."""


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
    """Number format of the weights, a name of ``formats.FORMATS``."""
    layout: WeightLayout = DEFAULT_LAYOUT
    scoring: Scoring | None = None
    """Calls have router logits (``MoECall.router_logits``), not ids and router weights."""

    @property
    def stored_hidden(self) -> int:
        """FC1's columns and FC2's rows as they are stored, padding included."""
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
        """Relative L2 within which a kernel stays that adds one bf16 per route and 128 columns to the output, in any order.

        1.3 times what rounding each running sum predicts: 0.0044 at 8 sums, 0.006 at 20, 0.012 at 90, 0.026 at 462
        (docs/sm12x-on-hopper.md).
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
