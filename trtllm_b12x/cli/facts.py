"""What a bug report has to hold, as rows of text.  No torch, FlashInfer or CuTe DSL is imported here."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from trtllm_b12x import __version__, environment
from trtllm_b12x.decision import Environment
from trtllm_b12x.environment import answers, packages

_HOSTS = {
    "none": "not installed (the embedded host stands in)",
    "unsupported": "of a shape that is not known",
    "installed": "not looked at",
}
_DEVICES = """
import json, torch
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
names = ("multi_processor_count", "memory_clock_rate", "memory_bus_width")
print(json.dumps([[getattr(p, name, 0) for name in names] for p in found]))
"""


def cuda(found: tuple[int, int] | None) -> str:
    return "unknown" if found is None else f"CUDA {found[0]}.{found[1]}" if found[0] else "none"


def rows(e: Environment, target: str | None, driver: tuple[int, int] | None) -> list[tuple[str, str]]:
    """(name, value) in the order in which they are printed."""
    gpu = "unknown" if e.sm is None else f"SM{e.sm}" if e.sm else "none"
    cards = environment.cards()
    host_version = _versions("tensorrt_llm").partition(" ")[2]
    recognized = _HOSTS.get(e.host or "", f"recognized as generation {e.host}")
    return [
        ("trtllm-b12x", __version__),
        ("Python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}"),
        ("torch", _versions("torch", "triton", "apache-tvm-ffi") or "not installed"),
        ("TensorRT-LLM", f"{host_version}, {recognized}" if host_version else recognized),
        ("GPU", f"{gpu} (assumed: --target {target})" if target else gpu),
        *(("", card) for card in [*cards, *(_devices() if cards else [])]),
        ("driver", cuda(driver)),
        ("toolkit", f"{cuda(e.toolkit_cuda)} (nvcc or torch, as FlashInfer sees it)"),
        ("FlashInfer", "not installed" if e.flashinfer == "none" else f"{e.flashinfer}{_features(e)}"),
        *(("", line) for line in [_versions("flashinfer-cubin", "flashinfer-jit-cache")] if line),
        ("CuTe DSL", "not installed" if e.dsl == "none" else _payload(e)),
        *(("", line) for line in [_versions(*e.dsl_wheels)] if line),
        *(("Triton", line) for line in [_triton(e)] if line),
        *(("cache", line) for line in _caches()),
    ]


def _versions(*names: str) -> str:
    return ", ".join(f"{name} {found}" for name, found in packages.versions(names).items())


def _payload(e: Environment) -> str:
    kept = ", as an earlier process read it (trtllm-b12x cache clear)" if e.payload_kept else ""
    where = f", from {e.payload_file}" if e.payload_file else ""
    return f"{e.dsl}, payload that loads: {cuda(e.payload_cuda)}{where}{kept}"


def _triton(e: Environment) -> str:
    if e.triton_lacks is None:
        return ""
    if e.triton_lacks:
        return "; ".join(item.what for item in e.triton_lacks)
    if tools := environment.triton.tools_lacking():
        why = "; ".join(item.what for item in tools)
        return f"loads kernels from {environment.triton.cache_folder()}, and compiles none: {why}"
    return "has a C compiler, a ptxas that knows the card, and a cache"


def _features(e: Environment) -> str:
    if e.exact_scales is None:
        return ""
    scales = "exact scales" if e.exact_scales else "no exact scales"
    return f" ({scales}, {'expert parallelism' if e.expert_parallel else 'no expert parallelism'})"


def _devices() -> list[str]:
    """From torch, in a process of its own: it may not import, and it makes a CUDA context."""
    try:
        output = subprocess.run([sys.executable, "-c", _DEVICES], capture_output=True, text=True, timeout=60, cwd="/").stdout
        return [device(*numbers) for numbers in json.loads(output)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return ["SM count and bandwidth: unknown, torch does not say"]


def device(sm_count: int, memory_khz: int, bus_bits: int) -> str:
    """SM count and memory bandwidth: two transfers a clock over the whole bus, which is what data sheets state."""
    bandwidth = 2e3 * memory_khz * bus_bits / 8
    return f"{sm_count} SMs, memory bandwidth {f'{bandwidth / 1e9:.0f} GB/s' if bandwidth else 'unknown'}"


def _caches() -> list[str]:
    """Ours and FlashInfer's folder of compiled kernels (``jit/env.py``), with their sizes."""
    found = []
    ours = answers.directory()
    if ours is None:
        found.append("none: neither XDG_CACHE_HOME nor HOME is an absolute path")
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    theirs = Path(base) if base else _home()
    for folder in (ours, None if theirs is None else theirs / ".cache" / "flashinfer"):
        if folder is not None and folder.is_dir():
            size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
            found.append(f"{folder}: {size / 1e6:.1f} MB")
    return found


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:
        return None
