"""``CutlassFusedMoEBase``: what the leaves share, and abstract: a leaf brings its checks, its weights and its calls."""

from __future__ import annotations

from typing import Any

from ....model_config import ModelConfig
from .._generation import ACTIVATIONS
from ..impl_base import MoEImplBase, apply_moe_impl_construction_state
from ..impl_contract import canonical_quant
from .eligibility import SmSupport, identity_quant


class CutlassFusedMoEBase(MoEImplBase):
    descriptor: Any
    sm_support: SmSupport
    supported_dtypes: frozenset[Any]
    supports_gptoss_style = False
    rejects_gptoss_expert_bias = False
    activation_support = ACTIVATIONS

    def __init__(
        self,
        *,
        model_config: ModelConfig = ModelConfig(),  # noqa: B008 - as the host's
        apply_router_weight_on_input: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(eplb=None)
        apply_moe_impl_construction_state(self, model_config=model_config, **arguments)
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.use_fused_finalize = not model_config.moe_disable_finalize_fusion and model_config.lora_config is None
        self._weights_created = False
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def create_weights(self) -> None:
        if self._weights_created:
            return
        self._check_quant_config_is_my_format()
        super().create_weights()

    def _check_quant_config_is_my_format(self) -> None:
        expected = type(self).descriptor.identity.quant
        actual = identity_quant(canonical_quant(None if self.quant_config is None else self.quant_config.quant_algo))
        if actual != expected:
            name = type(self).__name__
            raise ValueError(
                f"{name} implements quant={expected}, but layer {self.layer_idx}'s quant_config resolves to {actual}"
            )

    def _check_configs(self) -> None:
        assert self._weights_created
        if self.apply_router_weight_on_input:
            assert self.routing_method.top_k == 1, "Current walkaround only supports top-1 routing"

    def _supports_load_balancer(self) -> bool:
        return True

    def supports_moe_output_in_alltoall_workspace(self) -> bool:
        return True
