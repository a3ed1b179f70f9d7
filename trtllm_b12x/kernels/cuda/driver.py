"""Load and launch compiled kernels through CUDA's driver API."""

from __future__ import annotations

import ctypes
import functools
import struct
from typing import Any

_OVERLAP = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: a launch begins before the one ahead of it has ended."""
_SHARED_MEMORY = 8
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""


class DriverError(RuntimeError):
    """A function of the driver failed."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


_Slot = tuple[_Config, "ctypes.Array[ctypes.c_char]", Any, ctypes.c_void_p, Any]
"""What one launch at a time fills in: config and record; and the arguments of cuLaunchKernelEx: config, function, pointers."""


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


class Function:
    """A kernel on torch's current device, whose context exists."""

    def __init__(self, cubin: bytes, name: str) -> None:
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())

    def constant(self, name: str) -> int:
        """Read an ``int`` of the module."""
        at, size, value = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
        _call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), self._module, name.encode())
        _call("cuMemcpyDtoH_v2", ctypes.byref(value), at, ctypes.c_size_t(ctypes.sizeof(value)))
        return int(value.value)

    def configure(self, threads: int, shared_bytes: int) -> None:
        _call("cuFuncSetAttribute", self._function, _SHARED_MEMORY, shared_bytes)
        self._threads, self._shared_bytes = threads, shared_bytes

    def slot(self, blocks: int, layer: ctypes.Structure, call: struct.Struct) -> _Slot:
        config = _Config(blocks, 1, 1, self._threads, 1, 1, self._shared_bytes, 0, ctypes.pointer(_Attribute(_OVERLAP, 0, 1)), 1)
        memory = ctypes.create_string_buffer(call.size)
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(layer), ctypes.addressof(memory))
        return config, memory, ctypes.byref(config), self._function, ctypes.byref(pointers)


class Launch:
    """Launches of a kernel with two arguments: ``layer``, and a record ``call`` that each launch fills in. Any thread may launch.

    Programmatic dependent launch: the kernel waits for the one ahead of it by itself.
    """

    def __init__(self, function: Function, blocks: int, layer: ctypes.Structure, call: struct.Struct) -> None:
        self._slot = functools.partial(function.slot, blocks, layer, call)
        self._pack, self._driver = call.pack_into, _library().cuLaunchKernelEx
        self._free: list[_Slot] = []
        """Slots that no thread uses: ctypes releases the GIL while the driver reads one."""

    def launch(self, stream: int, *values: int) -> None:
        """Launch with a record of ``values``."""
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._slot()
        config, memory, config_at, function, pointers = slot
        config.stream = stream
        self._pack(memory, 0, *values)
        code = self._driver(config_at, function, pointers, None)
        self._free.append(slot)
        if code:
            _check("cuLaunchKernelEx", code)


def capture_of(stream: int) -> int:
    """Return the number of the capture that ``stream`` is part of, or 0."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    answers = ctypes.byref(status), ctypes.byref(number), None, None, None
    _call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), *answers)
    return number.value if status.value == 1 else 0
