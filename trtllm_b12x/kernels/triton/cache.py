# SPDX-License-Identifier: Apache-2.0
"""Load a plan's kernels from Triton's cache. Kernels that the cache lacks are compiled into it first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from trtllm_b12x.core import locks, log, settings
from trtllm_b12x.environment import triton as toolchain
from trtllm_b12x.environment.gpu import WSL_FOLDER
from trtllm_b12x.kernels import PlanError, first_line

from . import compile_pool
from .variant import Variant

_TIMEOUT_S = 600
"""Maximum seconds to wait for another process."""
_POLL_S = 0.5
_lock = locks.new()


class CacheMissError(Exception):
    """Triton's cache lacks a kernel or module, which is not compiled. The message is its name."""


def load(variants: Sequence[Variant], capability: int, remedy: str) -> tuple[dict[tuple[Any, ...], Any], int]:
    """Return every kernel by its key, loaded on torch's current device, and the number of processes that compiled.

    Args:
        capability: capability of the current device, major * 10 + minor.
        remedy: command that fills the cache beforehand.

    Raises:
        PlanError: a kernel is not in the cache, and ``TRTLLM_B12X_FREEZE`` forbids a compile or a compiler is missing.
    """
    if faults := toolchain.lacking(capability):
        raise PlanError("; ".join(map(str, faults)))
    obstacle = f"{settings.FREEZE.name}=1" if settings.FREEZE() else "; ".join(map(str, toolchain.tools_lacking()))
    processes = 0
    if obstacle:
        try:
            with hits_only():
                return {variant.key: _loaded(variant) for variant in variants}, 0
        except CacheMissError as missing:
            raise PlanError(f"{missing} is not in Triton's cache and is not compiled: {obstacle} ({remedy})") from missing
    if _missing(variants):
        processes = fill(variants, capability)
    return {variant.key: _loaded(variant) for variant in variants}, processes


def fill(variants: Iterable[Variant], capability: int) -> int:
    """Compile the variants that Triton's cache lacks, in order. Return the number of processes.

    While another thread or process of this machine compiles, wait for the cache to fill: ranks of a node need the same kernels.
    """
    needed = list({(variant.module, *variant.key): variant for variant in variants}.values())
    deadline = time.monotonic() + _TIMEOUT_S
    while _missing(needed):
        with _turn() as ours:
            if ours or time.monotonic() > deadline:
                return compile_pool.fill(_missing(needed), capability)
    return 0


def _loaded(variant: Variant) -> Any:
    kernel = variant.warm_up()
    kernel.run  # noqa: B018 (loads it)
    return kernel


def _missing(variants: Sequence[Variant]) -> list[Variant]:
    """Look up every kernel in Triton's cache by the key that Triton computes. Return the kernels that the cache lacks."""
    from triton.runtime import driver

    driver.active.get_current_device()  # compiles Triton's own module, if that is missing
    missing = []
    with hits_only():
        for variant in variants:
            try:
                variant.warm_up()
            except CacheMissError:
                missing.append(variant)
    return missing


@contextmanager
def hits_only() -> Iterator[None]:
    """Raise CacheMissError instead of compiling a kernel that Triton's cache lacks, only in this thread.

    Triton has one cache manager for the whole process. Other threads, such as the engine's, compile as before.
    """
    from triton import knobs

    with _lock:
        values = vars(knobs.cache)  # assigning None would delete the environment variable
        before = {name: value for name, value in values.items() if name == "manager_class"}
        knobs.cache.manager_class = _without_misses(knobs.cache.manager_class, threading.get_ident())
        try:
            yield
        finally:
            del values["manager_class"]
            values.update(before)


def _without_misses(chosen: Any, thread: int) -> Any:
    """Derive a cache manager that raises on a miss in ``thread`` from the one that the user chose, or from Triton's."""
    from triton.runtime.cache import FileCacheManager

    manager: Any = chosen or FileCacheManager

    class HitsOnly(manager):
        def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
            self._raises = threading.get_ident() == thread and not (override or dump)
            with suppress(*((OSError,) if self._raises else ())):  # a read-only cache cannot create a folder for this key
                super().__init__(key, override=override, dump=dump)

        def get_file(self, filename: str) -> Any:
            return self._hit(filename, super().get_file(filename))

        def get_group(self, filename: str) -> Any:
            return self._hit(filename, super().get_group(filename))

        def _hit(self, filename: str, entry: Any) -> Any:
            if self._raises and not entry:
                raise CacheMissError(_named(filename))
            return entry

    return HitsOnly


def _named(filename: str) -> str:
    name = Path(filename).name.split(".")[0]
    if name != "cuda_utils":
        return name
    place = f"set TRITON_LIBCUDA_PATH to it, {WSL_FOLDER} under WSL2, the same for trtllm-b12x warmup and for the server"
    return f"Triton's own {name} for this folder of libcuda.so.1 ({place})"


@contextmanager
def _turn() -> Iterator[bool]:
    """Yield False if another process still compiles after half a second, else True. Where files have no locks, yield True."""
    from filelock import FileLock, Timeout

    with ExitStack() as stack:
        ours = True
        try:
            folder = toolchain.cache_folder()
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(FileLock(folder / "trtllm_b12x.lock", timeout=_POLL_S))
        except Timeout:
            ours = False
        except (OSError, NotImplementedError) as error:
            log.once(f"Triton's kernels are compiled without waiting for other processes: {first_line(error)}")
        yield ours
