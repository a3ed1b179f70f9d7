"""The door to the kernels.  Nothing outside this package knows where a kernel comes from.

A kernel has three moments: :meth:`Kernel.plan` may allocate and compile, :meth:`Kernel.bind` takes views, and
:meth:`Kernel.run` does neither.  Between the last two, once at load, :meth:`Kernel.self_test` compares what it computes with the
reference.  What a kernel can do is data (:class:`KernelFeatures`), which the decision reads; which kernels there are says
:mod:`trtllm_b12x.decision.families`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from trtllm_b12x.core import errors
from trtllm_b12x.decision import KernelFeatures
from trtllm_b12x.formats.geometry import GATED, Geometry

__all__ = ["GATED", "Geometry", "Kernel", "PlanError", "Workspace", "first_line"]


class PlanError(RuntimeError):
    """A kernel cannot serve its geometry here; the message is the first line of the cause."""

    @property
    def lasting(self) -> bool:
        """Other layers of the geometry need not try; memory may be there for the next one, or at the next load."""
        return not isinstance(self.__cause__, torch.OutOfMemoryError)


def first_line(error: BaseException) -> str:
    """``Type: message``, one line; the message alone of a :class:`PlanError`."""
    line = errors.first_line(error)
    return line.removeprefix("PlanError: ") if isinstance(error, PlanError) else line


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, at an address that kernels load 16 bytes from: a chunk of a longer call may begin anywhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def check_call(
    geometry: Geometry,
    x: torch.Tensor,
    ids: torch.Tensor,
    router_weights: torch.Tensor,
    out: torch.Tensor | None,
    columns: int,
) -> None:
    """Raise ValueError, naming the tensor, if a call's tensor has another shape than kernels read or write.

    Args:
        columns: of ``x``.
    """
    shape = x.shape
    tokens = shape[0]
    routes, rows = (tokens, geometry.top_k), (tokens, geometry.hidden_size)
    if shape == (tokens, columns) and ids.shape == routes == router_weights.shape and (out is None or out.shape == rows):
        return
    given = {"x": (x, (tokens, columns)), "ids": (ids, routes), "router_weights": (router_weights, routes), "out": (out, rows)}
    for name, (tensor, expected) in given.items():
        if tensor is not None and tensor.shape != expected:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {expected}")


def check_scales(x: torch.Tensor, x_sf: torch.Tensor, swizzled: bool, hidden_size: int) -> None:
    """Raise ValueError if there are too few block scales for the tokens of :meth:`Kernel.run_quantized`."""
    tokens = x.shape[0]
    needed = -(-tokens // 128) * -(-hidden_size // 64) * 512 if swizzled else tokens * (hidden_size // 16)
    if x_sf.numel() < needed:
        raise ValueError(f"x_sf has {x_sf.numel()} scales, expected {needed} for {tokens} tokens")


def output(out: torch.Tensor | None, like: torch.Tensor, dtype: torch.dtype, columns: int) -> torch.Tensor:
    """Return the tensor that a kernel writes: ``out`` if it can, else a new one, ``(tokens of like, columns)``."""
    if out is not None and out.dtype is dtype and out.is_contiguous() and out.data_ptr() % 16 == 0:
        return out
    return torch.empty(like.shape[0], columns, dtype=dtype, device=like.device)


def handed_back(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    """To the caller who gave ``out``, and for whom :func:`output` gave ``result``."""
    return result if out is None or result is out else out.copy_(result)


class Kernel(ABC):
    """Decode for one layer: ``plan`` once, ``bind`` after every load, ``self_test`` once, ``run`` per call."""

    features: ClassVar[KernelFeatures]
    geometry: Geometry
    capacity: int
    """Most tokens that it was planned for."""
    instruction: ClassVar[str] = ""
    """Tensor core instruction in the PTX of its products."""
    limited = ""
    """Why these are fewer than :meth:`plan` was asked for."""
    weights: Any
    """The :class:`trtllm_b12x.formats.weights.Weights` of their format."""

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
        """Device that it was planned for, as it was given."""

    @abstractmethod
    def bind(self, weights: Any, first_expert: int = 0) -> None:
        """Take the layer's weights, those of the experts from ``first_expert`` on; only views are made.

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
        """Return True if the packages that make these kernels are installed."""
        return True

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """:meth:`plan` may be asked for this device."""
        return True

    @classmethod
    def assembled(cls, geometry: Geometry, card: Any, directory: Path) -> Iterable[str]:
        """PTX of some of its kernels of a layer, for a :class:`trtllm_b12x.kernels.cards.Card` that need not be here.

        Args:
            directory: for what compiling writes.

        Raises:
            Exception: they do not compile; the first line, or what ptxas says in another, tells why.
        """
        raise PlanError(f"{cls.features.name} has no kernel to compile")

    @property
    def settled(self) -> bool:
        """True once the answers of :meth:`serves` are final."""
        return True

    def check(self, geometry: Geometry, multiples: tuple[int, int]) -> None:
        """Raise ValueError, naming what, where the activation or a size is none of the family's.

        Args:
            multiples: of the hidden and of the intermediate size.
        """
        known, sizes = self.features.activations, (geometry.hidden_size, geometry.intermediate_size)
        if geometry.activation not in known:
            raise ValueError(f"activation {geometry.activation} is none of {', '.join(sorted(known))}")
        if any(size % multiple for size, multiple in zip(sizes, multiples, strict=True)):
            named = f"hidden size {sizes[0]} and intermediate size {sizes[1]}"
            raise ValueError(f"{named} must be multiples of {' and '.join(map(str, dict.fromkeys(multiples)))}")

    def serves(self, tokens: int) -> bool:
        """:meth:`run` takes this many tokens."""
        return max(1, self.features.measured_from) <= tokens <= self.capacity

    def rounding(self, tokens: int) -> float:
        """Relative L2 from the reference that is no mistake: the order of bf16 sums, reciprocals for divisions; 0 for neither."""
        return 0.0

    def summary(self) -> tuple[str, ...]:
        """Describe which kernel serves which token counts, and what was left out and why, for the log and for ``status()``."""
        first, name = self.features.measured_from, self.features.name
        found = f"{name}: {max(first, 1)} to {self.capacity} tokens"
        return (f"{found}, where the card has measured that it is faster" if first else found,)

    @property
    def workspace(self) -> Workspace | None:
        """Scratch memory, which layers of one geometry share."""
        return None

    @abstractmethod
    def run(
        self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Experts on ``x``.

        Args:
            x: ``(tokens, H)`` in one of the features' dtypes, not quantized.
            ids: ``(tokens, top_k)`` integers of any type, global ids; one that is none of this rank's is unrouted.
            router_weights: ``(tokens, top_k)``, any float type.
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
        ids: torch.Tensor,
        router_weights: torch.Tensor,
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
