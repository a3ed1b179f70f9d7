"""Speed and memory, measured; none of it is a test."""

from __future__ import annotations

import sys

import torch


def require_gpu() -> None:
    """Exit with 2 and a line where there is nothing to measure on."""
    if not torch.cuda.is_available():
        print("error: this measures on a GPU, and torch sees none: run it where torch.cuda.is_available()", file=sys.stderr)
        sys.exit(2)
