# SPDX-License-Identifier: Apache-2.0
"""Every function of the package, and one of them at a time made to raise when it is called.

A function is replaced by its code object, so that it raises however it was bound: as a method, in a closure, in a table.
One that is defined inside another is replaced in the other's constants.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import trtllm_b12x

PACKAGE = Path(trtllm_b12x.__file__).parent
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")


class FaultError(Exception):
    """What an injected fault raises; no code anywhere expects it."""


def name(code: CodeType) -> str:
    """``module.Class.function``, as of the package."""
    module = Path(code.co_filename).relative_to(PACKAGE).with_suffix("")
    return ".".join((*module.parts, getattr(code, "co_qualname", code.co_name)))  # from Python 3.11 on


def of_the_package(code: CodeType) -> bool:
    path = Path(code.co_filename)
    inside = path.is_relative_to(PACKAGE) and not path.is_relative_to(PACKAGE / "engines" / "trtllm" / "embedded")
    return inside and bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_name not in _COMPREHENSIONS


def called(flow: Callable[[], Any]) -> list[CodeType]:
    """The package's functions that ``flow`` calls, in the order of their first call."""
    seen: dict[CodeType, None] = {}

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and of_the_package(frame.f_code):
            seen.setdefault(frame.f_code)

    sys.setprofile(profile)
    try:
        flow()
    finally:
        sys.setprofile(None)
    return list(seen)


def functions() -> list[FunctionType]:
    """The package's functions that are alive; those that a flow makes anew come from their constants."""
    return [thing for thing in gc.get_objects() if type(thing) is FunctionType and of_the_package(thing.__code__)]


@contextmanager
def injected(target: CodeType, among: list[FunctionType]) -> Iterator[None]:
    """``target`` raises :class:`FaultError` at every call."""
    originals = [(function, function.__code__) for function in among]
    changed = [(function, _replaced(code, target)) for function, code in originals]
    assert any(new is not code for (_, new), (_, code) in zip(changed, originals, strict=True)), name(target)
    try:
        for function, code in changed:
            function.__code__ = code
        yield
    finally:
        for function, code in originals:
            function.__code__ = code


def _replaced(code: CodeType, target: CodeType) -> CodeType:
    if code == target:
        return _raising(code)
    constants = tuple(_replaced(c, target) if isinstance(c, CodeType) else c for c in code.co_consts)
    unchanged = all(new is old for new, old in zip(constants, code.co_consts, strict=True))
    return code if unchanged else code.replace(co_consts=constants)


def _raising(code: CodeType) -> CodeType:
    """With a closure of the same size: a function's code can be exchanged for no other."""
    free = ", ".join(code.co_freevars)
    lines = [f"def outer({free}):", "  def inner(*args, **kwargs):", "    fault = 'FAULT'", f"    raise fault({name(code)!r})"]
    lines += [f"    return ({free},)"] if free else []
    scope: dict[str, Any] = {}
    exec("\n".join([*lines, "  return inner"]), scope)
    inner: CodeType = scope["outer"](*code.co_freevars).__code__
    return inner.replace(co_consts=tuple(FaultError if c == "FAULT" else c for c in inner.co_consts))
