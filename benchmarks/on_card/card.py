# SPDX-License-Identifier: Apache-2.0
"""``python -m benchmarks.on_card.card``: print the card, its driver and clocks, and versions, as JSON."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.on_card.steps import ROOT, StepError, gpu_state
from trtllm_b12x.environment import packages

PACKAGES = (
    "trtllm-b12x",
    "tensorrt-llm",
    "vllm",
    "b12x",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-cu13",
    "torch",
    "triton",
    "transformers",
)
CLOCKS = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "clocks.max.mem",
    "clocks.applications.graphics",
    "clocks_event_reasons.active",
    "persistence_mode",
    "power.limit",
    "temperature.gpu",
    "pstate",
)
IDENTITY = ("name", "uuid", "driver_version", "vbios_version", "memory.total", "mig.mode.current")


def look(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return ``facts`` from a separate process, so that this process does not hold GPU memory. Raise StepError if it fails."""
    command = [sys.executable, "-m", "benchmarks.on_card.card"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (LookupError, ValueError):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise StepError(f"{' '.join(command)} ended with {done.returncode}: {' / '.join(lines[-3:])}") from None
    return found


def facts() -> dict[str, Any]:
    """Return facts about the machine, its GPU and its packages. Unknown facts are left out."""
    import torch

    found: dict[str, Any] = {
        "machine": platform.machine(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cuda_of_torch": torch.version.cuda,
        "versions": packages.versions(PACKAGES),
    }
    found["gpus"] = torch.cuda.device_count()
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        names = ("name", "total_memory", "multi_processor_count", "L2_cache_size", "clock_rate", "memory_clock_rate")
        found["card"] = {name: getattr(card, name) for name in names if hasattr(card, name)}
        found["card"] |= {"capability": [card.major, card.minor], "gpu": f"GPU-{card.uuid}" if hasattr(card, "uuid") else ""}
    gpu = found.get("card", {}).get("gpu", "")
    return found | {"nvidia_smi": gpu_state(IDENTITY, gpu), "clocks": gpu_state(CLOCKS, gpu)}


def identity(found: dict[str, Any]) -> dict[str, Any]:
    """Return the card, driver and versions that a measurement belongs to."""
    smi = (found.get("nvidia_smi") or [{}])[0]
    return {
        "card": found.get("card", {}).get("name"),
        "uuid": smi.get("uuid") or found.get("card", {}).get("gpu"),
        "driver_version": smi.get("driver_version"),
        "versions": found["versions"],
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
