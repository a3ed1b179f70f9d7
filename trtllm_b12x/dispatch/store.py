"""Measured tables on disk: one JSON per card and geometry, in the folder that ``trtllm-b12x cache`` names.

What cannot be used is named in one line and measured anew; nothing here raises into a host.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_b12x.core.errors import first_line
from trtllm_b12x.core.log import logger
from trtllm_b12x.core.version import __version__
from trtllm_b12x.environment import answers, packages

from .policy import Timings

FORM = 3
"""Of the files."""
_LARGEST = 1 << 20
"""Bytes of a file that is read."""
_PACKAGES = ("torch", "triton", "flashinfer-python", "nvidia-cutlass-dsl", "tensorrt_llm")


@dataclass(frozen=True)
class Key:
    """What a table holds for."""

    card: Mapping[str, Any]
    """Name, capability, multiprocessors, L2 cache."""
    geometry: Mapping[str, Any]
    """Sizes of one layer on one rank, and the format of its weights."""
    paths: Mapping[str, Any]
    """Families, the host, and whether it has tuned its own."""
    conditions: Mapping[str, Any]
    """Versions."""

    @property
    def file(self) -> str:
        words = json.dumps([self.card, self.geometry, self.paths], sort_keys=True)
        return f"crossover-{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"

    def record(self) -> dict[str, Any]:
        return {name: dict(value) for name, value in vars(self).items()}


@functools.cache
def versions() -> dict[str, str]:
    return {"trtllm-b12x": __version__, **packages.versions(_PACKAGES)}


def record(key: Key, timings: Timings) -> dict[str, Any]:
    """Of one table, as files have it."""
    rows = {str(tokens): {name: round(t, 3) for name, t in paths.items()} for tokens, paths in timings.rows.items()}
    return {"form": FORM, **key.record(), "microseconds": rows}


def load(key: Key) -> Timings | None:
    """What was kept of ``key``, if it can be used; else a line says why not, unless there is nothing."""
    folder = answers.directory()
    if folder is None:
        return None
    file = folder / key.file
    try:
        content = _read(file)
        doubt = _foreign(content, key, conditions=True)
        if not doubt:
            return _times(content)
    except FileNotFoundError:
        return None
    except Exception as error:
        doubt = first_line(error)
    logger.info("the stored crossover is not used, %s: %s", file, doubt)
    return None


def given(path: str, key: Key) -> Timings:
    """From a file that the user names: one table, or ``trtllm-b12x tune --json``; of this card and geometry, whatever versions.

    Raises:
        ValueError: it holds none of them, or cannot be read; the message says what is the matter.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        tables = content.get("tables", [content])
        doubts = [_foreign(table, key, conditions=False) for table in tables]
        fitting = [table for table, doubt in zip(tables, doubts, strict=True) if not doubt]
        if fitting:
            return _times(fitting[0])
    except Exception as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
    raise ValueError(f"{path}: {doubts[0] if doubts else 'no table'}")


def keep(key: Key, timings: Timings) -> None:
    """Write the table; the file is replaced as a whole. One line says what prevents it."""
    folder = answers.directory()
    if folder is None:
        logger.info("the crossover is measured at every start: neither XDG_CACHE_HOME nor HOME is an absolute path")
        return
    try:
        answers.make(folder)
        answers.write(folder / key.file, record(key, timings))
    except Exception as error:
        logger.info("the crossover is measured at every start, %s cannot be written: %s", folder, first_line(error))


def _read(file: Path) -> Any:
    """Its JSON.

    Raises:
        OSError: it cannot be read.
        ValueError: another user could have written it, or it is no file of ours.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        found = os.fstat(descriptor)
        for status, name in ((os.stat(file.parent), str(file.parent)), (found, file.name)):
            others = stat.S_IWGRP | stat.S_IWOTH
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & others:
                raise ValueError(f"{name} can be written by other users: chmod go-w, or remove it if it is not yours")
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            raise ValueError("no file of ours")
        return json.loads(stream.read().decode("utf-8"))


_OTHERS = {"card": "another card", "geometry": "another geometry", "paths": "other kernels", "conditions": "other versions"}


def _foreign(content: Any, key: Key, conditions: bool) -> str:
    """What of ``key`` differs; empty for nothing."""
    if not isinstance(content, dict) or content.get("form") != FORM:
        return "of another form"
    wanted = json.loads(json.dumps(key.record()))
    for part in _OTHERS:
        if part in ("paths", "conditions") and not conditions:
            continue
        found = content.get(part)
        if found != wanted[part]:
            found = found if isinstance(found, dict) else {}
            differing = [name for name in {**wanted[part], **found} if wanted[part].get(name) != found.get(name)]
            return f"of {_OTHERS[part]} ({', '.join(differing[:3])})"
    return ""


def _times(content: dict[str, Any]) -> Timings:
    points = {int(tokens): dict(paths) for tokens, paths in content["microseconds"].items()}
    if not points:
        raise ValueError("no counts")
    return Timings(points)
