# SPDX-License-Identifier: Apache-2.0
"""Query the GPU, its driver and the CUDA toolkit without creating a CUDA context."""

from __future__ import annotations

import csv
import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

from .packages import origin, source

TIMEOUT_S = 30
WSL_FOLDER = "/usr/lib/wsl/lib"
"""Folder of the Windows driver's libraries and nvidia-smi under WSL2. Services and ssh may lack this folder on PATH."""
_DRIVER_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Device files of the Linux driver, and of WSL2's driver."""


def smi_program() -> str | None:
    return shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=WSL_FOLDER)


def _smi(*arguments: str) -> str | None:
    """Run nvidia-smi. Return its output, "" if it fails or is missing, or None if unknown (timeout, cannot be executed).

    Unknown is not "no GPU": the driver may be starting up, or a container may hide the program.
    """
    program = smi_program()
    if program is None:
        return None if any(device.exists() for device in _DRIVER_DEVICES) else ""
    try:
        return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except subprocess.CalledProcessError:
        return ""
    except (OSError, subprocess.SubprocessError):
        return None


def _query(fields: str) -> list[list[str]] | None:
    output = _smi(f"--query-gpu={fields}", "--format=csv,noheader")
    rows = csv.reader((output or "").splitlines(), skipinitialspace=True)
    return None if output is None else [row for row in rows if len(row) == 3]


def driver_version() -> str:
    """Return the driver's version from NVML, such as "580.95.05"; empty if unknown."""
    text = ctypes.create_string_buffer(96)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if not nvml.nvmlInit_v2():
            nvml.nvmlSystemGetDriverVersion(text, len(text))
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return ""
    return text.value.decode(errors="replace")


def gpu_sm() -> int | None:
    """Return major * 10 + minor of the first GPU in CUDA_VISIBLE_DEVICES; 0 without a GPU, None if unknown."""
    gpus = _query("index,uuid,compute_cap")
    if gpus is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        first = visible.split(",")[0].strip()
        slice_of_any = first.startswith("MIG-")  # the query lists whole GPUs, not their MIG instances
        chosen = [gpu for gpu in gpus if first and (slice_of_any or gpu[0] == first or gpu[1].startswith(first))]
        by_number = first.isdigit() and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"  # CUDA: by speed; nvidia-smi: by bus
        if chosen and (slice_of_any or by_number) and len({gpu[2] for gpu in gpus}) > 1:
            return None
        gpus = chosen
    if not gpus or not re.fullmatch(r"\d+\.\d+", gpus[0][2]):
        return 0
    major, minor = gpus[0][2].split(".")
    return int(major) * 10 + int(minor)


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the driver supports, from nvidia-smi; None if unknown or without a driver."""
    match = re.search(r"CUDA (?:UMD )?Version:\s*(\d+)\.(\d+)", _smi() or "")
    return (int(match[1]), int(match[2])) if match else None


def cards() -> list[str]:
    """Return ``name, memory, driver version`` of each GPU, as nvidia-smi lists them."""
    return [", ".join(row) for row in _query("name,memory.total,driver_version") or ()]


def toolkit_cuda() -> tuple[int, int]:
    """Return the result of FlashInfer's ``get_cuda_version``: nvcc's version, else torch's build version, else (0, 0)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
        match = re.search(r"release (\d+)\.(\d+),", output)
    except (OSError, subprocess.SubprocessError):
        match = re.search(r"^cuda\b.*=\s*'(\d+)\.(\d+)", source(origin("torch"), "version.py"), re.MULTILINE)
    return (int(match[1]), int(match[2])) if match else (0, 0)
