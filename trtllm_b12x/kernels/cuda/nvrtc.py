# SPDX-License-Identifier: Apache-2.0
"""Compile CUDA C++ with the NVRTC that PyTorch brings. It needs no C compiler, no CUDA toolkit and no GPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Collection, Mapping
from typing import Any

from trtllm_b12x.environment import nvrtc as environment


class CompileError(RuntimeError):
    """NVRTC is missing or rejects the source; the message has its log."""


def library() -> ctypes.CDLL:
    """Return NVRTC. Raise CompileError if it is not installed."""
    if (found := environment.library()) is not None:
        return found
    raise CompileError("NVRTC is not installed: pip install nvidia-cuda-nvrtc")


@functools.cache
def version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compiled(name: str, files: Mapping[str, str], target: str) -> tuple[bytes, str]:
    """Compile for ``"sm_120a"`` to a cubin, for ``"compute_120a"`` to PTX.

    Return the cubin or PTX, and the log with registers and spills.

    ``files`` has the source ``name`` and its headers, by name. Raise CompileError if NVRTC is missing or rejects the source.
    """
    lib, program = library(), ctypes.c_void_p()
    options = [f"--gpu-architecture={target}", "--std=c++17", "-default-device", "--ptxas-options=-v"]
    headers = {other: text for other, text in files.items() if other != name}
    texts, names = (_strings(strings) for strings in (headers.values(), headers))
    lib.nvrtcCreateProgram(ctypes.byref(program), files[name].encode(), name.encode(), len(headers), texts, names)
    try:
        failed = lib.nvrtcCompileProgram(program, len(options), _strings(options))
        log = _read(lib, "ProgramLog", program).decode(errors="replace").rstrip("\0\n")
        if failed:
            raise CompileError(f"NVRTC {version()} does not compile {name} for {target}: {log}")
        return _read(lib, "CUBIN" if target.startswith("sm") else "PTX", program), log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _strings(texts: Collection[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*map(str.encode, texts))


def _read(lib: Any, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{what}")(program, content)
    return content.raw
