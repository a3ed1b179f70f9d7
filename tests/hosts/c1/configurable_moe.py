# SPDX-License-Identifier: Apache-2.0
"""``ConfigurableMoE`` of C1: the backend is built, without weights, in ``__init__``."""

import copy

from tensorrt_llm._wrapping import build_backend

from .wrapper import Wrapper

_OF_BACKENDS = ("activation", "situ_beta", "situ_linear_beta")


class ConfigurableMoE(Wrapper):
    def __init__(self, *, moe_cls, model_config, override_quant_config=None, **kwargs):
        from tensorrt_llm._torch.modules.fused_moe.create_moe import create_moe_backend

        local = {name: kwargs.pop(name) for name in list(kwargs) if name in _OF_BACKENDS or name.startswith("trtllm_gen_")}
        super().__init__(model_config=model_config, override_quant_config=override_quant_config, **kwargs)
        self._override_quant_config = override_quant_config
        if override_quant_config is not None:
            model_config = copy.deepcopy(model_config)
            model_config.quant_config = override_quant_config
        options = {name: value for name, value in kwargs.items() if name.startswith("swiglu_")} | local
        build_backend(self, create_moe_backend, moe_cls, model_config, activation_type=self.activation_type, **options)
        if not model_config.skip_create_weights_in_init:
            self.create_weights()
        self._install_backend_dependents()

    def create_weights(self):
        """With the quantization that the layer has by now, which may not be the one it was selected for."""
        override = self._override_quant_config
        self.backend.quant_config = override if override is not None else self.quant_config
        self.backend.create_weights()
