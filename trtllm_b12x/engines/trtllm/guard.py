# SPDX-License-Identifier: Apache-2.0
"""Catch errors of this package before they reach TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trtllm_b12x.core.log import logger


@contextmanager
def host_takes_over(layer: Any) -> Iterator[None]:
    """Let TensorRT-LLM's class serve the layer after an error in the block, and log one line."""
    try:
        yield
    except Exception as error:
        layer._leave_to_the_host(error)


@contextmanager
def bookkeeping() -> Iterator[None]:
    """Log an error in the block at DEBUG. No weight load or call depends on the block."""
    try:
        yield
    except Exception as error:
        logger.debug("bookkeeping failed", exc_info=error)
