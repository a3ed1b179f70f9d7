"""What ``trtllm_b12x.pth`` starts in a process that imports TensorRT-LLM: wait for its MoE package, then rebind its names.

The ``.pth`` itself reads no file: it leaves a finder that calls :func:`startup` once ``tensorrt_llm`` is imported.  What it costs
is its compilation, token by token, hence no class and one string for what can wait; and a function whose globals are ``site``'s
would keep these until the interpreter's last moment, which costs as much again, hence ``eval``.  From Python 3.15 on
``trtllm_b12x.start`` (PEP 829) takes its place.  Standard library only, no import (not even ``__future__``) that the interpreter
has not made already, and nothing here ever raises.  TensorRT-LLM builds the model in spawned MPI or Ray workers,
which run no code of the user's: this is how they are reached.
"""

import os
import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

WATCHED = frozenset(
    f"tensorrt_llm._torch.{name}" for name in ("modules.fused_moe.create_moe", "moe.fused_moe.create_moe", "autotuner")
)
"""Modules whose names :mod:`trtllm_b12x.selection` rebinds; which of them exist depends on the host's generation."""

failure = ""
"""First line of what kept the hook from patching a host in this process."""


class _Loader:
    """The module's own loader, with a look at the module after its first execution and after every reload."""

    def __init__(self, original: "Any") -> None:
        self._original = original

    def __getattr__(self, name: str) -> "Any":
        if name == "_original":  # a copy or an unpickled one, before __init__
            raise AttributeError(name)
        return getattr(self._original, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        module: ModuleType | None = self._original.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        self._original.exec_module(module)
        if any(isinstance(finder, Finder) for finder in sys.meta_path):  # nobody called uninstall() meanwhile
            patch(module)


class Finder:
    """Answers for :data:`WATCHED` names alone, by asking the finders behind it.

    It stays on ``sys.meta_path``: a reload asks the finders anew, and would otherwise give the host its plain functions back.
    Any other import costs one look into a frozenset.
    """

    def __init__(self) -> None:
        self._asking: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        asking = (get_ident(), name)
        if name not in WATCHED or asking in self._asking:
            return None
        self._asking.add(asking)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = find(name, path, target) if find is not None and finder is not self else None
                if spec is not None:
                    if hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _Loader):
                        spec.loader = _Loader(spec.loader)
                    return spec
            return None
        finally:
            self._asking.discard(asking)


def patch(module: "ModuleType") -> None:
    """Hand a freshly executed module of the host to :func:`trtllm_b12x.selection.patch`; whatever goes wrong, the host runs."""
    global failure
    try:
        from trtllm_b12x import selection

        selection.patch(module)
    except Exception as error:
        from trtllm_b12x.core.errors import first_line, say

        failure = first_line(error)
        say(f"[trtllm_b12x] [WARNING] {module.__name__} is left alone: {failure} (run trtllm-b12x doctor)")


def start() -> None:
    """Watch imports in this process.  Idempotent; modules that are there already are for ``install()``."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def startup() -> None:
    """What ``trtllm_b12x.start`` and the ``.pth`` name: :func:`start`, unless ``TRTLLM_B12X`` says no."""
    if os.environ.get("TRTLLM_B12X", "").strip().lower() not in ("0", "false", "off", "no"):
        start()


def watching() -> bool:
    """This process was reached: by :func:`start`, or by the ``.pth``, which waits for ``tensorrt_llm``."""
    return any(isinstance(finder, Finder) or _waits(finder) for finder in sys.meta_path)


def stop() -> None:
    """Watch no longer."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder) and not _waits(finder)]


def _waits(finder: object) -> bool:
    return "TrtllmB12xWaits" in getattr(getattr(finder, "find_spec", None), "__globals__", ())
