"""What became of this process's MoE layers: for :func:`trtllm_b12x.status` and the one line after the model is built."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from trtllm_b12x.core import hook, locks, process
from trtllm_b12x.core.log import logger

from . import host
from .decision import Resolution
from .dispatch.schedule import EVERY
from .host import patches

_lock = locks.new()


@dataclass
class _Entry:
    module: weakref.ref[Any]
    verdict: Resolution
    ready: bool


_entries: list[_Entry] = []
_last_line: tuple[int, int] = (0, 0)
_collected = 0


@dataclass(frozen=True)
class Status:
    """Of one process.  Bytes are those of this rank's device memory."""

    generation: str
    """The host's: ``embedded``, one of ``trtllm_b12x.host.contract``, ``installed`` where it is not imported, ``unsupported``."""
    refused: str
    """What went wrong, or what differs from the nearest generation, if the host is left alone for that."""
    active: bool
    patches: tuple[str, ...]
    """``module.name`` of everything rebound in the host."""
    layers: int
    """MoE layers of the CUTLASS backend that are alive."""
    promoted: int
    """Of these, on kernels of ours."""
    families: dict[str, int] = field(default_factory=dict)
    """Kernel family to the number of layers that it serves; a layer may have several."""
    formats: dict[str, int] = field(default_factory=dict)
    """Number format to the number of layers on kernels of ours."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Reject reason to the number of layers it keeps on CUTLASS."""
    padding_bytes: int = 0
    """Zeros that fill the kernels' tile, in payload and block scales, those of the host's own padding among them."""
    scalar_bytes: int = 0
    """Per-expert scalars beside the host's own."""
    workspace_bytes: int = 0
    """Scratch memory, one for all layers of a geometry."""
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Geometry to the kernels that serve it, and to those that the self-test left out, with the numbers."""
    crossovers: dict[str, str] = field(default_factory=dict)
    """Geometry to which path serves how many tokens, and how that is known."""
    late_compiles: dict[str, int] = field(default_factory=dict)
    """Kernel to how often it was compiled while a call waited; there should be none."""


def record(module: Any, verdict: Resolution, ready: bool) -> None:
    """A layer and its latest verdict; ``ready`` once its weights are loaded, or where nothing waits for them."""
    with _lock:
        for entry in _entries:
            if entry.module() is module:
                entry.verdict, entry.ready = verdict, ready or entry.ready
                break
        else:
            _entries.append(_Entry(weakref.ref(module), verdict, ready))
    if ready:
        _report()


def alive() -> list[tuple[Any, Resolution]]:
    """Layers that still exist, in the order of their construction.

    The host builds a model on meta tensors first and, if that fails, anew: what is left of the attempt does not count.  Nor do
    layers of other pipeline ranks, which it builds and takes the weights from (``modeling_utils.remove_weights``).
    """
    with _lock:
        _entries[:] = [e for e in _entries if e.module() is not None and not getattr(e.module(), "_weights_removed", False)]
        return [(entry.module(), entry.verdict) for entry in _entries]


def status() -> Status:
    """See :func:`trtllm_b12x.status`."""
    gc.collect()  # a failed attempt's layers hold each other
    layers = alive()
    served = [module for module, verdict in layers if verdict.served]
    bound = [kernel for module in served for kernel in module.schedule.kernels]
    reasons = Counter(reason.name for _, verdict in layers for reason in verdict.reasons)
    state, detail = host.state()
    return Status(
        generation="embedded" if state == "none" else state,
        refused=patches.promotion.refused or hook.failure or detail,
        active=patches.promotion.active,
        patches=patches.names(),
        layers=len(layers),
        promoted=len(served),
        families=dict(Counter(name for module in served for name in module.schedule.families)),
        formats=_formats(served),
        reasons=dict(reasons),
        padding_bytes=sum(_bytes(module, "padding_bytes") for module in served),
        scalar_bytes=sum(_bytes(module, "scalar_bytes") for module in served),
        workspace_bytes=sum({w.key: w.nbytes for w in (kernel.workspace for kernel in bound) if w is not None}.values()),
        kernels=_summaries(bound),
        crossovers={str(m.schedule.kernels[0].geometry): m.schedule.summary for m in served if m.schedule.kernels},
        late_compiles=_late_compiles(),
    )


def _late_compiles() -> dict[str, int]:
    late = sys.modules.get("trtllm_b12x.kernels.late")  # who has no kernels does not import them
    return late.compiles() if late is not None else {}


def _formats(served: list[Any]) -> dict[str, int]:
    """Layers that are being built in another thread have none yet."""
    return dict(Counter(module.quant_method.format for module in served if hasattr(module, "quant_method")))


def _summaries(kernels: list[Any]) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, None]] = {}
    for kernel in kernels:
        found.setdefault(str(kernel.geometry), {}).update(dict.fromkeys(kernel.summary()))
    return {geometry: tuple(lines) for geometry, lines in found.items()}


def _bytes(module: Any, what: str) -> int:
    try:
        return int(getattr(module.quant_method, what)(module))
    except AttributeError:  # built in another thread just now
        return 0


@process.kept
def _forget() -> None:
    global _last_line, _collected
    with _lock:
        _entries.clear()
        _last_line, _collected = (0, 0), 0


def _report() -> None:
    """One line when the last layer's weights are there; another only if more layers follow, as of a draft model."""
    global _last_line, _collected
    layers = alive()
    with _lock:
        waiting = not all(entry.ready for entry in _entries)
        stale = waiting and _entries[-1].ready and _collected != len(_entries)
    if stale:  # once per model: what waits may be left of a failed attempt, whose layers hold each other
        _collected = len(_entries)
        gc.collect()
        layers = alive()
    with _lock:
        if not all(entry.ready for entry in _entries):
            return
        served = [module for module, verdict in layers if verdict.served]
        line = (len(served), len(layers))
        if not served or line == _last_line:
            return
        _last_line = line
    first, *_, last = sorted(module.schedule.below for module in served) * 2
    below = f"{first} to {last}" if first < last else str(last)
    counts = "at every token count" if first == EVERY else f"decode below {below} tokens"
    names = Counter("+".join(module.schedule.chosen) or "no kernel yet" for module in served)
    on = ", ".join(f"{count} on {name}" for name, count in names.items()) if len(names) > 1 else f"on {next(iter(names))}"
    caveats = dict.fromkeys(kernel.features.caveat for module in served for kernel in module.schedule.chosen.values())
    where = (*line, on, counts, " and ".join(_formats(served)), "".join(f"; {text}" for text in caveats if text))
    logger.info("rank %d: %d of %d MoE layers %s, %s (%s)%s", served[0].rank, *where)
