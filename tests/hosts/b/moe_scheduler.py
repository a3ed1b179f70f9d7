# SPDX-License-Identifier: Apache-2.0
"""The calls into a backend in generation B; keywords go to ``CutlassFusedMoE`` alone, by its exact class."""

from tensorrt_llm._scheduling import KeywordScheduler

from .fused_moe_cutlass import CutlassFusedMoE
from .other_backends import DenseGEMMFusedMoE, TRTLLMGenFusedMoE


class ExternalCommMoEScheduler(KeywordScheduler):
    def filled(self, chunk, first):
        """With attention-DP, the first chunk again."""
        moe = self.moe
        if not moe.use_dp or len(chunk[0]):
            return chunk
        counts, rank = chunk[3], moe.mapping.tp_rank
        counts[rank] = first[3][rank]
        return (*first[:3], counts)

    def check(self, scales):
        moe = self.moe
        if isinstance(moe.backend, (CutlassFusedMoE, DenseGEMMFusedMoE)):
            super().check(scales)

    def backend_kwargs(self, counts, *, do_finalize=True, lora_params=None, **call):
        moe = self.moe
        if moe.backend.__class__ == CutlassFusedMoE:
            return {**super().backend_kwargs(counts, **call), "lora_params": lora_params}
        return {"do_finalize": do_finalize} if isinstance(moe.backend, TRTLLMGenFusedMoE) else {}
