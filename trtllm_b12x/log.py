"""What the log says of a decision: one line per process and reason, a warning where the user can mend it."""

from __future__ import annotations

import logging

from . import locks, settings
from .bootstrap import say
from .decision import RejectReason, Verdict

logger = logging.getLogger("trtllm_b12x")
_said: set[RejectReason | str] = set()
_lock = locks.new()


def announce(verdict: Verdict, subject: str, rank: int = 0) -> None:
    """Log each rejection whose reason this process has not logged yet.

    A warning on rank 0 where something can be done, with the commands.  For debugging only, elsewhere, and where the card, the
    model or the deployment is simply another one: then what else could be mended would not help either.
    """
    hopeless = not all(rejection.reason.mendable for rejection in verdict.rejections)
    for rejection in verdict.rejections:
        if not _first_time(rejection.reason):
            continue
        level = logging.DEBUG if hopeless or rank else logging.WARNING
        logger.log(level, "rank %d: %s stays on CUTLASS: %s", rank, subject, rejection)


def once(message: str) -> None:
    """A warning that this process has not given yet."""
    if _first_time(message):
        logger.warning(message)


def _first_time(what: RejectReason | str) -> bool:
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


def forget() -> None:
    """Start over, as a new process would."""
    with _lock:
        _said.clear()
