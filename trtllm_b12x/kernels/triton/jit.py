# SPDX-License-Identifier: Apache-2.0
"""Base of the kernel families that Triton compiles.

A plan's kernels come from Triton's cache (``cache.py``). Processes first compile the kernels that it lacks (``compile_pool.py``).
"""

from __future__ import annotations

import copy
import os
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.core import settings
from trtllm_b12x.core.log import logger
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels import Geometry, Kernel, MoECall, PlanError
from trtllm_b12x.kernels.cards import Card, card_of, warmup_command
from trtllm_b12x.kernels.layer_tensors import check
from trtllm_b12x.kernels.plans import OwnKernel, Plan
from trtllm_b12x.kernels.self_test import SelfTestResult, run_quick_self_test

from . import cache, launcher
from .launcher import LaunchPlan, LayerTensors, WorkspaceLayout
from .variant import Variant

_PROOF_TOKENS = 63
"""Largest call whose kernels ``assembled`` compiles."""


@dataclass
class CompiledPlan(Plan):
    compiled: Mapping[tuple[Any, ...], Any] | None
    """Kernels by variant key; None if Triton's JIT or its interpreter launches."""
    calls: dict[tuple[str, tuple[Any, ...]], LaunchPlan] = field(default_factory=dict)
    """Launch plans by tile set, and by token count, quantized input and dtypes of a call."""


def interpreted() -> bool:
    """Return True if Triton's kernels run on the CPU, in Python."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class JitKernel(OwnKernel):
    held: Any = None
    """Set of tiles for every call. If None, calls use the first of ``proposals``."""
    _label = ""
    _plan: CompiledPlan
    _layers: dict[bool, tuple[LayerTensors, LayerTensors]]
    """Tensors of the layer and their addresses, by whether the input arrives quantized."""

    @classmethod
    def available(cls) -> bool:
        return toolchain.version() != "none"

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        if device.type != "cuda":
            return interpreted()
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor >= cls.features.oldest_sm

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Compile every kernel for 1 to ``capacity`` tokens, or share what another layer compiled."""
        self.describe(geometry, capacity, device)
        self._share((type(self), *self._identity(), str(device)), self._make_plan)

    @abstractmethod
    def variants(self) -> Iterator[Variant]:
        """Yield every kernel that a call may launch, some more than once. Call ``describe`` first."""

    @classmethod
    def assembled(cls, geometry: Geometry, card: Card, directory: Path) -> Iterator[str]:
        kernel = cls(card)
        kernel.describe(geometry, _PROOF_TOKENS, torch.device("cuda"))
        one_of_each = {variant.name: variant for variant in kernel.variants()}
        return (variant.compile_for(card.capability).asm["ptx"] for variant in one_of_each.values())

    @abstractmethod
    def _identity(self) -> tuple[Any, ...]:
        """Return the key that distinguishes the plans of a family, besides the device."""

    def _make_plan(self) -> CompiledPlan:
        if self.device.type != "cuda":
            if not interpreted():
                raise PlanError(f"Triton's kernels do not run on {self.device}")
            return CompiledPlan(None)
        if settings.FREEZE() and not launcher.known():
            raise PlanError(f"Triton {toolchain.version()} launches through its JIT, which may compile: {settings.FREEZE.name}=1")
        name, capability = self.features.name, self.card.capability
        started, variants = time.monotonic(), list({variant.key: variant for variant in self.variants()}.values())
        logger.info("%s kernels for %s: compiling, or loading from Triton's cache", name, self.geometry)
        with torch.cuda.device(self.device):
            remedy = warmup_command(self.geometry, self.card)
            compiled, processes = cache.load(variants, capability, remedy)
        by, took = f" by {processes} processes" if processes else "", time.monotonic() - started
        logger.info("%s kernels for %s: %d in %.1f s%s", name, self.geometry, len(variants), took, by)
        return CompiledPlan(compiled if launcher.known() else None)

    @classmethod
    def compile_ahead(cls, planned: Sequence[tuple[type[Kernel], int]], geometry: Geometry, device: torch.device) -> int:
        card, ours = card_of(device), [(kind, limit) for kind, limit in planned if issubclass(kind, JitKernel)]
        # The first Triton family compiles for all of them.
        if ours[0][0] is not cls or settings.FREEZE() or toolchain.lacking(card.capability) or toolchain.tools_lacking():
            return 0
        variants: list[Variant] = []
        for kind, limit in ours:
            kernel = kind(card)
            with suppress(ValueError):  # its plan raises it again
                kernel.describe(geometry, limit, device)
                variants += kernel.variants()
        with torch.cuda.device(device):
            return cache.fill(variants, card.capability)

    def bind(self, weights: Any, first_expert: int = 0) -> None:
        check(self.geometry, weights)
        layers = self._layer_tensors(weights, first_expert)
        self._layers = {quantized: (layer, layer.addresses()) for quantized, layer in layers.items()}
        self.weights, self.first_expert = weights, first_expert

    @abstractmethod
    def _layer_tensors(self, weights: Any, first_expert: int) -> dict[bool, LayerTensors]:
        """Return the tensors that calls read, by whether the input arrives quantized."""

    @abstractmethod
    def proposals(self, tokens: int) -> tuple[Any, ...]:
        """Return the sets of tiles for a call of ``tokens``. Without measurements, the first set is used."""

    @abstractmethod
    def _counts(self) -> Iterable[int]:
        """Return token counts that together propose every set."""

    def tiles(self, tokens: int) -> Any:
        """Return the set of tiles for a call of ``tokens``."""
        return self.proposals(tokens)[0] if self.held is None else self.held

    def sets(self) -> dict[Any, list[int]]:
        """Return every set with the token counts of ``_counts`` that propose it."""
        counts: dict[Any, list[int]] = {}
        for tokens in self._counts():
            for tiles in self.proposals(tokens):
                counts.setdefault(tiles, []).append(tokens)
        return counts

    def forms(self) -> Mapping[str, JitKernel]:
        return {str(tiles): self._holding(tiles) for tiles in self.sets()}

    def _holding(self, tiles: Any) -> JitKernel:
        kernel = copy.copy(self)
        kernel.held, kernel._label = tiles, str(tiles)
        return kernel

    def _test(self) -> list[SelfTestResult] | None:
        tested: dict[int, list[JitKernel]] = {}
        for tiles, counts in self.sets().items():
            for tokens in {counts[0], counts[-1]}:
                tested.setdefault(tokens, []).append(self._holding(tiles))
        return run_quick_self_test(self, self.reference(), self.first_expert, tested)

    def serves(self, tokens: int) -> bool:
        # If the engine has no path for the format, weights that are all zero or not finite are served too.
        tested = self._plan.tested or (self._plan.untestable and self.features.every_count)
        return tested and super().serves(tokens) and (self.held is None or self.held in self.proposals(tokens))

    @abstractmethod
    def _workspace(self, tokens: int, quantized: bool, tiles: Any) -> WorkspaceLayout:
        """Return the scratch memory layout of calls with ``tokens`` tokens."""

    def scratch_bytes(self, tokens: int) -> int:
        tokens = min(tokens, self.capacity)
        return max(self._workspace(tokens, False, tiles).nbytes for tiles in self.proposals(tokens))

    def _launch(self, call: MoECall) -> None:
        plan, quantized = self._plan, call.x_sf is not None
        form = (call.x.shape[0], quantized, call.ids.dtype, call.router_weights.dtype)
        key = (self._label, form)
        launch_plan = plan.calls.get(key)
        if launch_plan is None:
            if not 0 < form[0] <= self.capacity:
                raise ValueError(f"no kernel is planned for {form[0]} tokens, only for 1 to {self.capacity}")
            launch_plan = plan.calls[key] = self._launch_plan(*form, plan.compiled is not None)
        launch_plan.start(self._layers[quantized], call)

    @abstractmethod
    def _launch_plan(
        self, tokens: int, quantized: bool, ids: torch.dtype, router_weights: torch.dtype, direct: bool
    ) -> LaunchPlan:
        """Prepare the launches of calls with these properties. If ``direct``, launches bypass Triton's JIT."""

    def _launchers(self, variants: Sequence[Variant], grids: Sequence[tuple[int, int]], direct: bool) -> list[launcher.Launch]:
        compiled = self._plan.compiled if direct else None
        calls = zip(variants, grids, strict=True)
        return [launcher.launcher(variant, grid, compiled and compiled[variant.key]) for variant, grid in calls]
