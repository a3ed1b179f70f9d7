# SPDX-License-Identifier: Apache-2.0
"""Read installed packages from their metadata: versions, RECORD files and declared requirements."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

Distribution = importlib.metadata.Distribution


def installed(names: Iterable[str]) -> dict[str, Distribution]:
    """Return the distributions of ``names`` that are installed. If the path has two copies, the first wins."""
    distributions = {}
    for name in names:
        try:
            distributions[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions


def versions(names: Iterable[str]) -> dict[str, str]:
    return {name: distribution.version for name, distribution in installed(names).items()}


def record(distribution: Distribution) -> dict[Path, str]:
    """Map each installed file to its hash in RECORD (``sha256=...``). The map is empty without a RECORD."""
    root = Path(str(distribution.locate_file("")))
    rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
    return {root / row[0]: row[1] for row in rows if len(row) >= 2 and row[1]}


def digest(path: Path) -> str:
    """Return a file's hash in RECORD's format, or "" if the file cannot be read."""
    sha256 = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
    except OSError:
        return ""
    return "sha256=" + base64.urlsafe_b64encode(sha256.digest()).decode().rstrip("=")


_UNSTATED = {"nvidia-cutlass-dsl": (">=4.6", "apache-tvm-ffi>=0.1.10")}
"""Requirements that a release needs but does not declare. From 4.6.0 on, ``cutlass_dsl/tvm_ffi_provider.py`` of the CuTe DSL
passes ``map_dataclass_to_tuple`` to ``tvm_ffi.utils.make_kwargs_wrapper``, which accepts it from 0.1.10 on."""


def _unstated(distribution: Distribution) -> list[str]:
    from packaging.specifiers import SpecifierSet

    versions, requirement = _UNSTATED.get(distribution.metadata["Name"].lower(), ("", ""))
    return [requirement] if versions and SpecifierSet(versions).contains(distribution.version, prereleases=True) else []


def requirements(distributions: Iterable[Distribution]) -> tuple[list[str], list[str]]:
    """Return unmet requirements, as ``requirement (version is installed)``, and requirements that are not installed at all."""
    from packaging.requirements import InvalidRequirement, Requirement

    unmet: dict[str, str] = {}
    missing: list[str] = []
    wheels = list(distributions)
    stated = [text for wheel in wheels for text in wheel.requires or ()]
    for text in (*stated, *(text for wheel in wheels for text in _unstated(wheel))):
        try:
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            version = importlib.metadata.version(requirement.name)
            met = requirement.specifier.contains(version, prereleases=True)
            if not met and (text in stated or requirement.name not in unmet.values()):
                unmet[f"{requirement.name}{requirement.specifier} ({version} is installed)"] = requirement.name
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"{requirement.name}{requirement.specifier}")
        except InvalidRequirement:
            continue
    return list(unmet), list(dict.fromkeys(missing))


def origin(package: str) -> Path | None:
    """Return ``__init__.py`` of the copy that an import would load, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def source(package: Path | None, relative: str) -> str:
    """Return the text of a file next to a package's ``__init__.py``, or "" if it cannot be read."""
    try:
        return "" if package is None else (package.parent / relative).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
