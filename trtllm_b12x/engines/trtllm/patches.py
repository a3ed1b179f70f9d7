"""Keep track of the TensorRT-LLM names that are rebound in this process, with their originals."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trtllm_b12x.core import locks

building = locks.new()
"""Lock for building layers. Held while the host imports modules and constructs layers."""
lock = locks.new()
"""Lock for the patch list. Import nothing while holding it: the import hook takes it while it holds the module's import lock."""


@dataclass
class Promotion:
    """State of promotion in this process."""

    active: bool = False
    refused: str = ""
    """Reason why TensorRT-LLM stays unpatched in this process; empty if none is known."""


promotion = Promotion()


@dataclass(frozen=True)
class Patch:
    """Rebound name."""

    owner: Any
    """Module or class."""
    name: str
    original: Any
    ours: Any

    def __str__(self) -> str:
        module = getattr(self.owner, "__module__", "")
        return f"{module}{'.' if module else ''}{self.owner.__name__}.{self.name}"


_patches: list[Patch] = []


def rebind(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Rebind a name to ``wrapper(original)``."""
    replacement = wrapper(vars(owner)[name])
    replacement._trtllm_b12x = True
    put(owner, name, replacement)


def rebound(original: Any) -> bool:
    """Return True if the function is already one of our wrappers."""
    return getattr(original, "_trtllm_b12x", False)


def put(owner: Any, name: str, ours: Any) -> None:
    original = vars(owner)[name]
    setattr(owner, name, ours)
    _patches[:] = [entry for entry in _patches if entry.owner is not owner or entry.name != name]  # entries from before a reload
    _patches.append(Patch(owner, name, original, ours))


def give_back() -> None:
    """Restore the originals, except names that another package has rebound since."""
    with lock:
        for entry in reversed(_patches):
            if vars(entry.owner).get(entry.name) is entry.ours:
                setattr(entry.owner, entry.name, entry.original)
        _patches.clear()


def names() -> tuple[str, ...]:
    """Return ``module.name`` of each rebound name."""
    return tuple(map(str, _patches))


_lent: list[tuple[dict[str, Any], type]] = []
"""Namespaces in which ``CutlassFusedMoE`` is temporarily our class, with the original class."""


@contextmanager
def known_as_cutlass(names: dict[str, Any], ours: type | None) -> Iterator[None]:
    """Bind ``CutlassFusedMoE`` in ``names`` to ``ours`` during ``create_moe_backend``. None: keep it, but wait for other threads.

    Every generation tests the class there against that name, with ``==``, ``in`` or ``is``, and refuses unknown classes.
    """
    with building:
        before = names["CutlassFusedMoE"]
        _lent.append((names, before))
        names["CutlassFusedMoE"] = before if ours is None else ours
        try:
            yield
        finally:
            names["CutlassFusedMoE"] = before
            _lent.remove((names, before))


def _give_back_in_child() -> None:
    """Restore names in a forked child if another thread was building a layer: that thread does not exist in the child."""
    if not building._is_owned():
        for names, before in _lent:
            names["CutlassFusedMoE"] = before
        _lent.clear()


os.register_at_fork(after_in_child=_give_back_in_child)
