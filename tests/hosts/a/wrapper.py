# SPDX-License-Identifier: Apache-2.0
"""What ``ConfigurableMoE`` of generations A and B owns: it asks for the class again and builds the backend without weights."""

from tensorrt_llm._wrapping import Delegating, build_backend

from ...model_config import ModelConfig
from .communication import CommunicationFactory
from .interface import MoE


class Wrapper(Delegating, MoE):
    def __init__(
        self,
        *,
        model_config=ModelConfig(),  # noqa: B008 - as the host's
        apply_router_weight_on_input=False,
        override_quant_config=None,
        **kwargs,
    ):
        from tensorrt_llm._torch.modules.fused_moe.create_moe import create_moe_backend

        super().__init__(model_config=model_config, **kwargs)
        self.model_config = model_config
        self.apply_router_weight_on_input = apply_router_weight_on_input
        moe_cls, backend_config = self._resolve(model_config, override_quant_config)
        swiglu = {name: kwargs.get(name) for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit")}
        more = {"without_comm": True, "activation_type": self.activation_type, **swiglu}
        build_backend(self, create_moe_backend, moe_cls, backend_config, **more)
        if not model_config.skip_create_weights_in_init:
            self.backend.create_weights()
        self.comm = CommunicationFactory.create_strategy(model_config)
        self.moe_max_num_tokens = model_config.moe_max_num_tokens
        self._weights_removed = True
