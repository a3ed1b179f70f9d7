"""The door to the kernels.  Nothing outside this package knows where a kernel comes from.

A kernel has three moments: :meth:`Kernel.plan` may allocate and compile, :meth:`Kernel.bind` takes views, and
:meth:`Kernel.run` does neither.  Between the last two, once at load, :meth:`Kernel.self_test` compares what it computes with the
reference.  What a kernel can do is data (:class:`KernelFeatures`), which the decision reads; which kernels there are says
:mod:`trtllm_b12x.families`.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import ClassVar

import torch

from trtllm_b12x import bootstrap, decision, families, host, settings
from trtllm_b12x import environment as machine
from trtllm_b12x.decision import Environment, KernelFeatures, Resolution
from trtllm_b12x.host.questions import Question

from .epilogue import Epilogue

__all__ = [
    "GATED",
    "Epilogue",
    "Geometry",
    "InputScales",
    "Kernel",
    "KernelFeatures",
    "KernelWeights",
    "PlanError",
    "Workspace",
    "considered",
    "environment",
    "first_line",
    "resolve",
]


GATED = frozenset({"Swiglu", "SwigluBias", "Geglu"})


@dataclass(frozen=True)
class Geometry:
    """Sizes of one layer on one rank, as the kernel sees them: local experts, intermediate size on its tile."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    """A member of the host's ``ActivationType``."""
    dtype: torch.dtype = torch.bfloat16
    """Of activations."""
    ranks: int = 1
    """That share the experts."""
    bias: torch.dtype | None = None
    """Of FC1's and FC2's bias; None: they have none."""

    @property
    def expert_parallel(self) -> bool:
        """Many ids are those of other ranks' experts."""
        return self.ranks > 1

    @property
    def gated(self) -> bool:
        """Rows of FC1 are [up; gate]."""
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
        extra = ", bias" * (self.bias is not None)
        return f"{experts}, {self.hidden_size} x {self.intermediate_size}, {self.activation}{dtype}{extra}"


@dataclass(frozen=True)
class InputScales:
    """Where the divisors of a layer's activations come from: the host's parameters, which anyone may overwrite without a word.

    Hence a call reads these, or derives the divisors before it reads those, in the launch that it makes for its routes.
    """

    fc31_input_scale: torch.Tensor
    """One float32, or ``(E,)``: what the host multiplies FC1's input by."""
    fc2_input_scale: torch.Tensor
    """One float32, or ``(E,)``."""
    up_to_gate: torch.Tensor
    """``(E,)`` float32: up's ``weight_scale_2`` over gate's."""
    fc1_divisor: torch.Tensor
    """``(E,)`` float32, written: ``1 / fc31_input_scale``."""
    fc2_divisor: torch.Tensor
    """``(E,)`` float32, written: ``1 / fc2_input_scale / up_to_gate``."""

    def __post_init__(self) -> None:
        for name in ("fc31_input_scale", "fc2_input_scale"):
            tensor = getattr(self, name)
            if tensor.numel() not in (1, self.up_to_gate.numel()) or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, not one float32, nor one of each expert")

    @torch.inference_mode()  # what is written may come from a load inside it, and then be written nowhere else
    def derive(self) -> None:
        """In place, without synchronizing, in torch; :func:`trtllm_b12x.kernels.routes.prepare` does the same on a GPU."""
        torch.reciprocal(self.fc31_input_scale.expand_as(self.up_to_gate), out=self.fc1_divisor)
        torch.div(self.fc2_input_scale.reciprocal(), self.up_to_gate, out=self.fc2_divisor)


_NO_TENSORS = ("input_scales", "epilogue")


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
    epilogue: Epilogue = field(default_factory=Epilogue)
    """Biases, and the constants of the activation."""

    @property
    def w1_alpha(self) -> torch.Tensor:
        """``(E,)`` float32, new: FC1's ``weight_scale_2``, for FlashInfer's public entry points, which fold by themselves."""
        return self.folded_w1_alpha / self.input_global_scale

    def tensors(self) -> dict[str, torch.Tensor]:
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _NO_TENSORS}

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError, naming the tensor, where a shape or dtype is not what kernels of ``geometry`` take.

        Block scales fill tiles of 128 rows by 64 columns, the last ones padded.
        """
        experts, hidden, size = geometry.num_experts, geometry.hidden_size, geometry.intermediate_size
        rows = (2 if geometry.gated else 1) * size
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "w1_weight": ((experts, rows, hidden // 2), torch.uint8),
            "w1_weight_sf": ((32, 4, -(-rows // 128), 4, -(-hidden // 64), experts), torch.float8_e4m3fn),
            "w2_weight": ((experts, hidden, size // 2), torch.uint8),
            "w2_weight_sf": ((32, 4, -(-hidden // 128), 4, -(-size // 64), experts), torch.float8_e4m3fn),
        }
        for name, tensor in self.tensors().items():
            shape, dtype = expected.get(name, ((experts,), torch.float32))
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the kernel takes {shape} {dtype}")
        self.epilogue.check(experts, rows, hidden, geometry.bias, self.w1_weight.device)


class PlanError(RuntimeError):
    """A kernel cannot serve its geometry here; the message is the first line of the cause."""


def first_line(error: BaseException) -> str:
    """``Type: message``, one line; the message alone of a :class:`PlanError`."""
    line = bootstrap.first_line(error)
    return line.removeprefix("PlanError: ") if isinstance(error, PlanError) else line


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
    def available(cls) -> bool:
        """What makes these kernels is installed."""
        return True

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """:meth:`plan` may be asked for this device."""
        return True

    @property
    def settled(self) -> bool:
        """What :meth:`serves` says is final."""
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
            x: ``(tokens, H)`` in one of the features' dtypes, not quantized.
            token_selected_experts: ``(tokens, top_k)`` integers of any type, global ids; one that is none of this rank's is
                unrouted.
            token_final_scales: ``(tokens, top_k)``, any float type.
            out: ``(tokens, H)`` in the dtype of ``x``, to write into.

        Returns:
            ``(tokens, H)`` in the dtype of ``x``, ``out`` if given, else a tensor of the caller's own.

        Raises:
            ValueError: no kernel is planned for so many tokens.
        """

    def run_quantized(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor,
        swizzled: bool,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """:meth:`run` on input that the host has quantized, by ``fc31_input_scale``; of kernels whose features say so.

        Args:
            x: ``(tokens, H/2)`` bytes of two FP4 each.
            x_sf: E4M3 bytes of its blocks of 16, in rows of ``H/16`` or, if ``swizzled``, 128x4-interleaved.

        Returns:
            In the geometry's dtype.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Workspace:
    """Identity and size of scratch memory."""

    key: int
    nbytes: int


def environment() -> Environment:
    """What a decision is to know of this process's machine, inside TensorRT-LLM.

    The embedded host runs on any machine, so there the machine says nothing.
    """
    return replace(
        machine.probe() if host.installed() else Environment(),
        enabled=settings.ENABLED() != "0",
        gather_bf16=settings.GATHER_BF16(),
        only_deterministic=settings.DETERMINISTIC(),
    )


def considered(device: str | None = None) -> dict[str, type[Kernel]]:
    """Family to its kernels, in order, for layers that are made on ``device``, torch's default one if not given.

    TensorRT-LLM's layers are on its GPU.  Where torch sees no card that the family's kernels run on, what stands in for them; but
    kernels that run on the CPU (Triton's, in its interpreter) stand in for themselves.
    """
    on_gpu = host.installed() or torch.device(device or torch.get_default_device()).type == "cuda"
    rows = {family.name: family for family in families.FAMILIES}
    found = {}
    for row in (rows[name] for name in settings.KERNELS.listed()):
        kernel = _load(row.kernel)
        there = _card_is_there(kernel.features) if on_gpu else kernel.runs_on(torch.device("cpu"))
        if there and kernel.available():
            found[row.name] = kernel
        elif row.stand_in:
            found[row.name] = _load(row.stand_in)
    return found


def resolve(
    question: Question, kernels: Mapping[str, type[Kernel]] | None = None, plan_errors: Mapping[str, str] = MappingProxyType({})
) -> Resolution:
    """Which families serve a layer in this process, and why not the others.

    Args:
        question: of :mod:`trtllm_b12x.host.questions`.
        kernels: :func:`considered`.
        plan_errors: family to what planning its kernels for the layer has raised.
    """
    asked = ((name, kernel.features) for name, kernel in (considered() if kernels is None else kernels).items())
    return decision.resolve(*question, environment(), tuple(asked), plan_errors)


def _load(place: str) -> type[Kernel]:
    module, _, name = place.partition(":")
    found: type[Kernel] = getattr(importlib.import_module(module), name)
    return found


def _card_is_there(features: KernelFeatures) -> bool:
    if not torch.cuda.is_available():
        return False
    sm = machine.probe().sm if host.installed() else None  # torch's answer would create a CUDA context in whoever only asks
    if not sm:
        major, minor = torch.cuda.get_device_capability()
        sm = 10 * major + minor
    return features.oldest_sm <= sm <= features.newest_sm
