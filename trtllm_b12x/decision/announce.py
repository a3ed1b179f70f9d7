# SPDX-License-Identifier: Apache-2.0
"""Log a decision: one line per process and reason, as a warning if the user can do something about it."""

from __future__ import annotations

import logging

from trtllm_b12x.core.log import first_time, logger

from .verdicts import RejectReason, Resolution, joined


def announce(resolution: Resolution, subject: str, rank: int = 0, alone: bool = False) -> None:
    """Log each rejection whose reason this process has not logged yet. ``alone``: TensorRT-LLM has no path for the format.

    Rank 0 warns, with the commands, if the user can fix every reason against the family. Other rejections are logged at DEBUG.
    A family is skipped if another family fails for a proper subset of its reasons. If the layer is served, each preferred family
    that was refused gets one line, at INFO, or as a warning if its kernels failed.
    """
    without = "has no implementation" if alone else "stays on CUTLASS"
    nearest = [set(verdict.reasons) for _, verdict in resolution.verdicts]
    preferred = next((name for name, verdict in resolution.verdicts if not verdict.rejections), "")
    for name, verdict in resolution.verdicts:
        if not verdict.rejections:
            break  # families after the preferred one are not reported
        if not preferred and any(reasons < set(verdict.reasons) for reasons in nearest):
            continue
        hopeless = not all(rejection.fixable for rejection in verdict.rejections)
        level = logging.DEBUG if hopeless or rank else logging.WARNING
        if not preferred:
            for rejection in verdict.rejections:
                if first_time(("", rejection.reason)):
                    logger.log(level, "rank %d: %s %s: %s", rank, subject, without, rejection)
        elif sum(first_time((name, reason)) for reason in verdict.reasons):
            if level == logging.WARNING and RejectReason.KERNEL_PLAN_FAILED not in verdict.reasons:
                level = logging.INFO
            where = f"is served by {preferred}, not by {name}"
            logger.log(level, "rank %d: %s %s: %s", rank, subject, where, joined(verdict.rejections))
