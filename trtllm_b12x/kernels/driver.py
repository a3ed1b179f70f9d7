# SPDX-License-Identifier: Apache-2.0
"""Load and launch compiled kernels through CUDA's driver API."""

from __future__ import annotations

import ctypes
import functools
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a launch begins before the previous one has ended
_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class DriverError(RuntimeError):
    """A function of the CUDA driver failed."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(name: str, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        _library().cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'').decode() or code}")


def _call(name: str, *arguments: object) -> None:
    _check(name, getattr(_library(), name)(*arguments))


def _context() -> ctypes.c_void_p:
    """Return the context that is current in this thread. Its value is None if the thread has no context."""
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    return context


@contextmanager
def _current(library: ctypes.CDLL, context: ctypes.c_void_p) -> Iterator[None]:
    """Make a context current in this thread until the block ends."""
    _check("cuCtxPushCurrent_v2", library.cuCtxPushCurrent_v2(context))
    try:
        yield
    finally:
        library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


def _unload(library: ctypes.CDLL, context: ctypes.c_void_p, module: ctypes.c_void_p) -> None:
    """Unload a module, also while a stream is captured. In a forked process, which has no CUDA, do nothing."""
    mode = ctypes.c_int(_RELAXED)
    with suppress(DriverError), _current(library, context):
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        library.cuModuleUnload(module)
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class Module:
    """Kernels of one cubin on torch's current device, whose context exists. The module is unloaded with its last function."""

    def __init__(self, cubin: bytes) -> None:
        self.handle, self.context = ctypes.c_void_p(), _context()
        _call("cuModuleLoadData", ctypes.byref(self.handle), cubin)
        self._unloads = weakref.finalize(self, _unload, _library(), self.context, self.handle)
        self._unloads.atexit = False

    def constant(self, name: str) -> int:
        """Read an ``int`` constant of the module."""
        at, size, value = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        _call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), self.handle, name.encode())
        _call("cuMemcpyDtoH_v2", ctypes.byref(value), at, ctypes.c_size_t(ctypes.sizeof(value)))
        return int(value.value)

    def keep(self) -> None:
        """Leave the module loaded: a captured graph launches its kernels and may outlive this object."""
        self._unloads.detach()


class Function:
    """A kernel. Its module has the block's ``threads`` and ``shared_bytes``, with the prefix ``of`` if it has several kernels."""

    def __init__(self, module: Module, name: str, of: str = "") -> None:
        self.module, self._function, self._context = module, ctypes.c_void_p(), module.context
        _call("cuModuleGetFunction", ctypes.byref(self._function), module.handle, name.encode())
        self.threads, self.shared_bytes = (module.constant(of + what) for what in ("threads", "shared_bytes"))
        _call("cuFuncSetAttribute", self._function, _SHARED_MEMORY, self.shared_bytes)

    def launcher(self, blocks: int, layer: ctypes.Structure, record: struct.Struct) -> Callable[..., None]:
        """Return a function that takes a stream and the values of a record, and launches with ``layer`` and that record.

        The kernel itself waits for the previous kernel. Any thread may launch, on any current device.
        """
        start, context = _library().cuLaunchKernelEx, self._context
        idle: list[tuple[Any, ...]] = []

        def slot() -> tuple[Any, ...]:
            attributes, memory = ctypes.pointer(_Attribute(_OVERLAP, 0, 1)), ctypes.create_string_buffer(record.size)
            config = _Config(blocks, 1, 1, self.threads, 1, 1, self.shared_bytes, 0, attributes, 1)
            pointers = (ctypes.c_void_p * 2)(ctypes.addressof(layer), ctypes.addressof(memory))
            fill = functools.partial(record.pack_into, memory, 0)
            return config, fill, ctypes.byref(config), self._function, ctypes.byref(pointers)

        def launch(stream: int, *values: int) -> None:
            try:
                mine = idle.pop()  # one thread owns a slot while the driver reads it: ctypes releases the GIL
            except IndexError:
                mine = slot()
            config, fill, config_at, function, pointers = mine
            config.stream = stream
            fill(*values)
            code = start(config_at, function, pointers, None)
            # A thread has no context before its first CUDA call, and another card's context after ``torch.cuda.set_device``.
            if code and _context().value != context.value:
                with _current(_library(), context):
                    code = start(config_at, function, pointers, None)
            idle.append(mine)
            if code:
                _check("cuLaunchKernelEx", code)

        return launch


def capture_of(stream: int) -> int:
    """Return the number of the capture that ``stream`` is part of, or 0."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    answers = ctypes.byref(status), ctypes.byref(number), None, None, None
    _call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *answers)
    return number.value if status.value == 1 else 0
