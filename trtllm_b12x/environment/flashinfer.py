"""Inspect FlashInfer without importing it: version, capabilities of its kernels, and damage."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import os
import re
from pathlib import Path

from trtllm_b12x.decision import EXPERT_PARALLEL_FLASHINFER, Environment, version_tuple

from . import packages

_KERNELS = ("flashinfer/fused_moe/cute_dsl/blackwell_sm12x/", "flashinfer/cute_dsl/", "flashinfer/jit/")
"""Folders with the code that planning runs."""
_WRAPPER = "fused_moe/cute_dsl/b12x_moe.py"


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
    arguments = _method_arguments(packages.source(init, _WRAPPER), "B12xMoEWrapper")
    dispatch = packages.source(init, "fused_moe/cute_dsl/blackwell_sm12x/moe_dispatch.py")
    return Environment(
        flashinfer=version,
        flashinfer_fault=_damage(distribution),
        mismatched=_mismatched(version, packages.source(init, "jit/env.py")),
        exact_scales="input_global_scale" in arguments.get("run", ()),
        # No signature shows it. From 0.7.2 on; source: comparison of the wheels.
        expert_parallel=bool(arguments) and version_tuple(version) >= EXPERT_PARALLEL_FLASHINFER,
        # The static kernel of newer releases keeps groups of 256 columns.
        tile=256 if "_STATIC_RETAINED_GROUP_N" in dispatch else 128,
    )


def distribution_of(init: Path) -> packages.Distribution | None:
    """Return the metadata of the copy at ``init``, or else of the first copy on the path."""
    copies = list(importlib.metadata.distributions(name="flashinfer-python"))
    beside = (d for d in copies if Path(str(d.locate_file("flashinfer/__init__.py"))) == init)
    return next(beside, copies[0] if copies else None)


def kernel_sources() -> list[Path]:
    """Return the source files that planning runs, of the copy that loads."""
    init = packages.origin("flashinfer")
    paths = [] if init is None else [path for name in _KERNELS for path in (init.parents[1] / name).rglob("*.py")]
    return sorted(paths)


def _damage(distribution: packages.Distribution | None) -> str:
    short = (
        packages.shortened(packages.record(distribution, under=(*_KERNELS, f"flashinfer/{_WRAPPER}")))
        if distribution is not None
        else []
    )
    return f"missing or cut off: {', '.join(path.name for path in short[:3])}, in {short[0].parent}" if short else ""


def _mismatched(version: str, environment_source: str) -> tuple[str, ...]:
    """List kernel wheels of another version: ``flashinfer/jit/env.py`` raises for them. From 0.7.2 on it ignores such wheels."""
    if os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK") or version == "0.0.0+unknown":
        return ()
    if "Ignoring incompatible flashinfer-cubin" in environment_source:
        return ()
    others = []
    for name, wheel in packages.installed(("flashinfer-cubin", "flashinfer-jit-cache")).items():
        if name == "flashinfer-cubin":
            fits = wheel.version == version or "FLASHINFER_CUBIN_DIR" in os.environ
        else:  # its version ends with the CUDA version: 0.6.18+cu130
            fits = wheel.version.startswith(version)
        if not fits:
            others.append(f"{name} {wheel.version}")
    return tuple(others)


@functools.lru_cache(maxsize=4)
def _method_arguments(source: str, class_name: str) -> dict[str, set[str]]:
    """Map each method of a class to its argument names; empty if the class is missing."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            return {m.name: {a.arg for a in [*m.args.posonlyargs, *m.args.args, *m.args.kwonlyargs]} for m in methods}
    return {}
