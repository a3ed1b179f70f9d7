# SPDX-License-Identifier: Apache-2.0
"""The driver and FlashInfer's own compile path on a machine without its card: real plans, and what can go wrong with them.

A process of its own, by ``python -m tests.forks call``: the CuTe DSL reads its settings once.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.integration.sm12x_on_hopper import problem
from trtllm_b12x.core import process
from trtllm_b12x.kernels import Geometry, MoECall, plans
from trtllm_b12x.kernels.b12x import compiler
from trtllm_b12x.kernels.b12x.compiler import DISPATCH
from trtllm_b12x.kernels.b12x.kernel import B12xKernel

GEOMETRY = Geometry(4, 2, 256, 768, "Swiglu")
"""Micro and static for its one token: beyond direct micro's sizes."""


@contextmanager
def card() -> Iterator[Any]:
    """Answers for a GPU of 48 SMs, where FlashInfer asks for one while it compiles."""
    properties = mock.Mock(major=12, minor=0, multi_processor_count=48, total_memory=96 << 30)
    with ExitStack() as stack:
        for name, answer in {
            "get_device_capability": (12, 0),
            "current_device": 0,
            "get_device_properties": properties,
            "current_stream": mock.Mock(cuda_stream=0),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *arguments, answer=answer: answer))
        dispatch = importlib.import_module(DISPATCH)
        for name in ("get_num_sm", "get_max_active_clusters"):
            stack.enter_context(mock.patch.object(dispatch, name, return_value=48))
        yield dispatch


def forget(dispatch: Any) -> None:
    """As in a new process."""
    dispatch.clear_sm120_moe_caches()
    compiler._compiled.clear()


def planned(tokens: int, **sizes: Any) -> B12xKernel:
    """Return a kernel of the geometry, or of one that differs in these sizes."""
    kernel = B12xKernel()
    kernel.plan(replace(GEOMETRY, **sizes), tokens, torch.device("cpu"))
    return kernel


def attempt(dispatch: Any) -> dict[str, Any]:
    """Plan as a layer does, twice; what came of it, and what is left of it."""
    forget(dispatch)
    errors, lasting = [], None
    for _ in range(2):
        try:
            planned(1)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
            lasting = getattr(error, "lasting", None)
    gc.collect()
    workspaces = [o for o in gc.get_objects() if type(o).__name__ == "Sm120StaticMoEWorkspace"]
    found = {"errors": errors, "plans": len(plans._plans), "workspaces": len(workspaces), "lasting": lasting}
    process.forget()
    return found


PADDED = {1344: False, 640: True}
"""Intermediate sizes off FlashInfer's tile (half of Nemotron-3-Super, and another) to whether there is a gate."""


def padded(dispatch: Any, size: int, gated: bool) -> dict[str, Any]:
    """Plan and bind a layer of that size on our tile, with FlashInfer's own padding out of order."""
    tile = B12xKernel.features.tile
    rows = -(-size // tile) * tile
    with mock.patch.object(dispatch, "_pad_intermediate_to_tile", mock.Mock(side_effect=AssertionError("padded"))):
        kernel = planned(3, intermediate_size=rows, activation="Swiglu" if gated else "Relu2", ranks=2)
        shape = problem.Shape("", 4, 2, 256, size, gated)
        with mock.patch.object(problem, "TILE", tile):
            kernel.bind(problem.empty_layer(shape).weights)
        found, plan = {"planned": rows, "summary": kernel.summary()}, kernel._plan
        weights = [StorageWeakRef(tensor.untyped_storage()) for tensor in kernel.weights.tensors().values()]
        del kernel
        gc.collect()
        return {**found, "weights left": sum(not storage.expired() for storage in weights), "plan": type(plan).__name__}


def shared() -> dict[str, Any]:
    """Two layers of one geometry, one of another; and after they are gone."""
    kernels = [planned(2, num_experts=experts, ranks=2) for experts in (4, 4, 8)]
    spaces = [kernel.workspace for kernel in kernels]
    unplanned = ""
    kernels[0].bind(problem.empty_layer(problem.Shape("", 4, 2, 256, GEOMETRY.intermediate_size, GEOMETRY.gated)).weights)
    try:
        routes = torch.zeros(5, 2, dtype=torch.int32), torch.zeros(5, 2)
        kernels[0].run(MoECall(torch.zeros(5, 256, dtype=torch.bfloat16), *routes))
    except ValueError as error:
        unplanned = str(error)
    variants = [kernels[0]._plan.candidates[tokens][-1].variant for tokens in (1, 2)]
    kernels.clear()
    gc.collect()
    return {
        "same": [spaces[0] == spaces[1], spaces[0] == spaces[2]],
        "bytes": spaces[0][1] if spaces[0] else 0,
        "left": len(plans._plans),
        "unplanned": unplanned,
        "variants": variants,
    }


def preferred() -> dict[str, Any]:
    """Kinds for one token, and what is left of them for expert parallelism."""
    kernels = {"any": planned(1, intermediate_size=256), "expert parallel": planned(1, intermediate_size=256, ranks=2)}
    return {name: [candidate.kind.name for candidate in kernel._plan.candidates[1]] for name, kernel in kernels.items()}


def restarted(dispatch: Any, cute: Any) -> dict[str, Any]:
    """Both kinds, once compiled and once more with no compiler: what FlashInfer's cache holds is enough."""

    def plan() -> list[str]:
        kernels = planned(1), planned(1, intermediate_size=256)  # beyond direct micro's sizes, and within
        return sorted({c.kind.name for kernel in kernels for candidates in kernel._plan.candidates.values() for c in candidates})

    compiled = plan()
    forget(dispatch)
    with mock.patch.object(cute, "compile", mock.Mock(side_effect=AssertionError("compiled"))) as compile_again:
        loaded = plan()
    again = compile_again.call_count
    return {"compiled": compiled, "loaded": loaded, "compiled again": again, "warmed up": warmed_up()}


def warmed_up() -> list[bool]:
    """What ``trtllm-b12x warmup`` asks the same cache for: whether each kernel is there already, that is under the same key."""
    from trtllm_b12x.core import child
    from trtllm_b12x.kernels.b12x import precompile

    request = {
        "target": "sm_120a",
        "multiprocessors": [48],
        "capacity": 1,
        "processes": 1,
        "geometry": precompile.fields(GEOMETRY),
    }
    answers: list[dict[str, Any]] = []
    assert child.answers(child.command(precompile.__name__), request, dict(os.environ), answers.append) == 0
    return [bool(answer["cached"]) for answer in answers if "cached" in answer]


def kinds_and_padding(base: str) -> dict[str, Any]:
    """Return kinds and padding."""
    os.environ.update(
        CUTE_DSL_ARCH="sm_120a", FLASHINFER_CUDA_ARCH_LIST="12.0", FLASHINFER_WORKSPACE_BASE=base, TRTLLM_B12X_LOG="ERROR"
    )
    with card() as dispatch:
        return {"kinds": preferred(), **{f"padding {n}": padded(dispatch, n, gated) for n, gated in PADDED.items()}}


def cases(folder: str) -> dict[str, Any]:
    """Return what came of each case, by its name."""
    found, base = kinds_and_padding(folder), Path(folder)
    with card() as dispatch:
        from cutlass import cute
        from flashinfer.jit import cute_dsl_core

        def try_(fault: str, *patches: Any) -> None:
            with ExitStack() as stack:
                for patch in patches:
                    stack.enter_context(patch)
                found[fault] = attempt(dispatch)

        def cache(folder: str) -> Any:
            return mock.patch.object(cute_dsl_core.jit_env, "FLASHINFER_JIT_DIR", base / folder)

        def fails(owner: Any, name: str, kind: type[Exception], message: str) -> Any:
            def raises(*arguments: Any, **named: Any) -> None:  # a new one: it holds the frames that it passes
                raise kind(message)

            return mock.patch.object(owner, name, raises)

        found["restart"] = restarted(dispatch, cute)
        found["sharing"] = shared()
        try_("nothing")
        for path in sorted(base.rglob("*.o")):
            path.write_bytes(b"not an object")
        try_("damaged objects in the cache")
        for path in base.rglob("meta.json"):
            path.write_text("{")
        try_("damaged index of the cache")
        (base / "a file").touch()
        try_("a cache that cannot be written", cache("a file"))
        try_("no compiler on the path", cache("elsewhere"), mock.patch.dict(os.environ, PATH=""))
        try_("ptxas", cache("third"), fails(cute, "compile", RuntimeError, "NVVM Compilation Error\nptxas fatal: ..."))
        try_("another CuTe DSL", cache("third"), fails(cute, "compile", AttributeError, "module 'cutlass.cute' has no 'copy'"))
        no_memory = torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ..."
        try_("out of memory", fails(dispatch, "allocate_sm120_static_workspace", *no_memory))

        def another(self: Any, a_input: Any, tile_plan: Any, stream: Any) -> None: ...

        try_("a kernel of another FlashInfer", mock.patch.object(dispatch.MoEStaticKernel, "__call__", another))
    with mock.patch.dict(sys.modules, {DISPATCH: None}):
        found["no kernels in FlashInfer"] = attempt(dispatch)
    return found
