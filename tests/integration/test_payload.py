"""The CUDA 13 gate on real wheels, in fresh environments: verdict, reasons, and remedies that mend what they are printed for."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
import venv
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
BORROWED = ("torch", "triton", "numpy", "packaging", "click", "rich", "safetensors", "filelock")
"""What the environments borrow from this one, with all it needs; FlashInfer and the CuTe DSL are their own."""

OLD = ("nvidia-cutlass-dsl==4.5.0",)
OLD_CU13 = "nvidia-cutlass-dsl-libs-cu13==4.5.0"
NEW = ("nvidia-cutlass-dsl==4.8.1",)
NEW_CU13 = "nvidia-cutlass-dsl-libs-cu13==4.8.1"


@cache
def borrowed_paths() -> list[Path]:
    """Top-level files and folders of the borrowed distributions and of everything they require."""
    wanted: list[str] = list(BORROWED)
    paths: set[str] = set()
    for name in wanted:
        found = distribution(name)
        for requirement in map(Requirement, found.requires or ()):
            if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and requirement.name not in wanted:
                wanted.append(requirement.name)
        paths.update(file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__"))
    site = Path(sysconfig.get_path("purelib"))
    return sorted(site / path for path in paths)


class Fresh:
    """A virtual environment with torch and click, and nothing of the DSL yet."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = str(directory / "bin" / "python")
        self.directory = directory
        borrowed = directory / "borrowed"
        borrowed.mkdir()
        for path in borrowed_paths():
            (borrowed / path.name).symlink_to(path)
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        self.site = Path(self.run(self.python, "-c", code).stdout.strip())
        (self.site / "shared.pth").write_text(f"{borrowed}\n{ROOT}\n")

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        home = {"XDG_CACHE_HOME": str(self.directory / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1"}
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRTLLM")} | home
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.directory)
        assert not check or result.returncode == 0, result.stderr[-2000:]
        return result

    def pip(self, *arguments: str) -> None:
        self.run(sys.executable, "-m", "pip", "--python", self.python, *arguments, "--quiet")

    def install(self, *packages: str) -> None:
        self.pip("install", *packages)

    def doctor(self, *arguments: str) -> dict[str, Any]:
        result = self.run(self.python, "-m", "trtllm_b12x", "doctor", "--json", "--target", "sm_120a", *arguments, check=False)
        assert result.returncode in (0, 1), result.stderr[-2000:]
        report: dict[str, Any] = json.loads(result.stdout)
        assert report["active"] == (result.returncode == 0)
        return report

    def damage(self, statement: str) -> None:
        """The first lines of the DSL's own package."""
        (file,) = (path for path in self.site.glob("nvidia_cutlass_dsl/*packages/cutlass/__init__.py"))
        file.write_text(f"{statement}\n{file.read_text()}")


def reasons(report: dict[str, Any]) -> list[str]:
    return [rejection["reason"] for rejection in report["verdicts"][0]["rejections"]]


def mend(fresh: Fresh, report: dict[str, Any]) -> dict[str, Any]:
    """Run every printed command, in order, and ask again."""
    for rejection in report["verdicts"][0]["rejections"]:
        assert rejection["commands"], rejection
        for command in rejection["commands"]:
            program, *arguments = shlex.split(command)
            assert program == "pip"
            fresh.pip(*arguments)
    return fresh.doctor()


def cu13_missing(fresh: Fresh) -> None:
    fresh.install(*OLD)
    fresh.pip("install", "--no-deps", "flashinfer-python==0.6.17")


def old_flashinfer(version: str) -> Any:
    def make(fresh: Fresh) -> None:
        fresh.install(*OLD)
        fresh.pip("install", "--no-deps", f"flashinfer-python=={version}")

    make.__name__ = f"flashinfer_{version}"
    return make


def complete(fresh: Fresh) -> None:
    fresh.install(*NEW, NEW_CU13)
    fresh.pip("install", "--no-deps", "flashinfer-python==0.7.2.post1")


def new_without_cu13(fresh: Fresh) -> None:
    fresh.install(*NEW)
    fresh.pip("install", "--no-deps", "flashinfer-python==0.7.2.post1")


def no_dsl(fresh: Fresh) -> None:
    fresh.pip("install", "--no-deps", "flashinfer-python==0.7.2.post1")


def no_flashinfer(fresh: Fresh) -> None:
    fresh.install(*NEW, NEW_CU13)


def import_raises(fresh: Fresh) -> None:
    complete(fresh)
    fresh.damage("raise RuntimeError('cannot load _cutlass_ir')")


def import_kills(fresh: Fresh) -> None:
    complete(fresh)
    fresh.damage("import os; os.kill(os.getpid(), 11)")


CASES: list[tuple[Any, list[str], str]] = [
    (cu13_missing, ["DSL_PAYLOAD"], "loads its CUDA 12.9 payload; nvidia-cutlass-dsl-libs-cu13 is not installed"),
    (old_flashinfer("0.6.8"), ["DSL_PAYLOAD", "FLASHINFER_TOO_OLD"], "is not installed"),
    (old_flashinfer("0.6.16"), ["DSL_PAYLOAD", "FLASHINFER_TOO_OLD"], "is not installed"),
    (new_without_cu13, ["DSL_PAYLOAD"], "loads its CUDA 12.9 payload; nvidia-cutlass-dsl-libs-cu13 is not installed"),
    (no_dsl, ["DSL_MISSING"], "is not installed"),
    (no_flashinfer, ["FLASHINFER_MISSING"], "is not installed"),
    (import_raises, ["DSL_PAYLOAD"], "importing the CuTe DSL fails; RuntimeError: cannot load _cutlass_ir"),
    (import_kills, ["DSL_PAYLOAD"], "importing the CuTe DSL kills the process; SIGSEGV"),
]


@pytest.mark.parametrize(("make", "expected", "words"), CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_no_and_the_remedy_turns_it_into_yes(tmp_path: Path, make: Any, expected: list[str], words: str) -> None:
    fresh = Fresh(tmp_path / "env")
    make(fresh)
    report = fresh.doctor()
    assert reasons(report) == expected
    assert words in report["verdicts"][0]["rejections"][0]["detail"]
    assert not report["active"]
    mended = mend(fresh, report)
    assert reasons(mended) == []
    assert mended["active"]
    assert mended["environment"]["payload_cuda"] >= [13, 0]


def test_the_shadowed_payload_of_the_field(tmp_path: Path) -> None:
    """libs-cu13 is installed and listed by pip, libs-base was reinstalled over it: TensorRT-LLM issue 15853."""
    fresh = Fresh(tmp_path / "env")
    fresh.install(*OLD, "flashinfer-python==0.6.17")
    fresh.install(OLD_CU13)
    good = fresh.doctor("--compile")
    assert good["active"], good
    assert good["proof"]["compiled"]
    assert good["proof"]["block_scaled_mma"] > 0
    fresh.pip("install", "--force-reinstall", "--no-deps", "nvidia-cutlass-dsl-libs-base==4.5.0")
    bad = fresh.doctor("--compile")
    assert reasons(bad) == ["DSL_PAYLOAD"]
    assert "overwritten by nvidia-cutlass-dsl-libs-base" in bad["verdicts"][0]["rejections"][0]["detail"]
    assert not bad["proof"]["compiled"]
    assert "_mma" in bad["proof"]["error"], bad["proof"]
    assert mend(fresh, bad)["active"]


def test_the_complete_line_compiles_and_so_does_an_older_flashinfer(tmp_path: Path) -> None:
    fresh = Fresh(tmp_path / "env")
    fresh.install(*NEW, NEW_CU13, "flashinfer-python==0.7.2.post1")
    report = fresh.doctor("--compile")
    assert report["active"], report
    assert report["proof"]["compiled"]
    assert report["environment"]["expert_parallel"] is True
    fresh.pip("install", "--no-deps", "flashinfer-python==0.6.18.post1")
    # The driver's plans there are on a tile of 128, and FlashInfer's own padding is not reached.  For 0.7.2: test_b12x.py.
    result = fresh.run(fresh.python, "-m", "tests.integration.b12x_on_cpu", str(fresh.directory), "plans")
    found = {case["case"]: case for case in map(json.loads, filter(lambda line: line[:1] == "{", result.stdout.splitlines()))}
    assert found["kinds"]["any"] == ["micro", "static"]
    for size, planned in {2688: 2688, 1344: 1408, 640: 640, 1856: 1920}.items():
        assert found[f"padding {size}"]["planned"] == planned
