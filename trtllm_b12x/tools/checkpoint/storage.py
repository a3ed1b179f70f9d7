"""Describe how a checkpoint stores the matrices of each number format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x import formats

_GROUP_SIZE = {row.name: row.group_size for row in formats.FORMATS}


@dataclass(frozen=True)
class StorageFormat:
    """The tensors of one matrix, by the last part of their names."""

    dtypes: Mapping[str, str]
    """Tensor to its dtype in safetensors; empty: any."""
    elements: Mapping[str, int]
    """Tensor to the weights of a row that one entry holds or scales. A tensor that is not listed is a scalar."""
    fault: Callable[[str, torch.Tensor], str] = lambda name, tensor: ""
    """Return why a tensor cannot be used, or an empty string."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors in checkpoints of other producers, to ours."""
    quant_methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``quant_method`` in config.json to the settings it stands for, as TensorRT-LLM reads it."""

    @property
    def scalars(self) -> frozenset[str]:
        return frozenset(self.dtypes.keys() - self.elements.keys())


def _nvfp4_fault(name: str, tensor: torch.Tensor) -> str:
    if name == "weight":
        return ""
    if name == "weight_scale":
        # 0x7F is NaN in E4M3. Block-scaled tensor cores ignore the sign of a scale.
        return "holds NaN or a negative value" if bool((tensor.view(torch.uint8) >= 0x7F).any()) else ""
    return "" if bool(tensor.isfinite().all() & (tensor >= 0).all()) else f"is {tensor.flatten()[0].item()}"


def _mxfp8_fault(name: str, tensor: torch.Tensor) -> str:
    data = tensor.view(torch.uint8)
    nan = (data & 0x7F) == 0x7F if name == "weight" else data == 0xFF
    return "holds NaN" if bool(nan.any()) else ""


UNQUANTIZED = StorageFormat({"weight": ""}, {"weight": 1})

STORAGE = {
    "NVFP4": StorageFormat(
        {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"},
        {"weight": 2, "weight_scale": _GROUP_SIZE["NVFP4"]},
        _nvfp4_fault,
        quant_methods={"nvfp4": {"quant_algo": "NVFP4", "ignore": ["*.mlp.gate", "lm_head"]}},
    ),
    "MXFP8": StorageFormat(
        {"weight": "F8_E4M3", "weight_scale": "U8"},
        {"weight": 1, "weight_scale": _GROUP_SIZE["MXFP8"]},
        _mxfp8_fault,
        # MiniMax-M3-MXFP8 and trainers write this name; TensorRT-LLM accepts both.
        aliases={"weight_scale_inv": "weight_scale"},
        quant_methods={"mxfp8": {"quant_algo": "MXFP8"}},
    ),
}


def storage_of(quant_algo: str) -> StorageFormat:
    """Return the storage of a format, or that of plain weights for any other algorithm."""
    return STORAGE.get(quant_algo, UNQUANTIZED)
