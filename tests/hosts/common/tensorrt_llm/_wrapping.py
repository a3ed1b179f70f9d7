# SPDX-License-Identifier: Apache-2.0
"""What layers and their wrappers of all generations have in common."""

from __future__ import annotations

import weakref
from unittest import mock

import torch

from tensorrt_llm._torch.utils import get_model_extra_attrs, is_torch_compiling
from tests.communication import AllGatherReduceScatter, all_reduce


class Delegating:
    """A wrapper that leaves weights and calls to ``backend``, as ``scheduler`` orders them."""

    def _supports_load_balancer(self):
        return bool(self.backend._supports_load_balancer()) if hasattr(self, "backend") else self.use_dp

    def create_weights(self):
        self.backend.create_weights()

    def load_weights(self, weights, allow_partial_loading=False):
        self.backend.load_weights(weights, allow_partial_loading)

    def post_load_weights(self):
        self.backend.post_load_weights()

    def process_weights_after_loading(self):
        self.backend.process_weights_after_loading()

    def pre_reload_weights(self):
        self.backend.pre_reload_weights()

    def forward_impl(self, x, router_logits, **kwargs):
        return self.scheduler.forward(x, router_logits, **kwargs)

    @property
    def enable_alltoall(self):
        return self.comm is not None and not isinstance(self.comm, AllGatherReduceScatter)


def build_backend(moe, create_moe_backend, moe_cls, model_config, **more):
    """Build what the wrapper is about to hold, without weights."""
    vars(model_config)["_frozen"] = True
    with mock.patch.dict(vars(model_config), skip_create_weights_in_init=True):
        backend = create_moe_backend(
            moe_cls=moe_cls,
            routing_method=moe.routing_method,
            num_experts=moe.num_experts,
            hidden_size=moe.hidden_size,
            intermediate_size=moe.intermediate_size,
            dtype=moe.dtype,
            reduce_results=moe.reduce_results,
            model_config=model_config,
            aux_stream_dict=moe.aux_stream_dict,
            weight_loading_mode=moe.weight_loading_mode,
            bias=moe.bias,
            apply_router_weight_on_input=moe.apply_router_weight_on_input,
            layer_idx=None,
            init_load_balancer=False,
            **more,
        )
    backend.layer_idx, backend.layer_load_balancer = moe.layer_idx, moe.layer_load_balancer
    moe.backend = backend


class CompleteLayer:
    """Under a compiler its ``forward`` is one operator, to which it is known by its index."""

    def complete(self, layer_idx, model_config, balancer):
        self.all_reduce = all_reduce if not self.use_dp and self.parallel_size > 1 else None
        self.register_to_config = layer_idx is not None
        if layer_idx is not None:
            layers = model_config.extra_attrs.setdefault("moe_layers", {})
            layers[str(layer_idx)] = weakref.ref(self)
        if balancer is not None:
            self.layer_load_balancer = balancer

    def forward(self, x, router_logits, **kwargs):
        if self.register_to_config and is_torch_compiling():
            return moe_custom_op(str(self.layer_idx), x, router_logits)
        return self.forward_impl(x, router_logits, **kwargs)


@torch.library.custom_op("trtllm::moe_custom_op", mutates_args=())
def moe_custom_op(layer_idx: str, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
    layers = get_model_extra_attrs()["moe_layers"]
    return layers[layer_idx]().forward_impl(x, router_logits)


@moe_custom_op.register_fake
def _(layer_idx, x, router_logits):
    return torch.empty_like(x)
