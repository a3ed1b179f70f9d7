# SPDX-License-Identifier: Apache-2.0
"""Create locks that a forked child can take, whichever thread held them in the parent."""

from __future__ import annotations

import os
import threading
from typing import Any


def new() -> Any:
    """Return a ``threading.RLock`` that is free in a forked child unless the forking thread holds it."""
    lock: Any = threading.RLock()

    def in_child() -> None:
        if not lock._is_owned():  # the holding thread does not exist in the child
            lock._at_fork_reinit()

    os.register_at_fork(after_in_child=in_child)
    return lock
