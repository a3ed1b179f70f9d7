"""What has to stand in FlashInfer's sources, told by reading them, and the one line that is added where it is missing.

``MoEMicroKernel`` scatters what other warps stored without a barrier in between, up to 0.7.2 (docs/flashinfer-micro-barrier.md).
Beside other work on the GPU one call in a thousand is wrong for it, so micro runs from a source with the barrier or not at all.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_STORE = "fence_proxy"
_SCATTER = "scatter_add_bf16x2"
_BARRIER = "epilog_sync_barrier.arrive_and_wait"


def with_barrier(source: str) -> str | None:
    """``moe_micro_kernel.py`` with a barrier between the store of an output tile and its scatter.

    Returns:
        ``source`` itself where it is there, mended where it is not, None where the place cannot be told.
    """
    tree = ast.parse(source)
    places = list(_scatters(tree))
    covered = {id(call) for _, _, scatter in places for call in _calls(scatter, _SCATTER)}
    if not covered or any(id(call) not in covered for call in _calls(tree, _SCATTER)):
        return None
    lines = source.splitlines(keepends=True)
    for fence in sorted({fence for fence, waits, _ in places if not waits}, key=lambda fence: fence.lineno, reverse=True):
        assert fence.end_lineno is not None
        lines.insert(fence.end_lineno, f"{' ' * fence.col_offset}self.{_BARRIER}()\n")
    return "".join(lines)


def _scatters(tree: ast.AST) -> Iterator[tuple[ast.stmt, bool, ast.stmt]]:
    """For each block that stores a tile and scatters it: the fence behind the store, whether a barrier follows, the scatter."""
    for node in ast.walk(tree):
        for body in (getattr(node, name, None) for name in ("body", "orelse")):
            if not isinstance(body, list):
                continue
            for number, statement in enumerate(body):
                fences = [at for at in range(number) if isinstance(body[at], ast.Expr) and _calls(body[at], _STORE)]
                if fences and _calls(statement, _SCATTER):
                    between = body[fences[-1] + 1 : number]
                    waits = any(isinstance(each, ast.Expr) and _calls(each, _BARRIER) for each in between)
                    yield body[fences[-1]], waits, statement


def _calls(node: ast.AST, name: str) -> list[ast.Call]:
    calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
    return [call for call in calls if f".{ast.unparse(call.func)}".endswith(f".{name}")]


@dataclass(frozen=True)
class Micro:
    """FlashInfer's micro kernel with its barrier."""

    kernel: type
    """``MoEMicroKernel``, FlashInfer's own or of the mended source."""
    digest: str
    """Of the mended source; empty for FlashInfer's own."""


def micro(dispatch: Any) -> Micro | None:
    """The micro kernel that may run, or None where its source cannot be judged."""
    own = dispatch.MoEMicroKernel
    original = sys.modules[own.__module__]
    source = inspect.getsource(original)
    mended = with_barrier(source)
    if mended is None or mended == source:
        return None if mended is None else Micro(own, "")
    digest = hashlib.sha256(mended.encode()).hexdigest()[:12]
    name = f"{original.__name__}_{digest}"
    if name not in sys.modules:
        module = types.ModuleType(name, original.__doc__)
        module.__package__ = original.__package__
        module.__file__ = f"{original.__file__}:{digest}"
        # The CuTe DSL reads a kernel's source again, by the file that its code names.
        linecache.cache[module.__file__] = (len(mended), None, mended.splitlines(keepends=True), module.__file__)
        exec(compile(mended, module.__file__, "exec"), module.__dict__)
        sys.modules[name] = module
    return Micro(getattr(sys.modules[name], own.__name__), digest)


def with_globals(function: Any, **replaced: Any) -> Any:
    """``function`` as it is, but for what some of its module's names mean to it."""
    module = {**function.__globals__, **replaced}
    copy = types.FunctionType(function.__code__, module, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
