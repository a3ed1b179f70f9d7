# SPDX-License-Identifier: Apache-2.0
"""Find out which CuTe DSL payload loads. Only an import shows this. It runs in a subprocess, so that a crash does not end the
server."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtllm_b12x.core import child, disk
from trtllm_b12x.core.errors import first_line
from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Environment, PayloadFault

from . import flashinfer, gpu, packages, payload_child

PROBE_TIMEOUT_S = 120
WHEELS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)
_IMPORTED = ("apache-tvm-ffi", "triton", "torch", "cuda-python", "cuda-bindings", "numpy", "protobuf")
_MPI_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "MPICH_", "MV2_", "HYDRA_", "SLURM_", "I_MPI_")


def inspect_payload(known: Environment = Environment()) -> Environment:  # noqa: B008 - immutable
    """Add to ``known`` which payload loads and, if it is not for CUDA 13, why."""
    wheels = packages.installed(WHEELS)
    if "nvidia-cutlass-dsl" not in wheels:
        return replace(known, dsl="none")
    look, kept = _look()
    file = look.get("file", "")
    facts = replace(
        known,
        dsl=look.get("version") or wheels["nvidia-cutlass-dsl"].version,
        payload_cuda=(0, 0),
        payload_file=file,
        payload_kept=kept,
        flashinfer_fault=look.get("flashinfer", ""),
    )
    if "error" in look:
        fault = PayloadFault[look["fault"]]
        known_files = {path for wheel in wheels.values() for path in packages.record(wheel) if path.match("cutlass/__init__.py")}
        if fault is not PayloadFault.IMPORT or not file or not known_files or Path(file) in known_files:
            return replace(facts, payload_fault=fault, payload_detail=f"{look['error']}, in {file}" if file else look["error"])
        advice = "uninstall its package, rename it, or take its folder off PYTHONPATH"
        return replace(facts, payload_fault=PayloadFault.FOREIGN, payload_detail=f"{file}; {advice}")
    facts = replace(facts, payload_cuda=(int(look["cuda"][0]), int(look["cuda"][1])))
    if look["cuda"][0] >= 13:
        return facts
    why, detail = _why_not_13(wheels)
    return replace(facts, payload_fault=why, payload_detail=detail)


def _look() -> tuple[dict[str, Any], bool]:
    """Return the payload facts: from this process if ``cutlass`` is imported, else from a subprocess once per installation."""
    here = _look_here() if "cutlass" in sys.modules else None
    if here is not None and (payload_child.DISPATCH in sys.modules or packages.origin("flashinfer") is None):
        return here, False
    look, kept = disk.once(f"payload {installation_key()}", _look_in_subprocess, _may_be_kept)
    return ({**look, **here} if here is not None else look), kept


def _look_here() -> dict[str, Any]:
    module = sys.modules["cutlass"]
    loaded = {"file": str(getattr(module, "__file__", "") or ""), "version": str(getattr(module, "__version__", "") or "")}
    try:
        from cutlass.base_dsl.version_info import CUDA_VERSION

        return {**loaded, "cuda": [CUDA_VERSION.major, CUDA_VERSION.minor]}
    except (ImportError, AttributeError) as error:
        return {**loaded, "error": first_line(error), "fault": PayloadFault.IMPORT.name}


def _may_be_kept(look: Any) -> bool:
    """Return True if the result may be cached: the payload loads and FlashInfer's kernels import."""
    return isinstance(look, dict) and bool(look.get("cuda")) and not look.get("flashinfer")


def _look_in_subprocess() -> dict[str, Any]:
    """Import the DSL in a subprocess: outside the working directory, without this process's MPI rank, and without promotion."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_VARIABLES)}
    env |= {"TRTLLM_B12X": "0", "PYTHONSAFEPATH": "1"}
    try:
        result = child.run([sys.executable, payload_child.__file__], env, PROBE_TIMEOUT_S)
        output, how = result.stdout, _ending(result)
    except subprocess.TimeoutExpired as late:
        output = late.stdout.decode(errors="replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        how = (PayloadFault.NO_ANSWER, f"none within {PROBE_TIMEOUT_S} s")
    except OSError as error:  # no memory for a process, no file handles
        output, how = "", (PayloadFault.NO_ANSWER, first_line(error))
    answers: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(('{"cutlass"', '{"flashinfer"')):
            answers |= json.loads(line)
    look: dict[str, Any] = answers.get("cutlass") or {"error": how[1], "fault": how[0].name, "file": ""}
    if "error" in look:
        return {"fault": PayloadFault.IMPORT.name, **look}
    if "flashinfer" in answers:
        raised = answers["flashinfer"]["error"]
        look["flashinfer"] = f"import of its kernels: {raised}" if raised else ""
    elif packages.origin("flashinfer") is not None:
        look["flashinfer"] = f"import of its kernels: {how[1]}"
    return look


def _ending(result: subprocess.CompletedProcess[str]) -> tuple[PayloadFault, str]:
    """Return how a subprocess ended. The kernel sends SIGKILL when memory runs out, which may not happen again."""
    if result.returncode < 0:
        number = -result.returncode
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        return (PayloadFault.NO_ANSWER if number == signal.SIGKILL else PayloadFault.CRASH), name
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    if result.returncode:
        return PayloadFault.IMPORT, lines[-1] if lines else f"exit status {result.returncode}"
    return PayloadFault.CRASH, "the process ended without an answer"


def _why_not_13(wheels: dict[str, packages.Distribution]) -> tuple[PayloadFault, str]:
    names = ", ".join(f"{name.removeprefix('nvidia-cutlass-dsl-')} {wheel.version}" for name, wheel in wheels.items())
    cu13 = wheels.get("nvidia-cutlass-dsl-libs-cu13")
    if cu13 is None:
        return PayloadFault.CU13_MISSING, names
    base = wheels.get("nvidia-cutlass-dsl-libs-base")
    shared = packages.record(base) if base is not None else {}
    for path, recorded_hash in packages.record(cu13).items():
        # Compare files that both wheels own with different contents: version_info.py, and libraries before DSL 4.6.
        if path in shared and shared[path] != recorded_hash and packages.digest(path) != recorded_hash:
            return PayloadFault.SHADOWED, names
    driver = gpu.driver_cuda()
    if driver is not None and driver < (13, 0):
        return PayloadFault.DRIVER, f"the driver supports CUDA {driver[0]}.{driver[1]}"
    return PayloadFault.UNKNOWN, names


def installation_key() -> str:
    """Return a hash of everything that affects the result: interpreter, driver, search path, versions, and overwritten files."""
    variables = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name in ("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD") or re.match("CUTE_DSL_|FLASHINFER_", name)
    )
    head = (__version__, sys.executable, platform.python_version(), sysconfig.get_platform(), gpu.driver_cuda(), variables)
    key = hashlib.sha256(repr(head).encode())
    files: list[Path] = []
    for name, distribution in packages.installed((*WHEELS, "flashinfer-python", *_IMPORTED)).items():
        key.update(f"{name} {distribution.version} {distribution.locate_file('')}\n".encode())
        files += _files(distribution) if name in WHEELS else []
    for package in ("cutlass", "flashinfer"):
        key.update(f"{package} {packages.origin(package)}\n".encode())
    for path in [*files, *flashinfer.kernel_sources()]:
        try:
            status = path.stat()
            key.update(f"{path} {status.st_size} {status.st_mtime_ns}\n".encode())
        except OSError:
            key.update(f"{path} missing\n".encode())
    return key.hexdigest()


def _files(wheel: packages.Distribution) -> list[Path]:
    return [path for path in packages.record(wheel) if path.suffix in (".so", ".py", ".pth")]
