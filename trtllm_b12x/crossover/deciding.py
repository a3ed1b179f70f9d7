"""When a process measures, and whose word counts for a layer: the setting, what is stored, a measurement, the default.

Asked at calls outside capture, once the layer's kernels are tested: the first after the host's autotuner has run, because the
host's path is fair only then.  A host that calls layers before it tunes, or never tunes, has an answer for as long as that is
so.  Ranks that share layers add up their times, so that all of them come to the same answer; one that has none takes the
others'.  Until then, and where nothing can be measured, the fixed split holds.  What a graph has captured stays as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from .measuring import Draw, Path
from .search import Measure, Search
from .table import HOST, Fixed, Measured, Split, Times

WAIT_S = 5.0
"""For other ranks, which come to the same call at about the same time and measure for :data:`measuring.BUDGET_S` at most."""
UNTUNED_S = 0.8
"""Before the host has tuned; afterwards there is what this has left of :data:`measuring.BUDGET_S`."""
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

    search: Search | None = None
    known: Times | None = None
    """From a file, or stored."""
    source: str = ""
    budget: float = UNTUNED_S
    spent: float = 0.0
    """Seconds, to measure and of measuring."""
    least: measuring.Least = field(default_factory=dict)
    waited: bool = False
    split: Split | None = None
    """Once it is settled."""


@dataclass
class _Process:
    stage: int = UNTUNED
    """Until a call of the host's autotuner is seen."""
    states: dict[tuple[Any, ...], _State] = field(default_factory=dict)
    unmeasured: bool = False
    """See :func:`unmeasured`."""


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


def most(features: KernelFeatures, geometry: Geometry, device: torch.device) -> int:
    """Tokens that a family's kernels are planned for."""
    if features.every_count:
        return schedule.EVERY
    if features.measured_from:
        measurable = measuring.possible(device) and settings.CROSSOVER.first(settings.CROSSOVER()) is None
        return measuring.LARGEST if measurable or _process.unmeasured else 0
    return schedule.crossover(geometry.top_k, [features], first(geometry, device)) - 1


def fixed() -> Split:
    """What holds until a layer's own split is settled."""
    if _process.unmeasured:
        return Fixed(measuring.LARGEST + 1, "unmeasured", measured=True)
    count = settings.CROSSOVER.first(settings.CROSSOVER())
    return Fixed(schedule.DEFAULT_CROSSOVER) if count is None else Fixed(count, f"{settings.CROSSOVER.name}={count}")


@contextmanager
def unmeasured() -> Iterator[None]:
    """Layers that are loaded in here have every count that their first family takes served by it: to see what it computes."""
    before, _process.unmeasured = _process.unmeasured, True
    try:
        yield
    finally:
        _process.unmeasured = before


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
        at = TUNED if found.base else _process.stage  # of kernels of ours the host tunes nothing
        question = (geometry, tuple(found.families), str(device))
        before = _process.states.get((*question, UNTUNED))
        budget = UNTUNED_S if at == UNTUNED else measuring.BUDGET_S - (before.spent if before else 0)
        state = _process.states.setdefault((*question, at), _State(budget=budget))
        if state.split is None and not torch.cuda.is_current_stream_capturing():
            _settle(state, geometry, device, module, like, at)
        split = state.split or (before.split if before else None)
        if split is not None:
            module.schedule = Schedule(found.families, split)
        elif torch.cuda.is_current_stream_capturing():
            log.once(
                f"{geometry}: a CUDA graph is captured before any eager call: it keeps {found.summary}, nothing is measured yet"
            )
        return state.split is not None


def _settle(state: _State, geometry: Geometry, device: torch.device, module: Any, like: Any, at: int) -> None:
    families = list(module.schedule.families)
    about = f"crossover, {geometry}, {'+'.join(families)}, {at}"
    told = settings.CROSSOVER.first(settings.CROSSOVER())
    if told is not None:
        votes.share(module._mapping, f"{about}, 1", str(told), 0)
        state.split = fixed()
        _say(module, geometry, state.split)
        return
    timed = paths(module, like)
    steps = measuring.steps(timed)
    if state.search is None:
        state.search = Search(measuring.served(timed), steps)
        state.known, state.source = _known(geometry, device, module, at)
    others: list[str] = []

    def together(own: Times, number: int) -> Times | None:
        texts = votes.share(module._mapping, f"{about}, {number}", own.text(), 0 if state.waited else WAIT_S)
        if texts is None:
            return None
        others.extend(text for text in texts if text.isdigit())
        return Times({}) if others else Times.sum(Times.of(text) for text in texts if text)

    draw, left = draw_of(module, geometry, device), state.budget - state.spent
    bench = measuring.Bench(timed, geometry, draw, device, left, least=state.least)
    whole = state.search.run(_measuring(state, bench), together)
    if whole is None:
        state.waited = True
        log.once(f"rank {getattr(module, 'rank', 0)}: other ranks have not measured yet: the fixed split holds until they have")
        return
    if state.known is None and state.search.own.counts:
        store.keep(_keys(geometry, device, module, at)[-1], state.search.own)
    if others:
        state.split = Fixed(int(others[0]), f"another rank's {settings.CROSSOVER.name}={others[0]}")
    elif whole.counts:
        measured = f"measured in {state.spent:.1f} s" if state.search.own.counts else "measured on other ranks"
        state.split = Measured(whole, state.source or measured, schedule.DEFAULT_CROSSOVER, steps)
    else:
        state.split = fixed()
    state.search = None
    _say(module, geometry, state.split)


def _say(module: Any, geometry: Geometry, split: Split) -> None:
    with suppress(Exception):  # a log that fails costs no kernel
        summary = Schedule(module.schedule.families, split).summary
        log.once(f"rank {getattr(module, 'rank', 0)}: {geometry}: {summary}", logging.INFO)


def _keys(geometry: Geometry, device: torch.device, module: Any, at: int) -> list[store.Key]:
    """Of tables that will do, the better first; the last is that of a measurement now."""
    return [key(geometry, device, module.schedule, tuned) for tuned in ((True,) if at == TUNED else (True, False))]


def _known(geometry: Geometry, device: torch.device, module: Any, at: int) -> tuple[Times | None, str]:
    """What need not be measured, and where it is from; None and nothing where there is none."""
    keys = _keys(geometry, device, module, at)
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
    return None, ""


def _measuring(state: _State, bench: measuring.Bench) -> Measure:
    """What is known, or what the bench finds at the call under way; where that fails it is not tried again."""
    before = state.spent

    def measure(counts: Sequence[int]) -> Times:
        if state.known is not None:
            return state.known
        try:
            return bench(counts)
        except Exception as error:
            logger.debug("measuring %s", bench.geometry, exc_info=error)
            log.once(f"the crossover of {bench.geometry} cannot be measured: {first_line(error)}")
            state.known = Times({})
            return state.known
        finally:
            state.spent = before + bench.spent

    return measure


def key(geometry: Geometry, device: torch.device, among: Schedule, tuned: bool) -> store.Key:
    """What a measurement on ``device`` holds for."""
    families = [name for name in among.families if name != among.base]
    words = {name: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for name, v in asdict(geometry).items()}
    return store.Key(
        card=_card(device),
        geometry=words,
        paths={"kernels": families, "host": among.base or host.load().generation, "tuned": tuned},
        conditions=store.versions(),
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
    """Each family and the host's own path, or the family in its place, on this layer and others like it."""
    alike = [module, *(other for other, _ in registry.alive() if other is not module and _alike(other, module))][:_LAYERS]
    found = {}
    for name, kernel in module.schedule.families.items():
        runs = [layer.schedule.families[name].run for layer in alike]
        path = HOST if name == module.schedule.base else name
        # Prefill is rarely in a graph: there what launches cost counts, and the host's time is without.
        captured = bool(kernel.features.graph_safe) and not kernel.features.measured_from
        found[path] = Path(runs, kernel.serves, captured, kernel.launches)
    if HOST in found:
        return found
    hosts = [partial(layer.run_as_the_host, like) for layer in alike]
    if host.load().generation == "embedded":  # its operator asks which experts have tokens
        return {**found, HOST: Path(hosts, captured=False)}
    # A tactic that was tuned for a power of two serves the counts up to the next: ``MoERunner.tuning_config`` maps by
    # ``last_positive_power_of_2`` (``_torch/custom_ops/torch_custom_ops.py``).
    return {**found, HOST: Path(hosts, launches=int.bit_length)}


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


def draw_of(module: Any, geometry: Geometry, device: torch.device) -> Draw:
    """Routes as the layer's router draws them from random logits; of a router that needs more than those, by the logits alone."""

    def draw(tokens: int, seed: int, skewed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logits = measuring.router_logits(geometry, tokens, seed, skewed).to(device)
        try:
            ids, router_weights = module.routing_method.apply(logits)
            if ids.shape == router_weights.shape == (tokens, geometry.top_k):
                return ids.to(torch.int32), router_weights.float()
        except Exception as error:
            logger.debug("router of %s", geometry, exc_info=error)
        values, ids = logits.topk(geometry.top_k, dim=1)
        return ids.to(torch.int32), values.softmax(1)

    return draw
