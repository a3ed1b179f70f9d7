# SPDX-License-Identifier: Apache-2.0
"""Installing the package into a TensorRT-LLM environment changes no other package."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

from tests.hosts.machine import site
from tests.installations import distribution

from .environments import Environment, pip

ROOT = Path(__file__).parents[2]
PINS = sorted((Path(__file__).parent / "host_pins").glob("*.txt"))

BROUGHT_BY_THE_HOST = {
    # Unpinned there; brought by TensorRT-LLM's own requirements (click), nvidia-modelopt 0.37 (rich, safetensors, tqdm) and
    # transformers 4.57 (filelock, safetensors, tqdm).  Old versions on purpose.
    "click": "8.1.0",
    "filelock": "3.12.0",
    "packaging": "23.0",
    "rich": "13.0.0",
    "safetensors": "0.4.3",
    "tqdm": "4.66.0",
    "pydantic": "2.9.1",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(directory), str(ROOT))
    (path,) = directory.glob("*.whl")
    return path


def environment(directory: Path, pins: Path) -> Path:
    """An environment that has, as far as pip can see, what a host of this generation has; returns its interpreter."""
    venv.create(directory, with_pip=False, symlinks=True)
    python = directory / "bin" / "python"
    exact = re.findall(r"^([\w.-]+)[=~]=([\w.]+)$", pins.read_text(), re.MULTILINE)
    oldest = re.search(r"^torch>=([\d.]+?)a0", pins.read_text(), re.MULTILINE)
    torch = oldest.group(1) if oldest else "2.9.0"
    packages = site(python)
    for name, version in {"torch": torch, **BROUGHT_BY_THE_HOST, **dict(exact)}.items():
        distribution(packages, name, version, [])
    return python


def dry_run(python: Path, wheel: Path, pins: Path, *, extra: str = "", index: bool = False) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--dry-run"]
    command += ["-c", str(pins), f"{wheel}{extra}", *([] if index else ["--quiet", "--report", "-", "--no-index"])]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIP_NO_INPUT": "1"})


@pytest.mark.all("trtllm-1.[34]*", "*sep-2026")
@pytest.mark.parametrize("pins", PINS, ids=lambda path: path.stem)
def test_nothing_else_changes(wheel: Path, pins: Path, tmp_path: Path) -> None:
    result = dry_run(environment(tmp_path / "host", pins), wheel, pins)
    assert result.returncode == 0, result.stderr
    assert [item["metadata"]["name"] for item in json.loads(result.stdout)["install"]] == ["trtllm-b12x"]


def test_the_extra_never_moves_a_pin_silently(wheel: Path, tmp_path: Path) -> None:
    pins = next(path for path in PINS if path.stem == "trtllm-1.2")
    result = dry_run(environment(tmp_path / "host", pins), wheel, pins, extra="[kernels]", index=True)
    assert result.returncode != 0
    assert "ResolutionImpossible" in result.stderr, result.stderr
    assert "flashinfer-python" in result.stdout  # with --quiet no pip says which


def test_the_wheel_holds_the_package_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = message_from_string(archive.read(next(n for n in names if n.endswith("METADATA"))).decode())
    tops = {name.split("/")[0] for name in names}
    assert tops == {"trtllm_b12x", "trtllm_b12x.pth", "trtllm_b12x.start", next(t for t in tops if t.endswith(".dist-info"))}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    requirements = metadata.get_all("Requires-Dist") or []
    extras = {re.split(r"[<>=;]", r)[0].strip() for r in requirements if "extra ==" in r}
    assert extras == {"flashinfer-python", "matplotlib", "nvidia-cutlass-dsl[cu13]"}
    # Without a bound, no version that a host has can be wrong.
    assert {r for r in requirements if "extra ==" not in r} == {"click", "filelock", "packaging", "rich", "safetensors", "torch"}
    assert set(metadata.get_all("Provides-Extra") or ()) == {"kernels", "expert-parallel", "plot"}


@pytest.mark.all
def test_the_source_distribution_is_whole(wheel: Path, tmp_path: Path) -> None:
    """The wheel made of it is the same, and its tests run where no git is."""
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)], cwd=ROOT, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for path in (".ci/run", "Makefile", "requirements/constraints.txt", "tests/integration/environments.json"):
        assert (folder / path).is_file()
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheel")]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(folder)], check=True)
    (again,) = (tmp_path / "wheel").glob("*.whl")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert {info.filename: info.CRC for info in one.infolist()} == {info.filename: info.CRC for info in other.infolist()}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unittest/test_decision.py"]
    subprocess.run(tests, cwd=folder, check=True, env={**os.environ, "GIT_DIR": str(tmp_path / "none")})


def test_where_a_cpu_build_of_torch_is_all_there_is(tmp_path: Path) -> None:
    """It brings Triton, but not NVRTC."""
    alone = Environment(tmp_path / "env")
    command = (alone.python, "-m", "trtllm_b12x", "doctor", "--target", "sm_120a")
    result = alone.run("env", "--unset=TRTLLM_B12X_KERNELS", *command)
    assert "FlashInfer    not installed" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1] == "triton WOULD serve decode on sm_120a"
    assert "pip install nvidia-cuda-nvrtc" in " ".join(result.stdout.split())
