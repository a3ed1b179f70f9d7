"""What the plugins of vLLM and SGLang share: the engine is compared with what we know, and an error of ours costs it nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator

from trtllm_b12x.core import log
from trtllm_b12x.core.errors import first_line


class UnknownEngineError(RuntimeError):
    """The installed engine differs from what this package relies on. The message says where."""


def check(engine: str, version: str, differences: Iterable[str]) -> None:
    """Raise UnknownEngineError with the first of the differences, or with the error that finding them raises."""
    try:
        found = next(iter(differences), "")
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found:
        raise UnknownEngineError(f"this version of trtllm-b12x has no adapter for {engine} {version}: {found}")


@contextlib.contextmanager
def keeps(engine: str, what: str, level: int = logging.WARNING) -> Iterator[None]:
    """After an error in the block the engine goes on as without us, and one line says so."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            log.once(f"{engine} keeps {what}: {first_line(error)}", level)
