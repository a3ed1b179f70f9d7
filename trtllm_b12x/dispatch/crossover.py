# SPDX-License-Identifier: Apache-2.0
"""Decide which kernel serves how many tokens, once per geometry: the setting, stored times, a measurement, or the default.

A layer decides at its first eager call with tested kernels, and once more if the engine tunes its own path later: only then is
the path's time fair. Until then, and where nothing can be measured, the fixed threshold holds. A captured graph keeps the
kernels that it captured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.core import locks, log, process, settings
from trtllm_b12x.decision import KernelFeatures
from trtllm_b12x.kernels import Geometry

from . import store, timing
from .policy import DEFAULT_CROSSOVER, HOST, DispatchPolicy, FixedThreshold, MeasuredPolicy, counts_to_measure
from .schedule import EVERY, Schedule, default_crossover
from .timing import RouteSampler, TimedPath

_ROWS = 32
"""Routed rows per local expert up to which kernels are planned if a measurement decides: two of Triton's largest blocks."""
_TOKENS = (64, 256)
"""Kernels are planned for at least the first and at most the second number of tokens."""
UNTUNED, TUNED = 0, 1
"""Stages of a process, before and after the engine's autotuner has run."""
Paths = Callable[[], Mapping[str, TimedPath]]
"""Function that returns the families and the engine's path, to be timed."""


_lock = locks.new()
_policies: dict[tuple[Any, ...], DispatchPolicy] = {}
"""Policies by geometry, families, device and stage."""
_stage = UNTUNED
_unmeasured = False


@process.kept
def _forget() -> None:
    global _stage, _unmeasured
    with _lock:
        _policies.clear()
        _stage, _unmeasured = UNTUNED, False


def max_tokens(features: KernelFeatures, geometry: Geometry, device: torch.device) -> int:
    """Return the largest token count that a family's kernels are planned for; 0 if it is not to be planned."""
    said, measurable = settings.CROSSOVER(), timing.possible(device)
    fixed = said if isinstance(said, int) else None
    if features.every_count:
        return EVERY
    if features.measured_from:
        return timing.LARGEST if (measurable and fixed is None) or _unmeasured else 0
    if fixed is None and measurable:
        rows = _ROWS * geometry.num_experts * geometry.ranks // geometry.top_k
        fixed = 1 + min(max(rows, _TOKENS[0]), _TOKENS[1])
    return default_crossover(geometry.top_k, [features], fixed) - 1


def default_policy() -> FixedThreshold:
    """Return the policy that holds until a layer's own is decided."""
    if _unmeasured:
        return FixedThreshold(timing.LARGEST + 1, "unmeasured", measured=True, asked=True)
    if isinstance(said := settings.CROSSOVER(), int):
        return FixedThreshold(said, f"{settings.CROSSOVER.name}={said}", asked=True)
    return FixedThreshold(asked=said is not None)


@contextmanager
def unmeasured() -> Iterator[None]:
    """Let the first family of layers loaded in the block serve every count that it can, to see what it computes."""
    global _unmeasured
    before, _unmeasured = _unmeasured, True
    try:
        yield
    finally:
        _unmeasured = before


def stage() -> int:
    """Return the stage of this process. The stage changes when layers should decide again."""
    return _stage


def tuning() -> None:
    """Record that the engine's autotuner is running."""
    global _stage
    _stage = TUNED


def paths_of(schedules: Sequence[Schedule], host: TimedPath | None) -> dict[str, TimedPath]:
    """Return the paths to time: every variant of every kernel, over layers of equal schedules, and ``HOST``.

    ``host`` is None if the engine has no path; a family that serves every count then takes its place.
    """
    first, paths = schedules[0], {}
    base = first.families.get(first.base)
    if base is not None:
        host = TimedPath([schedule.families[first.base].run for schedule in schedules], base.serves)
    assert host is not None
    for name, kernel in first.forms.items():
        if kernel is not base:
            # Prefill rarely runs in a graph. Launch time then counts for prompt kernels; the engine's path is timed without it.
            captured = bool(kernel.features.graph_safe) and kernel.features.measured_from < DEFAULT_CROSSOVER
            paths[name] = TimedPath([schedule.forms[name].run for schedule in schedules], kernel.serves, captured)
    return {**paths, HOST: host}


def ensure_measured(
    schedule: Schedule, device: torch.device, paths: Paths, sample_routes: RouteSampler, host: str
) -> tuple[DispatchPolicy, bool]:
    """Return the policy of the schedule's geometry, decided if necessary, and whether the policy is final at this stage.

    ``paths`` is called only for a measurement, whose exceptions are raised. Times are stored by ``host``, the name of the
    engine's generation.
    """
    geometry = schedule.kernels[0].geometry
    if not timing.possible(device):
        _log(schedule)
        return schedule.policy, True
    if not schedule.settled:
        return schedule.policy, False
    stage = TUNED if schedule.base else _stage  # the engine's autotuner does not tune our kernels
    now, before = ((geometry, tuple(schedule.families), str(device), at) for at in (stage, UNTUNED))
    with _lock:
        policy = _policies.get(now)
        final = policy is not None or not torch.cuda.is_current_stream_capturing()
        if policy is None and final:
            # This policy stays if the measurement fails: the geometry's other layers do not retry.
            _policies[now] = _policies.get(before) or default_policy()
            policy = _policies[now] = _policy(schedule, device, stage == TUNED, paths, sample_routes, host)
            _log(Schedule(schedule.families, policy, schedule.hostless))
        policy = policy or _policies.get(before)
    if policy is not None:
        return policy, final
    log.once(
        f"{geometry}: a CUDA graph is captured before any eager call: it keeps {schedule.summary}; nothing is measured yet, "
        "and the engine's own path is not judged"
    )
    return schedule.policy, False


def _policy(
    schedule: Schedule, device: torch.device, tuned: bool, paths: Paths, sample_routes: RouteSampler, host: str
) -> DispatchPolicy:
    """Decide in this order: a fixed setting, a file that the setting names, stored times, a measurement, the default."""
    file, geometry, base = settings.CROSSOVER(), schedule.kernels[0].geometry, schedule.base
    if isinstance(file, int):
        return default_policy()
    key, tuned_key = (key_of(geometry, device, schedule, host, stage) for stage in (tuned, True))
    if isinstance(file, Path):
        try:
            return MeasuredPolicy(store.load_file(file, key), f"{settings.CROSSOVER.name}={file}", True, base)
        except ValueError as error:
            log.once(f"{settings.CROSSOVER.name} has no table for {geometry}: {error}; it is measured on this card")
    for stored_key in (tuned_key,) if tuned else (tuned_key, key):
        if (timings := store.load(stored_key)) is not None:
            return MeasuredPolicy(timings, "stored", base=base)
    timed = paths()
    timer = timing.PathTimer(timed, geometry, sample_routes, device)
    timings = timer(counts_to_measure(timing.largest_served(timed).values()))
    store.keep(key, timings)
    return MeasuredPolicy(timings, f"measured in {timer.spent_s:.1f} s", base=base)


def _log(schedule: Schedule) -> None:
    with suppress(Exception):  # an error in logging must not stop a kernel
        log.once(f"{schedule.kernels[0].geometry}: {schedule.summary}", logging.INFO)


def key_of(geometry: Geometry, device: torch.device, schedule: Schedule, host: str, tuned: bool) -> store.Key:
    """Return the conditions under which a measurement on ``device`` is valid."""
    families = [name for name in schedule.forms if name != schedule.base]
    sizes = {name: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in asdict(geometry).items()}
    card: dict[str, Any] = {"name": device.type}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        card = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": int(getattr(properties, "L2_cache_size", 0)),
        }
    paths = {"kernels": families, "host": schedule.base or host, "tuned": tuned}
    return store.Key(card, sizes, paths, store.versions(), max(kernel.capacity for kernel in schedule.kernels))
