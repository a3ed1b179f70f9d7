# SPDX-License-Identifier: Apache-2.0
"""Programs and installed packages made for a test."""

from __future__ import annotations

from pathlib import Path

from trtllm_b12x.environment import packages


def program(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    file = directory / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    file.chmod(0o755)


def distribution(site: Path, name: str, version: str, files: list[Path], requires: tuple[str, ...] = ()) -> None:
    """A dist-info whose RECORD holds the files' hashes as they are now."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    lines = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")
    rows = [f"{file.relative_to(site)},{packages.digest(file)},{file.stat().st_size}" for file in files]
    (info / "RECORD").write_text("\n".join(rows) + "\n")
