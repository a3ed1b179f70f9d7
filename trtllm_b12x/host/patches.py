"""Names of the host that are rebound in this process, and what they were."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trtllm_b12x.core import locks

building = locks.new()
"""Of the layers that are built; held while the host imports and constructs."""
lock = locks.new()
"""Nothing is imported under it: the import hook takes it, with the import lock of the host's module."""


@dataclass
class Promotion:
    """Whether layers are promoted in this process."""

    active: bool = False
    refused: str = ""
    """Why the host of this process is left alone, once that is known."""


promotion = Promotion()


@dataclass(frozen=True)
class Patch:
    """One rebound name."""

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
    """To what ``wrapper`` makes of it."""
    replacement = wrapper(vars(owner)[name])
    replacement._trtllm_b12x = True
    put(owner, name, replacement)


def rebound(original: Any) -> bool:
    """It is one of ours already."""
    return getattr(original, "_trtllm_b12x", False)


def put(owner: Any, name: str, ours: Any) -> None:
    original = vars(owner)[name]
    setattr(owner, name, ours)
    _patches[:] = [entry for entry in _patches if entry.owner is not owner or entry.name != name]  # of before a reload
    _patches.append(Patch(owner, name, original, ours))


def give_back() -> None:
    """What nobody else has rebound since."""
    with lock:
        for entry in reversed(_patches):
            if vars(entry.owner).get(entry.name) is entry.ours:
                setattr(entry.owner, entry.name, entry.original)
        _patches.clear()


def names() -> tuple[str, ...]:
    """``module.name`` of each."""
    return tuple(map(str, _patches))


_lent: list[tuple[dict[str, Any], type]] = []
"""Names of the host that are ours for the time of a construction."""


@contextmanager
def known_as_cutlass(names: dict[str, Any], ours: type | None) -> Iterator[None]:
    """Inside ``create_moe_backend``, its name for the CUTLASS class is ours; None leaves it, and waits until it is the host's.

    Every generation tests the class there against that name, with ``==``, ``in`` or ``is``, and refuses what it does not know.
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
    """A fork while another thread constructs: nobody ends that construction in the child."""
    if not building._is_owned():
        for names, before in _lent:
            names["CutlassFusedMoE"] = before
        _lent.clear()


os.register_at_fork(after_in_child=_give_back_in_child)
