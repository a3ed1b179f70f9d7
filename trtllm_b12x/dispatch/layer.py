# SPDX-License-Identifier: Apache-2.0
"""Plan, bind and test the kernels of one layer, and choose one for each call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from trtllm_b12x.core import log, process, settings
from trtllm_b12x.decision import KernelFeatures
from trtllm_b12x.formats.geometry import Scoring
from trtllm_b12x.kernels import Geometry, Kernel, MoECall, PlanError, first_line

from . import crossover, host_check
from .host_check import HostPath
from .policy import DispatchPolicy
from .schedule import EMPTY_SCHEDULE, EVERY, Schedule
from .timing import RouteSampler

LIKE = 1.01
"""Ratio up to which scales of gate and up count as equal."""
_failures: dict[tuple[str, Geometry, str], str] = {}
"""Errors of plans that failed permanently on this rank since the last model began to load. Further layers do not try them."""
_ahead: set[tuple[Any, ...]] = set()
"""Geometries, devices and families that a thread compiles for or has compiled for."""
_model_is_built = False
"""True once weights have been loaded. The next new layer then belongs to another model."""
process.kept(_failures.clear)
process.kept(_ahead.clear)


class LayerDispatch:
    """Plans, binds and selects the kernels of one layer. An engine's layer holds one and hands it weights and calls."""

    def __init__(self, kernels: Mapping[str, type[Kernel]] = MappingProxyType({}), max_num_tokens: int | None = None) -> None:
        """Take the families that may serve the layer, the preferred one first, and the engine's largest batch."""
        global _model_is_built
        self.kernels, self.max_num_tokens = kernels, max_num_tokens
        self.schedule = self.detached = EMPTY_SCHEDULE
        self.waiting: dict[str, int] = {}
        """Families that no call reaches before a measurement, with the token counts that ``plan_waiting`` plans them for."""
        self.decided = False
        """True if nothing is left to measure."""
        self.host: host_check.Verdict | None = None
        """Verdict on the engine's own path, once it was judged."""
        self.scale_ratio = 1.0
        """Largest ratio of gate and up scales, if the engine's own path applies one to both. Set it before ``load``."""
        self.scoring: Scoring | None = None
        """How calls are routed, if the engine passes router logits. Set it before ``load``."""
        self._routing: dict[str, Kernel] = {}
        """Kernels that take router logits, by family."""
        self._errors: dict[str, str] = {}
        self._layer: Any = None
        """Geometry, weights, device and first expert."""
        self._stage = -1
        if _model_is_built:
            _failures.clear()
            _model_is_built = False

    def load(
        self, geometry: Geometry, weights: Any, device: torch.device, first_expert: int, eligible: Collection[str]
    ) -> dict[str, str]:
        """Plan, bind and test the kernels of the eligible families. May compile, allocate and synchronize.

        A family that serves only after a measurement waits for it, while a thread compiles its kernels. Return the first line of
        each error, by family. A family that no call would reach is skipped.
        """
        global _model_is_built
        _model_is_built = True
        policy, self.waiting = crossover.default_policy(), {}
        limits = {name: self._limit(kind.features, geometry, device) for name, kind in self.kernels.items() if name in eligible}
        limits = {name: limit for name, limit in limits.items() if limit}
        # The largest count of each family that a call may reach without a measurement.
        ends = {name: EVERY if self.kernels[name].features.every_count else policy.first - 1 for name in limits}
        reached = {name: min(limit, ends[name]) for name, limit in limits.items()}
        # The first family and those that serve calls beyond it are planned below. Others wait, so that they do not take CPU time.
        first = next((name for name, limit in limits.items() if self.kernels[name].fits(geometry, limit, device)), "")
        if soon := {name: limit for name, limit in limits.items() if first and reached[name] > limits[first]}:
            self._compile_ahead({first: limits[first]} | soon, geometry, device)
        self._layer = geometry, weights, device, first_expert
        self._routing = {}
        bound: dict[str, Kernel] = {}
        errors: dict[str, str] = {}
        for name, limit in limits.items():
            served = Schedule(bound, policy)
            if served.serves_all(limit):
                continue
            if self._existing(name, device) is None and served.serves_all(reached[name]):
                self.waiting[name] = limit
            else:
                self._add(name, limit, bound, errors)
        self._schedule(bound, policy)
        self.detached, self._stage = EMPTY_SCHEDULE, -1
        self.decided, self._errors = False, errors
        self._compile_ahead(self.waiting, geometry, device)
        if bound and not self.schedule.base:
            host_check.prepare(geometry, weights, device)
        if errors and device.type == "cuda":
            torch.cuda.empty_cache()  # the engine sizes its KV cache by free memory
        return errors

    def plan_waiting(self) -> dict[str, str]:
        """Plan, bind and test the families that ``load`` left to a measurement. If one fails, return every failure so far."""
        errors: dict[str, str] = {}
        if self.waiting and not torch.cuda.is_current_stream_capturing():
            bound, waiting = dict(self.schedule.families), self.waiting
            self.waiting = {}
            for name, limit in waiting.items():
                self._add(name, limit, bound, errors)
            self._schedule({name: bound[name] for name in self.kernels if name in bound}, self.schedule.policy)
        return self._errors | errors if errors else {}

    def _add(self, name: str, limit: int, bound: dict[str, Kernel], errors: dict[str, str]) -> None:
        """Plan a family for ``limit`` tokens, bind and test it. Add the kernel to ``bound``, or its error to ``errors``."""
        geometry, weights, device, first_expert = self._layer
        plan = name, geometry, str(device)
        try:
            if plan in _failures:
                raise PlanError(_failures[plan])
            kernel = self._existing(name, device)
            if kernel is None:
                kernel = self.kernels[name]()
                kernel.plan(geometry, limit, device)
            kernel.bind(weights, first_expert)
            kernel.self_test()
            bound[name] = kernel
            if self.scoring is not None and kernel.takes_logits:
                self._add_routing(name, kernel.capacity)
        except Exception as error:
            errors[name] = first_line(error)
            if isinstance(error, PlanError) and error.lasting:
                _failures[plan] = errors[name]

    def _add_routing(self, name: str, limit: int) -> None:
        """Plan, bind and test a family's kernel that takes router logits. After a failure, the engine routes all calls."""
        geometry, weights, device, first_expert = self._layer
        geometry = replace(geometry, scoring=self.scoring)
        plan, kernel = (name, geometry, str(device)), self.kernels[name]()
        try:
            if plan in _failures:
                raise PlanError(_failures[plan])
            kernel.plan(geometry, limit, device)
            kernel.bind(weights, first_expert)
            kernel.self_test()
        except Exception as error:
            if isinstance(error, PlanError) and error.lasting:
                _failures[plan] = first_line(error)
            log.once(f"{name} does not take router logits of {geometry}: {first_line(error)}", logging.INFO)
        else:
            self._routing[name] = kernel

    def run_logits(self, call: MoECall) -> torch.Tensor | None:
        """Return the output of a kernel that routes by itself; None if the engine has to route the call, as after an error."""
        kernel = self.schedule.with_logits(call.x.shape[0])
        try:
            return None if kernel is None else kernel.run(call)
        except Exception as error:
            self.route_first(error)
        return None

    def route_first(self, error: Exception) -> None:
        """Let the engine route all calls after an error of ours, and log one line."""
        geometry = self.schedule.kernels[0].geometry if self.schedule.kernels else "a MoE layer"
        log.once(f"{geometry}: calls are routed by the engine after an error of ours: {first_line(error)}")
        self._routing = {}
        self._schedule(self.schedule.families, self.schedule.policy)

    def _existing(self, name: str, device: torch.device) -> Kernel | None:
        kernel = self.schedule.families.get(name) or self.detached.families.get(name)
        return kernel if kernel is not None and kernel.device == device else None

    def _compile_ahead(self, limits: Mapping[str, int], geometry: Geometry, device: torch.device) -> None:
        """Compile these families' kernels in a thread, in order, once per geometry. Their plans repeat what fails there."""
        key = geometry, str(device), *limits
        if not limits or device.type != "cuda" or key in _ahead:
            return
        _ahead.add(key)
        planned = [(self.kernels[name], limit) for name, limit in limits.items()]

        def compile_all() -> None:
            for kind, _ in planned:
                with suppress(Exception):
                    kind.compile_ahead(planned, geometry, device)

        threading.Thread(target=compile_all, daemon=True).start()

    def _limit(self, features: KernelFeatures, geometry: Geometry, device: torch.device) -> int:
        """Return the largest token count to plan a family for; 0 if no call would reach it."""
        limit = crossover.max_tokens(features, geometry, device)
        if features.measured_from and self.max_num_tokens is not None:
            limit = min(limit, self.max_num_tokens)
        return limit if limit >= features.measured_from else 0

    def bind(self, weights: Any, first_expert: int) -> None:
        """Bind weights that have moved."""
        geometry, _, device, _ = self._layer
        self._layer = geometry, weights, device, first_expert
        for kernel in (*self.schedule.kernels, *self._routing.values()):
            kernel.bind(weights, first_expert)
        self._schedule(self.schedule.families, self.schedule.policy)  # with their variants

    def should_measure(self) -> bool:
        """Return whether ``measure`` has something to decide at this stage of the process."""
        return self._stage != crossover.stage() and not self.decided and bool(self.schedule.kernels)

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Suppress and log an error in the block. The kernels then serve as before, and this stage measures nothing more."""
        try:
            yield
        except Exception as error:
            self._stage = crossover.stage()
            geometry = self.schedule.kernels[0].geometry
            log.logger.debug("measuring %s", geometry, exc_info=error)
            log.once(f"the crossover of {geometry} cannot be measured: {first_line(error)}")

    def measure(self, device: torch.device, paths: crossover.Paths, sample_routes: RouteSampler, host: str) -> None:
        """Apply the policy of the layer's geometry, measured if necessary; see ``crossover.ensure_measured``."""
        stage = crossover.stage()
        policy, final = crossover.ensure_measured(self.schedule, device, paths, sample_routes, host)
        self._schedule(self.schedule.families, policy)
        if final:
            self._stage, self.decided = stage, stage == crossover.TUNED

    def judge_host(self, path: HostPath) -> None:
        """Judge the engine's own path. If the path is wrong, our kernels serve its counts as far as they can."""
        if self.schedule.base or not self.schedule.settled or torch.cuda.is_current_stream_capturing():
            return
        name, last = self._instead()
        instead = f"{name} serves instead, up to {last} tokens; longer calls stay with it"
        if self.schedule.policy.asked:
            instead = f"it serves nevertheless, as {settings.CROSSOVER.name} says"
        elif last == EVERY:
            instead = f"{name} serves instead, unless {settings.CROSSOVER.name} is set"
        one_scale = self.scale_ratio > LIKE
        self.host = host_check.judge(self.schedule.kernels[0], self._layer[3], path, crossover.stage(), instead, one_scale)
        self._schedule(self.schedule.families, self.schedule.policy)

    def _schedule(self, families: Mapping[str, Kernel], policy: DispatchPolicy) -> None:
        self.schedule = Schedule(families, policy, self._wrong_host, self._routing)

    @property
    def _wrong_host(self) -> bool:
        return (self.host is not None and self.host.wrong) or self.scale_ratio > LIKE

    def _instead(self) -> tuple[str, int]:
        """Return what serves if the engine's path is wrong, and its largest token count: ``EVERY`` for a family for prompts."""
        limits = {name: kernel.capacity for name, kernel in self.schedule.families.items()} | self.waiting
        name = next((name for name in reversed(limits) if self.kernels[name].features.measured_from), "")
        return (name, EVERY) if name else ("+".join(limits), max(limits.values(), default=0))

    def tell_of_halves(self, layer: str, host: str) -> None:
        """Log what serves prompts if gate and up have different scales and ``host``, the engine's path, applies one to both."""
        ratio, (name, last) = self.scale_ratio, self._instead()
        if ratio <= LIKE or not self.schedule.kernels:
            return
        served = last == EVERY and not self.schedule.policy.asked
        wrong = f"prompts, which it serves, are off by a factor of up to {ratio:.3g}"
        log.once(
            f"{layer}: gate and up have different weight_scale_2 (up to {ratio:.3g} times). Our kernels apply each. "
            f"{host}: {f'{name} serves prompts instead' if served else wrong}",
            logging.INFO if served else logging.WARNING,
            "different weight_scale_2",
        )

    def drop(self) -> None:
        """Send all further calls to the engine. Captured graphs stay valid, because they own their workspace."""
        self.schedule = self.detached = EMPTY_SCHEDULE
        self.waiting, self._layer, self._routing = {}, None, {}

    def moved_to(self, device: torch.device) -> bool:
        """Detach the kernels of a layer that has moved to ``device``. Return whether they run there and can be bound again."""
        schedule = self.schedule if self.schedule.kernels else self.detached
        self.schedule, self.detached = EMPTY_SCHEDULE, schedule
        return bool(schedule.kernels) and all(kernel.runs_on(device) for kernel in schedule.kernels)
