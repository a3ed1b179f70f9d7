"""Hand modules of TensorRT-LLM to a function right after they are first executed, and after every reload.

Imported in every Python process of the environment (Python 3.15's ``.start``) or once ``tensorrt_llm`` is imported: standard
library only, no import that the interpreter has not made already.
"""

import sys
from _thread import get_ident

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

WATCHED = frozenset(
    f"tensorrt_llm._torch.{name}" for name in ("modules.fused_moe.create_moe", "moe.fused_moe.create_moe", "autotuner")
)
"""Modules whose names the promotion rebinds; which of them exist depends on the host's generation."""

failure = ""
"""First line of what kept the callback from patching a module in this process."""


class _Loader:
    """The module's own loader, with a look at the module after its first execution and after every reload."""

    def __init__(self, original: "Any", callback: "Callable[[ModuleType], None]") -> None:
        self._original, self._callback = original, callback

    def __getattr__(self, name: str) -> "Any":
        if name in ("_original", "_callback"):  # a copy or an unpickled one, before __init__
            raise AttributeError(name)
        return getattr(self._original, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        module: ModuleType | None = self._original.create_module(spec)
        return module

    def exec_module(self, module: "ModuleType") -> None:
        self._original.exec_module(module)
        if any(isinstance(finder, Finder) for finder in sys.meta_path):  # nobody called uninstall() meanwhile
            hand_over(module, self._callback)


class Finder:
    """Answers for :data:`WATCHED` names alone, by asking the finders behind it.

    It stays on ``sys.meta_path``: a reload asks the finders anew, and would otherwise give the host its plain functions back.
    Any other import costs one look into a frozenset.
    """

    def __init__(self, callback: "Callable[[ModuleType], None]") -> None:
        self._callback = callback
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
                        spec.loader = _Loader(spec.loader, self._callback)
                    return spec
            return None
        finally:
            self._asking.discard(asking)


def hand_over(module: "ModuleType", callback: "Callable[[ModuleType], None]") -> None:
    """Call ``callback`` with a freshly executed module. If it raises, the host runs as it is and one line says so."""
    global failure
    try:
        callback(module)
    except Exception as error:
        from .errors import first_line, say

        failure = first_line(error)
        say(f"[trtllm_b12x] [WARNING] {module.__name__} is left alone: {failure} (run trtllm-b12x doctor)")


def start(callback: "Callable[[ModuleType], None]") -> None:
    """Watch imports in this process. Idempotent; modules that are imported already are not handed over."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder(callback))


def watching() -> bool:
    """Return whether this process was reached: by ``start``, or by the ``.pth``, which waits for ``tensorrt_llm``."""
    return any(isinstance(finder, Finder) or _waits(finder) for finder in sys.meta_path)


def stop() -> None:
    """Watch no longer."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder) and not _waits(finder)]


def _waits(finder: object) -> bool:
    return "TrtllmB12xWaits" in getattr(getattr(finder, "find_spec", None), "__globals__", ())
