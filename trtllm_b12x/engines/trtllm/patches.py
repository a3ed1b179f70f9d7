# SPDX-License-Identifier: Apache-2.0
"""Keep track of the TensorRT-LLM names that are rebound in this process, with their originals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from trtllm_b12x.core import hook, locks

building = locks.new()
"""Lock for building layers, held while TensorRT-LLM imports modules and constructs layers."""
lock = locks.new()
"""Lock for the patch list. Import nothing while holding it: the import hook takes it while it holds the module's import lock."""


active = False
"""True if promotion is on in this process."""
refused = ""
"""Reason why TensorRT-LLM stays unpatched in this process; empty if none is known."""
refused_sizes: dict[int, Exception] = {}
"""TensorRT-LLM's error, by intermediate size that it refuses for its NVFP4 layers and our layers serve."""
_patches: dict[tuple[ModuleType, str], tuple[Any, Any]] = {}
"""Original and replacement, by module and rebound name."""


def put(module: ModuleType, name: str, ours: Any) -> None:
    _patches[module, name] = vars(module)[name], ours  # after a reload this replaces the earlier entry
    setattr(module, name, ours)


def restore() -> None:
    """Stop watching imports. Restore the originals, except names that another package has rebound since."""
    with lock:
        hook.stop()
        for (module, name), (original, ours) in _patches.items():
            if vars(module).get(name) is ours:
                setattr(module, name, original)
        _patches.clear()


def names() -> tuple[str, ...]:
    """Return ``module.name`` of each rebound name."""
    return tuple(f"{module.__name__}.{name}" for module, name in tuple(_patches))


def raise_if_refused(intermediate_size: Any, quant_algo: str | None) -> None:
    """Raise TensorRT-LLM's error if it refuses the size, for which its own layer would compute garbage."""
    if quant_algo == "NVFP4" and (error := refused_sizes.get(intermediate_size)) is not None:
        raise error


@contextmanager
def known_as_cutlass(names: dict[str, Any], ours: type | None) -> Iterator[None]:
    """Bind ``CutlassFusedMoE`` in ``names`` to ``ours`` during ``create_moe_backend``. For None, only wait for other threads.

    Every generation's ``create_moe_backend`` compares the class with that name (``==``, ``in`` or ``is``) and refuses others.
    """
    with building:
        before = names["CutlassFusedMoE"]
        names["CutlassFusedMoE"] = before if ours is None else ours
        try:
            yield
        finally:
            names["CutlassFusedMoE"] = before
