"""``ConfigurableMoE`` of C2 binds late: the backend is built and filled in ``create_weights``."""

import copy

from tensorrt_llm._wrapping import build_backend

from .activation import install_activation_params
from .impl_base import MoEImplBase
from .wrapper import Wrapper


class ConfigurableMoE(Wrapper):
    def __init__(self, *, moe_cls, model_config, **kwargs):
        super().__init__(model_config=model_config, **kwargs)
        if not issubclass(moe_cls, MoEImplBase):
            raise ValueError(f"layer {self.layer_idx} resolves to {moe_cls.__name__}, a complete MoE layer")
        self._pinned_moe_cls = moe_cls
        self._backend_bound = False
        if not model_config.skip_create_weights_in_init:
            self.create_weights()

    def create_weights(self):
        from tensorrt_llm._torch.moe.fused_moe.create_moe import create_moe_backend

        quant_config = self.quant_config
        if not self._backend_bound:
            model_config = self.model_config
            if quant_config is not model_config.quant_config:
                model_config = copy.copy(model_config)
                model_config.quant_config = quant_config
            build_backend(self, create_moe_backend, self._pinned_moe_cls, model_config, activation=self.activation)
            install_activation_params(self.backend)
        self.backend.quant_config = quant_config
        self.backend.create_weights()
        if not self._backend_bound:
            self._install_backend_dependents()
            self._backend_bound = True

    @property
    def _weights_created(self):
        return self._backend_bound and bool(self.backend._weights_created)
