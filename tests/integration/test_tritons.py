# SPDX-License-Identifier: Apache-2.0
"""Our kernels as each Triton compiles them that a host may bring: releases beside the environment's own, for SM12x cards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[2]
TESTS = "what_the_compiler_made or spill_nothing or products_are_native"
RELEASES = {"3.5.1": (" and not 121", "not all"), "3.6.0": (" and not 121 and not turns", "")}
"""Cases that are left out, by name and by mark. 3.5's ptxas knows no sm_121a. Rows by turns are vLLM's, which brings 3.9.
Python 3.12 brings 3.7.1, 3.11 brings 3.9."""


@pytest.mark.all
@pytest.mark.parametrize("release", RELEASES)
def test_a_release(release: str, tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    options = ["--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, f"triton=={release}"], check=True)
    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"  # its disassembler knows every card
    paths = os.pathsep.join(map(str, (folder, ROOT)))
    env = {**os.environ, "PYTHONPATH": paths, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "SASS_TOOLS": str(own)}
    files = ["tests/unittest/test_triton_compiled.py"]
    names, marks = RELEASES[release]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", f"({TESTS}) and not 90{names}", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options]
    result = subprocess.run([*command, *files], cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
    told = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"], env=env, capture_output=True, text=True
    )
    assert told.stdout.strip() == release
