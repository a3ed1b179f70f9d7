# SPDX-License-Identifier: Apache-2.0
"""Describe how checkpoints store the matrices of each number format, one row per format."""

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

    dtypes: Mapping[str, tuple[str, ...]]
    """Tensor to its allowed dtypes in safetensors; an empty tuple allows every dtype."""
    elements: Mapping[str, int]
    """Tensor to the number of weights in a row that one entry holds or scales. Tensors that are not listed are scalars."""
    fault: Callable[[str, torch.Tensor], str] = lambda name, tensor: ""
    """Return why a tensor cannot be used, or an empty string."""
    optional: frozenset[str] = frozenset()
    """Tensors that a checkpoint may lack."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other producers' tensor names to our names."""
    reciprocals: frozenset[str] = frozenset()
    """Other producers' tensors whose values are the reciprocals of our values."""
    quant_methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """``quant_method`` in config.json to the settings it stands for, as TensorRT-LLM reads it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Other values of ``quant_algo`` for the format, to what TensorRT-LLM does with such a checkpoint on SM12x."""
    weight_only: str = ""
    """Format of the same tensors without ``input_scale``."""
    mislabeled: str = ""
    """What engines do with such tensors in U8 if the configuration names a different format."""

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


def _mxfp4_fault(name: str, tensor: torch.Tensor) -> str:
    return "holds NaN" if name == "weight_scale" and bool((tensor == 0xFF).any()) else ""


UNQUANTIZED = StorageFormat({"weight": ()}, {"weight": 1}, aliases={"weight_packed": "weight", "blocks": "weight"})

_FP4: dict[str, Any] = {
    "dtypes": {"weight": ("U8",), "weight_scale": ("F8_E4M3",), "weight_scale_2": ("F32",), "input_scale": ("F32",)},
    "elements": {"weight": 2, "weight_scale": _GROUP_SIZE["NVFP4"]},
    "fault": _nvfp4_fault,
    # TensorRT-LLM renames compressed-tensors in the same way (checkpoints/hf/compressed_tensors.py, file id 57889776691).
    "aliases": {"weight_packed": "weight", "weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"},
    "reciprocals": frozenset({"weight_global_scale", "input_global_scale"}),
}
UNCALIBRATED = (
    "Kernels with 16-bit activations need none. TensorRT-LLM from 1.3 on takes the largest of the layer's other experts, as "
    "verify does; 1.2 raises KeyError. vLLM reads uninitialized scales, so that its own kernels may compute NaN. "
    "Calibrate with more text, or write the layer's largest scale"
)
"""What engines do with an expert that has no ``input_scale``: NVFP4FusedMoEMethod of TensorRT-LLM (quantization.py),
ModelOptNvFp4FusedMoE of vLLM 0.33 (modelopt.py; issue 45212)."""
_NO_MEMBER = "raises ValueError: its QuantAlgo has no such member"

STORAGE = {
    "NVFP4": StorageFormat(
        **_FP4,
        quant_methods={"nvfp4": {"quant_algo": "NVFP4", "ignore": ["*.mlp.gate", "lm_head"]}},
        weight_only="W4A16_NVFP4",
    ),
    # nvidia-modelopt does not write input scales, but nvidia/Qwen3.6-35B-A3B-NVFP4 has them.
    "W4A16_NVFP4": StorageFormat(
        **_FP4,
        optional=frozenset({"input_scale"}),
        # Sources: as for UNCALIBRATED, and vLLM's ModelOptNvFp4Config._from_config.
        mislabeled="no expert has an input_scale. TensorRT-LLM 1.2 raises KeyError, newer ones quantize activations with a scale "
        "of 1, which loses small values. vLLM 0.33 keeps 16-bit activations if every config group has input_activations null, "
        "otherwise it reads uninitialized scales. Set quant_algo to W4A16_NVFP4",
    ),
    "MXFP4": StorageFormat(
        {"weight": ("U8", "I8"), "weight_scale": ("U8", "F8_E8M0")},
        {"weight": 2, "weight_scale": _GROUP_SIZE["MXFP4"]},
        _mxfp4_fault,
        # gpt-oss has blocks and scales, DeepSeek-V4 weight and scale, compressed-tensors weight_packed, MiMo-V2 weight_scale_inv.
        aliases={
            **dict.fromkeys(("blocks", "weight_packed"), "weight"),
            **dict.fromkeys(("scales", "scale", "weight_scale_inv"), "weight_scale"),
        },
        quant_methods={"mxfp4": {"quant_algo": "W4A8_MXFP4_MXFP8"}},
        # Sources: nvidia-modelopt 0.47 and 0.48; model_config.py (file id 60599514144), fused_moe_cutlass.py (57675435166).
        labels={
            "mxfp4": _NO_MEMBER,
            "MXFP4": _NO_MEMBER,
            "W4A16_MXFP4": "refuses it on SM120 and SM121: it has W4A16_MXFP4 kernels for SM90 alone",
        },
        # Sources: fp8.py and bailing_moe_v3.py of vLLM 0.33.
        mislabeled="TensorRT-LLM looks for packed experts in I8, these are in U8. vLLM 0.33 serves them if store_dtype names "
        "mxfp4, in bailing_moe_v3 if routed_experts_quant_method does",
    ),
    "MXFP8": StorageFormat(
        {"weight": ("F8_E4M3",), "weight_scale": ("U8",)},
        {"weight": 1, "weight_scale": _GROUP_SIZE["MXFP8"]},
        _mxfp8_fault,
        # MiniMax-M3-MXFP8 and trainers write this name; TensorRT-LLM accepts both.
        aliases={"weight_scale_inv": "weight_scale"},
        quant_methods={"mxfp8": {"quant_algo": "MXFP8"}},
    ),
}


def storage_of(quant_algo: str) -> StorageFormat:
    """Return the storage of a format, or ``UNQUANTIZED`` for other algorithms."""
    form = formats.find(quant_algo)
    return UNQUANTIZED if form is None else STORAGE[form.name]


def algorithm(label: str) -> str:
    """Return TensorRT-LLM's ``QuantAlgo`` for a checkpoint's label; an unknown label stays as it is."""
    name = next((name for name, storage in STORAGE.items() if label in storage.labels), label)
    form = formats.find(name)
    return label if form is None else form.quant_algo
