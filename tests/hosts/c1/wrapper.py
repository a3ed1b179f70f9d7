# SPDX-License-Identifier: Apache-2.0
"""What ``ConfigurableMoE`` of C1 and C2 have in common: all but when and how the backend is bound."""

from tensorrt_llm._wrapping import Delegating

from ...model_config import ModelConfig
from .communication import CommunicationFactory
from .interface import MoE
from .moe_scheduler import create_moe_scheduler


class Wrapper(Delegating, MoE):
    def __init__(
        self,
        *,
        model_config=ModelConfig(),  # noqa: B008 - as the host's
        aux_stream_dict=None,
        apply_router_weight_on_input=False,
        override_quant_config=None,
        **kwargs,
    ):
        super().__init__(model_config=model_config, **kwargs)
        if override_quant_config is not None:
            self.quant_config = override_quant_config
        self.model_config, self.aux_stream_dict = model_config, aux_stream_dict
        self.apply_router_weight_on_input = apply_router_weight_on_input
        if apply_router_weight_on_input:
            assert self.routing_method.top_k == 1, "apply_router_weight_on_input only supports top-1 routing"
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self._weights_removed = True  # the model loader skips the wrapper and finds the backend as a submodule

    def _install_backend_dependents(self):
        self.comm = CommunicationFactory.create_strategy(self.model_config)
        self.backend.validate_configurable_moe(self)
        self.scheduler = create_moe_scheduler(self)

    def load_weights(self, weights, allow_partial_loading=False):
        self.backend.load_weights(weights, allow_partial_loading)
        if weights:
            self._weights_transformed = False

    def transform_weights(self):
        if getattr(self, "_weights_transformed", False):
            return
        self.backend.transform_weights()
        self._weights_transformed = True

    def cache_derived_state(self):
        self.backend.cache_derived_state()

    def post_load_weights(self):
        self.transform_weights()
        self.cache_derived_state()
