# SPDX-License-Identifier: Apache-2.0
"""``ConfigurableMoE`` of generation B: resolves the class by itself and leaves the calls to a scheduler."""

import copy

from .moe_scheduler import ExternalCommMoEScheduler
from .wrapper import Wrapper


class ConfigurableMoE(Wrapper):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.backend.validate_configurable_moe(self)
        self.scheduler = ExternalCommMoEScheduler(self, self.backend)

    def _resolve(self, model_config, override_quant_config):
        from tensorrt_llm._torch.modules.fused_moe.create_moe import resolve_moe_cls

        moe_cls = resolve_moe_cls(model_config, self.routing_method, self.dtype, override_quant_config=override_quant_config)
        if override_quant_config is not None:  # the backend then holds another object
            model_config = copy.deepcopy(model_config)
            model_config.quant_config = override_quant_config
        return moe_cls, model_config
