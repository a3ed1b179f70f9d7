"""Report kernels of ours that Triton compiles while a call waits. A plan compiles all of them, so there should be none."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from trtllm_b12x import formats
from trtllm_b12x.core import locks, log, process, settings
from trtllm_b12x.kernels import Geometry, PlanError

if TYPE_CHECKING:
    from trtllm_b12x.kernels.cards import Card

_SHAPE = ("H", "SIZE", "EXPERTS", "TOP_K", "BM", "BN", "block")
"""Constants of our kernels that name one in a message."""
_compiled: dict[str, int] = {}
_lock = locks.new()
_thread = threading.local()
_watching = False
process.kept(_compiled.clear)


def compiles() -> dict[str, int]:
    """Return kernels with their shapes, and how often each was compiled while a call waited."""
    with _lock:
        return dict(_compiled)


@contextmanager
def expected() -> Iterator[None]:
    """Do not count what this thread compiles in here: it belongs to a plan."""
    _watch()
    before, _thread.plans = getattr(_thread, "plans", False), True
    try:
        yield
    finally:
        _thread.plans = before


@contextmanager
def may_compile(geometry: Geometry) -> Iterator[None]:
    """Watch a call that Triton's JIT launches.

    Raises:
        PlanError: it compiled, ``TRTLLM_B12X_FREEZE`` is set, and the host has a path of its own for the layer.
    """
    before = sum(_compiled.values())
    yield
    if sum(_compiled.values()) > before and settings.FREEZE():
        form = formats.find(geometry.format)
        if form is not None and form.hosts_path:
            raise PlanError(f"a kernel was compiled while a call waited, and {settings.FREEZE.name}=1")


def remedy(geometry: Geometry, card: Card) -> str:
    """Return the command that compiles what a layer needs."""
    g, capability = geometry, card.capability
    sizes = f"--hidden {g.hidden_size} --intermediate {g.intermediate_size} --experts {g.num_experts * g.ranks} --top-k {g.top_k}"
    form = f"--activation {g.activation.lower()} --format {g.format.lower()}" + f" --ep {g.ranks}" * g.expert_parallel
    form += " --dtype float16" * (g.dtype is torch.float16)
    return f"trtllm-b12x warmup {sizes} {form} --target sm_{capability}a --card {card.multiprocessors}"


def _watch() -> None:
    """Listen to Triton's compiles, besides whoever does already."""
    global _watching
    with _lock:
        if _watching:
            return
        _watching = True
    with suppress(Exception):  # another Triton
        from triton import knobs

        before = knobs.compilation.listener

        def listen(**event: Any) -> Any:
            with suppress(Exception):
                if not event["cache_hit"]:
                    _count(event["src"])
            return None if before is None else before(**event)

        knobs.compilation.listener = listen


def _count(source: Any) -> None:
    ours = str(getattr(source.fn, "__module__", "")).startswith("trtllm_b12x.")
    if not ours or getattr(_thread, "plans", False):
        return
    constants = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
    kernel = f"{source.fn.__name__} ({', '.join(f'{name}={constants[name]}' for name in _SHAPE if name in constants)})"
    with _lock:
        _compiled[kernel] = _compiled.get(kernel, 0) + 1
    problem = "was compiled while a call waited: it is in no plan; please report it, with the output of trtllm-b12x doctor"
    log.once(f"{kernel} {problem}")
