# SPDX-License-Identifier: Apache-2.0
"""``MoE``, a complete layer, and the sizes and ranks that it shares with its backend."""

from tensorrt_llm._wrapping import CompleteLayer
from torch import nn

from trtllm_b12x.engines.trtllm.embedded.config import MoEWeightLoadingMode

from ...model_config import ModelConfig
from ._generation import set_activation
from .impl_blocks import MoEEplbWeightLayoutMixin, MoEWeightOwnerMixin
from .moe_load_balancer import get_moe_load_balancer

__all__ = ["MoE", "MoEWeightLoadingMode"]


def set_layer(
    module,
    *,
    routing_method,
    num_experts,
    hidden_size,
    intermediate_size,
    dtype=None,
    reduce_results=False,
    model_config=ModelConfig(),  # noqa: B008 - as the host's
    aux_stream_dict=None,
    weight_loading_mode=None,
    bias=False,
    layer_idx=None,
    **activation,
):
    """Sizes, ranks and slots, which wrapper and backend each set for themselves."""
    module.routing_method, module.num_experts, module.bias, module.dtype = routing_method, num_experts, bias, dtype
    module.hidden_size = hidden_size
    module.intermediate_size, module.reduce_results = intermediate_size, reduce_results
    module.weight_loading_mode = weight_loading_mode or MoEWeightLoadingMode.VANILLA
    module.layer_idx = layer_idx
    set_activation(module, **activation)
    module.quant_config, module.moe_backend = model_config.quant_config, model_config.moe_backend
    module.mapping = mapping = model_config.mapping
    module.rank, module.use_dp = mapping.rank, mapping.enable_attention_dp
    module.tp_rank, module.tp_size = mapping.moe_tp_rank, mapping.moe_tp_size
    module.ep_rank, module.ep_size = mapping.moe_ep_rank, mapping.moe_ep_size
    module.parallel_rank, module.parallel_size = mapping.tp_rank, mapping.tp_size
    module.intermediate_size_per_partition = intermediate_size // module.tp_size
    module.all_reduce, module.aux_stream_dict, module.layer_load_balancer = None, aux_stream_dict, None
    size = module.expert_size_per_partition = num_experts // module.ep_size
    module.slot_start = module.ep_rank * size
    module.initial_local_expert_ids = list(range(module.slot_start, module.slot_start + size))


class MoE(CompleteLayer, MoEWeightOwnerMixin, MoEEplbWeightLayoutMixin, nn.Module):
    def __init__(
        self,
        *,
        model_config=ModelConfig(),  # noqa: B008 - as the host's
        layer_idx=None,
        init_load_balancer=True,
        **arguments,
    ):
        super().__init__()
        set_layer(self, model_config=model_config, layer_idx=layer_idx, **arguments)
        self.complete(layer_idx, model_config, get_moe_load_balancer() if init_load_balancer else None)
