"""The folder of what is kept on this machine, and in it the answers that cost a process each.

They are kept once per node and state of the installation, and shared by all ranks under a lock.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT = 16
"""Answers that are kept, the newest."""
_FILE = "payload.json"
TABLES = "crossover-*.json"
"""Files of :mod:`trtllm_b12x.dispatch.store`, beside it."""


def directory() -> Path | None:
    """``$XDG_CACHE_HOME/trtllm_b12x`` or ``~/.cache/trtllm_b12x``; None where neither is an absolute path that can be known.

    A relative ``XDG_CACHE_HOME`` is to be ignored (XDG base directory specification), and a container may have neither HOME nor
    an entry for its user.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME") or ".")
    if given.is_absolute():
        return given / "trtllm_b12x"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "trtllm_b12x" if home.is_absolute() else None


def make(folder: Path) -> None:
    """Nobody else may write into it, whatever the umask."""
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)


def once(key: str, ask: Callable[[], Any], keep: Callable[[Any], bool]) -> tuple[Any, bool]:
    """The answer to ``key``, and whether it was kept from before.  What ``keep`` refuses is asked anew by the next process."""
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
                write(file, {**dict(list(known.items())[1 - LIMIT :]), key: answer})
        return answer, False
    except (OSError, Timeout, NotImplementedError):  # filelock up to 3.20 raises the last where the file system has no flock
        # A home like that, or a read-only one, costs a look per process, nothing else.
        return (answer if asked else ask()), False


def read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def write(file: Path, content: dict[str, Any]) -> None:
    replace(file, json.dumps(content))


def replace(file: Path, text: str) -> None:
    """The file as a whole, or not at all.  The new one is made with O_EXCL: a link that lies in its place is not followed."""
    temporary = file.with_name(f".{file.name[:200]}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def contents() -> list[tuple[str, int]]:
    """Files of the cache with their sizes in bytes."""
    folder = directory()
    if folder is None or not folder.is_dir():
        return []
    return [(entry.name, entry.lstat().st_size) for entry in sorted(folder.iterdir())]


def clear() -> int:
    """Remove the folder, or, where it is a link, what we keep in it; returns how many bytes were freed."""
    folder = directory()
    freed = sum(size for _, size in contents())
    if folder is not None and folder.is_dir():
        if folder.is_symlink():
            for file in (folder / _FILE, *folder.glob(TABLES)):
                file.unlink(missing_ok=True)
        else:
            shutil.rmtree(folder)
    return freed
