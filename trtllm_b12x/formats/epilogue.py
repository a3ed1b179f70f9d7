"""Biases of a layer and the constants of its activation."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from . import constants

NEUTRAL = {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": float("inf")}
"""Values of SwiGLU's constants that are not given."""


@dataclass(frozen=True)
class Epilogue:
    """E local experts, I intermediate size, H hidden size, r = 2 if gated."""

    fc1_bias: torch.Tensor | None = None
    """``(E, r*I)``, rows [up; gate], any float type."""
    fc2_bias: torch.Tensor | None = None
    """``(E, H)``, of the same type."""
    swiglu_alpha: torch.Tensor | None = None
    """``(E,)`` float32; where it is not given, :data:`NEUTRAL`."""
    swiglu_beta: torch.Tensor | None = None
    swiglu_limit: torch.Tensor | None = None

    def swiglu(self, experts: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """alpha, beta and limit, ``(E,)`` float32 each, also where they are not given."""
        given = ((getattr(self, name), value) for name, value in NEUTRAL.items())
        return tuple(constants.filled(value, (experts,), device) if tensor is None else tensor for tensor, value in given)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in named if tensor is not None}

    def check(self, experts: int, rows: int, hidden: int, bias: torch.dtype | None, device: torch.device) -> None:
        """Raise ValueError, naming the tensor, where one is not what kernels of these sizes and type of bias take."""
        shapes = {"fc1_bias": ((experts, rows), bias), "fc2_bias": ((experts, hidden), bias)}
        found = self.tensors()
        for name, tensor in found.items():
            shape, dtype = shapes.get(name, ((experts,), torch.float32))
            if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
                raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, the kernel takes contiguous {shape} {dtype}")
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, the weights are on {device}")
        if bias is not None and not found.keys() >= shapes.keys():
            raise ValueError(f"a bias of {bias} is planned for, and there are {', '.join(found) or 'none'}")
