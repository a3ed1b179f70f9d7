"""Triton's compiles that come too late: of kernels of ours, outside any plan, while a call waits.

Calls launch what a plan has compiled, so there should be none; Triton's JIT alone knows (``knobs.compilation.listener``).
"""

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
"""Constants of our kernels that tell a user which."""
_found: dict[str, int] = {}
_lock = locks.new()
_thread = threading.local()
_watching = False
process.kept(_found.clear)


def compiles() -> dict[str, int]:
    """Kernel, with its shape, to how often it was compiled while a call waited."""
    with _lock:
        return dict(_found)


@contextmanager
def expected() -> Iterator[None]:
    """Count nothing that this thread compiles in here: it belongs to a plan."""
    _watch()
    before, _thread.plans = getattr(_thread, "plans", False), True
    try:
        yield
    finally:
        _thread.plans = before


@contextmanager
def may_compile(geometry: Geometry) -> Iterator[None]:
    """A call that Triton's JIT launches, which may compile.

    Raises:
        PlanError: it did, ``TRTLLM_B12X_FREEZE`` is set, and the host has a path of its own for the layer.
    """
    before = sum(_found.values())
    yield
    if sum(_found.values()) > before and settings.FREEZE():
        form = formats.find(geometry.format)
        if form is not None and form.hosts_path:
            raise PlanError(f"a kernel was compiled while a call waited, and {settings.FREEZE.name}=1")


def remedy(geometry: Geometry, card: Card) -> str:
    """The command that compiles what a layer takes."""
    g, capability = geometry, card.capability
    sizes = f"--hidden {g.hidden_size} --intermediate {g.intermediate_size} --experts {g.num_experts * g.ranks} --top-k {g.top_k}"
    form = f"--activation {g.activation.lower()} --format {g.format.lower()}" + f" --ep {g.ranks}" * g.expert_parallel
    form += " --dtype float16" * (g.dtype is torch.float16)
    return f"trtllm-b12x warmup {sizes} {form} --target sm_{capability}a --card {card.multiprocessors}"


def _watch() -> None:
    """Beside whoever listens already."""
    global _watching
    with _lock:
        if _watching:
            return
        _watching = True
    with suppress(Exception):  # another Triton
        from triton import knobs

        before = knobs.compilation.listener

        def listen(**told: Any) -> Any:
            with suppress(Exception):
                if not told["cache_hit"]:
                    _note(told["src"])
            return None if before is None else before(**told)

        knobs.compilation.listener = listen


def _note(source: Any) -> None:
    ours = str(getattr(source.fn, "__module__", "")).startswith("trtllm_b12x.")
    if not ours or getattr(_thread, "plans", False):
        return
    given = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
    shape = ", ".join(f"{name}={given[name]}" for name in _SHAPE if name in given)
    what = f"{source.fn.__name__} ({shape})"
    with _lock:
        _found[what] = _found.get(what, 0) + 1
    log.once(
        f"{what} was compiled while a call waited: it is in no plan; please report it, with the output of trtllm-b12x doctor"
    )
