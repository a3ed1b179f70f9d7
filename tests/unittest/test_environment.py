# SPDX-License-Identifier: Apache-2.0
"""Probes against real programs and real package layouts made for the test: no GPU, no network."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import filelock
import pytest

from tests.installations import distribution, program
from trtllm_b12x import environment
from trtllm_b12x.core import child, disk
from trtllm_b12x.decision import Environment
from trtllm_b12x.environment import cute_dsl, gpu, packages


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the head of the path, and no FlashInfer that another test has imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    return tmp_path


def write(root: Path, **files: str) -> None:
    """Files of FlashInfer by the names below, ``__init__.py`` among them."""
    for name, text in {"init": "", **files}.items():
        path = root / "flashinfer" / FILES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


KERNELS = "fused_moe/cute_dsl/blackwell_sm12x"
FILES = {
    "init": "__init__.py",
    "version": "_build_meta.py",
    "dispatch": f"{KERNELS}/moe_dispatch.py",
    "static": f"{KERNELS}/moe_static_kernel.py",
}
SMI, EQUAL = "0, GPU-aaaa, 12.0\n1, GPU-bbbb, 12.1\n2, GPU-cccc, 9.0", "0, GPU-a, 12.0\n1, GPU-b, 12.0"


@pytest.mark.parametrize(
    ("gpus", "visible", "order", "expected"),
    [
        (SMI, None, None, 120),
        (SMI, "", None, 0),
        (SMI, "-1", None, 0),
        (SMI, "GPU-cc", None, 90),
        (SMI, "1,0", "PCI_BUS_ID", 121),
        (SMI, "2", "PCI_BUS_ID", 90),
        (SMI, "1", None, None),  # CUDA may number them otherwise
        (SMI, "7", "PCI_BUS_ID", 0),
        (SMI, "MIG-aaaa", None, None),  # an instance of one of them
        (EQUAL, "1", None, 120),
        (EQUAL, "MIG-aaaa", None, 120),
    ],
)
def test_first_visible_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: str, visible: str | None, order: str | None, expected: int | None
) -> None:
    program(tmp_path / "bin", "nvidia-smi", gpus)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert environment.gpu_sm() == expected


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed", "0, GPU-a, [N/A]"])
def test_no_usable_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    program(tmp_path / "bin", "nvidia-smi", text)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.gpu_sm() == 0
    monkeypatch.setenv("PATH", str(tmp_path))
    devices = tmp_path / "nvidiactl", tmp_path / "dxg"
    monkeypatch.setattr(gpu, "_DRIVER_DEVICES", devices)
    assert environment.gpu_sm() == 0
    for device in devices:
        device.touch()
        assert environment.gpu_sm() is None
        device.unlink()


def test_nvidia_smi_of_wsl2_need_not_be_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "wsl" / "nvidia-smi"
    file.parent.mkdir()
    file.write_text("#!/bin/sh\necho 0, GPU-a, 12.0\n")  # nothing else is on PATH
    file.chmod(0o755)
    monkeypatch.setattr(gpu, "WSL_FOLDER", str(file.parent))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment.gpu_sm() == 120


def test_a_slow_nvidia_smi_is_not_a_machine_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without persistence mode takes its time to start; a program that fails says so at once."""
    file = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu, "TIMEOUT_S", 0.3)
    for text, expected in (("exec sleep 5", None), ("exit 9", 0)):
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(0o755)
        assert environment.gpu_sm() == expected
        assert environment.driver_cuda() is None
        assert environment.cards() == []


def test_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "nvcc", "Cuda compilation tools, release 12.9, V12.9.86")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert environment.toolkit_cuda() == (12, 9)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nothing"))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for line, expected in (("cuda: Optional[str] = '13.0'", (13, 0)), ("cuda: Optional[str] = None", (0, 0))):
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\n")
        code = f"from trtllm_b12x import environment; assert environment.toolkit_cuda() == {expected}"
        python_path = f"{tmp_path}:{Path(__file__).parents[2]}"
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": python_path})


@pytest.mark.parametrize(
    ("version", "dispatch", "expected"),
    [
        ("0.6.18.post1", "", (False, 128)),
        ("0.7.0", "_STATIC_RETAINED_GROUP_N = 256", (False, 256)),
        ("0.7.2.post1", "_STATIC_RETAINED_GROUP_N = 256", (True, 256)),
    ],
)
def test_flashinfer_is_read_not_imported(site: Path, version: str, dispatch: str, expected: tuple[Any, ...]) -> None:
    write(site, init="raise RuntimeError('imported')", dispatch=dispatch)
    distribution(site, "flashinfer-python", version, [])
    found = environment.inspect_flashinfer()
    assert found.flashinfer == version
    assert (found.expert_parallel, found.tile) == expected


@pytest.mark.parametrize(
    ("given", "home", "expected"),
    [
        ("/some/where", "/root", Path("/some/where/trtllm_b12x")),
        ("rel", "/home/user", Path("/home/user/.cache/trtllm_b12x")),
        ("", "/home/user", Path("/home/user/.cache/trtllm_b12x")),
        ("", None, None),  # a container's UID without an entry in /etc/passwd
        ("rel", None, None),
        ("", "rel", None),
    ],
)
def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, given: str, home: str | None, expected: Path | None) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.delenv("HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert disk.directory() == expected
    if expected is None:
        assert disk.once("question", lambda: "answer", bool) == ("answer", False)
        assert (disk.contents(), disk.clear()) == ([], 0)


def test_no_link_is_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Who may write into a shared cache must not choose what we write over."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "trtllm_b12x"
    folder.mkdir()
    (folder / f"payload.json.{os.getpid()}").symlink_to(victim)
    assert disk.once("question", lambda: [1], bool) == ([1], False)
    assert disk.once("question", lambda: [2], bool) == ([1], True)
    assert victim.read_text() == "precious"


def test_a_file_system_without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where flock says ENOSYS, filelock up to 3.20 raises this (``filelock/_unix.py``)."""
    unsupported = NotImplementedError("FileSystem does not appear to support flock; use SoftFileLock instead")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(filelock.BaseFileLock, "acquire", Mock(side_effect=unsupported))
    assert disk.once("question", lambda: "answer", bool) == ("answer", False)


def test_what_an_answer_depends_on(monkeypatch: pytest.MonkeyPatch, site: Path) -> None:
    """Another FlashInfer, driver, search path or setting of FlashInfer's asks anew."""
    keys = [cute_dsl.installation_key()]
    write(site, static="1")
    kernel = site / "flashinfer" / FILES["static"]
    distribution(site, "flashinfer-python", "0.7.2", [kernel])
    importlib.invalidate_caches()
    keys.append(cute_dsl.installation_key())
    kernel.write_text("23")
    keys.append(cute_dsl.installation_key())
    assert keys[-1] == cute_dsl.installation_key()
    for name in ("PYTHONPATH", "FLASHINFER_DISABLE_VERSION_CHECK", "CUTE_DSL_ARCH"):
        monkeypatch.setenv(name, "1")
        keys.append(cute_dsl.installation_key())
    monkeypatch.setattr(gpu, "driver_cuda", lambda: (13, 3))
    keys.append(cute_dsl.installation_key())
    assert len(set(keys)) == len(keys)


def test_the_copy_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder on the path before site-packages hides the installed one, whose metadata may be found first all the same."""
    for folder, version in (("first", "0.7.1"), ("second", "0.7.2")):
        write(tmp_path / folder, version=f'__version__ = "{version}"\n', static="a = 1\n" * 10)
    distribution(tmp_path / "second", "flashinfer-python", "0.7.2", [])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "second"))
    assert environment.inspect_flashinfer().flashinfer == "0.7.2"
    monkeypatch.syspath_prepend(str(tmp_path / "first"))
    assert environment.inspect_flashinfer().flashinfer == "0.7.1"


def test_what_packages_require_of_each_other(site: Path) -> None:
    wants = ("pytest>=9999", "pytest>=1", "nobody-has-this<3", 'pytest>=9999; extra == "x"', "torch>=999a0")
    distribution(site, "asker", "1.0", [], wants)
    unmet, missing = packages.requirements(packages.installed(["asker", "nobody"]).values())
    torch = importlib.metadata.version("torch")  # a CUDA build says +cu130 in the module alone
    assert unmet == [f"pytest>=9999 ({pytest.__version__} is installed)", f"torch>=999a0 ({torch} is installed)"]
    assert missing == ["nobody-has-this<3"]


@pytest.mark.parametrize(
    ("dsl", "tvm_ffi", "met"), [("4.6.0", "0.1.9", False), ("4.6.0", "0.1.10", True), ("4.5.0", "0.1.6", True)]
)
def test_what_the_dsl_requires_and_does_not_say(site: Path, dsl: str, tvm_ffi: str, met: bool) -> None:
    distribution(site, "nvidia-cutlass-dsl", dsl, [])
    distribution(site, "apache-tvm-ffi", tvm_ffi, [])
    found = packages.installed(["nvidia-cutlass-dsl"]).values()
    assert packages.requirements(found) == ([] if met else [f"apache-tvm-ffi>=0.1.10 ({tvm_ffi} is installed)"], [])
    distribution(site, "nvidia-cutlass-dsl", dsl, [], ("apache-tvm-ffi>=0.1.11",))
    found = packages.installed(["nvidia-cutlass-dsl"]).values()
    assert packages.requirements(found) == ([f"apache-tvm-ffi>=0.1.11 ({tvm_ffi} is installed)"], [])  # told once


def test_no_dsl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)  # of another test of this process
    assert environment.inspect_payload() == Environment(dsl="none")
    assert environment.inspect_flashinfer() == Environment(flashinfer="none")


POLICY = ("FLASHINFER_TOO_OLD", "REQUIREMENT", "DSL_PAYLOAD")
"""Reasons that refuse what compiles: releases whose kernels are known wrong, versions that packages exclude themselves, payloads
below CUDA 13 and files that are not their wheels'."""


def test_no_compile_refutes_what_was_said_of_real_environments() -> None:
    table = json.loads((Path(__file__).parents[1] / "integration/environments.json").read_text())
    assert table
    for name, row in table.items():
        assert row["compiles"] or not row["active"], name
        if row["compiles"] and not row["active"]:
            assert all(reason.startswith(POLICY) for reason in row["reasons"]), name


# ---- a program that answers in JSON lines, and ends with everything that it started ------------------------------------------


PROGRAM = """
import json, os, subprocess, sys, time
request = json.load(sys.stdin)
print("not JSON")
print(json.dumps({"asked": request}), flush=True)
other = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(json.dumps({"other": other.pid}), flush=True)
time.sleep(request["seconds"])
os._exit(3)
"""


@pytest.mark.parametrize(("seconds", "timeout", "status"), [(0, None, 3), (60, 1.0, -9)])
def test_a_program_that_dies_or_takes_too_long(seconds: int, timeout: float | None, status: int) -> None:
    answers: list[dict[str, Any]] = []
    command = [sys.executable, "-c", PROGRAM]
    assert child.answers(command, {"seconds": seconds}, dict(os.environ), answers.append, timeout) == status
    assert answers[0] == {"asked": {"seconds": seconds}}
    process = Path("/proc") / str(answers[1]["other"])
    for _ in range(100):
        if not process.exists() or "State:\tZ" in (process / "status").read_text():
            return
        time.sleep(0.05)
    pytest.fail("what the program started still runs")


def test_a_program_that_does_not_read_its_request() -> None:
    assert child.answers([sys.executable, "-c", "raise SystemExit(1)"], ["x" * 10**6], dict(os.environ), print) == 1
