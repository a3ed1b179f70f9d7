"""``python -m benchmarks.on_card.card FILE``: the card, its driver and clocks, and versions, as JSON.  A process of its own: one
that goes on holds no GPU memory."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.on_card.steps import gpu_state, write_json
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


def facts() -> dict[str, Any]:
    """Nothing that is not known."""
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
    """What a measurement belongs to."""
    smi = (found.get("nvidia_smi") or [{}])[0]
    return {
        "card": found.get("card", {}).get("name"),
        "uuid": smi.get("uuid") or found.get("card", {}).get("gpu"),
        "driver_version": smi.get("driver_version"),
        "versions": found["versions"],
    }


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), facts())
