# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of speed and memory. They are not tests."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_b12x.core import disk
from trtllm_b12x.core.errors import say


def require_gpu() -> None:
    """Exit with status 2 and one error line if torch sees no GPU."""
    import torch

    if not torch.cuda.is_available():
        print("error: this measures on a GPU, and torch sees none: run it where torch.cuda.is_available()", file=sys.stderr)
        sys.exit(2)


def finish(main: Callable[[], int]) -> None:
    """Run ``main`` and exit with its status. SIGTERM counts as Ctrl-C. A full standard output gives a one-line error."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except OSError as error:
        if error.filename is not None:
            raise
        say(f"error: standard output cannot be written ({error.strerror})")
        os._exit(2)  # Python's own flush would fail again
    sys.exit(status)


def positive(text: str) -> int:
    """Convert an argument to a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {text}")
    return int(text)


def utf8(text: str) -> str:
    """Return an argument that is passed on to programs and files. They accept only UTF-8 paths."""
    if not disk.is_utf8(text):
        raise argparse.ArgumentTypeError(f"must be UTF-8, got {text!r}; rename it or choose another one")
    return text


def folder(text: str) -> Path:
    """Convert OUT, the folder that a benchmark fills, to a path."""
    if not disk.writable(Path(utf8(text)).absolute()):
        raise argparse.ArgumentTypeError(f"{text} must be a folder that can be written; choose another one")
    return Path(text)
