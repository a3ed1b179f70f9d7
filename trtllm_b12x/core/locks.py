"""Locks that a forked child can take, whichever thread held them in its parent."""

from __future__ import annotations

import os
import threading
from typing import Any


def new() -> Any:
    """A ``threading.RLock``, free in a child unless the thread that forked holds it."""
    lock: Any = threading.RLock()

    def in_child() -> None:
        if not lock._is_owned():  # the thread that holds it is not there
            lock._at_fork_reinit()

    os.register_at_fork(after_in_child=in_child)
    return lock
