"""Records that the host passes to a launch: the fields of ``Layer`` and ``Call`` of ``records.cuh``, and their offsets."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator

_Fields = tuple[tuple[str, type[ctypes.c_void_p] | type[ctypes.c_int]], ...]
_LAYER: _Fields = (
    *((name, ctypes.c_void_p) for name in ("w1", "s1", "alpha1", "halves1", "input1", "w2", "s2", "alpha2", "input2")),
    *((name, ctypes.c_void_p) for name in ("bias1", "bias2", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "stuck")),
    *((name, ctypes.c_int) for name in ("step1", "step2", "first")),
)
_CALL: _Fields = (
    *((name, ctypes.c_void_p) for name in ("x", "x_sf", "ids", "router_weights", "out", "workspace")),
    *((name, ctypes.c_int) for name in ("tokens", "wide_ids", "weight_type", "swizzled")),
)


class Layer(ctypes.Structure):
    """Addresses of a layer's tensors."""

    _fields_ = _LAYER


class _Call(ctypes.Structure):
    _fields_ = _CALL


CALL = struct.Struct("".join("P" if kind is ctypes.c_void_p else "i" for _, kind in _CALL))
"""A call, packed: a launch writes one within a microsecond."""


def checks() -> str:
    """Return ``host_records.cuh``: the device's offsets are the host's."""
    return "\n".join((*_checks(Layer, "Layer"), *_checks(_Call, "Call"))) + "\n"


def _checks(record: type[ctypes.Structure], name: str) -> Iterator[str]:
    yield f'static_assert(sizeof({name}) == {ctypes.sizeof(record)}, "{name} has another size on the host");'
    for field, *_ in record._fields_:
        at = getattr(record, field).offset
        yield f'static_assert(OFFSET_OF({name}, {field}) == {at}, "{name}::{field} lies elsewhere on the host");'
