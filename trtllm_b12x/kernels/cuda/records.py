# SPDX-License-Identifier: Apache-2.0
"""Arguments of a launch: the fields of ``Layer`` and ``Call`` in ``call.cuh``, and their offsets."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch

from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.layer_tensors import check, scalars_of, scales_in_memory


def _fields(pointers: str, integers: str) -> list[tuple[str, Any]]:
    return [(name, ctypes.c_void_p) for name in pointers.split()] + [(name, ctypes.c_int) for name in integers.split()]


class Layer(ctypes.Structure):
    """Addresses of a layer's tensors."""

    _fields_ = _fields(
        "w1 s1 alpha1 halves1 input1 w2 s2 alpha2 input2 bias1 bias2 swiglu_alpha swiglu_beta swiglu_limit stuck",
        "step1 step2 first",
    )


class Call(ctypes.Structure):
    """Addresses of a call's tensors, their number of tokens, dtypes and layout."""

    _fields_ = _fields("x x_sf ids router_weights padding out workspace", "tokens wide_ids weight_type swizzled")


def layers_of(
    geometry: Geometry, weights: Any, stuck: torch.Tensor, first_expert: int
) -> tuple[tuple[torch.Tensor, ...], list[Layer]]:
    """Return a layer's tensors, and its records for calls of unquantized and of quantized input.

    Raise ValueError with the tensor's name if the kernels cannot read its layout.
    """
    check(geometry, weights)
    s = scalars_of(geometry, weights)
    fc1 = weights.fc1_weight, scales_in_memory(weights, "fc1_weight_sf"), s.fc1_alpha, s.fc1_half_alphas
    fc2 = weights.fc2_weight, scales_in_memory(weights, "fc2_weight_sf"), s.fc2_alpha, s.fc2_input
    rest = *fc2, *s.biases, *s.swiglu, stuck
    layers = [
        Layer(*(tensor.data_ptr() for tensor in (*fc1, scale, *rest)), step, s.steps[1], first_expert)
        for scale, step in ((s.fc1_input, s.steps[0]), (s.one, 0))
    ]
    return (*fc1, s.fc1_input, s.one, *rest), layers


CALL = struct.Struct("".join("P" if kind is ctypes.c_void_p else "i" for _, kind in Call._fields_))
"""Packed fields of ``Call``. A launch writes them within a microsecond."""


def checks() -> str:
    """Return ``host_records.cuh``, which checks that ``call.cuh`` has the sizes and offsets of this file's records."""
    text = ""
    for record in (Layer, Call):
        name = record.__name__
        text += f'static_assert(sizeof({name}) == {ctypes.sizeof(record)}, "{name} has another size on the host");\n'
        for field, *_ in record._fields_:
            at, message = getattr(record, field).offset, f"{name}::{field} lies elsewhere on the host"
            text += f'static_assert(OFFSET_OF({name}, {field}) == {at}, "{message}");\n'
    return text
