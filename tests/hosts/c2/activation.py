"""Activations of C2: one frozen record instead of ``activation_type`` and ``swiglu_*``, and what a backend makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, ClassVar

import torch

from ...utils import ActivationType


@dataclass(frozen=True, eq=False)
class ActivationConstants:
    alpha: Any = None
    beta: Any = None
    limit: Any = None


@dataclass(frozen=True, eq=False)
class SwigluActivation:
    clamp: torch.Tensor | float | None = None
    kind: ClassVar[ActivationType] = ActivationType.Swiglu

    def constants(self) -> ActivationConstants:
        return ActivationConstants(limit=self.clamp)


@dataclass(frozen=True, eq=False)
class SwigluBiasActivation:
    gate_sigmoid_scale: torch.Tensor | float
    linear_offset: torch.Tensor | float
    clamp: torch.Tensor | float | None = None
    kind: ClassVar[ActivationType] = ActivationType.SwigluBias

    def constants(self) -> ActivationConstants:
        return ActivationConstants(alpha=self.gate_sigmoid_scale, beta=self.linear_offset, limit=self.clamp)


@dataclass(frozen=True, eq=False)
class SimpleActivation:
    """Without constants: Relu2, Silu and the like."""

    kind: ActivationType

    def __post_init__(self) -> None:
        if self.kind in (ActivationType.Swiglu, ActivationType.SwigluBias):
            raise ValueError(f"{self.kind.name} has a record of its own")

    def constants(self) -> ActivationConstants:
        return ActivationConstants()


DEFAULT_MOE_ACTIVATION = SwigluActivation()


class ActivationParamShape(Enum):
    PER_EXPERT_TENSOR = auto()
    UNSUPPORTED = auto()


@dataclass(frozen=True)
class MoEActivationSupport:
    kinds: frozenset[ActivationType]
    alpha_beta: ActivationParamShape = ActivationParamShape.UNSUPPORTED
    limit: ActivationParamShape = ActivationParamShape.UNSUPPORTED

    def lacking(self, kind: ActivationType, constants: frozenset[str]) -> list[str]:
        """What the resolver refuses a candidate for: the kind, or constants that its kernels do not take."""
        if kind not in self.kinds:
            return [kind.name]
        shapes = {"alpha": self.alpha_beta, "beta": self.alpha_beta, "clamp": self.limit}
        return sorted(name for name in constants if shapes[name] is ActivationParamShape.UNSUPPORTED)


def install_activation_params(module: Any) -> None:
    """``act_alpha``, ``act_beta`` and ``act_clamp``, as non-persistent buffers where there is a value."""
    if module.activation.kind not in type(module).activation_support.kinds:
        raise ValueError(f"{type(module).__name__} does not implement activation {module.activation.kind.name}")
    constants = module.activation.constants()
    for name, value in (("act_alpha", constants.alpha), ("act_beta", constants.beta), ("act_clamp", constants.limit)):
        if hasattr(module, name):
            delattr(module, name)
        if value is None:
            setattr(module, name, None)
        else:
            tensor = torch.as_tensor(value, dtype=torch.float32).expand(module.expert_size_per_partition).clone()
            module.register_buffer(name, tensor, persistent=False)
