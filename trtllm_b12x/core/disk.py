# SPDX-License-Identifier: Apache-2.0
"""Manage the cache folder, and cache results that each cost a process to compute.

A result is valid for one node and one state of the installation. All ranks share it under a file lock.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 16
"""Maximum number of cached results. The newest stay."""
_LARGEST = 4 << 20
"""Maximum size in bytes of a file that ``owned_bytes`` reads."""
_FILE = "payload.json"
TABLES = "crossover-*.json"
"""Pattern of the crossover tables that ``trtllm_b12x.dispatch.store`` keeps in the same folder."""
COMPARISONS = "marlin-*.json"
"""Pattern of the timings that ``trtllm_b12x.engines.vllm.marlin`` keeps in the same folder."""


def directory() -> Path | None:
    """Return ``$XDG_CACHE_HOME/trtllm_b12x`` or ``~/.cache/trtllm_b12x``; None if neither is absolute.

    A relative ``XDG_CACHE_HOME`` must be ignored (XDG base directory specification). A container may have neither HOME nor an
    entry for its user.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    if base.is_absolute():
        return base / "trtllm_b12x"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "trtllm_b12x" if home.is_absolute() else None


def make(folder: Path) -> None:
    """Create the folder. Only its owner may write into it, whatever the umask."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)


def writable(folder: Path) -> bool:
    """Return whether files can be created in the folder, or in its first parent that exists."""
    parent = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    return os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)


def is_utf8(path: str | Path) -> bool:
    """Return whether a path is valid UTF-8. Triton and safetensors cannot open other paths."""
    return os.fsencode(path).decode(errors="replace") == str(path)


def once(key: str, ask: Callable[[], Any], keep: Callable[[Any], bool]) -> tuple[Any, bool]:
    """Return the result for ``key``, and whether it was cached. A new result of ``ask`` is stored if ``keep`` accepts it."""
    from filelock import FileLock, Timeout

    folder = directory()
    if folder is None:
        return ask(), False
    file = folder / _FILE
    answer, asked = None, False
    try:
        make(folder)
        with FileLock(folder / f"{_FILE}.lock", timeout=600):
            known = read(file)
            if key in known and keep(known[key]):
                return known[key], True
            answer, asked = ask(), True
            if keep(answer):
                replace(file, json.dumps({**dict(list(known.items())[1 - LIMIT :]), key: answer}))
        return answer, False
    except (OSError, Timeout, NotImplementedError):  # filelock up to 3.20 raises NotImplementedError without flock
        # In a home without flock, or in a read-only home, each process calls ``ask`` once.
        return (answer if asked else ask()), False


def read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_owned(file: Path) -> Any:
    """Read and parse the file; see ``owned_bytes``."""
    return json.loads(owned_bytes(file).decode("utf-8"))


def owned_bytes(file: Path) -> bytes:
    """Read a file. Raise OSError if that fails, ValueError if it is irregular, too large, or could be written by other users."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        for place, name in ((os.stat(file.parent), str(file.parent)), (status, file.name)):
            if place.st_uid not in (os.geteuid(), 0) or place.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError(f"{name} can be written by other users: chmod go-w, or remove it if it is not yours")
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise ValueError("no file of ours")
        return stream.read()


def replace(file: Path, content: str | bytes) -> None:
    """Replace a file atomically. O_EXCL creates the new file, so a symbolic link at its path is not followed."""
    temporary = file.with_name(f".{file.name[:200]}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content.encode("utf-8") if isinstance(content, str) else content)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def contents() -> list[tuple[str, int]]:
    """Return the names of the cached files, with sizes in bytes."""
    folder = directory()
    if folder is None or not folder.is_dir():
        return []
    return [(entry.name, entry.lstat().st_size) for entry in sorted(folder.iterdir())]


def clear() -> int:
    """Remove the cache folder. If it is a symbolic link, remove only our files in it. Return the number of bytes freed."""
    folder = directory()
    freed = sum(size for _, size in contents())
    if folder is not None and folder.is_dir():
        if folder.is_symlink():
            for file in (folder / _FILE, *folder.glob(TABLES), *folder.glob(COMPARISONS)):
                file.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder)
    return freed
