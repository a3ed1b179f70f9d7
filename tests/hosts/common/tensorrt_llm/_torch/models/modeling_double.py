# SPDX-License-Identifier: Apache-2.0
"""A model file: it binds ``create_moe`` at import, as Qwen3-MoE's does."""

import torch
from torch import nn

from tensorrt_llm.models.modeling_utils import QuantConfig

try:
    from tensorrt_llm._torch.moe.fused_moe import create_moe
    from tensorrt_llm._torch.moe.fused_moe.routing import RenormalizeMoeRoutingMethod
except ImportError:
    from tensorrt_llm._torch.modules.fused_moe import create_moe
    from tensorrt_llm._torch.modules.fused_moe.routing import RenormalizeMoeRoutingMethod


class Model(nn.Module):
    """``layers`` of 4 experts, hidden size 128, intermediate size 192; ``excluded`` ones lose their quantization late."""

    def __init__(self, model_config, layers, excluded=()):
        super().__init__()
        for index in range(layers):
            layer = create_moe(
                RenormalizeMoeRoutingMethod(2), 4, 128, 192, dtype=torch.bfloat16, model_config=model_config, layer_idx=index
            )
            setattr(self, f"layer{index}", layer)
        for index in excluded:
            for module in getattr(self, f"layer{index}").modules():
                if hasattr(module, "quant_config"):
                    module.quant_config = QuantConfig()  # as apply_quant_config_exclude_modules
