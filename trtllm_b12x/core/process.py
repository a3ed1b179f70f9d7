"""What this process keeps of its layers beside the layers themselves: who keeps something says how to forget it."""

from __future__ import annotations

from collections.abc import Callable

_kept: list[Callable[[], None]] = []


def kept(forget: Callable[[], None]) -> Callable[[], None]:
    """Takes, or decorates, the function that forgets it."""
    _kept.append(forget)
    return forget


def forget() -> None:
    """Start over, as a new process would.  Layers that live stay what they are."""
    for one in _kept:
        one()


in_server = False
"""True once an engine has installed our kernels in this process: a compile that may kill it runs in a child first."""
