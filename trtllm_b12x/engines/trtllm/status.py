# SPDX-License-Identifier: Apache-2.0
"""Track the MoE layers of this process, for ``trtllm_b12x.status`` and the log line after the model is built."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from trtllm_b12x.core import hook, locks, process
from trtllm_b12x.core.log import logger
from trtllm_b12x.decision import Resolution
from trtllm_b12x.dispatch.schedule import EVERY

from . import host, patches

_lock = locks.new()


_layers: weakref.WeakKeyDictionary[Any, tuple[Resolution, bool]] = weakref.WeakKeyDictionary()
"""Latest verdict on each layer, and whether it is ready, in order of construction."""
_last_line: tuple[int, int] = (0, 0)
_collected = 0


@dataclass(frozen=True)
class Status:
    """State of one process. Bytes count the device memory of this rank."""

    generation: str
    """``embedded``, a generation of ``contract.py``, ``installed`` (not imported yet) or ``unsupported``."""
    refused: str
    """Reason why TensorRT-LLM runs unpatched: an error, or the difference from the nearest generation."""
    active: bool
    patches: tuple[str, ...]
    """``module.name`` of each rebound name."""
    layers: int
    """Number of live MoE layers with the CUTLASS backend."""
    promoted: int
    """Number of these layers that our kernels serve."""
    families: dict[str, int] = field(default_factory=dict)
    """Number of layers per kernel family. A layer may use several families."""
    formats: dict[str, int] = field(default_factory=dict)
    """Number of layers on our kernels, per number format."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Number of layers that stay on CUTLASS, per reject reason."""
    padding_bytes: int = 0
    """Zero padding of codes and block scales to the kernels' tile, including the padding that TensorRT-LLM itself adds."""
    scalar_bytes: int = 0
    """Per-expert scalars that we add to TensorRT-LLM's scalars."""
    workspace_bytes: int = 0
    """Scratch memory. Layers of the same geometry share it."""
    kernels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Kernels that serve each geometry, and those that failed the self-test, with its numbers."""
    crossovers: dict[str, str] = field(default_factory=dict)
    """Path per token count for each geometry, and the source of that choice."""
    host_paths: dict[str, str] = field(default_factory=dict)
    """Error of TensorRT-LLM's own path for each geometry, or the reason why it is not judged."""


def record(module: Any, verdict: Resolution, ready: bool) -> None:
    """Record a layer and its latest verdict. ``ready`` is True if the layer's weights are loaded or nothing waits for them."""
    with _lock:
        _, was_ready = _layers.get(module, (verdict, False))
        _layers[module] = verdict, ready or was_ready
    if ready:
        _report()


def alive() -> list[tuple[Any, Resolution]]:
    """Return the layers that still exist, in order of construction.

    TensorRT-LLM builds a model on meta tensors first and, if this fails, builds it again. Layers of a failed attempt do not
    count. Layers of other pipeline ranks, whose weights TensorRT-LLM removes (``modeling_utils.remove_weights``), do not either.
    """
    with _lock:
        for module in [module for module in _layers if getattr(module, "_weights_removed", False)]:
            del _layers[module]
        return [(module, verdict) for module, (verdict, _) in _layers.items()]


def status() -> Status:
    gc.collect()  # layers of a failed attempt refer to each other
    layers = alive()
    served = [module for module, verdict in layers if verdict.served]
    bound = [kernel for module in served for kernel in module.schedule.kernels]
    of_each = {str(module.schedule.kernels[0].geometry): module for module in served if module.schedule.kernels}
    state, detail = host.state()
    return Status(
        generation="embedded" if state == "none" else state,
        refused=patches.refused or hook.failure or detail,
        active=patches.active,
        patches=patches.names(),
        layers=len(layers),
        promoted=len(served),
        families=dict(Counter(name for module in served for name in module.schedule.families)),
        formats=_formats(served),
        reasons=dict(Counter(reason.name for _, verdict in layers for reason in verdict.reasons)),
        padding_bytes=sum(_bytes(module, "padding_bytes") for module in served),
        scalar_bytes=sum(_bytes(module, "scalar_bytes") for module in served),
        workspace_bytes=sum(dict(kernel.workspace for kernel in bound if kernel.workspace is not None).values()),
        kernels=_summaries(bound),
        crossovers={geometry: module.schedule.summary for geometry, module in of_each.items()},
        host_paths={
            geometry: module.dispatch.host.text if module.dispatch.host else "not judged"
            for geometry, module in of_each.items()
            if not module.schedule.base
        },
    )


def _formats(served: list[Any]) -> dict[str, int]:
    """Count layers per number format. Layers under construction in another thread have none yet."""
    return dict(Counter(module.quant_method.format for module in served if hasattr(module, "quant_method")))


def _summaries(kernels: list[Any]) -> dict[str, tuple[str, ...]]:
    lines_of: dict[str, dict[str, None]] = {}
    for kernel in kernels:
        lines_of.setdefault(str(kernel.geometry), {}).update(dict.fromkeys(kernel.summary()))
    return {geometry: tuple(lines) for geometry, lines in lines_of.items()}


def _bytes(module: Any, what: str) -> int:
    try:
        return int(getattr(module.quant_method, what)(module))
    except AttributeError:  # still under construction in another thread
        return 0


@process.kept
def _forget() -> None:
    global _last_line, _collected
    with _lock:
        _layers.clear()
        _last_line, _collected = (0, 0), 0


def _report() -> None:
    """Log one line when the last layer's weights are loaded, and another if more layers follow, e.g. of a draft model."""
    global _last_line, _collected
    layers = alive()
    with _lock:
        ready = [ready for _, ready in _layers.values()]
    if not all(ready) and ready[-1] and _collected != len(ready):
        _collected = len(ready)  # once per model: layers that wait may belong to a failed attempt and refer to each other
        gc.collect()
        layers = alive()
    with _lock:
        if not all(ready for _, ready in _layers.values()):
            return
        served = [module for module, verdict in layers if verdict.served]
        line = (len(served), len(layers))
        if not served or line == _last_line:
            return
        _last_line = line
    *limits, last = sorted({module.schedule.below for module in served if module.schedule.below != EVERY}) or [0]
    counts = [f"decode below {f'{limits[0]} to ' if limits else ''}{last} tokens"] if last else []
    counts += ["at every token count"] * any(module.schedule.below == EVERY for module in served)
    names = Counter("+".join(module.schedule.chosen) or "no kernel yet" for module in served)
    on = ", ".join(f"{count} on {name}" for name, count in names.items()) if len(names) > 1 else f"on {next(iter(names))}"
    waiting = dict.fromkeys(name for module in served for name in module.dispatch.waiting)
    notes = []
    if waiting:
        *some, last_one = waiting
        named = f"{', '.join(some)} and {last_one} are" if some else f"{last_one} is"
        notes.append(f"{named} benchmarked at the first call")
    notes += dict.fromkeys(kernel.features.caveat for module in served for kernel in module.schedule.chosen.values())
    where = (*line, on, " or ".join(counts), " and ".join(_formats(served)), "".join(f"; {text}" for text in notes if text))
    logger.info("rank %d: %d of %d MoE layers %s, %s (%s)%s", served[0].rank, *where)
