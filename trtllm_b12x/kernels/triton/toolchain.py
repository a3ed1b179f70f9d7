"""What compiling a Triton kernel needs beside Triton: a C compiler for its launcher, and a ptxas that knows the card."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# CUDA toolkit whose ptxas knows the target (PTX ISA release notes: sm_120a 8.7, sm_121a 8.8).
_KNOWN_FROM = {
    80: (11, 0),
    86: (11, 1),
    87: (11, 4),
    89: (11, 8),
    90: (11, 8),
    100: (12, 8),
    103: (12, 9),
    120: (12, 8),
    121: (12, 9),
}


@dataclass(frozen=True)
class Missing:
    """What is not there, and how to get it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


def missing(capability: int) -> tuple[Missing, ...]:
    """Everything that a compile for ``capability`` (90, 120, ...) lacks here; starts ptxas, once, and nothing on a GPU."""
    found = (_triton(), _c_compiler(), _ptxas(capability))
    return tuple(item for item in found if item is not None)


def _triton() -> Missing | None:
    try:
        import triton
    except ImportError as error:
        return Missing(f"Triton cannot be imported ({error})", "pip install triton, of the version that torch asks for")
    version = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
    if version < (3, 5):
        return Missing(f"Triton {triton.__version__} is older than 3.5", "torch 2.9 or newer brings it")
    return None


def _c_compiler() -> Missing | None:
    """Triton's own order: CC, then the clang that some builds carry, gcc and clang on PATH (``triton/runtime/build.py``)."""
    named = os.environ.get("CC")
    if named:
        if shutil.which(named.split()[0]):
            return None
        return Missing(f"CC={named} is no command", "name a C compiler in CC, or unset it")
    if any(map(shutil.which, ("clang", "gcc"))):
        return None
    return Missing("no C compiler for Triton's launcher", "apt-get install gcc, or name one in CC")


def _ptxas(capability: int) -> Missing | None:
    from triton import knobs

    # Triton keeps one for Blackwell apart (3.5 on), with a variable of its own.
    blackwell = capability >= 100 and hasattr(knobs.nvidia, "ptxas_blackwell")
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if blackwell else "TRITON_PTXAS_PATH"
    try:
        tool = knobs.nvidia.ptxas_blackwell if blackwell else knobs.nvidia.ptxas
        path, version = str(tool.path), _version_of(Path(tool.path))
    except Exception as error:
        return Missing(f"no ptxas ({type(error).__name__})", f"install a CUDA toolkit and name its ptxas in {variable}")
    needed = _KNOWN_FROM.get(capability)
    if version is None or needed is None or version >= needed:
        return None
    dotted = ".".join(map(str, needed))
    return Missing(
        f"{path} is of CUDA {'.'.join(map(str, version))} and does not know sm_{capability}",
        f"name the ptxas of CUDA {dotted} or newer in {variable} (pip install nvidia-cuda-nvcc has one)",
    )


def _version_of(ptxas: Path, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> tuple[int, ...] | None:
    """CUDA release of a ptxas; None where it does not say."""
    said = run([str(ptxas), "--version"], capture_output=True, text=True, timeout=20).stdout
    match = re.search(r"release (\d+)\.(\d+)", said)
    return tuple(map(int, match.groups())) if match else None
