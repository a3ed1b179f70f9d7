# SPDX-License-Identifier: Apache-2.0
"""NVFP4 loading of generation A, as the embedded host does it: every hook pads, interleaves and writes.

Alphas are there when the scales are. Distinct ``weight_scale_2`` of gate and up become the larger one.
"""

import torch
from tensorrt_llm._experts import of_expert

from trtllm_b12x.engines.trtllm.embedded.quantization import FusedMoEMethodBase as EmbeddedMethodBase
from trtllm_b12x.engines.trtllm.embedded.quantization import (
    MXFP4Tensors,
    TensorParallelMode,
    UnquantizedFusedMoEMethod,
    load_weight_shard,
)
from trtllm_b12x.engines.trtllm.embedded.quantization import NVFP4CutlassFusedMoEMethod as EmbeddedCutlassMethod

from .interface import MoEWeightLoadingMode

__all__ = ["MoEWeightLoadingMode", "TensorParallelMode", "UnquantizedFusedMoEMethod", "load_weight_shard"]


class _OneByOne(dict):
    """Tensors of all experts fused into one, read one by one."""

    def __init__(self, module, weights):
        super().__init__(weights)
        self._module = module

    def __contains__(self, name):
        """Asked of input scales, which a checkpoint may lack."""
        return super().__contains__(name) or (name.endswith("w2.input_scale") and "down_proj_input_scale" in self)

    def __missing__(self, name):
        expert, half, kind = name.split(".")
        return of_expert(self._module, self, int(expert), kind)[half]


class FusedMoEMethodBase(EmbeddedMethodBase):
    def load_weights(self, module, weights, weight_loading_mode, allow_partial_loading=False):
        super().load_weights(module, _OneByOne(module, weights), MoEWeightLoadingMode.VANILLA)

    def process_weights_after_loading(self, module):
        pass

    def pre_reload_weights(self, module):
        pass


class NVFP4FusedMoEMethod(FusedMoEMethodBase):
    def load_quant_scales(self, module, weights):
        super().load_quant_scales(module, weights)


class NVFP4CutlassFusedMoEMethod(NVFP4FusedMoEMethod, EmbeddedCutlassMethod):
    weight_dtype = torch.int64
    block_scales_dtype = torch.int32
    NVFP4_ROW_ALIGNMENT = 128
    NVFP4_COL_ALIGNMENT = 4

    def create_weights(self, module):
        super().create_weights(module)

    def load_expert_w3_w1_weight(self, module, w1_weight, w3_weight, dst_w3_w1_weight):
        super().load_expert_w3_w1_weight(module, w1_weight, w3_weight, dst_w3_w1_weight)

    def load_expert_w2_weight(self, module, w2_weight, dst_w2_weight):
        super().load_expert_w2_weight(module, w2_weight, dst_w2_weight)

    def load_expert_w3_w1_weight_scale_nvfp4(self, module, w1_weight_scale, w3_weight_scale, dst_w3_w1_weight_scale):
        super().load_expert_w3_w1_weight_scale_nvfp4(module, w1_weight_scale, w3_weight_scale, dst_w3_w1_weight_scale)

    def load_expert_w2_weight_scale_nvfp4(self, module, w2_weight_scale, dst_w2_weight_scale):
        super().load_expert_w2_weight_scale_nvfp4(module, w2_weight_scale, dst_w2_weight_scale)


class W4A8MXFP4MXFP8CutlassFusedMoEMethod(MXFP4Tensors, FusedMoEMethodBase):
    """Eager, and the same in every generation (file 287529276; commit 02320c35)."""
