# SPDX-License-Identifier: Apache-2.0
"""Define the configuration records of the embedded TensorRT-LLM, under their original names.

Sources (names and defaults): ``tensorrt_llm/quantization/mode.py``, ``models/modeling_utils.py``, ``mapping.py``,
``_torch/model_config.py`` and ``_torch/utils.py`` of TensorRT-LLM 1.2. Only fields that an MoE layer reads are included.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

import torch


class QuantAlgo(str, Enum):
    NVFP4 = "NVFP4"
    W4A16_NVFP4 = "W4A16_NVFP4"
    W4A8_MXFP4_MXFP8 = "W4A8_MXFP4_MXFP8"
    NVFP4_AWQ = "NVFP4_AWQ"
    MXFP8 = "MXFP8"
    FP8 = "FP8"
    W4A16_AWQ = "W4A16_AWQ"
    MIXED_PRECISION = "MIXED_PRECISION"


@dataclass
class QuantConfig:
    quant_algo: QuantAlgo | None = None
    group_size: int | None = 128


@dataclass(frozen=True)
class Mapping:
    """Parallel mapping. ``tp_size`` is the size of the group; MoE splits it into ``moe_tp_size * moe_ep_size``."""

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    moe_tp_size: int = 1
    moe_ep_size: int = 1
    enable_attention_dp: bool = False

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank // self.moe_ep_size

    @property
    def moe_ep_rank(self) -> int:
        return self.tp_rank % self.moe_ep_size

    @property
    def dp_size(self) -> int:
        return self.tp_size if self.enable_attention_dp else 1


@dataclass
class ModelConfig:
    pretrained_config: Any = None
    mapping: Mapping = field(default_factory=Mapping)
    quant_config: QuantConfig = field(default_factory=QuantConfig)
    moe_backend: str = "CUTLASS"
    max_num_tokens: int = 8192
    moe_max_num_tokens: int = 0
    """0 means max_num_tokens * dp_size (TensorRT-LLM uses None)."""
    skip_create_weights_in_init: bool = False
    lora_config: Any = None
    moe_load_balancer: Any = None
    use_cuda_graph: bool = False

    def __post_init__(self) -> None:
        if not self.moe_max_num_tokens:
            self.moe_max_num_tokens = self.max_num_tokens * self.mapping.dp_size


class ActivationType(IntEnum):
    """Activation types of ``tensorrt_llm/_torch/utils.py``, which follow the C++ enum."""

    Gelu = 2
    Silu = 4
    Swiglu = 5
    Geglu = 6
    SwigluBias = 7
    Relu2 = 8


def is_gated_activation(activation_type: ActivationType) -> bool:
    return activation_type in (ActivationType.Swiglu, ActivationType.SwigluBias, ActivationType.Geglu)


class MoEWeightLoadingMode(Enum):
    VANILLA = 0
    FUSED_GATE_UP_PROJ = 1


@dataclass
class Fp4QuantizedTensor:
    """Quantized activation: FP4 bytes ``[T, H/2]`` and their E4M3 scales."""

    fp4_tensor: torch.Tensor
    scaling_factor: torch.Tensor
    is_sf_swizzled: bool = True

    @property
    def shape(self) -> torch.Size:
        return self.fp4_tensor.shape
