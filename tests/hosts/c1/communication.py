from __future__ import annotations

from typing import Any

import torch

from trtllm_b12x.engines.trtllm.embedded import communication
from trtllm_b12x.engines.trtllm.embedded.communication import all_reduce

__all__ = ["AllGatherReduceScatter", "CommunicationFactory", "all_reduce"]


class AllGatherReduceScatter(communication.AllGatherReduceScatter):
    """With the arguments that the scheduler passes to every strategy."""

    def __init__(self, mapping: Any) -> None:
        super().__init__(mapping.tp_rank)

    def dispatch(self, *given: Any, use_dp_padding: bool | None = None, **arguments: Any) -> Any:  # type: ignore[override]
        return super().dispatch(*given, **arguments)

    def combine(self, final_hidden_states: torch.Tensor, all_rank_max_num_tokens: int | None = None) -> torch.Tensor:
        return super().combine(final_hidden_states)

    def destroy(self) -> None:
        pass


class CommunicationFactory:
    @staticmethod
    def create_strategy(model_config: Any, **kwargs: Any) -> AllGatherReduceScatter | None:
        mapping = model_config.mapping
        return AllGatherReduceScatter(mapping=mapping) if mapping.enable_attention_dp and mapping.tp_size > 1 else None
