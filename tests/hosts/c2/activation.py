# SPDX-License-Identifier: Apache-2.0
"""Activations of C2: one frozen record instead of ``activation_type`` and ``swiglu_*``, and what a backend makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ...utils import ActivationType


@dataclass(frozen=True, eq=False)
class ActivationConstants:
    alpha: Any = None
    beta: Any = None
    limit: Any = None
    clamp_after_silu: bool = False


@dataclass(frozen=True, eq=False)
class SwigluActivation:
    clamp: torch.Tensor | float | None = None
    clamp_after_silu: bool = False
    kind: ClassVar[ActivationType] = ActivationType.Swiglu

    def constants(self):
        return ActivationConstants(limit=self.clamp, clamp_after_silu=self.clamp_after_silu)


@dataclass(frozen=True, eq=False)
class SwigluBiasActivation:
    gate_sigmoid_scale: torch.Tensor | float
    linear_offset: torch.Tensor | float
    clamp: torch.Tensor | float | None = None
    kind: ClassVar[ActivationType] = ActivationType.SwigluBias

    def constants(self):
        return ActivationConstants(alpha=self.gate_sigmoid_scale, beta=self.linear_offset, limit=self.clamp)


@dataclass(frozen=True, eq=False)
class SimpleActivation:
    """Without constants: Relu2, Silu and the like."""

    kind: ActivationType

    def constants(self):
        return ActivationConstants()


DEFAULT_MOE_ACTIVATION = SwigluActivation()


def install_activation_params(module):
    """``act_alpha``, ``act_beta`` and ``act_clamp``, as non-persistent buffers where there is a value."""
    constants = module.activation.constants()
    for name, value in (("act_alpha", constants.alpha), ("act_beta", constants.beta), ("act_clamp", constants.limit)):
        if hasattr(module, name):
            delattr(module, name)
        if value is None:
            setattr(module, name, None)
        else:
            tensor = torch.as_tensor(value, dtype=torch.float32).expand(module.expert_size_per_partition).clone()
            module.register_buffer(name, tensor, persistent=False)
