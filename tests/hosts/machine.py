# SPDX-License-Identifier: Apache-2.0
"""A machine with an SM120 card and CUDA 13, as far as ``nvidia-smi`` and ``nvcc`` say, and doubles of TensorRT-LLM on it.

FlashInfer and the CuTe DSL are the real ones.  The package is the wheel, installed in an environment of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest

from tests import forks
from tests.forks import ROOT
from tests.hosts.build import Change, build

SHORT = ("B", "C2")
"""Doubles of ``make test``: a host that is called by keywords, and one that is called with a context."""
OURS, HOSTS = "FlashInferNvfp4Sm12xFusedMoE", "CutlassFusedMoE"
_SMI = """#!/bin/sh
case "$*" in
  *compute_cap*) echo "0, GPU-aaaa, ${FAKE_COMPUTE_CAP:-12.0}" ;;
  *) echo "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0 |" ;;
esac
"""
_NVCC = '#!/bin/sh\necho "Cuda compilation tools, release 13.0, V13.0.48"\n'
_STARTS = {"before_import", "spawned", "mpi_worker", "custom_module_dirs"}
"""Scenarios about how a process starts, each in an interpreter of its own; others are forked from one that has imported torch."""


def of(*generations: str) -> list[Any]:
    """Parameters of the fixture ``double``, those that are left to ``make test-all`` marked."""
    return [pytest.param(name, marks=() if name in SHORT else pytest.mark.all) for name in generations]


def site(python: Path) -> Path:
    """Return the folder of an interpreter's packages."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip())


class Machine:
    """The environment with the wheel, and variables of a machine that has the card, without a host yet."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.python = self._install()
        programs = base / "machine" / "bin"
        programs.mkdir(parents=True)
        for name, text in (("nvidia-smi", _SMI), ("nvcc", _NVCC)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRTLLM", "CUDA", "PYTHON"))}
        self.variables = {
            **kept,
            "CUDA_HOME": str(base / "machine"),
            "LD_LIBRARY_PATH": f"{sys.prefix}/lib",  # of the MPI wheel
            "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(base / "sources"),
            "TRTLLM_B12X_KERNELS": "b12x",  # where a test does not say which families it is about
            "XDG_CACHE_HOME": str(base / "cache"),
        }

    def _install(self) -> Path:
        """Install the wheel of a clean copy of the sources, and everything else by reference; return the interpreter."""
        base, ignore = self.base, shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "trtllm_b12x", base / "clone" / "trtllm_b12x", ignore=ignore)
        for name in ("pyproject.toml", "LICENSE", "README.md", "trtllm_b12x.pth", "trtllm_b12x.start"):
            shutil.copy(ROOT / name, base / "clone")
        pip = [sys.executable, "-m", "pip", "--quiet"]
        options = ["--no-deps", "--no-build-isolation", "-w", str(base / "wheel")]
        subprocess.run([*pip, "wheel", *options, str(base / "clone")], check=True)
        (wheel,) = (base / "wheel").glob("*.whl")
        venv.create(base / "venv", with_pip=False, symlinks=True)
        python = base / "venv" / "bin" / "python"
        subprocess.run([*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)], check=True)
        # What is installed here, by reference: the folder, and the hooks of the CuTe DSL's wheels, but none of ours.
        parent = Path(sysconfig.get_path("purelib"))
        (site(python) / "zz_parent.pth").write_text(f"{parent}\n")
        for hook in parent.glob("nvidia*.pth"):
            shutil.copy(hook, site(python) / f"zzz_{hook.name}")
        shutil.copytree(ROOT / "tests", base / "sources" / "tests", ignore=ignore)
        return python

    @functools.cached_property
    def server(self) -> forks.ForkServer:
        """Children with the import hook that the interpreter started with, and neither the package nor a host imported."""
        module = "torch.fx.experimental.symbolic_shapes"
        return forks.ForkServer(module, environment=self.variables, python=str(self.python), folder=self.base)

    def double(self, generation: str, name: str = "", changes: tuple[Change, ...] = ()) -> Double:
        """Build a double; ``changes`` need a ``name`` for its folder."""
        folder = self.base / "doubles" / (name or generation)
        if name or not folder.exists():
            build(generation, folder, changes)
        variables = {**self.variables, "PYTHONPATH": f"{folder}{os.pathsep}{self.variables['PYTHONPATH']}"}
        return Double(self, generation, folder, variables, self.python)


@dataclasses.dataclass(frozen=True)
class Double:
    """A double of TensorRT-LLM on the machine, first on the path."""

    machine: Machine
    generation: str
    folder: Path
    variables: dict[str, str]
    python: Path

    @property
    def has_contexts(self) -> bool:
        """Whether the host calls its backends with a context, as C1 and C2 do, not by keywords."""
        return self.generation.startswith("C")

    def scenario(self, name: str, *arguments: str, **variables: str) -> dict[str, Any]:
        """Run ``module.function`` of ``tests.hosts.scenarios``; add its standard error."""
        module, _, function = name.partition(".")
        target, environment = f"tests.hosts.scenarios.{module}:{function}", {**self.variables, **variables}
        if function in _STARTS or "TRTLLM_B12X" in variables or self.python != self.machine.python:
            # Not in the checkout, which would be imported.
            command = [str(self.python), "-m", "tests.forks", "call", target, *arguments]
            answer = _alone(command, environment, self.machine.base)
        else:
            answer = self.machine.server.run(target, *arguments, environment=environment)
        return {**forks.result(answer), "stderr": answer[2]}

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter with these arguments, outside the checkout."""
        environment = {**self.variables, **variables}
        command = [self.python, *arguments]
        return subprocess.run(command, env=environment, cwd=self.machine.base, capture_output=True, text=True)


def _alone(command: list[str], environment: dict[str, str], folder: Path) -> tuple[int, str, str]:
    """Run a command in a session that ends with it: where a worker dies, MPICH kills the process group of whoever spawned it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=forks.TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors
