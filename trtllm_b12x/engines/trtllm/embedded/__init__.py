"""Emulate TensorRT-LLM on machines without it: its MoE classes, call sequences and layouts in torch.

The same code that runs inside TensorRT-LLM can thus be run, verified and debugged anywhere. Covered: an NVFP4 (or unquantized)
CUTLASS layer on its ranks. Not covered: all-to-all, load balancing and LoRA.
"""

from . import create_moe, quantization
from .config import (
    ActivationType,
    AuxStreamType,
    Fp4QuantizedTensor,
    Mapping,
    ModelConfig,
    MoEWeightLoadingMode,
    QuantAlgo,
    QuantConfig,
)
from .fused_moe_cutlass import CutlassFusedMoE
from .ops import block_scale_interleave, block_scale_interleave_reverse, fp4_quantize
from .quantization import MXFP8CutlassFusedMoEMethod, NVFP4CutlassFusedMoEMethod, TensorParallelMode, load_weight_shard
from .routing import BaseMoeRoutingMethod, RenormalizeMoeRoutingMethod

__all__ = [
    "ActivationType",
    "AuxStreamType",
    "BaseMoeRoutingMethod",
    "CutlassFusedMoE",
    "Fp4QuantizedTensor",
    "MXFP8CutlassFusedMoEMethod",
    "Mapping",
    "MoEWeightLoadingMode",
    "ModelConfig",
    "NVFP4CutlassFusedMoEMethod",
    "QuantAlgo",
    "QuantConfig",
    "RenormalizeMoeRoutingMethod",
    "TensorParallelMode",
    "block_scale_interleave",
    "block_scale_interleave_reverse",
    "create_moe",
    "fp4_quantize",
    "load_weight_shard",
    "quantization",
]
