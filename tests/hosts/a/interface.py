"""``MoE``: metaclass ``type``, so that ``@abstractmethod`` binds nobody; under a compiler ``forward`` is one operator."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from typing import Any

import torch
from tensorrt_llm._torch.utils import ActivationType, get_model_extra_attrs, is_torch_compiling

from trtllm_b12x.host.embedded import interface
from trtllm_b12x.host.embedded.config import MoEWeightLoadingMode

from ...model_config import ModelConfig
from .communication import all_reduce
from .moe_load_balancer import get_moe_load_balancer
from .routing import BaseMoeRoutingMethod

__all__ = ["MoE", "MoEWeightLoadingMode", "moe_custom_op"]


@torch.library.custom_op("trtllm::moe_custom_op", mutates_args=())
def moe_custom_op(layer_idx: str, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
    layers: Any = get_model_extra_attrs()["moe_layers"]
    result: torch.Tensor = layers[layer_idx]().forward_impl(x, router_logits)
    return result


@moe_custom_op.register_fake
def _(layer_idx: str, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class MoE(interface.MoE):
    def __init__(
        self,
        *,
        routing_method: BaseMoeRoutingMethod,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        aux_stream_dict: Any = None,
        weight_loading_mode: MoEWeightLoadingMode = MoEWeightLoadingMode.VANILLA,
        bias: bool = False,
        swiglu_alpha: torch.Tensor | None = None,
        swiglu_beta: torch.Tensor | None = None,
        swiglu_limit: torch.Tensor | None = None,
        layer_idx: int | None = None,
        activation_type: ActivationType = ActivationType.Swiglu,
        init_load_balancer: bool = True,
    ) -> None:
        super().__init__(
            routing_method=routing_method,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            dtype=dtype,
            reduce_results=reduce_results,
            model_config=model_config,
            aux_stream_dict=aux_stream_dict,
            weight_loading_mode=weight_loading_mode or MoEWeightLoadingMode.VANILLA,
            bias=bias,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            swiglu_limit=swiglu_limit,
            layer_idx=layer_idx,
            activation_type=activation_type,
        )
        mapping = model_config.mapping
        self.cluster_rank, self.cluster_size = mapping.moe_cluster_rank, mapping.moe_cluster_size
        self.all_reduce = all_reduce if not self.use_dp and self.parallel_size > 1 else None
        self.register_to_config = layer_idx is not None
        if layer_idx is not None:
            layers: dict[str, Any] = model_config.extra_attrs.setdefault("moe_layers", {})
            layers[str(layer_idx)] = weakref.ref(self)
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
