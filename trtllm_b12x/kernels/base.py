"""The interface of a kernel: ``plan`` may allocate and compile, ``bind`` takes views, ``run`` does neither."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from trtllm_b12x.core import errors
from trtllm_b12x.decision import KernelFeatures
from trtllm_b12x.formats.geometry import Geometry

from .call import MoECall


class PlanError(RuntimeError):
    """A kernel cannot serve its geometry here; the message is the first line of the cause."""

    @property
    def lasting(self) -> bool:
        """True if other layers of the geometry need not try. Memory may be free for the next one, or at the next load."""
        return not isinstance(self.__cause__, torch.OutOfMemoryError)


def first_line(error: BaseException) -> str:
    """Return ``Type: message``, one line; the message alone of a PlanError."""
    line = errors.first_line(error)
    return line.removeprefix("PlanError: ") if isinstance(error, PlanError) else line


class Kernel(ABC):
    """Kernels of one family on one layer: ``plan`` once, ``bind`` and ``self_test`` after every load, ``run`` per call."""

    features: ClassVar[KernelFeatures]
    geometry: Geometry
    device: torch.device
    capacity: int
    """Maximum number of tokens this kernel was planned for."""
    instruction: ClassVar[str] = ""
    """Tensor core instruction in the PTX of its products."""
    takes_logits: ClassVar[bool] = False
    """True if a geometry may have a ``scoring``."""
    adds_bias: ClassVar[bool] = False
    """True if ``run`` adds the biases of ``Epilogue``."""
    limited = ""
    """Why the capacity is less than ``plan`` was asked for."""
    weights: Any
    """The bound ``trtllm_b12x.formats.weights.Weights``."""

    @abstractmethod
    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Prepare for up to ``capacity`` tokens. May allocate, compile and synchronize.

        Raise ValueError if the kernel does not support the activation or a size; PlanError, keeping nothing, if compiling or
        allocating failed.
        """

    @abstractmethod
    def bind(self, weights: Any, first_expert: int = 0) -> None:
        """Take views of the weights of the layer's experts, the first of which has the global id ``first_expert``.

        Raise ValueError, naming the tensor, if one has the wrong shape or dtype.
        """

    @abstractmethod
    def self_test(self) -> None:
        """Compare with the reference on the bound weights, and leave out what misses its bound.

        Call it after every ``bind``. Weights that are all zero or not finite leave the test to later ones; what was not tested
        does not serve. Raise PlanError if nothing is left.
        """

    @classmethod
    def available(cls) -> bool:
        """Return True if the packages that make these kernels are installed."""
        return True

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return True if ``plan`` may be asked for this device."""
        return True

    @classmethod
    def fits(cls, geometry: Geometry, capacity: int, device: torch.device) -> bool:
        """Return False if ``plan`` will raise before it compiles."""
        return True

    @classmethod
    def compile_ahead(cls, planned: Sequence[tuple[type[Kernel], int]], geometry: Geometry, device: torch.device) -> int:
        """Compile for the families of ``planned``, with their capacities, before their plans. Return the number of processes."""
        return 0

    @property
    def settled(self) -> bool:
        """True once the answers of ``serves`` are final."""
        return True

    def check(self, geometry: Geometry, multiples: tuple[int, int]) -> None:
        """Raise ValueError if the family lacks the activation, or hidden and intermediate size are not of these ``multiples``."""
        activations, sizes = self.features.activations, (geometry.hidden_size, geometry.intermediate_size)
        if geometry.activation not in activations:
            raise ValueError(f"activation {geometry.activation} is none of {', '.join(sorted(activations))}")
        if any(size % multiple for size, multiple in zip(sizes, multiples, strict=True)):
            named = f"hidden size {sizes[0]} and intermediate size {sizes[1]}"
            raise ValueError(f"{named} must be multiples of {' and '.join(map(str, dict.fromkeys(multiples)))}")

    def serves(self, tokens: int) -> bool:
        """Return True if ``run`` takes this many tokens."""
        return max(1, self.features.measured_from) <= tokens <= self.capacity

    def forms(self) -> Mapping[str, Kernel]:
        """Return this kernel in each of the ways that a measurement compares. They share its plan and its weights.

        By what tells them apart, which is empty if there is only one.
        """
        return {"": self}

    def rounding(self, tokens: int) -> float:
        """Return the relative L2 from the reference that rounding explains: the order of bf16 sums, reciprocals."""
        return 0.0

    def summary(self) -> tuple[str, ...]:
        """Describe which kernel serves which token counts, and what was left out and why, for the log and for ``status()``."""
        first, name = self.features.measured_from, self.features.name
        line = f"{name}: {max(first, 1)} to {self.capacity} tokens"
        return (f"{line}, where the card has measured that it is faster" if first else line,)

    def scratch_bytes(self, tokens: int) -> int:
        """Return the bytes of ``MoECall.scratch`` that suffice for every call of up to so many tokens in 16 bits."""
        return 0

    @property
    def workspace(self) -> tuple[int, int] | None:
        """Identity, and size in bytes, of scratch memory that layers of one geometry share, if any."""
        return None

    def run(self, call: MoECall) -> torch.Tensor:
        """Run the layer's experts. Return ``(tokens, H)``: ``call.out`` if given, else a new tensor in the layer's dtype.

        Raise ValueError if a tensor has the wrong shape, dtype or device, or no kernel is planned for so many tokens.
        """
        prepared = call.prepared(self.geometry, self.features.quantized_input, self.weights.fc1_weight.get_device())
        self._launch(prepared)
        given, out = call.out, prepared.out
        assert out is not None
        return out if given is None or given is out else given.copy_(out)  # the kernel could not write the caller's

    def _launch(self, call: MoECall) -> None:
        """Write ``call.out``, for a call as ``MoECall.prepared`` returns it."""
        raise NotImplementedError
