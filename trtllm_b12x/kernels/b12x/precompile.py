# SPDX-License-Identifier: Apache-2.0
"""Compile FlashInfer's kernels of one geometry into its cache, for cards not in this machine, in a separate process.

The process describes the card to FlashInfer and collects the kernels that ``Compiler`` would build. A pool of forked processes
then builds these kernels. The request comes on standard input; JSON lines go to standard output.
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
from multiprocessing import get_context
from typing import Any

from trtllm_b12x.environment import payload_child

_jobs: dict[str, tuple[str, Callable[[], Any], tuple[Any, ...], int]] = {}
"""Module, compile function and source files for FlashInfer's ``build_and_load_cute_dsl_kernel``, and the card's number of
multiprocessors, by kernel name. Forked processes read this dict, since functions cannot be sent to them."""


def main() -> None:
    request = json.load(sys.stdin)
    target = request["target"]
    os.environ.update(CUTE_DSL_ARCH=target, OMP_NUM_THREADS="1")
    # FlashInfer's cache has a folder for each set of architectures, here the set of the card's machine.
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

    describe(max(request["multiprocessors"]), target)
    from trtllm_b12x.kernels import Geometry

    from . import compiler as kernels
    from .scratch import Scratch, fitting

    fields = request["geometry"]
    geometry = Geometry(**{**fields, "dtype": getattr(torch, fields["dtype"])})
    dispatch = importlib.import_module(kernels.DISPATCH)
    capacity = fitting(geometry, request["capacity"])
    scratch = Scratch.allocate(dispatch, geometry, capacity, torch.device("cpu"))
    for count in request["multiprocessors"]:
        describe(count, target)
        dispatch.clear_sm120_moe_caches()
        kernels._compiled.clear()

        def collect(
            module: str, name: str, compile_kernel: Callable[[], Any], extra_key_files: Any = (), count: int = count
        ) -> object:
            _jobs.setdefault(name, (module, compile_kernel, tuple(extra_key_files), count))
            return object()

        compiler = kernels.Compiler(dispatch, geometry, scratch, torch.device("cpu"), collect)
        for tokens in kernels.sizes(dispatch, capacity):
            list(compiler.candidates(tokens))


def describe(multiprocessors: int, target: str) -> None:
    import torch

    payload_child.answer_for_the_gpu(torch, multiprocessors, int(target[3:5]), int(target[5]))
    dispatch = importlib.import_module(payload_child.DISPATCH)
    for name in ("get_num_sm", "get_max_active_clusters"):
        setattr(dispatch, name, lambda *arguments: multiprocessors)


def _store(name: str, target: str) -> dict[str, Any]:
    from flashinfer.jit import cute_dsl_core as core

    (module, compile_kernel, files, multiprocessors), started, cached, problem = _jobs[name], time.monotonic(), False, ""
    try:
        describe(multiprocessors, target)
        if core.cute_dsl_cache_disabled():
            raise RuntimeError("FLASHINFER_CUTE_DSL_DISABLE_CACHE=1: FlashInfer stores no kernel")
        spec = core.JitSpecCuteDsl(module, name, compile_kernel, core._hash_source_files(files))
        cached = spec.try_load() is not None
        if not cached:
            # build_and_load holds the module's lock while it compiles, so that only one process compiles at a time.
            getattr(spec, "compile_and_persist", spec.build_and_load)()
        if not spec.is_compiled:
            raise RuntimeError(f"FlashInfer could not store it as {spec.object_path}")
    except Exception as error:
        problem = payload_child.error_of(error)[:300]
    return {"name": name, "cached": cached, "error": problem, "seconds": round(time.monotonic() - started, 3)}


def fields(geometry: Any) -> dict[str, Any]:
    return {**dataclasses.asdict(geometry), "dtype": str(geometry.dtype).removeprefix("torch."), "bias": None}
