"""Store measured crossover tables on disk: one JSON file per card and geometry, in the folder shown by ``trtllm-b12x cache``.

An unusable table is logged in one line and measured again. Only ``given`` raises.
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

from trtllm_b12x.core import disk
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.core.log import logger
from trtllm_b12x.core.version import __version__
from trtllm_b12x.environment import packages

from .policy import Timings

FORM = 3
"""Version of the file format."""
_LARGEST = 1 << 20
"""Maximum file size in bytes; larger files are not read."""
_PACKAGES = ("torch", "triton", "flashinfer-python", "nvidia-cutlass-dsl", "tensorrt_llm")


@dataclass(frozen=True)
class Key:
    """Conditions under which a table is valid."""

    card: Mapping[str, Any]
    """GPU name, capability, multiprocessors and L2 cache."""
    geometry: Mapping[str, Any]
    """Sizes of one layer on one rank, and the weight format."""
    paths: Mapping[str, Any]
    """Kernel families, the host, and whether the host path is tuned."""
    conditions: Mapping[str, Any]
    """Package versions."""

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
    """Return one table as it is written to a file."""
    rows = {str(tokens): {name: round(t, 3) for name, t in paths.items()} for tokens, paths in timings.rows.items()}
    return {"form": FORM, **key.record(), "microseconds": rows}


def load(key: Key) -> Timings | None:
    """Load the stored table for ``key``, or None. If a table exists but cannot be used, log why."""
    folder = disk.directory()
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
    """Load a table from a user's file, or from ``trtllm-b12x tune --json``. Card and geometry must match, versions need not.

    Raises:
        ValueError: the file holds no matching table or cannot be read. The message says why.
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
    """Write the table, replacing the file atomically. On failure, log one line."""
    folder = disk.directory()
    if folder is None:
        logger.info("the crossover is measured at every start: neither XDG_CACHE_HOME nor HOME is an absolute path")
        return
    try:
        disk.make(folder)
        disk.write(folder / key.file, record(key, timings))
    except Exception as error:
        logger.info("the crossover is measured at every start, %s cannot be written: %s", folder, first_line(error))


def _read(file: Path) -> Any:
    """Read and parse the file. Refuse it if another user could have written it.

    Raises:
        OSError: the file cannot be read.
        ValueError: another user could have written it, or it is not a table of this package.
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
    """Describe how ``content`` differs from ``key``; "" if it matches."""
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
