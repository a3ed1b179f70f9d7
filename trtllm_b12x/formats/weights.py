# SPDX-License-Identifier: Apache-2.0
"""Define a layer's weights as kernels read them, for every number format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from math import log2
from typing import Any, ClassVar

import torch

from . import BY_TURNS, DEFAULT_LAYOUT, GATE_UP, ROWS, WeightLayout, constants
from .geometry import Geometry
from .layouts import mma_scale_view, plain_scales


def tensors_of(record: Any) -> dict[str, torch.Tensor]:
    """Return the fields of a dataclass that hold tensors."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class Epilogue:
    """Biases of a layer and the constants of SwiGLU. E local experts, I intermediate size, H hidden size, r = 2 if gated."""

    fc1_bias: torch.Tensor | None = None
    """``(E, r*I)``, rows [up; gate], any float type."""
    fc2_bias: torch.Tensor | None = None
    """``(E, H)``, same dtype as ``fc1_bias``."""
    swiglu_alpha: torch.Tensor | None = None
    """``(E,)`` float32, 1 if not given."""
    swiglu_beta: torch.Tensor | None = None
    """``(E,)`` float32, 0 if not given."""
    swiglu_limit: torch.Tensor | None = None
    """``(E,)`` float32, infinity if not given."""

    def swiglu(self, experts: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return alpha, beta and limit, ``(E,)`` float32 each. Missing tensors are filled with their default."""
        values = ((self.swiglu_alpha, 1.0), (self.swiglu_beta, 0.0), (self.swiglu_limit, float("inf")))
        return tuple(constants.filled(value, (experts,), device) if tensor is None else tensor for tensor, value in values)

    def check(self, experts: int, rows: int, hidden: int, bias: torch.dtype | None, device: torch.device) -> None:
        """Raise ValueError, naming the tensor, if a tensor does not fit these sizes, this bias dtype or this device."""
        shapes = {"fc1_bias": ((experts, rows), bias), "fc2_bias": ((experts, hidden), bias)}
        tensors = tensors_of(self)
        for name, tensor in tensors.items():
            shape, dtype = shapes.get(name, ((experts,), torch.float32))
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the kernel takes contiguous {shape} {dtype}")
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, the weights are on {device}")
        if bias is not None and not tensors.keys() >= shapes.keys():
            raise ValueError(f"a bias of {bias} is planned for, and there are {', '.join(tensors) or 'none'}")


@dataclass(frozen=True)
class Weights(ABC):
    """Views of one layer's parameters on one rank, as its kernels read them. Each format has its own fields."""

    stored_fields: ClassVar[tuple[str, ...]] = ("fc1_weight", "fc2_weight", "fc1_weight_sf", "fc2_weight_sf")
    """Fields that hold codes and block scales."""
    code_dtype: ClassVar[torch.dtype]
    scale_dtype: ClassVar[torch.dtype]
    group_size: ClassVar[int]
    """Number of codes that share a block scale."""
    packed: ClassVar[int] = 1
    """Number of codes in one element of ``code_dtype``."""
    epilogue: Epilogue = field(default_factory=Epilogue, kw_only=True)
    layout: WeightLayout = field(default=DEFAULT_LAYOUT, kw_only=True)

    @classmethod
    def on_storage(
        cls, codes: Iterable[torch.Tensor], scales: Iterable[torch.Tensor], layout: WeightLayout, **others: Any
    ) -> Weights:
        """View an engine's FC1 and FC2 tensors: ``(E, rows, ...)`` codes, and block scales in integers of any size."""

        def scale_view(tensor: torch.Tensor) -> torch.Tensor:
            if layout.scales == ROWS:
                return tensor.view(cls.scale_dtype)
            columns = tensor.shape[2] * tensor.element_size() * cls.group_size
            return mma_scale_view(tensor, tensor.shape[1], columns, cls.group_size, cls.scale_dtype)

        views: Any = *(tensor.view(cls.code_dtype) for tensor in codes), *map(scale_view, scales)
        return cls(**dict(zip(cls.stored_fields, views, strict=True)), layout=layout, **others)

    @classmethod
    def draw(cls, codes: torch.Tensor, scales: torch.Tensor, generator: torch.Generator) -> None:
        """Fill a matrix of every expert with random codes and block scales. E8M0 scales give products of about one."""
        data = codes.view(torch.uint8).random_(0, 256, generator=generator)
        if cls.packed == 1:
            data.bitwise_and_(0xBF)  # E4M3 below 2, so that no code is NaN
        first, count = 0x30, 0x11  # E4M3 of 0.5 to 2
        if cls.scale_dtype == torch.uint8:
            first, count = 127 - 2 * (cls.packed - 1) - round(log2(data.shape[2] * cls.packed) / 2), 2
        scales.view(torch.uint8).random_(first, first + count, generator=generator)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that kernels read, by field."""
        return tensors_of(self)

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError, naming the tensor, if its shape or dtype does not fit kernels of ``geometry``.

        Block scales fill tiles of 128 rows by 4 blocks, the last ones padded, or are in rows, ``(E, rows, blocks)``. Other fields
        have one float32 per expert.
        """
        if self.layout != geometry.layout:
            raise ValueError(f"the weights are laid out as {self.layout}, the kernel is planned for {geometry.layout}")
        experts, hidden, size = geometry.num_experts, geometry.stored_hidden, geometry.intermediate_size
        rows, width = (2 if geometry.gated else 1) * size, 4 * self.group_size
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"fc1_half_alphas": ((2, experts), torch.float32)}
        for name, height, columns in (("fc1_weight", rows, hidden), ("fc2_weight", hidden, size)):
            expected[name] = (experts, height, columns // self.packed), self.code_dtype
            if self.layout.scales == ROWS:
                shape: tuple[int, ...] = (experts, height, columns // self.group_size)
            else:
                shape = (32, 4, -(-height // 128), 4, -(-columns // width), experts)
            expected[f"{name}_sf"] = shape, self.scale_dtype
        for name, tensor in self.tensors().items():
            shape, dtype = expected.get(name, ((experts,), torch.float32))
            if tensor.dtype != dtype or tensor.shape != shape:
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the kernel takes {shape} {dtype}")
        self.epilogue.check(experts, rows, hidden, geometry.bias, self.device)

    def stored(self, slot: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Return FC1 (rows [up; gate]) and FC2 of a local expert, uint8 ``(rows, bytes)``, by ``weight`` and ``weight_scale``."""
        fields = self.tensors()
        codes = fields["fc1_weight"][slot], fields["fc2_weight"][slot]
        scales = self.row_scales(slot, "fc1_weight"), self.row_scales(slot, "fc2_weight")
        kinds = {"weight": codes, "weight_scale": scales}
        return {
            kind: (self.ordered(fc1.view(torch.uint8)), fc2.contiguous().view(torch.uint8)) for kind, (fc1, fc2) in kinds.items()
        }

    @abstractmethod
    def dequantized(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Multiply codes ``(rows, K / packed)`` by block scales ``(rows, blocks)`` to ``(rows, K)`` of ``dtype``."""

    def matrix(self, slot: int, name: str) -> torch.Tensor:
        """Return a local expert's ``fc1_weight`` (rows [up; gate]) or ``fc2_weight`` in float32, without per-expert scales."""
        values = self.matrices(slice(slot, slot + 1), name)[0]
        return self.ordered(values) if name == "fc1_weight" else values

    def matrices(self, slots: slice, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return ``matrix`` of several local experts, ``(experts, rows, columns)``, with FC1's rows in the layout's order."""
        return self.dequantized(getattr(self, name)[slots], self._scales_in_rows(slots, name), dtype)

    def ordered(self, rows: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """Return FC1's rows, or its bias, in the order [up; gate], or unchanged without a gate. ``dim`` holds the rows."""
        fc1, fc2 = (getattr(self, name) for name in self.stored_fields[:2])
        if self.layout.fc1 not in (GATE_UP, BY_TURNS) or fc1.shape[1] == fc2.shape[2] * self.packed:  # FC2's columns
            return rows
        if self.layout.fc1 == GATE_UP:
            return torch.cat(rows.chunk(2, dim)[::-1], dim)
        return torch.cat(rows.unflatten(dim, (-1, 2)).flip(dim + 1).unbind(dim + 1), dim)

    def row_scales(self, slot: int, name: str) -> torch.Tensor:
        """Return the block scales of a local expert's ``fc1_weight`` or ``fc2_weight`` in rows, ``(rows, blocks)``."""
        return self._scales_in_rows(slice(slot, slot + 1), name)[0]

    def _scales_in_rows(self, slots: slice, name: str) -> torch.Tensor:
        rows, columns = getattr(self, name).shape[1:]
        scales: torch.Tensor = getattr(self, f"{name}_sf")
        plain = scales[slots] if self.layout.scales == ROWS else plain_scales(scales[..., slots])
        return plain[:, :rows, : columns * self.packed // self.group_size]

    @property
    def largest_scale(self) -> int:
        """Largest byte of a block scale in formats where kernels have a limit (``mxfp4.py``), else 0. Reading synchronizes."""
        return 0

    def typical_input(self) -> float:
        """Return the magnitude of activations for kernel tests. This call synchronizes."""
        return 1.0

    def derive(self) -> None:  # noqa: B027
        """Derive tensors from other parameters before a call, in place, without synchronizing. Most formats derive none."""

    @property
    def device(self) -> torch.device:
        return next(iter(self.tensors().values())).device
