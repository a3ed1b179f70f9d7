# SPDX-License-Identifier: Apache-2.0
"""Read FlashInfer's version and the capabilities of its kernels without an import."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path

from trtllm_b12x.decision import EXPERT_PARALLEL_FLASHINFER, Environment, version_tuple

from . import packages

_KERNELS = ("flashinfer/fused_moe/cute_dsl/blackwell_sm12x/", "flashinfer/cute_dsl/", "flashinfer/jit/")
"""Folders with the code that planning runs."""


def inspect_flashinfer() -> Environment:
    """Return the facts about the copy that an import would load, from its metadata and source."""
    init = packages.origin("flashinfer")
    if init is None:
        return Environment(flashinfer="none")
    distribution = distribution_of(init)
    # The copy that loads states its version. The metadata may belong to another copy, later on the path.
    stated = re.search(r"""^__version__\s*=\s*["']([^"']+)""", packages.source(init, "_build_meta.py"), re.MULTILINE)
    version = stated[1] if stated else distribution.version if distribution is not None else ""
    if not version:
        return Environment(flashinfer="none")
    dispatch = packages.source(init, "fused_moe/cute_dsl/blackwell_sm12x/moe_dispatch.py")
    return Environment(
        flashinfer=version,
        expert_parallel=version_tuple(version) >= EXPERT_PARALLEL_FLASHINFER,
        # The static kernel of newer releases keeps groups of 256 columns.
        tile=256 if "_STATIC_RETAINED_GROUP_N" in dispatch else 128,
    )


def autotuner() -> tuple[bool, bool]:
    """Return whether FlashInfer's autotuner is tuning in this process, and whether it has loaded an earlier process's choices.

    No module is imported. vLLM 0.33 loads a file of choices instead of tuning if every rank has one (warmup/kernel_warmup.py).
    """
    kind = getattr(sys.modules.get("flashinfer.autotuner"), "AutoTuner", None)
    tuner = None if kind is None else kind.get()
    return bool(getattr(tuner, "is_tuning_mode", False)), bool(getattr(tuner, "_file_configs", ()))


def distribution_of(init: Path) -> packages.Distribution | None:
    """Return the metadata of the copy at ``init``, or else of the first copy on the path."""
    copies = list(importlib.metadata.distributions(name="flashinfer-python"))
    beside = (d for d in copies if Path(str(d.locate_file("flashinfer/__init__.py"))) == init)
    return next(beside, copies[0] if copies else None)


def cache_folder() -> Path:
    """Return the folder of FlashInfer's compiled kernels, for all cards (``jit/env.py``)."""
    return Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home()) / ".cache" / "flashinfer"


def kernel_sources() -> list[Path]:
    init = packages.origin("flashinfer")
    paths = [] if init is None else [path for name in _KERNELS for path in (init.parents[1] / name).rglob("*.py")]
    return sorted(paths)
