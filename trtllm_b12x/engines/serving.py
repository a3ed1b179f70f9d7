# SPDX-License-Identifier: Apache-2.0
"""Select candidate kernels for every engine. For vLLM and SGLang, also decide on a layer and measure it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from trtllm_b12x import decision
from trtllm_b12x.core import log, process, settings
from trtllm_b12x.decision import Deployment, Environment, Resolution, families
from trtllm_b12x.decision.families import Family
from trtllm_b12x.dispatch import crossover, timing
from trtllm_b12x.dispatch.host_check import HostPath
from trtllm_b12x.dispatch.layer import LayerDispatch
from trtllm_b12x.dispatch.timing import RouteSampler, TimedPath
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.environment.flashinfer import autotuner
from trtllm_b12x.formats.geometry import Geometry, LayerShape
from trtllm_b12x.formats.mxfp4 import LARGEST_SCALE, LARGEST_SCALE_OF_GEMM
from trtllm_b12x.kernels import Kernel
from trtllm_b12x.kernels.catalog import KERNELS


def classes(rows: Iterable[Family], suits: Callable[[type[Kernel]], bool], stand_in: bool = True) -> dict[str, type[Kernel]]:
    """Map each family, in order, to its kernel class if available and accepted by ``suits``; else to its torch class, if any."""
    found = {}
    for row in rows:
        kernel, in_torch = KERNELS[row.name, row.format]
        chosen = kernel if suits(kernel) and kernel.available() else in_torch if stand_in else None
        if chosen is not None:
            found[row.name] = chosen
    return found


def classes_on(device: torch.device, form: str, among: Collection[str]) -> dict[str, type[Kernel]]:
    """Map each family of ``among`` with kernels for the format to its class on ``device``. On the CPU, torch classes stand in."""
    named = families.rows((name for name in settings.KERNELS() if name in among), form)
    rows = (row for row in named if row.format == form)
    return classes(rows, lambda kernel: kernel.runs_on(device), stand_in=device.type == "cpu")


@functools.cache
def _toolchain(sm: int) -> dict[str, Any]:
    """Inspect Triton once per process, not once per layer: a large Triton cache folder takes 0.1 s."""
    return {"triton_lacks": toolchain.lacking(sm), "upcast": toolchain.upcast(sm)}


process.kept(_toolchain.cache_clear)


def served_sm(sm: int) -> int:
    """Return the SM number that the rules use for SM ``sm``. Log one line if Hopper stands in for another card."""
    if (number := settings.counted(sm) or 0) != sm:
        log.once(f"{settings.HOPPER.name}=1: experts run on SM{sm} as on SM{number}, to be measured and not to serve")
    return number


def resolve(
    shape: LayerShape, deployment: Deployment, kernels: dict[str, type[Kernel]], device: torch.device, sm: int, own_path: bool
) -> Resolution:
    """Return which families serve a layer. ``own_path``: the engine has its own kernels for the same tensors."""
    environment = Environment(enabled=settings.ENABLED(), sm=sm)
    if device.type == "cuda":
        environment = replace(environment, **_toolchain(sm))
    features = {name: kernel.features for name, kernel in kernels.items()}
    return decision.resolve(shape, deployment, environment, features, hosts_path=own_path)


def reached_by(largest_scale: int, names: Iterable[str]) -> set[str]:
    """Return the families that support E8M0 scale bytes up to ``largest_scale``."""
    beyond = {"cuda", "triton"} if LARGEST_SCALE < largest_scale <= LARGEST_SCALE_OF_GEMM else {"cuda", "triton", "gemm"}
    return {*names} if largest_scale <= LARGEST_SCALE else {*names} - beyond


@contextmanager
def float32_default() -> Iterator[None]:
    """Set torch's default dtype to float32 in the block. Engines change the default while they build a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_tuning() -> bool:
    """Return whether FlashInfer's autotuner is running. It must see the engine's own experts at every token count."""
    tuning, loaded = autotuner()
    if tuning or loaded:
        crossover.tuning()
    return tuning


def measurable(device: torch.device) -> bool:
    """Return whether a call on ``device`` can be timed now."""
    return timing.possible(device) and not torch.cuda.is_current_stream_capturing()


def measure(
    dispatch: LayerDispatch, device: torch.device, own_path: HostPath | None, sample_routes: RouteSampler, engine: str
) -> None:
    """Judge the engine's own path and measure the crossover, once per geometry, at the first eager call.

    Both are repeated once FlashInfer is tuned: engines tune it after their first call, and make eager calls before they capture.
    After an error nothing is measured.
    """
    with dispatch.measuring():
        geometry = dispatch.schedule.kernels[0].geometry
        for family, reason in dispatch.plan_waiting().items():
            log.once(f"{family} does not serve {geometry}: {reason}")
        if own_path is not None:
            dispatch.judge_host(own_path)
        path = None if own_path is None else TimedPath([own_path.run])
        dispatch.measure(device, lambda: crossover.paths_of([dispatch.schedule], path), sample_routes, engine)


def sample_routes(
    geometry: Geometry, device: torch.device, tokens: int, seed: int, skewed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the ids and router weights of a call."""
    logits = timing.router_logits(geometry, tokens, seed, skewed).to(device)
    values, ids = logits.topk(geometry.top_k, dim=1)
    return ids.to(torch.int32), values.softmax(1)
