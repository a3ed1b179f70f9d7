"""Collect the facts of a bug report as rows of text, without importing torch, FlashInfer or the CuTe DSL."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import platform
import sys

from trtllm_b12x import environment
from trtllm_b12x.core import disk, settings
from trtllm_b12x.core.version import __version__
from trtllm_b12x.decision import Environment
from trtllm_b12x.dispatch.policy import MeasuredPolicy, Timings
from trtllm_b12x.engines.vllm.report import vllm_lines
from trtllm_b12x.environment import packages
from trtllm_b12x.environment.flashinfer import cache_folder

_NO_HOST = "not installed (the embedded host stands in)"
_HOSTS = {"none": _NO_HOST, "unsupported": "an unknown version", "installed": "not looked at"}


def cuda(version: tuple[int, int] | None) -> str:
    return "unknown" if version is None else f"CUDA {version[0]}.{version[1]}" if version[0] else "none"


def doctor_rows(e: Environment, target: str | None, driver: tuple[int, int] | None) -> list[tuple[str, str]]:
    """Return (name, value) rows in print order."""
    ranks = "" if e.expert_parallel else "no "
    gpu = "unknown" if e.sm is None else f"SM{e.sm}" if e.sm else "none"
    host_version = _versions("tensorrt_llm").partition(" ")[2]
    recognized = _HOSTS.get(e.host or "", f"recognized as generation {e.host}")
    return [
        ("trtllm-b12x", __version__),
        ("Python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}"),
        ("torch", _versions("torch", "triton", "apache-tvm-ffi") or "not installed"),
        ("TensorRT-LLM", f"{host_version}, {recognized}" if host_version else recognized),
        *((name, line) for name, line in zip(itertools.chain(["vLLM"], itertools.repeat("")), vllm_lines(e), strict=False)),
        ("GPU", f"{gpu} (assumed: --target {target})" if target else gpu),
        *(("", card) for card in environment.cards()),
        ("driver", cuda(driver)),
        ("toolkit", f"{cuda(e.toolkit_cuda)} (nvcc or torch, as FlashInfer sees it)"),
        ("FlashInfer", "not installed" if e.flashinfer == "none" else f"{e.flashinfer} ({ranks}expert parallelism)"),
        *(("", line) for line in [_versions("flashinfer-cubin", "flashinfer-jit-cache")] if line),
        ("CuTe DSL", "not installed" if e.dsl == "none" else _payload(e)),
        *(("", line) for line in [_versions(*e.dsl_wheels)] if line),
        *(("Triton", line) for line in [_triton(e)] if line),
        *(("libcuda", line) for line in [environment.triton.libcuda()] if e.sm and target is None),
        *(("cache", line) for line in _caches()),
        *((name, line) for name, line in zip(itertools.chain(["paths"], itertools.repeat("")), _paths(), strict=False)),
    ]


def _versions(*names: str) -> str:
    return ", ".join(f"{name} {version}" for name, version in packages.versions(names).items())


def _payload(e: Environment) -> str:
    kept = ", read by an earlier process (trtllm-b12x cache clear)" if e.payload_kept else ""
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


def _paths() -> list[str]:
    """Return what says which kernel serves how many tokens: a setting, or the tables that cards have left here."""
    word = os.environ.get(settings.CROSSOVER.name, "auto")
    if word.lower() != "auto":
        return [f"{settings.CROSSOVER.name}={word}"]
    folder, lines = disk.directory(), []
    for file in sorted(folder.glob("crossover-*.json")) if folder is not None else ():
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # measured again by a server
            table = json.loads(file.read_text(encoding="utf-8"))
            g, host = table["geometry"], table["paths"]["host"]
            policy = MeasuredPolicy(Timings({int(tokens): row for tokens, row in table["microseconds"].items()}), "stored")
            sizes = f"{g['num_experts']} experts, top {g['top_k']}, {g['hidden_size']} x {g['intermediate_size']}, {g['format']}"
            lines.append(f"{table['card']['name']}, {sizes}: {policy.summary(host if host in settings.FAMILIES else 'CUTLASS')}")
    return lines or ["not measured yet: the card is asked at the first call of a server, or by trtllm-b12x tune"]


def _caches() -> list[str]:
    """Return our cache folder and FlashInfer's, with their sizes."""
    folders = [disk.directory()]
    lines = [] if folders[0] else ["none: neither XDG_CACHE_HOME nor HOME is an absolute path"]
    with contextlib.suppress(RuntimeError):  # no home
        folders.append(cache_folder())
    for folder in folders:
        if folder is not None and folder.is_dir():
            size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())
            lines.append(f"{folder}: {size / 1e6:.1f} MB")
    return lines
