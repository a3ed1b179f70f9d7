"""Compile FlashInfer's kernels of one geometry into its cache for cards that are not here, in a process of its own.

It describes the card to FlashInfer and collects what ``Compiler`` asks FlashInfer to build. A pool of forked processes then
builds it. The request comes on standard input; JSON lines go to standard output.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from trtllm_b12x.environment import payload_child


@dataclass(frozen=True)
class _Job:
    """Arguments of FlashInfer's ``build_and_load_cute_dsl_kernel``, and the card's number of multiprocessors."""

    module: str
    compile_kernel: Callable[[], Any]
    files: tuple[Any, ...]
    multiprocessors: int


_jobs: dict[str, _Job] = {}
"""Jobs by kernel name. The forked processes read them: functions cannot be sent."""


def main() -> None:
    request = json.load(sys.stdin)
    target = request["target"]
    os.environ.update(CUTE_DSL_ARCH=target, OMP_NUM_THREADS="1")
    # Its cache has a folder for each set of architectures: those of the card's machine.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{target[3:5]}.{target[5]}")
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stream:
        os.dup2(2, 1)  # the compiler writes to the process's own streams

        def say(**answer: Any) -> None:
            print(json.dumps(answer), file=stream, flush=True)

        try:
            _collect(request, target)
        except Exception as error:
            say(name="b12x", cached=False, error=payload_child.error_of(error)[:300], seconds=0.0)
            return
        say(total=len(_jobs))
        with ProcessPoolExecutor(request["processes"], get_context("fork"), stream.close) as pool:
            for result in as_completed([pool.submit(_store, name, target) for name in _jobs]):
                say(**result.result())


def _collect(request: dict[str, Any], target: str) -> None:
    import torch

    _answer(max(request["multiprocessors"]), target)
    from trtllm_b12x.kernels import Geometry

    from . import compiler as kernels
    from .scratch import Scratch, fitting

    fields = request["geometry"]
    geometry = Geometry(**{**fields, "dtype": getattr(torch, fields["dtype"])})
    dispatch = importlib.import_module(kernels.DISPATCH)
    capacity = fitting(geometry, request["capacity"])
    scratch = Scratch.allocate(dispatch, geometry, capacity, torch.device("cpu"))
    for count in request["multiprocessors"]:
        _answer(count, target)
        dispatch.clear_sm120_moe_caches()
        kernels._compiled.clear()

        def collect(
            module: str, name: str, compile_kernel: Callable[[], Any], extra_key_files: Any = (), count: int = count
        ) -> object:
            _jobs.setdefault(name, _Job(module, compile_kernel, tuple(extra_key_files), count))
            return object()

        compiler = kernels.Compiler(dispatch, geometry, scratch, torch.device("cpu"), collect)
        for tokens in kernels.sizes(dispatch, capacity):
            list(compiler.candidates(tokens))


def _answer(multiprocessors: int, target: str) -> None:
    """Describe the card to torch and FlashInfer."""
    import torch

    payload_child.answer_for_the_gpu(torch, multiprocessors, int(target[3:5]), int(target[5]))
    dispatch = importlib.import_module(payload_child.DISPATCH)
    for name in ("get_num_sm", "get_max_active_clusters"):
        setattr(dispatch, name, lambda *arguments: multiprocessors)


def _store(name: str, target: str) -> dict[str, Any]:
    from flashinfer.jit import cute_dsl_core as core

    job, started, cached, problem = _jobs[name], time.monotonic(), False, ""
    try:
        _answer(job.multiprocessors, target)
        if core.cute_dsl_cache_disabled():
            raise RuntimeError("FLASHINFER_CUTE_DSL_DISABLE_CACHE=1: FlashInfer stores no kernel")
        spec = core.JitSpecCuteDsl(job.module, name, job.compile_kernel, core._hash_source_files(job.files))
        cached = spec.try_load() is not None
        if not cached:
            # The second holds a lock of the module for all of the compile: one process at a time.
            getattr(spec, "compile_and_persist", spec.build_and_load)()
        if not spec.is_compiled:
            raise RuntimeError(f"FlashInfer could not store it as {spec.object_path}")
    except Exception as error:
        problem = payload_child.error_of(error)[:300]
    return {"name": name, "cached": cached, "error": problem, "seconds": round(time.monotonic() - started, 3)}


def assembled(geometry: Any, card: Any, directory: Path) -> list[str]:
    """Return the PTX of FlashInfer's static kernel for two tokens, by its own compile function, 0.6.18 to 0.7.2."""
    target = f"sm_{card.capability}a"
    os.environ.update(
        CUTE_DSL_ARCH=target,
        CUTE_DSL_KEEP_PTX="1",
        CUTE_DSL_DUMP_DIR=str(directory),
        FLASHINFER_CUTE_DSL_DISABLE_CACHE="1",
        CUTE_DSL_DISABLE_FILE_CACHING="1",
    )
    _answer(card.multiprocessors, target)
    dispatch = importlib.import_module(payload_child.DISPATCH)
    sizes = {"k": geometry.hidden_size, "n": geometry.intermediate_size, "num_topk": geometry.top_k}
    dispatch._get_static_kernel(geometry.num_experts, geometry.num_experts, m=2, max_rows=2 * geometry.top_k, **sizes)
    return [path.read_text(errors="replace") for path in directory.glob("*.ptx")]


def fields(geometry: Any) -> dict[str, Any]:
    """Return the geometry's part of the request."""
    return {**dataclasses.asdict(geometry), "dtype": str(geometry.dtype).removeprefix("torch."), "bias": None}


def cache_folder() -> Path:
    """Return the folder of FlashInfer's compiled kernels, for all cards (``jit/env.py``)."""
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    return (Path(base) if base else Path.home()) / ".cache" / "flashinfer"
