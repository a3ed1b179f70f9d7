"""What engines share: the candidate kernels, and for vLLM and SGLang also the decision on a layer and its measurement."""

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
    """Map each family to its kernel class, in order, if it can be imported and ``suits`` the machine; else to its torch class."""
    found = {}
    for row in rows:
        kernel, in_torch = KERNELS[row.name, row.format]
        chosen = kernel if suits(kernel) and kernel.available() else in_torch if stand_in else None
        if chosen is not None:
            found[row.name] = chosen
    return found


def classes_on(device: torch.device, form: str, among: Collection[str]) -> dict[str, type[Kernel]]:
    """Map each family of ``among`` with kernels of the format to its class for ``device``. On the CPU torch classes stand in."""
    named = families.rows((name for name in settings.KERNELS() if name in among), form)
    rows = (row for row in named if row.format == form)
    return classes(rows, lambda kernel: kernel.runs_on(device), stand_in=device.type == "cpu")


@functools.cache
def _toolchain(sm: int) -> dict[str, Any]:
    """Look once a process, not for each layer: a large cache folder of Triton takes 0.1 s."""
    return {"triton_lacks": toolchain.lacking(sm), "upcast": toolchain.upcast(sm)}


process.kept(_toolchain.cache_clear)


def served_sm(sm: int) -> int:
    """Return the card that the rules see for SM ``sm``. One line says so if Hopper is to be measured."""
    if (number := settings.counted(sm) or 0) != sm:
        log.once(f"{settings.HOPPER.name}=1: experts run on SM{sm} as on SM{number}, to be measured and not to serve")
    return number


def resolve(
    shape: LayerShape, deployment: Deployment, kernels: dict[str, type[Kernel]], device: torch.device, sm: int, own_path: bool
) -> Resolution:
    """Return which families serve a layer. ``own_path``: the engine has kernels of its own for the same tensors."""
    environment = Environment(enabled=settings.ENABLED(), sm=sm)
    if device.type == "cuda":
        environment = replace(environment, **_toolchain(sm))
    features = {name: kernel.features for name, kernel in kernels.items()}
    return decision.resolve(shape, deployment, environment, features, hosts_path=own_path)


def reached_by(largest_scale: int, names: Iterable[str]) -> set[str]:
    """Return the families that multiply by E8M0 scales of up to ``largest_scale``."""
    beyond = {"cuda", "triton"} if LARGEST_SCALE < largest_scale <= LARGEST_SCALE_OF_GEMM else {"cuda", "triton", "gemm"}
    return {*names} if largest_scale <= LARGEST_SCALE else {*names} - beyond


@contextmanager
def float32_default() -> Iterator[None]:
    """Undo the default dtype, which engines build a model under."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_tuning() -> bool:
    """Return whether FlashInfer's autotuner is at work: it must see the engine's own experts at every count."""
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

    Again once FlashInfer is tuned: engines tune it after their first call, and make eager calls before they capture. An error
    costs the measurement.
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
