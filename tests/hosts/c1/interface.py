"""``MoE``, a complete layer: it knows its place, and under a compiler its ``forward`` is one operator."""

from __future__ import annotations

import os
from enum import Enum
from typing import Any

import torch
from tensorrt_llm._torch.utils import is_torch_compiling
from tensorrt_llm._wrapping import moe_custom_op, register_layer
from torch import nn

from trtllm_b12x.engines.trtllm.embedded.config import MoEWeightLoadingMode

from ...model_config import ModelConfig
from ._generation import set_activation
from .communication import all_reduce
from .impl_blocks import MoEEplbWeightLayoutMixin, MoEWeightOwnerMixin
from .impl_contract import MoEEligibility, MoERejectReason
from .moe_load_balancer import get_moe_load_balancer
from .routing import BaseMoeRoutingMethod

__all__ = ["MoE", "MoESchedulerKind", "MoEWeightLoadingMode", "moe_custom_op"]

FORCE_SEPARATED_ROUTING = os.environ.get("TLLM_TRTLLMGEN_FORCE_SEPARATED_ROUTING", "0") == "1"


class MoESchedulerKind(Enum):
    EXTERNAL_COMM = "external_comm"
    FUSED_COMM = "fused_comm"


def _reject(reason: MoERejectReason, detail: str) -> MoEEligibility:
    return MoEEligibility.no(reason, detail)


def _compute_ep_partition(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int, int]:
    if num_experts % ep_size:
        raise ValueError(f"{num_experts} experts cannot be spread over {ep_size} expert-parallel ranks")
    size = num_experts // ep_size
    return size, ep_rank * size, (ep_rank + 1) * size


def set_layer(
    module: Any,
    *,
    routing_method: BaseMoeRoutingMethod,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype | None = None,
    reduce_results: bool = False,
    model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
    aux_stream_dict: Any = None,
    weight_loading_mode: MoEWeightLoadingMode | None = None,
    bias: bool = False,
    layer_idx: int | None = None,
    **activation: Any,
) -> None:
    """Sizes, ranks and slots, which wrapper and backend each set for themselves."""
    module.routing_method, module.num_experts, module.bias, module.dtype = routing_method, num_experts, bias, dtype
    module.hidden_size = module.unpadded_hidden_size = hidden_size
    module.intermediate_size, module.reduce_results = intermediate_size, reduce_results
    module.weight_loading_mode = weight_loading_mode or MoEWeightLoadingMode.VANILLA
    module.layer_idx, module.layer_idx_str = layer_idx, None if layer_idx is None else str(layer_idx)
    set_activation(module, **activation)
    module.intermediate_size_expand_ratio = 2 if module.is_gated_activation else 1
    module.quant_config, module.moe_backend = model_config.quant_config, model_config.moe_backend
    module.force_dynamic_quantization = getattr(model_config, "force_dynamic_quantization", False)
    module.mapping = mapping = model_config.mapping
    module.rank, module.use_dp = mapping.rank, mapping.enable_attention_dp
    module.cluster_rank, module.cluster_size = mapping.moe_cluster_rank, mapping.moe_cluster_size
    module.tp_rank, module.tp_size = mapping.moe_tp_rank, mapping.moe_tp_size
    module.ep_rank, module.ep_size = mapping.moe_ep_rank, mapping.moe_ep_size
    module.parallel_rank, module.parallel_size = mapping.tp_rank, mapping.tp_size
    module.intermediate_size_per_partition = intermediate_size // module.tp_size
    module.all_reduce, module.aux_stream_dict, module.layer_load_balancer = None, aux_stream_dict, None
    module.repeat_idx, module.repeat_count, module.num_slots = 0, 1, num_experts
    size, start, end = _compute_ep_partition(num_experts, module.ep_size, module.ep_rank)
    module.expert_size_per_partition, module.slot_start, module.slot_end = size, start, end
    module.initial_local_expert_ids = list(range(start, end))
    module.initial_global_assignments = list(range(num_experts))


class MoE(MoEWeightOwnerMixin, MoEEplbWeightLayoutMixin, nn.Module):
    def __init__(
        self,
        *,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        layer_idx: int | None = None,
        init_load_balancer: bool = True,
        **arguments: Any,
    ) -> None:
        super().__init__()
        set_layer(self, model_config=model_config, layer_idx=layer_idx, **arguments)
        self.all_reduce = all_reduce if not self.use_dp and self.parallel_size > 1 else None
        register_layer(self, layer_idx, model_config)
        if init_load_balancer and get_moe_load_balancer() is not None:
            self.layer_load_balancer = get_moe_load_balancer()

    def forward_impl(self, x: Any, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: Any, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.register_to_config and is_torch_compiling():
            return moe_custom_op(self.layer_idx_str, x, router_logits)
        return self.forward_impl(x, router_logits, **kwargs)
