# SPDX-License-Identifier: Apache-2.0
"""Environments as users have them, made of real wheels, and what a compile and ``doctor`` say of each.

``python -m tests.integration.environments`` makes those that ``environments.json`` lacks, one after the other, compiles
FlashInfer's micro kernel in each (CPU only, ``sm_120a``), asks ``doctor``, and writes the table; ``--again`` makes all of them,
``--only WORD`` those with the word in their name.  Wheels are unpacked once, into ``.environments``; an environment is hard links
to them, in the order in which pip would have installed them, so later wheels write over earlier ones as there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import click
from filelock import FileLock
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("environments.json")
STORE = Path(os.environ.get("TRTLLM_B12X_TEST_WHEELS") or ROOT / ".environments")
"""Unpacked wheels; on the file system of the environments, or they are copied."""

BORROWED = ("flashinfer-python", "nvidia-cutlass-dsl", "torch", "triton", "click", "rich", "safetensors", "filelock", "packaging")
"""What the environments borrow from this one, with all it requires, but for what they have of their own."""
OWN = ("flashinfer", "nvidia-cutlass-dsl", "apache-tvm-ffi")

FLASHINFER, TVM = "flashinfer-python", "apache-tvm-ffi"
DSL = "nvidia-cutlass-dsl"
NEWEST_TVM = (TVM, "0.1.15.post2")


@cache
def borrowed_paths() -> list[Path]:
    """Top-level files and folders of the borrowed distributions and of everything they require."""
    wanted: list[str] = list(BORROWED)
    paths: set[str] = set()
    for name in wanted:
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, found.requires or ()):
            if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and requirement.name not in wanted:
                wanted.append(requirement.name)
        if not name.startswith(OWN):
            paths.update(file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__"))
    site = Path(sysconfig.get_path("purelib"))
    return sorted(site / path for path in paths)


def pip(*arguments: str, **variables: str) -> None:
    links = f"{os.environ.get('PIP_FIND_LINKS', '')} {STORE / 'wheels'}"
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_COMPILE": "0", "PIP_FIND_LINKS": links.strip(), **variables}
    result = subprocess.run(
        [sys.executable, "-m", "pip", *arguments, "--quiet"], capture_output=True, text=True, env={**os.environ, **settings}
    )
    if result.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)}: {result.stderr[-2000:]}")


def unpacked(name: str, version: str) -> Path:
    """A wheel's files with the RECORD that pip writes, once per machine."""
    folder = STORE / f"{name}-{version}"
    (STORE / "wheels").mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=STORE) as temporary:
            pip("download", "--no-deps", "--dest", temporary, f"{name}=={version}")
            (wheel,) = Path(temporary).glob("*.whl")
            target = Path(temporary) / "files"
            pip("install", "--no-deps", "--target", str(target), str(wheel))
            wheel.replace(STORE / "wheels" / wheel.name)
            target.replace(folder)
    return folder


class Environment:
    """A virtual environment with torch and click, and of FlashInfer and the CuTe DSL what it is given."""

    def __init__(self, directory: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.python = str(directory / "bin" / "python")
        self.directory = directory
        borrowed = directory / "borrowed"
        borrowed.mkdir()
        for path in borrowed_paths():
            (borrowed / path.name).symlink_to(path)
        (self.site,) = directory.glob("lib/python*/site-packages")
        (self.site / "shared.pth").write_text(f"{borrowed}\n{ROOT}\n")

    def add(self, *wheels: tuple[str, str]) -> None:
        for name, version in wheels:
            # The files are links to the store's: what writes over one must make it anew, as pip does.
            command = ["cp", "-r", "--link", "--remove-destination", f"{unpacked(name, version)}/.", str(self.site)]
            if subprocess.run(command, capture_output=True).returncode:
                subprocess.run([*command[:2], *command[3:]], check=True)

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        # About b12x: what Triton's kernels need is in all of them.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TRTLLM")}
        environment = {**inherited, "XDG_CACHE_HOME": str(self.directory / "cache"), "OMP_NUM_THREADS": "1"}
        environment["TRTLLM_B12X_KERNELS"] = "b12x"
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.directory)
        assert not check or result.returncode == 0, result.stderr[-2000:]
        return result

    def pip(self, *arguments: str) -> None:
        pip("--python", self.python, *arguments)

    def doctor(self, *arguments: str) -> dict[str, Any]:
        result = self.run(self.python, "-m", "trtllm_b12x", "doctor", "--json", "--target", "sm_120a", *arguments, check=False)
        assert result.returncode in (0, 1), result.stderr[-2000:]
        report: dict[str, Any] = json.loads(result.stdout)
        assert report["active"] == (result.returncode == 0)
        return report

    def rewrite(self, pattern: str, change: Callable[[bytes], bytes]) -> None:
        """Change files of the environment, not the store's."""
        found = [path for path in self.site.glob(pattern) if path.is_file()]
        assert found, pattern
        for path in found:
            content = change(path.read_bytes())
            path.unlink()
            path.write_bytes(content)

    def remove(self, pattern: str) -> None:
        found = list(self.site.glob(pattern))
        assert found, pattern
        for path in found:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def lend_not(self, *patterns: str) -> None:
        """Take away what is borrowed, metadata included."""
        found = [path for pattern in patterns for path in (self.directory / "borrowed").glob(pattern)]
        assert found, patterns
        for path in found:
            path.unlink()


def dsl(version: str, cu13: bool = True) -> tuple[tuple[str, str], ...]:
    """The wheels of one version, in pip's order; before 4.6 there is no core and the CUDA 12 payload is in base."""
    libs = ["base", "cu13"] if version < "4.6" else ["core", "base", "cu12", "cu13"]
    if version < "4.4":  # one wheel, without a CUDA 13 payload
        libs = []
    return (*((f"{DSL}-libs-{lib}", version) for lib in libs if cu13 or lib != "cu13"), (DSL, version))


@dataclass(frozen=True)
class Case:
    """One environment of the table."""

    name: str
    wheels: tuple[tuple[str, str], ...]
    spoil: Callable[[Environment], Any] | None = None


def flashinfer(version: str, tvm: str = NEWEST_TVM[1]) -> tuple[tuple[str, str], ...]:
    return ((FLASHINFER, version), (TVM, tvm))


def prepend(statement: str) -> Callable[[bytes], bytes]:
    return lambda content: statement.encode() + b"\n" + content


INIT = "nvidia_cutlass_dsl/*packages/cutlass/__init__.py"
COMPLETE = dsl("4.8.1") + flashinfer("0.7.2.post1")
MAIN = dsl("4.7.0") + flashinfer("0.6.18", "0.1.13.post2")

SPOILED = (
    Case("import of the DSL raises", COMPLETE, lambda e: e.rewrite(INIT, prepend("raise RuntimeError('no _cutlass_ir')"))),
    Case("import of the DSL kills", COMPLETE, lambda e: e.rewrite(INIT, prepend("import os; os.kill(os.getpid(), 11)"))),
    Case("DSL's module missing", COMPLETE, lambda e: e.remove("nvidia_cutlass_dsl/*packages/cutlass/base_dsl/version_info.py")),
    Case("no Triton", COMPLETE, lambda e: e.lend_not("triton", "triton-*")),
    Case("no cuda-python", COMPLETE, lambda e: e.lend_not("cuda", "cuda_*")),
    Case("no tvm-ffi", (*dsl("4.8.1"), (FLASHINFER, "0.7.2.post1"))),
    Case("tvm-ffi 0.1.6", dsl("4.8.1") + flashinfer("0.7.2.post1", "0.1.6")),
    Case("tvm-ffi 0.1.6 with 0.6.18", dsl("4.8.1") + flashinfer("0.6.18", "0.1.6")),
    Case("libs of another version", (*dsl("4.7.0"), (DSL, "4.8.1"), *flashinfer("0.7.2.post1"))),
    Case("cu13 of another version", (*dsl("4.8.1", cu13=False), (f"{DSL}-libs-cu13", "4.7.0"), *flashinfer("0.7.2.post1"))),
    Case("base over cu13", (*dsl("4.5.0"), (f"{DSL}-libs-base", "4.5.0"), *flashinfer("0.6.18"))),
    Case("cubin of another version", (*MAIN, ("flashinfer-cubin", "0.6.13"))),
    Case("cubin of another version, 0.7.2", (*COMPLETE, ("flashinfer-cubin", "0.6.13"))),
    Case("PyPI's cutlass, DSL 4.5", (*dsl("4.5.0"), *flashinfer("0.6.18"), ("cutlass", "0.2.0"))),
    Case("no FlashInfer", dsl("4.8.1")),
    Case("no DSL", flashinfer("0.7.2.post1")),
)
PINS = {
    "pins of 1.2": dsl("4.3.4") + flashinfer("0.6.0", "0.1.6"),
    "pins of spring 2026": dsl("4.4.2", cu13=False) + flashinfer("0.6.8", "0.1.6"),
    "pins of May 2026": dsl("4.5.0", cu13=False) + flashinfer("0.6.11", "0.1.6"),
    "pins of late 1.3": dsl("4.5.0") + flashinfer("0.6.12", "0.1.6"),
    "pins of August 2026": dsl("4.7.0") + flashinfer("0.6.16", "0.1.13.post2"),
    "pins of the newest": MAIN,
}
GRID = tuple(
    Case(f"FlashInfer {f}, DSL {d}{'' if cu13 else ' without cu13'}", dsl(d, cu13) + flashinfer(f))
    for f in ("0.7.2.post1", "0.6.18", "0.7.0", "0.7.1", "0.6.18.post1", "0.6.17", "0.6.16")
    for d, cu13 in (("4.8.1", True), ("4.7.0", True), ("4.6.2", True), ("4.6.0", True), ("4.5.0", True), ("4.8.1", False))
)
CASES = (*(Case(name, wheels) for name, wheels in PINS.items()), *SPOILED, *GRID)


def made(case: Case, directory: Path) -> Environment:
    environment = Environment(directory)
    environment.add(*case.wheels)
    if case.spoil is not None:
        case.spoil(environment)
    return environment


def ask(case: Case, directory: Path) -> dict[str, Any]:
    """One row of the table: what is installed, what ``doctor`` says, what a compile says."""
    environment = made(case, directory)
    report = environment.doctor("--compile")
    if report["proofs"]["b12x"]["error"].startswith("no result within"):
        raise RuntimeError(report["proofs"]["b12x"]["error"])  # a busy machine says nothing of the environment
    rejections = report["verdicts"][0]["rejections"]
    return {
        "installed": [f"{name} {version}" for name, version in case.wheels],
        "payload": report["environment"]["payload_cuda"],
        "compiles": report["proofs"]["b12x"]["compiled"],
        "error": report["proofs"]["b12x"]["error"],
        "active": not rejections,
        "reasons": [f"{r['reason']}: {r['detail']}".replace(str(environment.site), "...") for r in rejections],
        "command": " && ".join(rejections[0]["commands"]) if rejections else "",
    }


@click.command(help=__doc__)
@click.option("--again", is_flag=True)
@click.option("--only", default="")
def main(again: bool, only: str) -> None:
    table: dict[str, Any] = {} if again else json.loads(TABLE.read_text()) if TABLE.exists() else {}
    for case in CASES:
        if case.name in table or only not in case.name:
            continue
        with tempfile.TemporaryDirectory(dir=STORE if STORE.is_dir() else None) as directory:
            try:
                table[case.name] = ask(case, Path(directory) / "env")
            except RuntimeError as error:  # a wheel that the index does not have, a compile that did not end
                click.echo(f"{case.name}: {error}", err=True)
                continue
        row = table[case.name]
        click.echo(f"{case.name}: {'active' if row['active'] else 'no'}, {'compiles' if row['compiles'] else row['error']}")
        ordered = {known.name: table[known.name] for known in CASES if known.name in table}
        TABLE.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main()
