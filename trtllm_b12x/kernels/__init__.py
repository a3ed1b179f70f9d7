"""The door to the kernels.  Nothing outside this package knows where a kernel comes from.

A kernel has three moments: :meth:`Kernel.plan` may allocate and compile, :meth:`Kernel.bind` takes views, and
:meth:`Kernel.run` does neither.  What a kernel can do is data (:class:`KernelFeatures`), which the decision reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from trtllm_b12x import host, settings
from trtllm_b12x.decision import Environment
from trtllm_b12x.environment import probe


@dataclass(frozen=True)
class KernelFeatures:
    """What a kernel can do, for :mod:`trtllm_b12x.decision` and for weight creation."""

    name: str
    activations: frozenset[str]
    """Names of the host's ``ActivationType`` members."""
    tile: int
    """The intermediate size it takes is a multiple of this."""
    hidden_size_multiple: int
    negative_ids: bool
    """A negative expert id is an unrouted slot, hence expert parallelism."""
    graph_safe: bool


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer on one rank, as the kernel sees them: local experts, intermediate size on its tile."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str


@dataclass(frozen=True)
class KernelWeights:
    """What FlashInfer's kernels take besides the call's own tensors, by the names of ``B12xMoEWrapper.run`` (0.7.2, b12x_moe.py).

    The wrapper's ``w1_alpha`` and ``input_global_scale`` reach the kernels as their product (``_folded_w1_alpha``), which is the
    host's own ``fc31_alpha``; so that tensor is what a kernel binds, and weights that are copied over it are followed at once.
    E local experts, H hidden size, T intermediate size on the tile, r = 2 if gated (rows [up; gate]) else 1.
    """

    w1_weight: torch.Tensor
    """``(E, r*T, H/2)`` uint8, two FP4 per byte."""
    w1_weight_sf: torch.Tensor
    """``(32, 4, r*T/128, 4, H/64, E)`` float8_e4m3fn."""
    folded_w1_alpha: torch.Tensor
    """``(E,)`` float32: FC1's ``weight_scale_2`` times its input scale."""
    w2_weight: torch.Tensor
    """``(E, H, T/2)`` uint8."""
    w2_weight_sf: torch.Tensor
    """``(32, 4, H/128, 4, T/64, E)`` float8_e4m3fn."""
    w2_alpha: torch.Tensor
    """``(E,)`` float32: FC2's ``weight_scale_2`` times its input scale."""
    fc2_input_scale: torch.Tensor
    """``(E,)`` or ``(1,)`` float32: the divisor of FC2's input (ModelOpt's ``input_scale``)."""
    input_global_scale: torch.Tensor
    """``(E,)`` or ``(1,)`` float32: the divisor of FC1's input."""

    @property
    def w1_alpha(self) -> torch.Tensor:
        """``(E,)`` float32, new: FC1's ``weight_scale_2``, for FlashInfer's public entry points, which fold by themselves."""
        return self.folded_w1_alpha / self.input_global_scale

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Kernel(ABC):
    """Decode for one layer: ``plan`` once, ``bind`` after every load, ``run`` per call."""

    features: ClassVar[KernelFeatures]

    @abstractmethod
    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Get ready for up to ``capacity`` tokens.  May allocate, compile and synchronize."""

    @abstractmethod
    def bind(self, weights: KernelWeights) -> None:
        """Take the layer's tensors; only views and small scalars are made."""

    @abstractmethod
    def run(
        self,
        x: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Experts on ``x``.

        Args:
            x: ``(tokens, H)`` bfloat16, not quantized.
            token_selected_experts: ``(tokens, top_k)`` integers, local ids; negative means unrouted.
            token_final_scales: ``(tokens, top_k)`` float32.
            out: ``(tokens, H)`` bfloat16 to write into.

        Returns:
            ``(tokens, H)`` bfloat16, ``out`` if given, else a tensor of the caller's own.
        """


def environment() -> Environment:
    """What :func:`trtllm_b12x.decision.decide` is to know of this process: the machine, inside TensorRT-LLM, and its kernel.

    The embedded host runs the torch kernel on any machine, so there the machine says nothing.
    """
    features = kernel_class().features
    machine = probe() if host.installed() else Environment()
    return replace(
        machine,
        enabled=settings.ENABLED() != "0",
        gather_bf16=settings.GATHER_BF16(),
        kernel=features.name if machine.kernel != "none" else "none",
        activations=features.activations,
        hidden_size_multiple=features.hidden_size_multiple,
        expert_parallel=features.negative_ids,
        graph_safe=features.graph_safe,
    )


def kernel_class() -> type[Kernel]:
    """The kernel of this process."""
    from .reference import ReferenceKernel

    return ReferenceKernel
