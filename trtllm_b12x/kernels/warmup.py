"""Kernels of whole layers compiled ahead of time, for cards that need not be here, into the caches that servers read."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.environment import child

from . import Geometry, Kernel, PlanError, first_line, routes
from .jit import JitKernel, precompile
from .jit.cards import Card
from .jit.variant import Variant

_MOST_PROCESSES = 16


@dataclass(frozen=True)
class Work:
    """A layer on one family."""

    kind: type[Kernel]
    geometry: Geometry
    capacity: int
    """Tokens that a server plans for."""


@dataclass(frozen=True)
class Made:
    """What became of one kernel."""

    family: str
    name: str
    seconds: float
    cached: bool
    """It was there."""
    error: str = ""


Report = Callable[[Made | None, int], None]
"""Is told of a kernel, and how many there will be as far as that is known."""


def run(works: Sequence[Work], cards: Sequence[Card], report: Report, workers: int | None = None) -> None:
    """Compile everything that ``works`` take on ``cards``, which are of one capability.

    Raises:
        PlanError: compilers cannot be run, or have died; the message says which.
    """
    capability = cards[0].capability
    workers = min(workers or len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    variants: dict[tuple[Any, ...], tuple[str, Variant]] = {}
    failed = False
    for work in works:
        if issubclass(work.kind, JitKernel):
            for card in cards:
                kernel = work.kind(card)
                kernel.describe(work.geometry, work.capacity, torch.device("cuda"))
                for variant in kernel.variants():
                    variants.setdefault((variant.module, *variant.key), (kernel.features.name, variant))
    total = len(variants)
    report(None, total)
    for work in works:
        if not issubclass(work.kind, JitKernel):
            name = work.kind.features.name
            more = _flashinfers(work, cards, report, total, workers)
            for variant in routes.variants():
                more += (variant.module, *variant.key) not in variants
                variants.setdefault((variant.module, *variant.key), (name, variant))
            total += more
            report(None, total)
    listed = [variant for _, variant in variants.values()]
    names = dict(zip(precompile.digests(listed, capability), (family for family, _ in variants.values()), strict=True))

    def said(told: dict[str, Any]) -> None:
        nonlocal failed
        failed = failed or bool(told["error"])
        report(Made(names[told.pop("digest")], **told), total)

    if listed:
        try:
            precompile.fill_cache(listed, capability, workers, said, ahead=True)
        except (OSError, subprocess.SubprocessError) as error:
            raise PlanError(f"Triton's cache cannot be filled: {first_line(error)}") from error
        lacking = precompile.missing(listed, capability)
        if lacking and not failed:
            raise PlanError(f"{len(lacking)} kernels did not get into Triton's cache: a process that compiles them has died")
        if not failed:
            precompile.seal(capability)


def _flashinfers(work: Work, cards: Sequence[Card], report: Report, before: int, workers: int) -> int:
    """Compile FlashInfer's kernels for one geometry; return how many there are."""
    from .b12x import worker

    counts = sorted({card.multiprocessors for card in cards})
    request: dict[str, Any] = {"target": f"sm_{cards[0].capability}a", "multiprocessors": counts, "capacity": work.capacity}
    request |= {"geometry": worker.fields(work.geometry)}
    asked = [json.dumps({**request, "share": [number, workers]}) for number in range(workers)]
    found: dict[str, Any] = {"total": 0, "done": 0, "failed": 0}

    def said(told: dict[str, Any]) -> None:
        if "total" in told:
            found.update(told)
            report(None, before + found["total"])
        else:
            found["failed" if told["error"] else "done"] += 1
            report(Made(work.kind.features.name, **told), before + found["total"])

    precompile.run_processes([(child.command(worker.__name__), text) for text in asked], child.variables(), said)
    if found["total"] and found["done"] == found["total"]:
        worker.seal(request["target"]).touch()
    elif not found["failed"]:
        raise PlanError("some of FlashInfer's kernels did not get into its cache: a process that compiles them has died")
    return int(found["total"])
