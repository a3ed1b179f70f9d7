"""FlashInfer's kernels of one geometry, compiled into its cache for cards that are not here: a process of its own.

FlashInfer is answered for the card, and ``build_and_load_cute_dsl_kernel`` is ours: of all kernels, in the order in which every
process asks for them, each compiles its share.  The request comes on stdin, JSON lines go to stdout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_b12x.environment import child, inspect_flashinfer, packages
from trtllm_b12x.environment.cute_dsl import WHEELS


class _Share:
    """Stands in for FlashInfer's function: compiles and stores the kernels of this process' share, and returns nothing to run."""

    def __init__(self, number: int, of: int, say: Callable[..., None]) -> None:
        self.number, self.of, self.say = number, of, say
        self.counting = True
        self.names: dict[str, int] = {}
        self.done: set[str] = set()

    def __call__(self, module: str, name: str, compile_kernel: Callable[[], Any], extra_key_files: Any = ()) -> object:
        place = self.names.setdefault(name, len(self.names))
        if not self.counting and place % self.of == self.number and name not in self.done:
            self.done.add(name)
            self._store(module, name, compile_kernel, extra_key_files)
        return object()

    def _store(self, module: str, name: str, compile_kernel: Callable[[], Any], files: Any) -> None:
        from flashinfer.jit import cute_dsl_core as core

        started, cached, error = time.monotonic(), False, ""
        try:
            if core.cute_dsl_cache_disabled():
                raise RuntimeError("FLASHINFER_CUTE_DSL_DISABLE_CACHE=1: FlashInfer stores no kernel")
            spec = core.JitSpecCuteDsl(module, name, compile_kernel, core._hash_source_files(tuple(files)))
            cached = spec.try_load() is not None
            if not cached:
                # The second holds a lock of the module for all of the compile: one process at a time.
                getattr(spec, "compile_and_persist", spec.build_and_load)()
            if not spec.is_compiled:
                raise RuntimeError(f"FlashInfer could not store it as {spec.object_path}")
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
        self.say(name=name, cached=cached, error=error, seconds=round(time.monotonic() - started, 3))


def main() -> None:
    asked = json.load(sys.stdin)
    target, share, counts = asked["target"], asked["share"], asked["multiprocessors"]
    os.environ.update(CUTE_DSL_ARCH=target)
    # Its cache has a folder for each set of architectures: those of the card's machine.
    os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", f"{target[3:5]}.{target[5]}")
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the compiler writes to the process's own streams

    def say(**what: Any) -> None:
        print(json.dumps(what), file=stream, flush=True)

    try:
        _compile(asked, target, share, counts, say)
    except Exception as problem:
        say(name="b12x", cached=False, error=f"{type(problem).__name__}: {problem}".splitlines()[0][:300], seconds=0.0)


def _compile(asked: dict[str, Any], target: str, share: list[int], counts: list[int], say: Callable[..., None]) -> None:
    import torch

    child.answer_for_the_gpu(torch, max(counts), int(target[3:5]), int(target[5]))
    from trtllm_b12x.kernels import Geometry

    from .compiler import DISPATCH, Compiler, sizes
    from .scratch import Scratch, fitting

    fields = asked["geometry"]
    geometry = Geometry(**{**fields, "dtype": getattr(torch, fields["dtype"])})
    dispatch = importlib.import_module(DISPATCH)
    capacity, build = fitting(geometry, asked["capacity"]), _Share(share[0], share[1], say)
    scratch = Scratch.allocate(dispatch, geometry, capacity, torch.device("cpu"))
    for counting in (True, False):
        build.counting = counting
        for count in counts:
            child.answer_for_the_gpu(torch, count, int(target[3:5]), int(target[5]))
            for name in ("get_num_sm", "get_max_active_clusters"):
                setattr(dispatch, name, lambda *arguments, count=count: count)
            dispatch.clear_sm120_moe_caches()
            importlib.import_module(f"{__package__}.compiler")._compiled.clear()
            compiler = Compiler(dispatch, geometry, scratch, torch.device("cpu"), build)
            for tokens in sizes(dispatch, capacity):
                list(compiler.candidates(tokens))
        if counting:
            say(total=len(build.names))


def assembled(geometry: Any, card: Any, directory: Path) -> list[str]:
    """PTX of FlashInfer's static kernel for two tokens, by its own compile function, 0.6.18 to 0.7.2."""
    os.environ.update(
        CUTE_DSL_ARCH=f"sm_{card.capability}a",
        CUTE_DSL_KEEP_PTX="1",
        CUTE_DSL_DUMP_DIR=str(directory),
        FLASHINFER_CUTE_DSL_DISABLE_CACHE="1",
        CUTE_DSL_DISABLE_FILE_CACHING="1",
    )
    captured = directory / "output"
    # The assembler writes to the process's own streams, past Python's.
    with captured.open("wb") as stream:
        saved = os.dup(1), os.dup(2)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            _compile_static(geometry, card)
        except Exception as error:
            from trtllm_b12x.kernels import PlanError

            raise PlanError(f"{type(error).__name__}: {error}\n{captured.read_text(errors='replace')}") from error
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(saved[0], 1)
            os.dup2(saved[1], 2)
    return [path.read_text(errors="replace") for path in directory.glob("*.ptx")]


def _compile_static(geometry: Any, card: Any) -> None:
    import torch

    child.answer_for_the_gpu(torch, card.multiprocessors, *divmod(card.capability, 10))
    dispatch = importlib.import_module(child.DISPATCH)
    for name in ("get_num_sm", "get_max_active_clusters"):
        setattr(dispatch, name, lambda *arguments: card.multiprocessors)
    sizes = {"k": geometry.hidden_size, "n": geometry.intermediate_size, "num_topk": geometry.top_k}
    dispatch._get_static_kernel(geometry.num_experts, geometry.num_experts, m=2, max_rows=2 * geometry.top_k, **sizes)


def fields(geometry: Any) -> dict[str, Any]:
    """For the request."""
    return {**dataclasses.asdict(geometry), "dtype": str(geometry.dtype).removeprefix("torch."), "bias": None}


def cache_folder() -> Path:
    """Of FlashInfer's kernels, whatever the card (``jit/env.py``)."""
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE")
    return (Path(base) if base else Path.home()) / ".cache" / "flashinfer"


def seal(target: str) -> Path:
    """The file by which ``trtllm-b12x warmup`` says that what is installed here has compiled for ``target`` into that folder."""
    said = json.dumps([inspect_flashinfer().version, sorted(packages.versions(WHEELS).items())])
    return cache_folder() / f"trtllm_b12x-{target}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
