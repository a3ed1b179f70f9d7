# SPDX-License-Identifier: Apache-2.0
"""Emulate TensorRT-LLM on machines without it: its MoE classes, call sequences and layouts in torch.

The same code that runs inside TensorRT-LLM can thus be run, verified and debugged anywhere. This package emulates a CUTLASS
layer in NVFP4, W4A16_NVFP4, MXFP4 or unquantized on its ranks, which return partial sums. It does not emulate communication
between ranks, chunks of long calls, load balancing and LoRA.
"""

from . import create_moe, quantization
from .config import ActivationType, Fp4QuantizedTensor, Mapping, ModelConfig, QuantAlgo, QuantConfig
from .fused_moe_cutlass import CutlassFusedMoE
from .ops import block_scale_interleave, block_scale_interleave_reverse, fp4_quantize
from .routing import RenormalizeMoeRoutingMethod

__all__ = [
    "ActivationType",
    "CutlassFusedMoE",
    "Fp4QuantizedTensor",
    "Mapping",
    "ModelConfig",
    "QuantAlgo",
    "QuantConfig",
    "RenormalizeMoeRoutingMethod",
    "block_scale_interleave",
    "block_scale_interleave_reverse",
    "create_moe",
    "fp4_quantize",
    "quantization",
]
