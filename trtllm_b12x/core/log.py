"""The logger ``trtllm_b12x``, and lines that a process logs once."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from trtllm_b12x.core.errors import say

from . import locks, process, settings

logger = logging.getLogger("trtllm_b12x")
_said: set[Hashable] = set()
_lock = locks.new()
process.kept(_said.clear)


def once(message: str, level: int = logging.WARNING, key: str = "") -> None:
    """Log a message that this process has not logged yet, or of several with one ``key`` the first."""
    if first_time(key or message):
        logger.log(level, message)


def first_time(what: Hashable) -> bool:
    """Return whether this process has not logged ``what`` yet, and remember it."""
    with _lock:
        new = what not in _said
        _said.add(what)
        return new


class _WhereNobodyListens(logging.Handler):
    """Standard error, as long as there is no other handler: this process may set its own after us."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("[trtllm_b12x] [%(levelname)s] %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers and logger.handlers == [self]:
            say(self.format(record))


def configure() -> None:
    """Level from ``TRTLLM_B12X_LOG``, standard error where nobody else listens, and a warning for each setting that is none."""
    logger.setLevel(settings.LOG())
    if not any(isinstance(handler, _WhereNobodyListens) for handler in logger.handlers):
        logger.addHandler(_WhereNobodyListens())
    for complaint in settings.complaints():
        logger.warning(complaint)
