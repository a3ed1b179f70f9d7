# SPDX-License-Identifier: Apache-2.0
from tests.communication import AllGatherReduceScatter, all_reduce

__all__ = ["AllGatherReduceScatter", "CommunicationFactory", "all_reduce"]


class CommunicationFactory:
    @staticmethod
    def create_strategy(model_config, **kwargs):
        mapping = model_config.mapping
        return AllGatherReduceScatter(mapping.tp_rank) if mapping.enable_attention_dp and mapping.tp_size > 1 else None
