# SPDX-License-Identifier: Apache-2.0
"""One Triton kernel with its constants and compiler options."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from . import compile_pool


@dataclass(frozen=True)
class Variant:
    module: str
    """Name of the module below ``trtllm_b12x.kernels``."""
    name: str
    types: tuple[Any, ...]
    """Types of the arguments up to the constants: tensors' dtypes and examples of integers."""
    constants: dict[str, Any]
    options: dict[str, Any]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        types = (kind if isinstance(kind, torch.dtype) else int for kind in self.types)
        return (self.name, *types, *sorted(self.constants.items()), *sorted(self.options.items()))

    @property
    def function(self) -> Any:
        """The function of Triton's JIT or of its interpreter."""
        return getattr(importlib.import_module(f"trtllm_b12x.kernels.{self.module}"), self.name)

    def warm_up(self) -> Any:
        """Compile the kernel for the current device as the JIT does, or find it in Triton's cache."""
        return self.function.warmup(*self.types, grid=(1,), **self.constants, **self.options)

    def compile_for(self, capability: int) -> Any:
        """Compile the kernel as the JIT does for another card. Triton compiles for that card in this process from then on."""
        from triton.runtime import driver

        card = compile_pool.driver(capability)
        card.get_current_device = lambda: capability  # Triton caches the target by device number
        driver.set_active(card)
        return self.warm_up()
