"""Read installed packages from their metadata: versions, RECORD files and declared requirements."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

Distribution = importlib.metadata.Distribution


def installed(names: Iterable[str]) -> dict[str, Distribution]:
    """Return the distributions of ``names`` that are installed. If the path has one twice, the first wins."""
    distributions = {}
    for name in names:
        try:
            distributions[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of ``names`` that are installed."""
    return {name: distribution.version for name, distribution in installed(names).items()}


@dataclass(frozen=True)
class Recorded:
    """Size and hash of a file, as the wheel's RECORD states them."""

    digest: str
    """Hash in RECORD's format (``sha256=...``)."""
    size: int | None


def record(distribution: Distribution, under: tuple[str, ...] = ("",)) -> dict[Path, Recorded]:
    """Map each installed file to its RECORD entry, for names that start with ``under``. Empty without a RECORD."""
    root, entries = Path(str(distribution.locate_file(""))), {}
    lines = (line for line in (distribution.read_text("RECORD") or "").splitlines() if line.startswith(under))
    for row in csv.reader(lines):
        if len(row) >= 2 and row[1]:
            size = int(row[2]) if len(row) > 2 and row[2].isdigit() else None
            entries[root / row[0]] = Recorded(row[1], size)
    return entries


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


def shortened(files: dict[Path, Recorded]) -> list[Path]:
    """Return the files that are missing or shorter than in their wheel. Edited files are not detected."""
    short = []
    for path, recorded in files.items():
        try:
            size = path.stat().st_size
        except OSError:
            size = -1
        if size < 0 or (recorded.size is not None and size < recorded.size):
            short.append(path)
    return short


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
    found = list(distributions)
    stated = [text for distribution in found for text in distribution.requires or ()]
    for text in (*stated, *(text for distribution in found for text in _unstated(distribution))):
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
    """Return ``__init__.py`` of the copy that an import would load. Import nothing."""
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
