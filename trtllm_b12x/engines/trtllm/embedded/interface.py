# SPDX-License-Identifier: Apache-2.0
"""Define ``MoE``, the module interface of ``fused_moe/interface.py``: sizes, ranks and slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .config import ActivationType, ModelConfig, MoEWeightLoadingMode, QuantAlgo, is_gated_activation
from .routing import RenormalizeMoeRoutingMethod


class MoE(nn.Module):
    """Mixture-of-experts layer of one rank.

    ``intermediate_size`` is the size in the model, ``intermediate_size_per_partition`` the size on this rank. This rank holds
    ``expert_size_per_partition`` experts from ``slot_start`` on. Load balancing and cluster parallelism are not covered.
    """

    def __init__(
        self,
        *,
        routing_method: RenormalizeMoeRoutingMethod,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype | None = None,
        model_config: ModelConfig,
        weight_loading_mode: MoEWeightLoadingMode = MoEWeightLoadingMode.VANILLA,
        bias: bool = False,
        swiglu_alpha: torch.Tensor | None = None,
        swiglu_beta: torch.Tensor | None = None,
        swiglu_limit: torch.Tensor | None = None,
        layer_idx: int | None = None,
        activation_type: ActivationType = ActivationType.Swiglu,
    ) -> None:
        super().__init__()
        self.routing_method = routing_method
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.weight_loading_mode = weight_loading_mode
        self.bias = bias
        self.dtype = dtype
        self.swiglu_alpha = swiglu_alpha
        self.swiglu_beta = swiglu_beta
        self.swiglu_limit = swiglu_limit
        self.layer_idx = layer_idx
        self.activation_type = int(activation_type)
        self.is_gated_activation = is_gated_activation(activation_type)
        self.quant_config = model_config.quant_config  # the model may replace it later, per layer
        self.mapping = mapping = model_config.mapping
        self.rank = mapping.rank
        self.tp_rank, self.tp_size = mapping.moe_tp_rank, mapping.moe_tp_size
        self.ep_rank, self.ep_size = mapping.moe_ep_rank, mapping.moe_ep_size
        self.use_dp = mapping.enable_attention_dp
        self.parallel_size = mapping.tp_size
        self.intermediate_size_per_partition = intermediate_size // self.tp_size
        self.layer_load_balancer: Any = None
        if num_experts % self.ep_size:
            raise ValueError(f"{num_experts} experts cannot be spread over {self.ep_size} expert-parallel ranks")
        self.expert_size_per_partition = num_experts // self.ep_size
        self.slot_start = self.ep_rank * self.expert_size_per_partition
        self.initial_local_expert_ids = list(range(self.slot_start, self.slot_start + self.expert_size_per_partition))
        self._weights_created = False

    def _using_dynamic_load_balancer(self) -> bool:
        return self.layer_load_balancer is not None and bool(self.layer_load_balancer.is_dynamic_routing())

    @property
    def quant_algo(self) -> QuantAlgo | None:
        return self.quant_config.quant_algo if self.quant_config is not None else None
