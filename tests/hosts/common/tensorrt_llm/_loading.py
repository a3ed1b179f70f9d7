"""What the quantization methods of all generations have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trtllm_b12x.engines.trtllm.embedded.quantization import FusedMoEQuantScalesNVFP4


def interleave(scales: torch.Tensor) -> None:
    interleaved = torch.ops.trtllm.block_scale_interleave(scales.view(torch.uint8))
    scales.copy_(interleaved.view(scales.dtype).reshape(scales.shape))


def register(module: Any, parameters: dict[str, torch.Tensor]) -> None:
    for name, tensor in parameters.items():
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


class Weights:
    """Base of ``FusedMoEMethodBase``."""

    def create_weights(
        self, module: Any, weight_dtype: torch.dtype, w3_w1_weight_shape: tuple[int, ...], w2_weight_shape: tuple[int, ...]
    ) -> None:
        shapes = {"w3_w1_weight": w3_w1_weight_shape, "w2_weight": w2_weight_shape}
        register(module, {name: torch.empty(shape, dtype=weight_dtype) for name, shape in shapes.items()})
        module.w3_w1_bias = module.w2_bias = None
        module.rebuild_tensor_metadata = {}


def create_unquantized(method: Any, module: Any) -> None:
    experts, hidden = module.expert_size_per_partition, module.hidden_size
    rows, inner = module.expand_intermediate_size_per_partition, module.intermediate_size_per_partition
    Weights.create_weights(method, module, module.dtype, (experts, rows, hidden), (experts, hidden, inner))
    method.setup_quant_scales(module)


class NVFP4:
    """Second base of ``NVFP4FusedMoEMethod``."""

    def create_scales(self, module: Any, w3_w1: tuple[int, ...], w2: tuple[int, ...], dtype: torch.dtype) -> None:
        experts = module.expert_size_per_partition
        parameters = {
            "w3_w1_weight_scale": torch.ones(w3_w1, dtype=dtype),
            "w2_weight_scale": torch.ones(w2, dtype=dtype),
            "fc31_input_scale": torch.tensor(1.0, dtype=torch.float32),
            "fc2_input_scale": torch.tensor(1.0, dtype=torch.float32),
            "fc31_alpha": torch.ones(experts, dtype=torch.float32),
            "fc2_alpha": torch.ones(experts, dtype=torch.float32),
        }
        register(module, parameters)
        module.register_parameter("fc31_act_scale", None)

    def load_expert_fc31_alpha_nvfp4(
        self, w1_weight_scale_2: Any, w3_weight_scale_2: Any, final_fc31_input_scale: torch.Tensor, dst_fc31_alpha: torch.Tensor
    ) -> None:
        assert torch.allclose(w1_weight_scale_2, w3_weight_scale_2), "w1_weight_scale_2 != w3_weight_scale_2"
        dst_fc31_alpha.copy_(1.0 / (final_fc31_input_scale * (1.0 / w1_weight_scale_2)))

    def load_expert_fc2_alpha_nvfp4(
        self, w2_weight_scale_2: Any, final_fc2_input_scale: torch.Tensor, dst_w2_alpha: torch.Tensor
    ) -> None:
        dst_w2_alpha.copy_(1.0 / (final_fc2_input_scale * (1.0 / w2_weight_scale_2)))


def nvfp4_scales(module: Any) -> FusedMoEQuantScalesNVFP4:
    return FusedMoEQuantScalesNVFP4(
        fc1_act_global=module.fc31_input_scale,
        fc1_weight_block=module.w3_w1_weight_scale,
        fc1_global=module.fc31_alpha,
        fc2_act_global=module.fc2_input_scale,
        fc2_weight_block=module.w2_weight_scale,
        fc2_global=module.fc2_alpha,
    )


def nvfp4_shapes(module: Any, alignment: int, weight_vec_size: int, block_scales_vec_size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of both weights, then of both block scales."""
    experts, hidden = module.expert_size_per_partition, module.hidden_size
    rows = -(-module.expand_intermediate_size_per_partition // alignment) * alignment
    inner = rows // module.intermediate_size_expand_ratio
    scales = module.scaling_vector_size * block_scales_vec_size
    return (
        (experts, rows, hidden // weight_vec_size),
        (experts, hidden, inner // weight_vec_size),
        (experts, rows, hidden // scales),
        (experts, hidden, inner // scales),
    )
