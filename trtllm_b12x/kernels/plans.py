# SPDX-License-Identifier: Apache-2.0
"""Plans: state that layers of one geometry share on one device. A plan is made once, and tested once on the card.

The first layer whose weights are finite and not all zero tests it. A plan is freed with the last layer that uses it.
"""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from trtllm_b12x.core import locks, process
from trtllm_b12x.core.log import logger
from trtllm_b12x.formats import FORMATS, Format
from trtllm_b12x.formats.geometry import Geometry

from .base import Kernel, PlanError, first_line
from .cards import Card, card_of
from .reference import ReferenceKernel
from .self_test import SelfTestResult


@dataclass(kw_only=True)
class Plan:
    """State that layers of one geometry share on one device."""

    tested: bool = False
    untestable: bool = False
    """The weights of the last test were all zero or not finite."""
    results: list[SelfTestResult] = field(default_factory=list)


_plans: weakref.WeakValueDictionary[tuple[Any, ...], Plan] = weakref.WeakValueDictionary()
_lock = locks.new()
process.kept(_plans.clear)


@contextmanager
def _any_error_as_plan_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PlanError(first_line(error)) from error


class PlannedKernel(Kernel):
    reference: ClassVar[type[ReferenceKernel]]
    """Torch kernel with which the self-test compares."""
    _plan: Any
    _key: tuple[Any, ...]

    @classmethod
    def number_format(cls) -> Format:
        return next(form for form in FORMATS if form.quant_algo in cls.features.quantizations)

    def _share(self, key: tuple[Any, ...], make: Callable[[], Plan]) -> None:
        """Use the plan of ``key`` if it exists, else make it. Raise PlanError if compiling or allocating failed."""
        with _lock:
            plan = _plans.get(key)
            if plan is None:
                # The engine may load weights in inference mode; the plan's tensors outlive this mode.
                with _any_error_as_plan_error(), torch.inference_mode(False):
                    plan = _plans[key] = make()
        self._plan, self._key = plan, key

    @abstractmethod
    def _test(self) -> list[SelfTestResult] | None:
        """Compare every kernel of the plan with the reference. Return None if the weights are all zero or not finite."""

    def _leave_out(self, failed: list[SelfTestResult]) -> None:
        """Serve without the kernels that failed. Raise PlanError, with the errors, if a token count has no kernel left."""
        raise PlanError("; ".join(map(str, failed)))

    def self_test(self) -> None:
        plan, name = self._plan, f"{self.features.name} kernels for {self.geometry}"
        with _lock:
            if plan.tested:
                return
            started = time.monotonic()
            _plans.pop(self._key, None)  # no other layer may take it if the test fails
            try:
                with _any_error_as_plan_error():
                    results = self._test()
                    if failed := [result for result in results or () if not result.passed]:
                        self._leave_out(failed)
            finally:
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()  # the engine sizes its KV cache by free memory
            _plans[self._key] = plan
            plan.tested, plan.untestable, plan.results = results is not None, results is None, results or []
        if not plan.tested:
            logger.info("%s: not tested yet, the weights are all zero or not finite", name)
            return
        logger.info("%s: tested in %.2f s", name, time.monotonic() - started)
        for result in plan.results:
            log = logger.debug if result.passed else logger.warning
            log("self-test, %s: %s", self.geometry, result)

    @property
    def settled(self) -> bool:
        return bool(self._plan.tested)

    def _pending(self) -> tuple[str, ...]:
        """Return the line of ``summary`` for kernels that are not tested yet."""
        if self._plan.tested:
            return ()
        return ("not before the self-test, which waits for weights that are finite and not all zero",)


class OwnKernel(PlannedKernel):
    """Our own kernels. They can be compiled for a card that is not in this machine."""

    instruction = "mma.sync"
    adds_bias = True
    first_expert: int

    def __init__(self, card: Card | None = None) -> None:
        """``card``: card that kernels are chosen and compiled for, instead of the device's card."""
        self._card = card

    @classmethod
    def fits(cls, geometry: Geometry, capacity: int, device: torch.device) -> bool:
        try:
            cls().describe(geometry, capacity, device)
        except Exception:  # the plan raises it again, and its message is kept
            return False
        return True

    def describe(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
        """Set the sizes that ``variants`` depends on; compile nothing. Raise ValueError if no kernel serves ``geometry``."""
        self.check(geometry, (self.features.hidden_size_multiple, self.features.group_size))
        if geometry.scoring is not None and not self.takes_logits:
            raise ValueError(f"{self.features.name} takes ids and router weights, no logits")
        self.geometry, self.capacity, self.device = geometry, capacity, device
        self.card = self._card or card_of(device)
