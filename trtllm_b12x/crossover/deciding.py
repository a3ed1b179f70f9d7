"""When a process measures, and whose word counts for a layer: the setting, what is stored, a measurement, the default.

Asked at calls outside capture, once the layer's kernels are tested: the first after the host's autotuner has run, because the
host's path is fair only then.  A host that calls layers before it tunes, or never tunes, has an answer for as long as that is
so.  Ranks that share layers add up their times, so that all of them come to the same answer; one that has none takes the
others'.  Until then, and where nothing can be measured, the fixed split holds.  What a graph has captured stays as it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from trtllm_b12x import host, locks, log, process, registry, schedule, settings, votes
from trtllm_b12x.bootstrap import first_line
from trtllm_b12x.decision import KernelFeatures
from trtllm_b12x.kernels import Geometry
from trtllm_b12x.log import logger
from trtllm_b12x.schedule import Schedule

from . import measuring, store
from .measuring import Path
from .table import HOST, Fixed, Measured, Split, Times

WAIT_S = 5.0
"""For other ranks, which come to the same call at about the same time and measure for :data:`measuring.BUDGET_S` at most."""
ROWS = 32
"""Routed rows per local expert up to which kernels are planned where the card decides: Triton's largest block, beyond which an
expert's weights are read more than once."""
_TOKENS = (64, 256)
"""But at least and at most so many tokens."""
_LAYERS = 32
UNTUNED, TUNED = 0, 1
"""Stages."""


@dataclass
class _State:
    """Of the layers of one geometry, families and device, before or after the host has tuned."""

    times: Times | None = None
    source: str = ""
    looked: bool = False
    waited: bool = False
    split: Split | None = None
    """Once it is settled."""


@dataclass
class _Process:
    stage: int = UNTUNED
    """Until a call of the host's autotuner is seen."""
    states: dict[tuple[Any, ...], _State] = field(default_factory=dict)


_lock = locks.new()
_process = _Process()


@process.kept
def _forget() -> None:
    global _process
    with _lock:
        _process = _Process()


def first(geometry: Geometry, device: torch.device) -> int | None:
    """Token count that kernels are planned below: a fixed crossover's, or as far as is measured; None: the default."""
    fixed = settings.CROSSOVER.first(settings.CROSSOVER())
    if fixed is not None or not measuring.possible(device):
        return fixed
    rows = ROWS * geometry.num_experts * geometry.ranks // geometry.top_k
    return 1 + min(max(rows, _TOKENS[0]), _TOKENS[1])


def most(features: KernelFeatures, geometry: Geometry, device: torch.device, alone: bool) -> int:
    """Tokens that a family's kernels are planned for.

    Args:
        alone: the host has no path of its own to be measured against.
    """
    if features.every_count:
        return schedule.EVERY
    return schedule.crossover(geometry.top_k, [features], None if alone else first(geometry, device)) - 1


def fixed() -> Split:
    """What holds until a layer's own split is settled."""
    count = settings.CROSSOVER.first(settings.CROSSOVER())
    return Fixed(schedule.DEFAULT_CROSSOVER) if count is None else Fixed(count, f"{settings.CROSSOVER.name}={count}")


def stage() -> int:
    """Changes when there is something new to :func:`ask`."""
    return _process.stage


def tuning() -> None:
    """The host's autotuner is at work."""
    _process.stage = TUNED


def ask(module: Any, like: Any) -> bool:
    """Give a layer's schedule the split of its geometry, and settle that if need be.

    Args:
        module: a layer of ours with kernels.
        like: the call that the host has just made, for :meth:`run_as_the_host`.

    Returns:
        Whether there is nothing more to ask at this :func:`stage`.
    """
    found: Schedule = module.schedule
    geometry, device = found.kernels[0].geometry, module.w2_weight.device
    if not measuring.possible(device):
        _say(module, geometry, found.split)
        return True
    if not found.settled:
        return False
    with _lock:
        at = _process.stage
        question = (geometry, tuple(found.families), str(device))
        state = _process.states.setdefault((*question, at), _State())
        if state.split is None and not torch.cuda.is_current_stream_capturing():
            _settle(state, geometry, device, module, like, at)
        before = _process.states.get((*question, UNTUNED), state)
        split = state.split or before.split
        if split is not None:
            module.schedule = Schedule(found.families, split)
        return state.split is not None


def _settle(state: _State, geometry: Geometry, device: torch.device, module: Any, like: Any, at: int) -> None:
    families = list(module.schedule.families)
    told = settings.CROSSOVER.first(settings.CROSSOVER()) is not None
    if not state.looked:
        state.looked = True
        if not told:
            state.times, state.source = _own(geometry, device, module, like, at)
    about = f"crossover, {geometry}, {'+'.join(families)}, {at}"
    texts = votes.share(module._mapping, about, state.times.text() if state.times else "", 0 if told or state.waited else WAIT_S)
    state.waited = True
    if told:
        state.split = fixed()
    elif texts is None:
        log.once(f"rank {getattr(module, 'rank', 0)}: other ranks have not measured yet: the fixed split holds until they have")
        return
    else:
        spoken = [Times.of(text) for text in texts if text]
        source = state.source or "measured on other ranks"
        state.split = Measured(Times.sum(spoken), source, schedule.DEFAULT_CROSSOVER) if spoken else fixed()
    _say(module, geometry, state.split)


def _say(module: Any, geometry: Geometry, split: Split) -> None:
    with suppress(Exception):  # a log that fails costs no kernel
        log.once(f"rank {getattr(module, 'rank', 0)}: {geometry}: {split.summary}", logging.INFO)


def _own(geometry: Geometry, device: torch.device, module: Any, like: Any, at: int) -> tuple[Times | None, str]:
    """This rank's times and where they come from; None and nothing where it has none."""
    keys = [key(geometry, device, list(module.schedule.families), tuned) for tuned in ((True,) if at == TUNED else (True, False))]
    word = settings.CROSSOVER()
    if settings.CROSSOVER.is_file(word):
        try:
            return store.given(word, keys[0]), f"{settings.CROSSOVER.name}={word}"
        except ValueError as error:
            log.once(f"{settings.CROSSOVER.name} has no table for {geometry}: {error}; the card is asked")
    for one in keys:
        times = store.load(one)
        if times is not None:
            return times, "stored"
    started = time.monotonic()
    try:
        timed = paths(module, like)
        shared = module.tp_size * module.ep_size > 1  # whether the host has won twice, only all ranks together can tell
        draw, given = draw_of(module, geometry, device), measuring.counts(timed) if shared else None
        times = measuring.measure(timed, geometry, draw, device, given=given)
    except Exception as error:
        logger.debug("measuring %s", geometry, exc_info=error)
        log.once(f"the crossover of {geometry} cannot be measured: {first_line(error)}")
        return None, ""
    store.keep(keys[-1], times)
    return times, f"measured in {time.monotonic() - started:.1f} s"


def key(geometry: Geometry, device: torch.device, families: list[str], tuned: bool) -> store.Key:
    """What a measurement on ``device`` holds for."""
    words = {name: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in asdict(geometry).items()}
    return store.Key(
        card=_card(device),
        geometry=words,
        paths={"kernels": families, "host": host.load().generation, "tuned": tuned},
        conditions={**store.versions(), "deterministic": settings.DETERMINISTIC()},
    )


def _card(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": device.type}
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": int(getattr(found, "L2_cache_size", 0)),
    }


def paths(module: Any, like: Any) -> dict[str, Path]:
    """Each family and the host's own path, on this layer and others like it."""
    alike = [module, *(other for other, _ in registry.alive() if other is not module and _alike(other, module))][:_LAYERS]
    found = {}
    for name, kernel in module.schedule.families.items():
        runs = [layer.schedule.families[name].run for layer in alike]
        found[name] = Path(runs, kernel.serves, kernel.features.graph_safe)
    hosts = [partial(layer.run_as_the_host, like) for layer in alike]
    # The embedded host's operator asks which experts have tokens.
    return {**found, HOST: Path(hosts, captured=host.load().generation != "embedded")}


def _alike(other: Any, module: Any) -> bool:
    try:
        mine, its = module.schedule, other.schedule
        return bool(
            its.families.keys() == mine.families.keys()
            and its.settled
            and its.kernels[0].geometry == mine.kernels[0].geometry
            and other.w2_weight.device == module.w2_weight.device
        )
    except AttributeError:
        return False


def draw_of(module: Any, geometry: Geometry, device: torch.device, skewed: bool = False) -> Callable[[int, int], Any]:
    """Routes as the layer's router draws them from random logits; of a router that needs more than those, uniform ones."""

    def draw(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = measuring.router_logits(geometry, tokens, seed, skewed).to(device)
        try:
            ids, scales = module.routing_method.apply(logits)
            if ids.shape == scales.shape == (tokens, geometry.top_k):
                return ids.to(torch.int32), scales.float()
        except Exception as error:
            logger.debug("router of %s", geometry, exc_info=error)
        values, ids = logits.topk(geometry.top_k, dim=1)
        return ids.to(torch.int32), values.softmax(1)

    return draw
