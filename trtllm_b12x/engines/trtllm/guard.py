"""Keep faults of this package away from TensorRT-LLM, where it calls us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trtllm_b12x.core.log import logger


@contextmanager
def host_takes_over(layer: Any) -> Iterator[None]:
    """After an error in the block TensorRT-LLM's class serves the layer, and one line says so."""
    try:
        yield
    except Exception as error:
        layer._leave_to_the_host(error)


@contextmanager
def bookkeeping() -> Iterator[None]:
    """Log an error in the block at DEBUG. No load and no call depends on what the block does."""
    try:
        yield
    except Exception as error:
        logger.debug("bookkeeping failed", exc_info=error)
