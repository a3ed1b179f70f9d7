# SPDX-License-Identifier: Apache-2.0
"""Compile the kernels of whole layers ahead of time into the caches that servers read, also for cards not in this machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch

from trtllm_b12x.core import child

from . import Geometry, Kernel, PlanError, first_line
from .b12x import precompile, routes
from .cards import Card
from .cuda import variant as cuda
from .cuda.decode import CudaKernel
from .cuda.gemm import GemmKernel
from .cuda.nvrtc import CompileError
from .cuda.probe import PROBE
from .triton import compile_pool
from .triton.jit import JitKernel
from .triton.variant import Variant


@dataclass(frozen=True)
class CompileTask:
    """A layer to compile for one kernel family."""

    kind: type[Kernel]
    geometry: Geometry
    capacity: int
    """Maximum number of tokens that a server plans for."""


@dataclass(frozen=True)
class CompileResult:
    family: str
    name: str
    seconds: float
    cached: bool
    error: str = ""


Report = Callable[[CompileResult | None, int], None]
"""Callback that receives the result of a kernel and the number of kernels known so far."""


def run(tasks: Sequence[CompileTask], cards: Sequence[Card], report: Report, workers: int | None = None) -> None:
    """Compile every kernel that ``tasks`` need on ``cards``, which have one capability.

    Raise PlanError, naming the cache, if a compiler cannot be run or has died.
    """
    capability = cards[0].capability
    workers = min(workers or len(os.sched_getaffinity(0)), compile_pool.MOST_PROCESSES)
    variants: dict[tuple[Any, ...], tuple[str, Variant]] = {}
    others, ours = [], []
    for task in tasks:
        needed: list[Variant] = []
        if issubclass(task.kind, (CudaKernel, GemmKernel)):
            ours.append(task)
        elif issubclass(task.kind, JitKernel):
            for card in cards:
                kernel = task.kind(card)
                kernel.describe(task.geometry, task.capacity, torch.device("cuda"))
                needed += kernel.variants()
        else:
            others.append(task)
            needed = list(routes.variants())
        for variant in needed:
            variants.setdefault((variant.module, *variant.key), (task.kind.features.name, variant))
    total = len(variants)
    report(None, total)
    for task in ours:
        total += _fill_cuda(task, cards, report, total, workers)
    for task in others:
        total += _fill_flashinfer(task, cards, report, total, workers)
    names = [(family, variant.name) for family, variant in variants.values()]

    def compiled(answer: dict[str, Any]) -> None:
        report(CompileResult(*names[answer.pop("index")], **answer), total)

    if variants:
        try:
            compile_pool.fill([variant for _, variant in variants.values()], capability, workers, compiled, ahead=True)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            raise PlanError(f"Triton's cache cannot be filled: {first_line(error)}") from error


def _fill_cuda(task: CompileTask, cards: Sequence[Card], report: Report, before: int, workers: int) -> int:
    """Compile the NVRTC kernels of one geometry. Return the number of variants."""
    family, target = task.kind.features.name, f"sm_{cards[0].capability}a"
    variants = dict.fromkeys([PROBE] if issubclass(task.kind, CudaKernel) else ())
    for card in cards:
        kernel = cast("type[CudaKernel | GemmKernel]", task.kind)(card)
        kernel.describe(task.geometry, task.capacity, torch.device("cuda"))
        variants |= dict.fromkeys(kernel.variants())
    report(None, before + len(variants))

    def compiled(variant: cuda.Compilation) -> CompileResult:
        started, cached, error = time.monotonic(), variant.cached(target) is not None, ""
        try:
            if not cached:
                cuda.fill(variant, target)
        except CompileError as failure:
            error = first_line(failure)
        return CompileResult(family, variant.name, time.monotonic() - started, cached, error)

    with ThreadPoolExecutor(workers) as pool:
        for result in pool.map(compiled, variants):
            report(result, before + len(variants))
    return len(variants)


def _fill_flashinfer(task: CompileTask, cards: Sequence[Card], report: Report, before: int, workers: int) -> int:
    """Compile FlashInfer's kernels for one geometry. Return the number of kernels."""
    counts = sorted({card.multiprocessors for card in cards})
    request = {"target": f"sm_{cards[0].capability}a", "multiprocessors": counts, "capacity": task.capacity}
    request |= {"processes": workers, "geometry": precompile.fields(task.geometry)}
    total = 0

    def compiled(answer: dict[str, Any]) -> None:
        nonlocal total
        if "total" in answer:
            total = answer["total"]
            report(None, before + total)
        else:
            report(CompileResult(task.kind.features.name, **answer), before + total)

    if child.answers(child.command(precompile.__name__), request, child.variables(), compiled):
        raise PlanError("FlashInfer's cache cannot be filled: a process that compiles has died")
    return total
