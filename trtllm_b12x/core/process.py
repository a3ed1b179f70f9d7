"""Register and run the functions that reset the process-wide state of this package."""

from __future__ import annotations

from collections.abc import Callable

_kept: list[Callable[[], None]] = []


def kept(forget: Callable[[], None]) -> Callable[[], None]:
    """Register a reset function. Also works as a decorator."""
    _kept.append(forget)
    return forget


def forget() -> None:
    """Reset all process-wide state, as in a new process. Layers that exist are not changed."""
    for one in _kept:
        one()


in_server = False
"""True once promotion is installed in an engine. A compile that may crash the process then runs in a child first."""
