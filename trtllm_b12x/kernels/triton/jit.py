"""Kernels that Triton compiles: what its families have in common.

A plan comes from Triton's cache (``cache.py``), into which processes compile what it lacks (``compile_pool.py``). The layers of a
geometry on a device share it. The first of them whose weights say anything tests it on the card (``examination.py``).
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.core import locks, process
from trtllm_b12x.core.log import logger
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.kernels import Geometry, Kernel, PlanError, first_line
from trtllm_b12x.kernels.cards import Card, card_of
from trtllm_b12x.kernels.reference import ReferenceKernel
from trtllm_b12x.kernels.self_test import run_quick_self_test

from . import cache, jit_monitor, launcher
from .variant import Variant


@dataclass
class Plan:
    """State that layers of one geometry share on one device."""

    compiled: dict[tuple[Any, ...], Any] | None
    """By variant; None where Triton's JIT or its interpreter launches."""
    calls: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """By tokens, form and types of a call, and whether past the JIT."""
    tested: bool = False
    untold: bool = False
    """Not tested, since the weights say nothing."""


_plans: dict[tuple[Any, ...], Any] = {}
_lock = locks.new()
_PROVED = 63
"""Tokens of a call that :meth:`JitKernel.assembled` is about."""
process.kept(_plans.clear)


def interpreted() -> bool:
    """Triton's kernels run on the CPU, in Python."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class JitKernel(Kernel):
    """Our own kernels on one layer."""

    reference: type[ReferenceKernel]
    """Torch kernel that the self-test compares with."""
    first_expert: int
    instruction = "mma.sync"
    _plan: Any
    """A :class:`Plan`."""

    def __init__(self, card: Card | None = None) -> None:
        """
        Args:
            card: that kernels are chosen for, instead of the device's own.
        """
        self._card = card

    @classmethod
    def available(cls) -> bool:
        return toolchain.version() != "none"

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        if device.type != "cuda":
            return interpreted()
        major, minor = torch.cuda.get_device_capability(device)
        return 10 * major + minor >= cls.features.oldest_sm

    # ---- plan --------------------------------------------------------------------------------------------------------

    def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Compile every kernel for 1 to ``capacity`` tokens, or share what another layer compiled."""
        self.describe(geometry, capacity, device)
        self._key = (*self._identity(), str(device))
        with _lock:
            if self._key not in _plans:
                try:
                    compiled = self._compile()
                    _plans[self._key] = self._planned(compiled if compiled and launcher.known() else None)
                except Exception as error:
                    raise PlanError(first_line(error)) from error
            self._plan = _plans[self._key]

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Set the sizes that :meth:`variants` depends on; compile nothing.

        Raises:
            ValueError: no kernel of the family serves ``geometry``.
        """
        self.check(geometry, (self.features.hidden_size_multiple, self.features.group_size))
        self.geometry, self.capacity, self._device = geometry, capacity, device

    @abstractmethod
    def variants(self) -> Iterator[Variant]:
        """Every kernel that a call may launch; :meth:`describe` was called."""

    @classmethod
    def assembled(cls, geometry: Geometry, card: Card, directory: Path) -> Iterator[str]:
        kernel = cls(card)
        kernel.describe(geometry, _PROVED, torch.device("cuda"))
        return (variant.assemble(card.capability).asm["ptx"] for variant in kernel.samples())

    def samples(self) -> Iterator[Variant]:
        """Yield the :meth:`variants` that a compile on another machine shows."""
        return self.variants()

    @abstractmethod
    def _identity(self) -> tuple[Any, ...]:
        """Return the key that tells plans apart, beside the device."""

    def _planned(self, compiled: dict[tuple[Any, ...], Any] | None) -> Plan:
        return Plan(compiled)

    @property
    def card(self) -> Card:
        return self._card or card_of(self._device)

    def _compile(self) -> dict[tuple[Any, ...], Any] | None:
        if self._device.type != "cuda":
            if not interpreted():
                raise PlanError(f"Triton's kernels do not run on {self._device}")
            return None
        name, capability = self.features.name, self.card.capability
        started, variants = time.monotonic(), list(self.variants())
        logger.info("%s kernels for %s: compiling, or loading from Triton's cache", name, self.geometry)
        with torch.cuda.device(self._device), torch.inference_mode(False):
            compiled, processes = cache.load(variants, capability, jit_monitor.remedy(self.geometry, self.card))
        took = time.monotonic() - started
        logger.info("%s kernels for %s: %d in %.1f s by %d processes", name, self.geometry, len(variants), took, processes or 1)
        return compiled

    # ---- test --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _tested_sizes(self) -> Sequence[int]:
        """Token counts that reach every kernel."""

    def self_test(self) -> None:
        """Once per plan; weights that say nothing (a dummy load) leave it to those that do.

        Raises:
            PlanError: a kernel is wrong; the message has the numbers.
        """
        if self._plan.tested:
            return
        try:
            with jit_monitor.expected():
                results = run_quick_self_test(self, self.reference, self.first_expert, self._tested_sizes())
            failed = [str(result) for result in results or () if not result.passed]
            if failed:
                raise PlanError("; ".join(failed))
        except Exception as error:
            with _lock:
                _plans.pop(self._key, None)
            raise PlanError(first_line(error)) from error
        finally:
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # the host sizes its KV cache by what is free
        if results is None:
            what = f"{self.features.name} kernels for {self.geometry}"
            logger.info("%s: not tested yet, the weights are all zero or not finite", what)
        self._plan.tested, self._plan.untold = results is not None, results is None

    @property
    def settled(self) -> bool:
        return bool(self._plan.tested)

    @property
    def device(self) -> torch.device:
        return self._device
