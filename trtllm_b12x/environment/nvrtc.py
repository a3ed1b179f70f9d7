# SPDX-License-Identifier: Apache-2.0
"""Find the NVRTC that compiles kernels of family ``cuda``."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the newest NVRTC of the environment's wheels, or else the system's NVRTC. Return None if neither exists."""
    folders = [Path(path) for path in sys.path]
    files = [file for folder in folders for file in folder.glob("nvidia/*/lib/libnvrtc.so.1?")]
    names = [str(file) for file in sorted(files, key=lambda file: file.name, reverse=True)] + ["libnvrtc.so.13", "libnvrtc.so.12"]
    for name in names:
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.1?.*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)  # NVRTC searches only the loader's path
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
