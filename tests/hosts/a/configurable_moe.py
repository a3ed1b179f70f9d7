# SPDX-License-Identifier: Apache-2.0
"""``ConfigurableMoE`` of generation A: it feeds its backend by the exact class."""

from tensorrt_llm._scheduling import KeywordScheduler

from .fused_moe_cutlass import CutlassFusedMoE
from .other_backends import CuteDslFusedMoE, DeepGemmFusedMoE
from .wrapper import Wrapper


class _Scheduler(KeywordScheduler):
    def check(self, scales):
        if isinstance(self.backend, CutlassFusedMoE):
            super().check(scales)

    def backend_kwargs(self, counts, **call):
        if self.backend.__class__ in (CutlassFusedMoE, DeepGemmFusedMoE, CuteDslFusedMoE):
            pass
        if self.backend.__class__ == CutlassFusedMoE:
            return super().backend_kwargs(counts, **call)
        return {}


class ConfigurableMoE(Wrapper):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.scheduler = _Scheduler(self, self.backend)

    def _resolve(self, model_config, override_quant_config):
        from tensorrt_llm._torch.modules.fused_moe.create_moe import get_moe_cls

        return get_moe_cls(model_config, override_quant_config=override_quant_config), model_config
