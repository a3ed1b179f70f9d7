"""The door to the kernels.  Nothing outside this package knows where a kernel comes from.

A kernel has three moments: :meth:`Kernel.plan` may allocate and compile, :meth:`Kernel.bind` takes views, and
:meth:`Kernel.run` does neither.  Between the last two, once at load, :meth:`Kernel.self_test` compares what it computes with the
reference.  What a kernel can do is data (:class:`KernelFeatures`), which the decision reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch

from trtllm_b12x import environment as machine
from trtllm_b12x import host, settings
from trtllm_b12x.decision import Environment

__all__ = [
    "Geometry",
    "InputScales",
    "Kernel",
    "KernelFeatures",
    "KernelWeights",
    "PlanError",
    "Workspace",
    "environment",
    "first_line",
    "kernel_class",
]


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
    deterministic: bool
    """It can be restricted to kernels whose reruns agree to the bit (``TRTLLM_B12X_DETERMINISTIC``)."""
    versions: str
    """Of flashinfer-python, as a requirement; empty where it does not matter."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer on one rank, as the kernel sees them: local experts, intermediate size on its tile."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    expert_parallel: bool = False
    """Many ids are those of other ranks' experts."""

    @property
    def gated(self) -> bool:
        return self.activation == "Swiglu"

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
        return f"{experts}, {self.hidden_size} x {self.intermediate_size}, {self.activation}"


@dataclass(frozen=True)
class InputScales:
    """Where the divisors of a layer's activations come from: the host's parameters, which anyone may overwrite without a word.

    Hence a call derives the divisors before it reads them, in the launch that it makes for its routes.
    """

    fc31_input_scale: torch.Tensor
    """One float32: what the host multiplies FC1's input by."""
    fc2_input_scale: torch.Tensor
    """One float32, or ``(E,)``."""
    up_to_gate: torch.Tensor
    """``(E,)`` float32: up's ``weight_scale_2`` over gate's."""
    fc1_divisor: torch.Tensor
    """``(E,)`` float32, written: ``1 / fc31_input_scale``."""
    fc2_divisor: torch.Tensor
    """``(E,)`` float32, written: ``1 / fc2_input_scale / up_to_gate``."""

    @torch.inference_mode()  # what is written may come from a load inside it, and then be written nowhere else
    def derive(self) -> None:
        """In place, without synchronizing, in torch; :func:`trtllm_b12x.kernels.routes.prepare` does the same on a GPU."""
        torch.reciprocal(self.fc31_input_scale.expand_as(self.up_to_gate), out=self.fc1_divisor)
        torch.div(self.fc2_input_scale.reciprocal(), self.up_to_gate, out=self.fc2_divisor)


@dataclass(frozen=True)
class KernelWeights:
    """What FlashInfer's kernels take besides the call's own tensors, by the names of ``B12xMoEWrapper.run`` (0.7.2, b12x_moe.py).

    The wrapper's ``w1_alpha`` and ``input_global_scale`` reach the kernels as their product (``_folded_w1_alpha``), which is the
    host's own ``fc31_alpha``; so that tensor is what a kernel binds, and weights that are copied over it are followed at once.
    Both input scales are given per expert: FlashInfer expands a single one at every call, which is a launch each.
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
    """``(E,)`` float32: the divisor of FC2's input (ModelOpt's ``input_scale``)."""
    input_global_scale: torch.Tensor
    """``(E,)`` float32, the same for all experts: the divisor of FC1's input."""
    input_scales: InputScales | None = None
    """What the last two are derived from at every call; None where they are constants."""

    @property
    def w1_alpha(self) -> torch.Tensor:
        """``(E,)`` float32, new: FC1's ``weight_scale_2``, for FlashInfer's public entry points, which fold by themselves."""
        return self.folded_w1_alpha / self.input_global_scale

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "input_scales"}

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError, naming the tensor, where a shape or dtype is not what kernels of ``geometry`` take."""
        experts, hidden, size = geometry.num_experts, geometry.hidden_size, geometry.intermediate_size
        rows = (2 if geometry.gated else 1) * size
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "w1_weight": ((experts, rows, hidden // 2), torch.uint8),
            "w1_weight_sf": ((32, 4, rows // 128, 4, hidden // 64, experts), torch.float8_e4m3fn),
            "w2_weight": ((experts, hidden, size // 2), torch.uint8),
            "w2_weight_sf": ((32, 4, hidden // 128, 4, size // 64, experts), torch.float8_e4m3fn),
        }
        for name, tensor in self.tensors().items():
            shape, dtype = expected.get(name, ((experts,), torch.float32))
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the kernel takes {shape} {dtype}")


class PlanError(RuntimeError):
    """A kernel cannot serve its geometry here; the message is the first line of the cause."""


def first_line(error: BaseException) -> str:
    """``Type: message``, one line; the message alone of a :class:`PlanError`."""
    text = str(error) if isinstance(error, PlanError) else f"{type(error).__name__}: {error}"
    return text.strip().splitlines()[0]


class Kernel(ABC):
    """Decode for one layer: ``plan`` once, ``bind`` after every load, ``self_test`` once, ``run`` per call."""

    features: ClassVar[KernelFeatures]
    geometry: Geometry
    capacity: int
    """Most tokens that it was planned for."""
    limited = ""
    """Why these are fewer than :meth:`plan` was asked for."""
    weights: KernelWeights

    @abstractmethod
    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Get ready for up to ``capacity`` tokens.  May allocate, compile and synchronize.

        Raises:
            ValueError: an activation or a size that the kernel does not take.
            PlanError: compiling or allocating failed; nothing is kept.
        """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """That it was planned for, as it was given."""

    @abstractmethod
    def bind(self, weights: KernelWeights, first_expert: int = 0) -> None:
        """Take the layer's tensors, those of the experts from ``first_expert`` on; only views are made.

        Raises:
            ValueError: a tensor has the wrong shape or dtype; the message names it.
        """

    @abstractmethod
    def self_test(self) -> None:
        """Compare with the reference on the weights that are bound, and leave out what misses its bound.

        To be called after every :meth:`bind`: weights that say nothing leave the test to later ones, and what was not tested does
        not serve.

        Raises:
            PlanError: nothing is left.
        """

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """:meth:`plan` may be asked for this device."""
        return True

    def serves(self, tokens: int) -> bool:
        """:meth:`run` takes this many tokens."""
        return 0 < tokens <= self.capacity

    def rounding(self, tokens: int) -> float:
        """Relative L2 from the reference that is no mistake: the order of bf16 sums, reciprocals for divisions; 0 for neither."""
        return 0.0

    def summary(self) -> tuple[str, ...]:
        """What serves which token counts, and what was left out and why, for the log and for ``status()``."""
        return (f"{self.features.name}: 1 to {self.capacity} tokens",)

    @property
    def workspace(self) -> Workspace | None:
        """Scratch memory, which layers of one geometry share."""
        return None

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
            token_selected_experts: ``(tokens, top_k)`` integers of any type, global ids; one that is none of this rank's is
                unrouted.
            token_final_scales: ``(tokens, top_k)``, any float type.
            out: ``(tokens, H)`` bfloat16 to write into.

        Returns:
            ``(tokens, H)`` bfloat16, ``out`` if given, else a tensor of the caller's own.

        Raises:
            ValueError: no kernel is planned for so many tokens.
        """


@dataclass(frozen=True)
class Workspace:
    """Identity and size of scratch memory."""

    key: int
    nbytes: int


def environment(kernel: type[Kernel] | None = None) -> Environment:
    """What :func:`trtllm_b12x.decision.decide` is to know of this process: the machine, inside TensorRT-LLM, and its kernel.

    The embedded host runs on any machine, so there the machine says nothing.
    """
    features = (kernel or kernel_class()).features
    return replace(
        machine.probe() if host.installed() else Environment(),
        enabled=settings.ENABLED() != "0",
        gather_bf16=settings.GATHER_BF16(),
        only_deterministic=settings.DETERMINISTIC(),
        kernel=features.name,
        activations=features.activations,
        hidden_size_multiple=features.hidden_size_multiple,
        expert_parallel=features.negative_ids,
        graph_safe=features.graph_safe,
        deterministic=features.deterministic,
    )


def kernel_class(device: str | None = None) -> type[Kernel]:
    """The kernel of layers that are made on ``device``, torch's default one if not given; TensorRT-LLM's are on its GPU.

    FlashInfer's on an SM120 or SM121, where FlashInfer has them, else torch's.
    """
    from .b12x import B12xKernel
    from .reference import ReferenceKernel

    on_gpu = host.installed() or torch.device(device or torch.get_default_device()).type == "cuda"
    return B12xKernel if on_gpu and B12xKernel.features.versions and _card_is_there() else ReferenceKernel


def _card_is_there() -> bool:
    if not torch.cuda.is_available():
        return False
    sm = machine.probe().sm if host.installed() else None  # torch's answer would create a CUDA context in whoever only asks
    return sm in (120, 121) if sm else torch.cuda.get_device_capability() in ((12, 0), (12, 1))
