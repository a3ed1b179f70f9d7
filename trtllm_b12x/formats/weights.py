"""The weights of a layer as kernels read them, for any number format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch

from .epilogue import Epilogue
from .geometry import Geometry


@dataclass(frozen=True)
class Weights(ABC):
    """Views of one layer's parameters on one rank, as its kernels read them; a format has its own fields."""

    payload: ClassVar[tuple[str, ...]]
    """Fields that hold codes."""
    block_scales: ClassVar[tuple[str, ...]]
    """Fields that hold what scales blocks of them."""
    epilogue: Epilogue = field(default_factory=Epilogue, kw_only=True)
    """Biases, and the constants of the activation."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that kernels read, by field."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in named if isinstance(value, torch.Tensor)}

    @abstractmethod
    def check(self, geometry: Geometry) -> None:
        """Raise ValueError, naming the tensor, where a shape or dtype is not what kernels of ``geometry`` take."""

    def compare(self, expected: Mapping[str, tuple[tuple[int, ...], torch.dtype]], others: tuple[int, ...] = ()) -> None:
        """:meth:`check` with shape and dtype by field; those that are not there are float32 of shape ``others``."""
        for name, tensor in self.tensors().items():
            shape, dtype = expected.get(name, (others, torch.float32))
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the kernel takes {shape} {dtype}")

    @abstractmethod
    def stored(self, slot: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A local expert's FC1 (rows [up; gate]) and FC2, uint8 ``(rows, bytes)``, by the checkpoint's kind of tensor."""

    def typical_input(self) -> float:
        """The size of activations to test kernels with.  Synchronizes."""
        return 1.0

    def derive(self) -> None:  # noqa: B027
        """In place and without synchronizing, what a call reads and parameters imply: in most formats nothing."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device
