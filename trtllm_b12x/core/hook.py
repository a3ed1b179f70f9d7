# SPDX-License-Identifier: Apache-2.0
"""Call a function with each watched module of TensorRT-LLM after its first execution and after every reload.

Python 3.15 and newer run this file in every process of the environment (``.start``). Older versions run it once
``tensorrt_llm`` is imported. The file therefore uses only standard library modules that the interpreter has already imported.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

WATCHED = frozenset(f"tensorrt_llm._torch.{package}.fused_moe.create_moe" for package in ("modules", "moe"))
"""Modules that promotion patches. Which of them exists depends on the TensorRT-LLM generation."""

failure = ""
"""First line of the error that kept the callback from patching a module in this process; empty if none."""


class _Loader:
    """Loader that delegates to the original one and calls the callback after each execution of the module."""

    def __init__(self, original: "Any", callback: "Callable[[ModuleType], None]") -> None:
        self._original, self._callback = original, callback

    def __getattr__(self, name: str) -> "Any":
        if name in ("_original", "_callback"):  # copy and pickle look attributes up before __init__
            raise AttributeError(name)
        return getattr(self._original, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        module: ModuleType | None = self._original.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        self._original.exec_module(module)
        if any(isinstance(finder, Finder) for finder in sys.meta_path):  # uninstall() was not called meanwhile
            hand_over(module, self._callback)


class Finder:
    """Import finder for the watched names. It calls the other finders and wraps the loader that they return.

    It stays on ``sys.meta_path`` because a reload searches the finders again and would otherwise restore the unpatched
    functions. Any other import costs one look-up in a frozenset.
    """

    def __init__(self, callback: "Callable[[ModuleType], None]", watched: "frozenset[str]" = WATCHED) -> None:
        self._callback, self.watched = callback, watched
        self._asking: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        asking = (get_ident(), name)
        if name not in self.watched or asking in self._asking:
            return None
        self._asking.add(asking)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None and finder is not self else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _Loader):
                        spec.loader = _Loader(spec.loader, self._callback)
                    return spec
            return None
        finally:
            self._asking.discard(asking)


def hand_over(module: "ModuleType", callback: "Callable[[ModuleType], None]") -> None:
    """Call ``callback`` with a freshly executed module. If it raises, the engine runs unpatched and a warning has the error."""
    global failure
    try:
        callback(module)
    except Exception as error:
        from .errors import first_line, say

        failure = first_line(error)
        say(f"[trtllm_b12x] [WARNING] {module.__name__} is left alone: {failure} (run trtllm-b12x doctor)")


def start(callback: "Callable[[ModuleType], None]", watched: "frozenset[str]" = WATCHED) -> None:
    """Watch imports. A second call changes nothing. Modules that are already imported are not passed to the callback."""
    if not any(isinstance(finder, Finder) and finder.watched == watched for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(callback, watched))


def watching() -> bool:
    """Return whether this process has a hook: from ``start``, or from the ``.pth`` file, which waits for ``tensorrt_llm``."""
    return any((isinstance(finder, Finder) and finder.watched == WATCHED) or _waits(finder) for finder in sys.meta_path)


def stop() -> None:
    """Remove all hooks of this package from ``sys.meta_path``."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder) and not _waits(finder)]


def _waits(finder: object) -> bool:
    return "TrtllmB12xWaits" in getattr(getattr(finder, "find_spec", None), "__globals__", ())
