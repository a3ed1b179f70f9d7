"""``MoE``: metaclass ``type``, so that ``@abstractmethod`` binds nobody; under a compiler ``forward`` is one operator."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from tensorrt_llm._torch.utils import is_torch_compiling
from tensorrt_llm._wrapping import moe_custom_op, register_layer

from trtllm_b12x.engines.trtllm.embedded import interface
from trtllm_b12x.engines.trtllm.embedded.config import MoEWeightLoadingMode

from ...model_config import ModelConfig
from .communication import all_reduce
from .moe_load_balancer import get_moe_load_balancer

__all__ = ["MoE", "MoEWeightLoadingMode", "moe_custom_op"]


class MoE(interface.MoE):
    def __init__(
        self,
        *,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        weight_loading_mode: MoEWeightLoadingMode | None = None,
        layer_idx: int | None = None,
        init_load_balancer: bool = True,
        **arguments: Any,
    ) -> None:
        mode = weight_loading_mode or MoEWeightLoadingMode.VANILLA
        super().__init__(model_config=model_config, weight_loading_mode=mode, layer_idx=layer_idx, **arguments)
        mapping = model_config.mapping
        self.cluster_rank, self.cluster_size = mapping.moe_cluster_rank, mapping.moe_cluster_size
        self.all_reduce = all_reduce if not self.use_dp and self.parallel_size > 1 else None
        register_layer(self, layer_idx, model_config)
        if init_load_balancer and get_moe_load_balancer() is not None:
            self.layer_load_balancer = get_moe_load_balancer()

    def _using_load_balancer(self) -> bool:
        return self.layer_load_balancer is not None

    def _add_raw_shared_weights_for_unmap(self, weights: list[Any]) -> None:
        pass

    @property
    def expand_intermediate_size_per_partition(self) -> int:
        return int(self.intermediate_size_per_partition * self.intermediate_size_expand_ratio)

    def process_weights_after_loading(self) -> None:
        self.quant_method.process_weights_after_loading(self)

    def pre_reload_weights(self) -> None:
        self.quant_method.pre_reload_weights(self)

    @abstractmethod
    def quantize_input(self, x: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    @abstractmethod
    def run_moe(self, x: Any, token_selected_experts: Any, token_final_scales: Any, x_sf: Any = None, **kwargs: Any) -> Any:
        raise NotImplementedError

    def forward(self, x: Any, router_logits: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.register_to_config and is_torch_compiling():
            return moe_custom_op(self.layer_idx_str, x, router_logits)
        return self.forward_impl(x, router_logits, **kwargs)
