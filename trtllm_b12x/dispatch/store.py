# SPDX-License-Identifier: Apache-2.0
"""Store measured crossover tables on disk: one JSON file per card and geometry, in the folder shown by ``trtllm-b12x cache``.

An unusable table is logged in one line and measured again. Only ``load_file`` raises.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from trtllm_b12x.core import disk
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.core.log import logger
from trtllm_b12x.core.version import __version__
from trtllm_b12x.environment import gpu, packages

from .policy import Timings

FORM = 4
"""Version of the file format."""
_PARTS = {"card": "another card", "geometry": "another geometry", "paths": "other kernels", "conditions": "other versions"}
"""Mismatch message by field of ``Key``."""
_UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors of reading a file that was truncated, edited or written by another user."""
_PACKAGES = ("torch", "triton", "flashinfer-python", "nvidia-cutlass-dsl", "tensorrt_llm")


@dataclass(frozen=True)
class Key:
    """Conditions under which a table is valid."""

    card: Mapping[str, Any]
    """GPU name, capability, multiprocessors and L2 cache."""
    geometry: Mapping[str, Any]
    """Sizes of one layer on one rank, and the weight format."""
    title: ClassVar[str] = "crossover"
    """Name of the table in log lines."""
    paths: Mapping[str, Any]
    """Kernel families, the engine, and whether the engine's path is tuned."""
    conditions: Mapping[str, Any]
    """Versions of packages and of the driver."""
    max_num_tokens: int
    """Largest count that the kernels are planned for. A table for a larger count is valid too."""

    @property
    def file(self) -> str:
        words = json.dumps([self.card, self.geometry, self.paths], sort_keys=True)
        return f"crossover-{hashlib.sha256(words.encode()).hexdigest()[:16]}.json"


@functools.cache
def versions() -> dict[str, str]:
    return {"trtllm-b12x": __version__, **packages.versions(_PACKAGES), "driver": gpu.driver_version()}


def record(key: Key, timings: Timings) -> dict[str, Any]:
    rows = {str(tokens): {name: round(t, 3) for name, t in paths.items()} for tokens, paths in timings.rows.items()}
    return {"form": FORM, **asdict(key), "microseconds": rows}


def load(key: Key) -> Timings | None:
    """Load the stored table for ``key``, or None. If a table exists but cannot be used, log why."""
    folder = disk.directory()
    if folder is None:
        return None
    file = folder / key.file
    try:
        table = disk.read_owned(file)
        problem = _mismatch(table, key, _PARTS)
        if not problem and table["max_num_tokens"] < key.max_num_tokens:
            problem = f"of {table['max_num_tokens']} tokens, not {key.max_num_tokens}"
        if not problem:
            return _timings(table)
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        problem = first_line(error)
    logger.info("the stored %s is not used, %s: %s", key.title, file, problem)
    return None


def load_file(path: Path, key: Key) -> Timings:
    """Load a table from a user's file, or from ``trtllm-b12x tune --out``. Card and geometry must match, versions need not.

    Raise ValueError with the reason if the file holds no matching table or cannot be read.
    """
    problems = []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for table in content.get("tables", [content]):
            problem = _mismatch(table, key, ("card", "geometry"))
            if not problem:
                return _timings(table)
            problems.append(problem)
    except _UNREADABLE as error:
        raise ValueError(f"{path}: {first_line(error)}") from error
    raise ValueError(f"{path}: {problems[0] if problems else 'no table'}")


def keep(key: Key, timings: Timings) -> None:
    """Write the table, replacing the file atomically. On failure, log one line."""
    folder = disk.directory()
    if folder is None:
        logger.info("the %s is measured at every start: neither XDG_CACHE_HOME nor HOME is an absolute path", key.title)
        return
    try:
        disk.make(folder)
        disk.replace(folder / key.file, json.dumps(record(key, timings)))
    except OSError as error:
        logger.info("the %s is measured at every start, %s cannot be written: %s", key.title, folder, first_line(error))


def _mismatch(table: Any, key: Key, parts: Iterable[str]) -> str:
    """Return how the table differs from these parts of ``key``; empty if it does not."""
    if not isinstance(table, dict) or table.get("form") != FORM:
        return "of another form"
    expected = json.loads(json.dumps(asdict(key)))
    for part in parts:
        if table.get(part) != expected[part]:
            actual = table[part] if isinstance(table.get(part), dict) else {}
            differing = [name for name in {**expected[part], **actual} if expected[part].get(name) != actual.get(name)]
            return f"of {_PARTS[part]} ({', '.join(differing[:3])})"
    return ""


def _timings(table: dict[str, Any]) -> Timings:
    return Timings({int(tokens): dict(paths) for tokens, paths in table["microseconds"].items()})
