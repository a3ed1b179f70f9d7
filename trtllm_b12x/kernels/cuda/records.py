"""Records that the host passes to a launch: the fields of ``Layer`` and ``Call`` of ``call.cuh``, and their offsets."""

from __future__ import annotations

import ctypes
import struct
from typing import Any


def _fields(pointers: str, integers: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in pointers.split()] + [(name, ctypes.c_int) for name in integers.split()]


class Layer(ctypes.Structure):
    """Addresses of a layer's tensors."""

    _fields_ = _fields(
        "w1 s1 alpha1 halves1 input1 w2 s2 alpha2 input2 bias1 bias2 swiglu_alpha swiglu_beta swiglu_limit stuck",
        "step1 step2 first",
    )


class Call(ctypes.Structure):
    """Addresses of a call's tensors, and what they are."""

    _fields_ = _fields("x x_sf ids router_weights out workspace", "tokens wide_ids weight_type swizzled")


CALL = struct.Struct("".join("P" if kind is ctypes.c_void_p else "i" for _, kind in Call._fields_))
"""A call, packed: a launch writes one within a microsecond."""


def checks() -> str:
    """Return ``host_records.cuh``: the device's offsets are the host's."""
    text = ""
    for record in (Layer, Call):
        name = record.__name__
        text += f'static_assert(sizeof({name}) == {ctypes.sizeof(record)}, "{name} has another size on the host");\n'
        for field, *_ in record._fields_:
            at, message = getattr(record, field).offset, f"{name}::{field} lies elsewhere on the host"
            text += f'static_assert(OFFSET_OF({name}, {field}) == {at}, "{message}");\n'
    return text
