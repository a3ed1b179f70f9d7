# SPDX-License-Identifier: Apache-2.0
"""Set up our logger (``trtllm_b12x`` or a child of an engine's logger), and log some messages only once per process."""

from __future__ import annotations

import logging
import os
from collections.abc import Hashable

from trtllm_b12x.core.errors import say

from . import locks, process, settings

_own = logging.getLogger("trtllm_b12x")
logger = logging.LoggerAdapter(_own, None)
"""Adapter whose logger ``configure`` may replace by a child of an engine's logger."""
_said: set[Hashable] = set()
_lock = locks.new()
process.kept(_said.clear)


def once(message: str, level: int = logging.WARNING, key: str = "") -> None:
    """Log ``message`` unless this process has already logged it or another message with the same ``key``."""
    if first_time(key or message):
        logger.log(level, message)


def first_time(what: Hashable) -> bool:
    """Return whether ``what`` is new in this process, and remember it."""
    with _lock:
        new = what not in _said
        _said.add(what)
        return new


class FallbackHandler(logging.Handler):
    """Handler that writes to standard error while no other handler exists. The process may add handlers after us."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[trtllm_b12x] [%(levelname)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and _own.handlers == [self]:
            say(self.format(record))


def configure(name: str = "") -> None:
    """Set the level from ``TRTLLM_B12X_LOG``, and warn about each invalid ``TRTLLM_B12X*`` variable.

    ``name`` is a child of an engine's logger. The engine's handlers apply, and its level if the variable is unset. ``dictConfig``
    disables loggers that it does not name, but not this child. Without ``name``, a fallback handler is added.
    """
    if name:
        logger.logger = logging.getLogger(name)
        if os.environ.get(settings.LOG.name):
            logger.logger.setLevel(settings.LOG())
    else:
        _own.setLevel(settings.LOG())
        if not any(isinstance(handler, FallbackHandler) for handler in _own.handlers):
            _own.addHandler(FallbackHandler())
    for complaint in settings.complaints():
        logger.warning(complaint)
