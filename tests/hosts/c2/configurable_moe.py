# SPDX-License-Identifier: Apache-2.0
"""``ConfigurableMoE`` of C2 binds late: the backend is built and filled in ``create_weights``. Newer code builds it at once."""

import copy

from tensorrt_llm._wrapping import build_backend

from .activation import install_activation_params
from .impl_base import MoEImplBase
from .wrapper import Wrapper

LATE = True


class ConfigurableMoE(Wrapper):
    def __init__(self, *, moe_cls, model_config, **kwargs):
        super().__init__(model_config=model_config, **kwargs)
        if not issubclass(moe_cls, MoEImplBase):
            raise ValueError(f"layer {self.layer_idx} resolves to {moe_cls.__name__}, a complete MoE layer")
        self._pinned_moe_cls = moe_cls
        self._backend_bound = False
        if not LATE:
            self._bind()
        if not model_config.skip_create_weights_in_init:
            self.create_weights()
        if not LATE:
            self._install_backend_dependents()

    def _bind(self):
        from tensorrt_llm._torch.moe.fused_moe.create_moe import create_moe_backend

        model_config, quant_config = self.model_config, self.quant_config
        if quant_config is not model_config.quant_config:
            model_config = copy.copy(model_config)
            model_config.quant_config = quant_config
        build_backend(self, create_moe_backend, self._pinned_moe_cls, model_config, activation=self.activation)
        install_activation_params(self.backend)
        self._backend_bound = True

    def create_weights(self):
        late = not self._backend_bound
        if late:
            self._bind()
        self.backend.quant_config = self.quant_config
        self.backend.create_weights()
        if late:
            self._install_backend_dependents()

    @property
    def _weights_created(self):
        return self._backend_bound and bool(self.backend._weights_created)
