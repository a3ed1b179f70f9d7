# SPDX-License-Identifier: Apache-2.0
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
    """A kernel cannot serve its geometry on this machine; the message is the first line of the cause."""

    @property
    def lasting(self) -> bool:
        """True if other layers of the geometry would fail too. Running out of memory does not last: memory may be free later."""
        return not isinstance(self.__cause__, torch.OutOfMemoryError)


def first_line(error: BaseException) -> str:
    """Return ``Type: message`` on one line. For a PlanError, return only the message."""
    line = errors.first_line(error)
    return line.removeprefix("PlanError: ") if isinstance(error, PlanError) else line


class Kernel(ABC):
    """Kernels of one family on one layer: call ``plan`` once, ``bind`` and ``self_test`` after every load, then ``run``."""

    features: ClassVar[KernelFeatures]
    geometry: Geometry
    device: torch.device
    capacity: int
    """Maximum number of tokens this kernel was planned for."""
    instruction: ClassVar[str] = ""
    """Tensor core instruction in the PTX of the family's matrix products."""
    takes_logits: ClassVar[bool] = False
    """True if a geometry may have a ``scoring``."""
    adds_bias: ClassVar[bool] = False
    """True if ``run`` adds the biases of ``Epilogue``."""
    limited = ""
    """Reason why the capacity is less than the one passed to ``plan``; empty if it is not."""
    weights: Any
    """The bound ``trtllm_b12x.formats.weights.Weights``."""

    @abstractmethod
    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Prepare for up to ``capacity`` tokens. The call may allocate, compile and synchronize.

        Raise ValueError if the kernel does not support the activation or a size. Raise PlanError, keeping nothing, if compiling
        or allocating failed.
        """

    @abstractmethod
    def bind(self, weights: Any, first_expert: int = 0) -> None:
        """Take views of the weights of the layer's experts. The first local expert has the global id ``first_expert``.

        Raise ValueError, naming the tensor, if one has the wrong shape or dtype.
        """

    @abstractmethod
    def self_test(self) -> None:
        """Compare the kernels with the reference on the bound weights, and drop kernels whose error exceeds its bound.

        Call it after every ``bind``. If the weights are all zero or not finite, the test waits for later weights. Untested
        kernels do not serve. Raise PlanError if no kernel is left.
        """

    @classmethod
    def available(cls) -> bool:
        """Return True if the packages that make these kernels are installed."""
        return True

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return True if ``plan`` supports this device."""
        return True

    @classmethod
    def fits(cls, geometry: Geometry, capacity: int, device: torch.device) -> bool:
        """Return False if ``plan`` will raise before it compiles."""
        return True

    @classmethod
    def compile_ahead(cls, planned: Sequence[tuple[type[Kernel], int]], geometry: Geometry, device: torch.device) -> int:
        """Compile the ``planned`` families for their capacities before their ``plan`` runs. Return the number of processes."""
        return 0

    @property
    def settled(self) -> bool:
        """True once the answers of ``serves`` are final."""
        return True

    def check(self, geometry: Geometry, multiples: tuple[int, int]) -> None:
        """Raise ValueError if the family lacks the activation, or ``multiples`` do not divide hidden and intermediate size."""
        activations, sizes = self.features.activations, (geometry.hidden_size, geometry.intermediate_size)
        if geometry.activation not in activations:
            raise ValueError(f"activation {geometry.activation} is not one of {', '.join(sorted(activations))}")
        if any(size % multiple for size, multiple in zip(sizes, multiples, strict=True)):
            named = f"hidden size {sizes[0]} and intermediate size {sizes[1]}"
            raise ValueError(f"{named} must be multiples of {' and '.join(map(str, dict.fromkeys(multiples)))}")

    def serves(self, tokens: int) -> bool:
        """Return True if ``run`` takes this many tokens."""
        return max(1, self.features.measured_from) <= tokens <= self.capacity

    def forms(self) -> Mapping[str, Kernel]:
        """Return the variants of this kernel that a benchmark compares. They share its plan and its weights.

        The keys name the variants; the key of a single variant is empty.
        """
        return {"": self}

    def rounding(self, tokens: int) -> float:
        """Return the relative L2 error that rounding explains: the order of bf16 sums, and reciprocals instead of divisions."""
        return 0.0

    def summary(self) -> tuple[str, ...]:
        """Describe which kernel serves which token counts, and what was left out and why, for the log and for ``status()``."""
        first, name = self.features.measured_from, self.features.name
        line = f"{name}: {max(first, 1)} to {self.capacity} tokens"
        return (f"{line}, where the card has measured that it is faster" if first else line,)

    def scratch_bytes(self, tokens: int) -> int:
        """Return the bytes of ``MoECall.scratch`` that suffice for every call with up to ``tokens`` tokens in 16 bits."""
        return 0

    @property
    def workspace(self) -> tuple[int, int] | None:
        """Identity and size in bytes of the scratch memory that layers of one geometry share, or None without shared memory."""
        return None

    def run(self, call: MoECall) -> torch.Tensor:
        """Run the layer's experts. Return ``(tokens, H)``: ``call.out`` if given, else a new tensor in the layer's dtype.

        Raise ValueError if a tensor has the wrong shape, dtype or device, or if no kernel is planned for this number of tokens.
        """
        prepared = call.prepared(self.geometry, self.features.quantized_input, self.weights.fc1_weight.get_device())
        self._launch(prepared)
        given, out = call.out, prepared.out
        assert out is not None
        return out if given is None or given is out else given.copy_(out)  # kernels cannot write this ``out``

    def _launch(self, call: MoECall) -> None:
        """Write ``call.out`` for a call that ``MoECall.prepared`` returned."""
        raise NotImplementedError
