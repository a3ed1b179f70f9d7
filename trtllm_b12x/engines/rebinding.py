# SPDX-License-Identifier: Apache-2.0
"""Shared by the vLLM and SGLang plugins: compare the engine with known facts, and keep errors of ours away from it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from trtllm_b12x.core import log
from trtllm_b12x.core.errors import first_line


class UnknownEngineError(RuntimeError):
    """The installed engine differs from what this package relies on. The message names the difference."""


def check(engine: str, version: str, differences: Iterable[str]) -> None:
    """Raise UnknownEngineError with the first difference, or with the error raised while looking for one."""
    try:
        found = next(iter(differences), "")
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        raise UnknownEngineError(f"this version of trtllm-b12x has no adapter for {engine} {version}: {found}")


@contextlib.contextmanager
def keeps(engine: str, what: str, level: int = logging.WARNING) -> Iterator[None]:
    """Suppress an error in the block and log one line. The engine then runs as it does without this package."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            log.once(f"{engine} keeps {what}: {first_line(error)}", level)
