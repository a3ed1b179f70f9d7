# SPDX-License-Identifier: Apache-2.0
"""Find what a Triton compile needs besides Triton: a C compiler for its launcher, a ptxas that knows the card, and a cache.

This module does not import Triton. It runs each ptxas to get its version.
"""

from __future__ import annotations

import glob
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

from trtllm_b12x.core import disk
from trtllm_b12x.decision import Lacking, version_tuple

from . import packages
from .gpu import TIMEOUT_S, WSL_FOLDER

OLDEST = (3, 5)
_BLOCK_SCALED_FROM = {120: (3, 6), 121: (3, 8)}

# First CUDA toolkit whose ptxas knows the target (PTX ISA release notes: sm_120a 8.7, sm_121a 8.8).
_KNOWN_FROM = {90: (11, 8), 100: (12, 8), 103: (12, 9), 120: (12, 8), 121: (12, 9)}


def version() -> str:
    """Return the version of the Triton that an import would load; ``none`` without Triton, empty if it is unknown."""
    init = packages.origin("triton")
    if init is None:
        return "none"
    stated = re.search(r"""^__version__\s*=\s*["']([^"']+)""", packages.source(init, "__init__.py"), re.MULTILINE)
    return stated[1] if stated else ""


def lacking(sm: int | None) -> tuple[Lacking, ...]:
    """List what this machine lacks for kernels on a card of ``sm`` (major * 10 + minor; None or 0 for no card in particular).

    After Triton or ``trtllm-b12x warmup`` has compiled, a missing C compiler does not matter until a plan needs a kernel that is
    not in the cache.
    """
    installed, init = version(), packages.origin("triton")
    if init is None:
        return (Lacking("Triton is not installed", "pip install triton, of the version that torch asks for"),)
    if not any(init.parent.glob("_C/libtriton*.so")):  # a stub, whose import may raise, exit or hang; or half an installation
        remedy = "remove it, then pip install triton, of the version that torch asks for"
        return (Lacking(f"{init.parent} is no Triton, or a damaged one: it has no _C/libtriton.so", remedy),)
    if installed and version_tuple(installed) < OLDEST:
        return (Lacking(f"Triton {installed} is older than {'.'.join(map(str, OLDEST))}", "torch 2.9 or newer brings it"),)
    fault = _ptxas(sm or 0)  # ptxas's version is part of every cache key
    compiled_before = glob.glob(
        f"{glob.escape(str(cache_folder()))}/*/cuda_utils*.so"
    )  # the C module that Triton needs before it loads a kernel
    return (*(() if compiled_before else tools_lacking()), *([fault] if fault is not None else ()))


def tools_lacking() -> tuple[Lacking, ...]:
    """List what this machine lacks for a compile but not for loading kernels from the cache."""
    return tuple(item for item in (_c_compiler(), _headers(), cache_lacking()) if item is not None)


def block_scaled(sm: int | None) -> bool:
    """Return True if ``tl.dot_scaled`` is known to be an instruction for a card of ``sm``.

    The compiled code of each release shows this, for E4M3 and for E2M1 (``tests/unittest/test_triton_compiled.py``).
    """
    needed = _BLOCK_SCALED_FROM.get(sm or 0)
    return needed is not None and version_tuple(version()) >= needed


def upcast(sm: int | None) -> str:
    """Return why ``tl.dot_scaled`` is not an instruction for a card of ``sm``; empty if it is an instruction or if unknown."""
    needed = _BLOCK_SCALED_FROM.get(sm or 0)
    if not version_tuple(version()) or needed is None or block_scaled(sm):
        return ""
    native = f"Triton {'.'.join(map(str, needed))} and newer have block-scaled products"
    return f"Triton {version()} multiplies bfloat16 on sm_{sm}, which is slow; {native}"


def _c_compiler() -> Lacking | None:
    """Look for a C compiler where Triton does: CC, then gcc and clang on PATH (``triton/runtime/build.py``)."""
    named = os.environ.get("CC")
    if named:
        if shutil.which(named.split()[0]):
            return None
        return Lacking(f"CC={named} is not a command", "name a C compiler in CC, or unset it")
    if any(map(shutil.which, ("clang", "gcc"))):
        return None
    return Lacking("no C compiler for Triton's launcher", "apt-get install gcc, or name one in CC")


def _headers() -> Lacking | None:
    """Check for the headers where Triton's build looks for them."""
    scheme = sysconfig.get_default_scheme()
    folder = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    if not folder or os.environ.get("CPATH") or os.environ.get("C_INCLUDE_PATH") or (Path(folder) / "Python.h").exists():
        return None
    return Lacking(f"no Python.h in {folder} for Triton's launcher", "apt-get install python3-dev")


def _ptxas(sm: int) -> Lacking | None:
    init = packages.origin("triton")
    # From 3.5 on, Triton has a separate ptxas for Blackwell, with its own variable.
    blackwell = sm >= 100 and "ptxas_blackwell" in packages.source(init, "knobs.py")
    variable = "TRITON_PTXAS_BLACKWELL_PATH" if blackwell else "TRITON_PTXAS_PATH"
    bundled = Path(init or ".").parent / "backends" / "nvidia" / "bin" / ("ptxas-blackwell" if blackwell else "ptxas")
    path = next((tool for tool in (Path(os.environ.get(variable) or bundled), bundled) if release(tool)), None)
    if path is None:
        return Lacking("no ptxas for Triton", f"install a CUDA toolkit and name its ptxas in {variable}")
    needed = _KNOWN_FROM.get(sm, (0, 0))
    if release(path) >= needed:
        return None
    dotted = ".".join(map(str, needed))
    return Lacking(
        f"{path} is of CUDA {'.'.join(map(str, release(path)))} and does not know sm_{sm}",
        f"name the ptxas of CUDA {dotted} or newer in {variable} (pip install nvidia-cuda-nvcc has one)",
    )


@cache
def release(ptxas: Path) -> tuple[int, ...]:
    """Return the CUDA release of a ptxas; empty if the file is not a ptxas."""
    try:
        output = subprocess.run([ptxas, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    match = re.search(r"release (\d+)\.(\d+)", output)
    return tuple(map(int, match.groups())) if match else ()


def cache_folder() -> Path:
    """Return Triton's cache folder (``triton/knobs.py``)."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home) / ".triton" / "cache").absolute()


def driver_folders() -> list[str]:
    """List the folders where a server may have libcuda.so.1: TRITON_LIBCUDA_PATH, or the folders of usual systems and of WSL2."""
    path, triplet = os.environ.get("TRITON_LIBCUDA_PATH"), f"{platform.machine()}-linux-gnu"
    return [path] if path else [f"/lib/{triplet}", f"/usr/lib/{triplet}", "/lib64", "/usr/lib64", WSL_FOLDER]


def libcuda() -> str:
    """Return the first of ``driver_folders`` that has libcuda.so.1, or a text with the folders and the variable to set."""
    folders = driver_folders()
    found = (folder for folder in folders if (Path(folder) / "libcuda.so.1").exists())
    return next(found, f"not in {', '.join(folders)}: set TRITON_LIBCUDA_PATH to its folder, for warmup and for the server")


def cache_lacking() -> Lacking | None:
    """Return why Triton's cache cannot be used, or None."""
    folder, problem = cache_folder(), "cannot be written"
    if not disk.is_utf8(folder):
        problem = "has a name that is not UTF-8"
    elif disk.writable(folder):
        return None
    return Lacking(f"Triton's cache {folder} {problem}", "name another folder in TRITON_CACHE_DIR")
