# SPDX-License-Identifier: Apache-2.0
"""Arguments of a launch: ``Layer`` and ``Call``, with the fields that ``call.cuh`` declares."""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

import torch

from trtllm_b12x.kernels import Geometry
from trtllm_b12x.kernels.layer_tensors import check, scalars_of, scales_in_memory


def _fields(record: str) -> list[tuple[str, Any]]:
    """Return the fields of a struct in ``call.cuh``, which are pointers and ``int``."""
    text = re.sub("//.*", "", Path(__file__).with_name("call.cuh").read_text(encoding="utf-8"))
    declarations = text.partition(f"struct {record} {{")[2].partition("}")[0].split(";")[:-1]
    kinds = {each: ctypes.c_void_p if "*" in each else {"int": ctypes.c_int}[each.split()[0]] for each in declarations}
    return [(name, kind) for each, kind in kinds.items() for name in re.findall(r"\w+(?=,|$)", each)]


class Layer(ctypes.Structure):
    _fields_ = _fields("Layer")


class Call(ctypes.Structure):
    _fields_ = _fields("Call")


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
