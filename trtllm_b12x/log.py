"""What the log says of a decision: one line per process and reason, a warning where the user can mend it."""

from __future__ import annotations

import logging

from . import locks, process, settings
from .bootstrap import say
from .decision import Rejection, RejectReason, Resolution

logger = logging.getLogger("trtllm_b12x")
_said: set[tuple[str, RejectReason] | str] = set()
_lock = locks.new()
process.kept(_said.clear)


def announce(resolution: Resolution, subject: str, rank: int = 0, alone: bool = False) -> None:
    """Log each rejection whose reason this process has not logged yet.

    A warning on rank 0 where something can be done, with the commands.  For debugging only, elsewhere, and where the card, the
    model or the deployment is simply another one: then what else could be mended would not help either; nor does what stands
    against one family only, if the rest stands against another that is free of it.  A layer that is served has one line for each
    family that would have been preferred: information, unless its kernels have failed.

    Args:
        alone: of a format that the host has no path for.
    """
    without = "has no implementation" if alone else "stays on CUTLASS"
    nearest = [set(verdict.reasons) for _, verdict in resolution.verdicts]
    preferred = next((name for name, verdict in resolution.verdicts if not verdict.rejections), "")
    for name, verdict in resolution.verdicts:
        if not verdict.rejections:
            break  # those behind it are not missed
        if not preferred and any(reasons < set(verdict.reasons) for reasons in nearest):
            continue
        hopeless = not all(rejection.mendable for rejection in verdict.rejections)
        level = logging.DEBUG if hopeless or rank else logging.WARNING
        if not preferred:
            for rejection in verdict.rejections:
                if _first_time(("", rejection.reason)):
                    logger.log(level, "rank %d: %s %s: %s", rank, subject, without, rejection)
        elif sum(_first_time((name, reason)) for reason in verdict.reasons):
            if level == logging.WARNING and RejectReason.KERNEL_PLAN_FAILED not in verdict.reasons:
                level = logging.INFO
            where = f"is served by {preferred}, not by {name}"
            logger.log(level, "rank %d: %s %s: %s", rank, subject, where, _in_one(verdict.rejections))


def _in_one(rejections: tuple[Rejection, ...]) -> str:
    """Everything that is wrong, and what mends it, once."""
    found = "; ".join(f"{rejection.reason.name}: {rejection.detail}" for rejection in rejections)
    moves = ", ".join(dict.fromkeys(move for rejection in rejections for move in rejection.moves))
    remedies = "; ".join(dict.fromkeys(rejection.remedy for rejection in rejections))
    return f"{found} ({remedies}{f'; this moves {moves}' if moves else ''})"


def once(message: str, level: int = logging.WARNING, key: str = "") -> None:
    """Log a message that this process has not logged yet, or of several with one ``key`` the first."""
    if _first_time(key or message):
        logger.log(level, message)


def _first_time(what: tuple[str, RejectReason] | str) -> bool:
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
