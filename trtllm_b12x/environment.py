"""Facts about this machine for :func:`trtllm_b12x.decision.decide`, probed once per process.

Static facts come first: package metadata, RECORD files, NVML, source text.  FlashInfer is not imported (0.6.17 asks for a GPU
while it is) and no CUDA context is made.  Only the CuTe DSL's payload cannot be known without loading it; where ``cutlass`` is
imported already it is read, else a subprocess looks, because an import that kills the process must not kill the server.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import host, settings
from .decision import Environment, PayloadFault, Problem, decide, version_tuple

PROBE_TIMEOUT_S = 120
_DSL_WHEELS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)
_DRIVER_DEVICE = Path("/dev/nvidiactl")
_MPI_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "MPICH_", "MV2_", "HYDRA_", "SLURM_", "I_MPI_")


@cache
def probe(always_look: bool = False) -> Environment:
    """Everything, for the process that asks.

    The CuTe DSL's payload is looked at only where every static fact says yes (or with ``always_look``): on another card a server
    starts without it.
    """
    state, detail = host.state()
    sm = gpu_sm()
    flashinfer = inspect_flashinfer()
    installed = flashinfer.version != "none"
    dsl = _dsl_wheels().get("nvidia-cutlass-dsl")
    facts = Environment(
        enabled=settings.ENABLED() != "0",
        force=settings.ENABLED() == "force",
        allow_baked_scales=settings.ALLOW_BAKED_SCALES(),
        host=state,
        host_detail=detail,
        sm=sm,
        toolkit_cuda=toolkit_cuda(),
        dsl="none" if dsl is None else dsl.version,
        flashinfer=flashinfer.version,
        kernel="b12x" if flashinfer.b12x else None,
        activations=frozenset({"Swiglu", "Relu2"}) if flashinfer.b12x else None,
        hidden_size_multiple=128,
        exact_scales=flashinfer.exact_scales if installed else None,
        expert_parallel=flashinfer.negative_ids if installed else None,
        deterministic=flashinfer.tile == 256 if installed else None,
        only_deterministic=settings.DETERMINISTIC(),
        gather_bf16=settings.GATHER_BF16(),
    )
    if not always_look and not decide(Problem(), environment=facts).served:
        return facts
    payload = inspect_payload()
    facts = replace(facts, payload_cuda=payload.cuda, payload_fault=payload.fault, payload_detail=payload.detail)
    if facts.force and facts.sm in (120, 121) and payload.cuda is not None and payload.cuda < (13, 0):
        facts = replace(facts, compile_proved=_proved(f"sm_{facts.sm}a"))
    return facts


# ---- GPU and toolkit ---------------------------------------------------------------------------------------------------


def gpu_sm() -> int | None:
    """major * 10 + minor of the first GPU that CUDA_VISIBLE_DEVICES leaves; 0 without one, None if it cannot be told.

    From NVML, hence nvidia-smi: no CUDA context.  A container may have the driver without nvidia-smi: unknown then.
    """
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None if _DRIVER_DEVICE.exists() else 0
    command = [smi, "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    gpus = [[cell.strip() for cell in row] for row in csv.reader(output.splitlines()) if len(row) == 3]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        first = visible.split(",")[0].strip()
        slice_of_any = first.startswith("MIG-")  # the query lists whole GPUs, not their MIG instances
        chosen = [gpu for gpu in gpus if first and (slice_of_any or gpu[0] == first or gpu[1].startswith(first))]
        by_number = first.isdigit() and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"  # by speed; nvidia-smi's: by bus
        if chosen and (slice_of_any or by_number) and len({gpu[2] for gpu in gpus}) > 1:
            return None
        gpus = chosen
    if not gpus or not re.fullmatch(r"\d+\.\d+", gpus[0][2]):
        return 0
    major, minor = gpus[0][2].split(".")
    return int(major) * 10 + int(minor)


def driver_cuda() -> tuple[int, int] | None:
    """Newest CUDA version the driver supports, from nvidia-smi; None where there is no driver."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    try:
        output = subprocess.run([smi], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)", output)
    return (int(match[1]), int(match[2])) if match else None


def toolkit_cuda() -> tuple[int, int]:
    """What FlashInfer's ``get_cuda_version`` would say: nvcc's version, else the one torch is built with; (0, 0) for neither."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
        match = re.search(r"release (\d+)\.(\d+),", output)
    except (OSError, subprocess.SubprocessError):
        torch = importlib.util.find_spec("torch")
        text = _source(torch.origin, "version.py") if torch is not None and torch.origin else ""
        match = re.search(r"^cuda\b.*=\s*'(\d+)\.(\d+)", text, re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else (0, 0)


# ---- FlashInfer ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlashInfer:
    """The installed flashinfer-python, read from its metadata and its source."""

    version: str = "none"
    b12x: bool = False
    exact_scales: bool = False
    """``B12xMoEWrapper.run`` takes ``input_global_scale``."""
    shared_workspaces: bool = False
    """``B12xMoEWrapper`` takes ``shared_static_workspace``."""
    negative_ids: bool = False
    """Every kernel skips them: no signature shows it; from 0.7.2, by comparison of the wheels' kernels."""
    tile: int = 128
    """What the intermediate size is padded to: 256 where the static kernel keeps groups of 256 columns."""


def inspect_flashinfer() -> FlashInfer:
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return FlashInfer()
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        return FlashInfer()
    text = _source(spec.origin, "fused_moe/cute_dsl/b12x_moe.py")
    arguments = _method_arguments(text, "B12xMoEWrapper")
    dispatch = _source(spec.origin, "fused_moe/cute_dsl/blackwell_sm12x/moe_dispatch.py")
    return FlashInfer(
        version=version,
        b12x=bool(arguments),
        exact_scales="input_global_scale" in arguments.get("run", ()),
        shared_workspaces="shared_static_workspace" in arguments.get("__init__", ()),
        negative_ids=bool(arguments) and version_tuple(version) >= (0, 7, 2),
        tile=256 if "_STATIC_RETAINED_GROUP_N" in dispatch else 128,
    )


def _source(origin: str, relative: str) -> str:
    try:
        return (Path(origin).parent / relative).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _method_arguments(source: str, class_name: str) -> dict[str, set[str]]:
    """Method name to argument names of one class; empty where the class is not there."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef))
            return {m.name: {a.arg for a in [*m.args.posonlyargs, *m.args.args, *m.args.kwonlyargs]} for m in methods}
    return {}


# ---- CuTe DSL payload ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Payload:
    """The CuTe DSL as it loads."""

    version: str = "none"
    cuda: tuple[int, int] | None = None
    """(0, 0) where nothing loads."""
    fault: PayloadFault | None = None
    detail: str = ""


def inspect_payload() -> Payload:
    """Which payload loads, and why it is not a CUDA 13 one."""
    wheels = _dsl_wheels()
    if "nvidia-cutlass-dsl" not in wheels:
        return Payload()
    version = wheels["nvidia-cutlass-dsl"].version
    look = _look_here() if "cutlass" in sys.modules else _look_cached(wheels)
    if look["error"]:
        fault = PayloadFault.CRASH if look["crashed"] else PayloadFault.IMPORT
        return Payload(version, (0, 0), fault, look["error"])
    cuda = (int(look["cuda"][0]), int(look["cuda"][1]))
    if cuda >= (13, 0):
        return Payload(version, cuda)
    return Payload(version, cuda, *_why_not_13(wheels))


def _look_here() -> dict[str, Any]:
    try:
        from cutlass.base_dsl.version_info import CUDA_VERSION

        return {"cuda": [CUDA_VERSION.major, CUDA_VERSION.minor], "error": "", "crashed": False}
    except Exception as error:
        return {"cuda": None, "error": _first_line(error), "crashed": False}


_LOOK = """
import json
from cutlass.base_dsl.version_info import CUDA_VERSION
print("\\n" + json.dumps({"cuda": [CUDA_VERSION.major, CUDA_VERSION.minor]}), flush=True)
"""


def _look_in_subprocess() -> dict[str, Any]:
    """Import the DSL where a crash costs nothing; without the MPI rank of this process, and without ourselves."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_MPI_VARIABLES)}
    environment["TRTLLM_B12X"] = "0"
    try:
        result = subprocess.run(
            [sys.executable, "-c", _LOOK],
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT_S,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"cuda": None, "error": f"no answer within {PROBE_TIMEOUT_S} s", "crashed": True}
    if result.returncode < 0:
        return {"cuda": None, "error": signal.Signals(-result.returncode).name, "crashed": True}
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return {"cuda": None, "error": lines[-1] if lines else f"exit status {result.returncode}", "crashed": False}
    answers = [line for line in result.stdout.splitlines() if line.startswith('{"cuda"')]
    if not answers:
        return {"cuda": None, "error": "the process ended without an answer", "crashed": True}
    return {**json.loads(answers[-1]), "error": "", "crashed": False}


def _look_cached(wheels: dict[str, importlib.metadata.Distribution]) -> dict[str, Any]:
    look: dict[str, Any] = _once_per_installation(wheels, "payload", _look_in_subprocess)
    return look


def _proved(target: str) -> bool:
    """``TRTLLM_B12X=force``: does the payload that is there compile the micro kernel?"""
    from .kernels.prove import prove

    return bool(_once_per_installation(_dsl_wheels(), f"compile {target}", lambda: prove(target).compiled))


def _once_per_installation(wheels: dict[str, importlib.metadata.Distribution], question: str, answer: Callable[[], Any]) -> Any:
    """One answer per node and state of the installation: the file is shared by all ranks, under a lock."""
    from filelock import FileLock, Timeout

    key = f"{question} {_installation_key(wheels)}"
    file = cache_directory() / "payload.json"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=600):
            known = _read_json(file)
            if key not in known:
                known = {**dict(list(known.items())[-15:]), key: answer()}
                temporary = file.with_suffix(f".{os.getpid()}")
                temporary.write_text(json.dumps(known), encoding="utf-8")
                temporary.replace(file)
            return known[key]
    except (OSError, Timeout):  # a read-only home costs a look per process, nothing else
        return answer()


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/trtllm_b12x``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trtllm_b12x"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _installation_key(wheels: dict[str, importlib.metadata.Distribution]) -> str:
    """Changes with the wheels' RECORDs, with a file of theirs that was written over, with the driver and the interpreter."""
    digest = hashlib.sha256(f"{sys.executable} {sysconfig.get_platform()} {driver_cuda()}".encode())
    for name in sorted(wheels):
        digest.update(f"{name} {wheels[name].version}\n".encode())
        for path, recorded in _record(wheels[name]).items():
            if path.suffix in (".so", ".py", ".pth"):
                try:
                    status = path.stat()
                    digest.update(f"{path} {recorded} {status.st_size} {status.st_mtime_ns}\n".encode())
                except OSError:
                    digest.update(f"{path} missing\n".encode())
    return digest.hexdigest()


def _dsl_wheels() -> dict[str, importlib.metadata.Distribution]:
    found = {}
    for name in _DSL_WHEELS:
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _record(wheel: importlib.metadata.Distribution) -> dict[Path, str]:
    """Installed file to the hash that the wheel gave it, in RECORD's own form (``sha256=...``)."""
    entries = {}
    for row in csv.reader((wheel.read_text("RECORD") or "").splitlines()):
        if len(row) >= 2 and row[1]:
            entries[Path(str(wheel.locate_file(row[0])))] = row[1]
    return entries


def _why_not_13(wheels: dict[str, importlib.metadata.Distribution]) -> tuple[PayloadFault, str]:
    names = ", ".join(f"{name.removeprefix('nvidia-cutlass-dsl-')} {wheel.version}" for name, wheel in wheels.items())
    cu13 = wheels.get("nvidia-cutlass-dsl-libs-cu13")
    if cu13 is None:
        return PayloadFault.CU13_MISSING, names
    base = wheels.get("nvidia-cutlass-dsl-libs-base")
    shared = _record(base) if base is not None else {}
    for path, recorded in _record(cu13).items():
        # Only what both wheels own, with other contents: version_info.py and the libraries before DSL 4.6.
        if path in shared and shared[path] != recorded and _hash(path) != recorded:
            return PayloadFault.SHADOWED, names
    driver = driver_cuda()
    if driver is not None and driver < (13, 0):
        return PayloadFault.DRIVER, f"the driver supports CUDA {driver[0]}.{driver[1]}"
    return PayloadFault.UNKNOWN, names


def _hash(path: Path) -> str:
    try:
        digest = hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return ""
    return "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
