# SPDX-License-Identifier: Apache-2.0
"""Find the parts of vLLM that the peers need, and take them out of its wheel where vLLM is not installed.

vLLM as a whole is never imported. Marlin is in its extension libraries, OpenAI's triton_kernels is a pure Python package below
``vllm/third_party``. Everything here was read in vLLM 0.22.1, which fits torch 2.11.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import sys
import zipfile
from pathlib import Path

import torch

PARTS = {
    "Marlin": ("vllm/_moe_C*.so", "vllm/_C_stable_libtorch*.so"),
    "triton_kernels": ("vllm/third_party/triton_kernels/*.py",),
    "version": ("vllm-*.dist-info/METADATA",),
}
"""Members of the wheel. ``_C_stable_libtorch`` has the activations; weights are prepared without ``_C``."""
MISSING = (
    "vLLM is not installed. Download the wheel that fits this torch (pip download vllm==0.22.1 --no-deps for 2.11), "
    "run python -m benchmarks.peers --parts WHEEL FOLDER and pass --vllm FOLDER"
)


def take(wheel: Path, folder: Path) -> None:
    """Unpack the parts of a wheel into ``folder``.

    Raises:
        ValueError: the file is not a wheel, or a part is missing.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for patterns in PARTS.values():
                found = [n for n in archive.namelist() if any(fnmatch.fnmatch(n, p) for p in patterns)]
                absent = [p for p in patterns if not fnmatch.filter(found, p)]
                if absent:
                    raise ValueError(f"{wheel} has no {' and no '.join(absent)}: expected a wheel of vLLM 0.22")
                for name in found:
                    archive.extract(name, folder)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel} is not a wheel that can be read: {error}") from None


def find(folder: Path | None) -> Path | None:
    """Return the package folder ``vllm`` in ``folder``, by default of the installed vLLM; None without vLLM.

    Raises:
        ValueError: ``folder`` has no folder ``vllm``.
    """
    if folder is not None:
        if not (folder / "vllm").is_dir():
            raise ValueError(f"--vllm {folder} has no folder vllm; python -m benchmarks.peers --parts WHEEL {folder} makes it")
        return (folder / "vllm").absolute()
    spec = importlib.util.find_spec("vllm")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def version(vllm: Path | None) -> str | None:
    """Return vLLM's version as its metadata names it."""
    for file in sorted(vllm.parent.glob("vllm-*.dist-info/METADATA")) if vllm else ():
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ")
    return None


@functools.cache
def load_operators(vllm: Path) -> str:
    """Load the extension libraries, which register ``torch.ops._moe_C`` and ``torch.ops._C``. Return an error, or ""."""
    libraries = sorted(vllm.glob("_moe_C*.so")) + sorted(vllm.glob("_C*.so"))
    if not libraries:
        return f"{vllm} has no _moe_C*.so"
    for path in libraries:
        try:
            torch.ops.load_library(str(path))
        except (OSError, RuntimeError) as error:
            return f"{path.name} does not load under torch {torch.__version__}: {error.__cause__ or error}"
    return ""


def load_triton_kernels(vllm: Path) -> str:
    """Make ``triton_kernels`` importable and import what a layer calls. Return an error, or ""."""
    if str(vllm / "third_party") not in sys.path:
        sys.path.append(str(vllm / "third_party"))
    try:
        for name in ("matmul_ogs", "routing", "swiglu", "tensor", "tensor_details.layout"):
            importlib.import_module(f"triton_kernels.{name}")
    except Exception as error:  # triton_kernels may not fit this Triton
        return f"triton_kernels does not import: {type(error).__name__}: {error}"
    return ""
