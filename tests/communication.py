# SPDX-License-Identifier: Apache-2.0
"""Communicate between ranks with ``torch.distributed``: all-reduce, and the gather for attention-DP.

Source: ``fused_moe/communication/allgather_reducescatter.py``. The tokens of all ranks are gathered in rank order. Every rank
computes its experts on all of them. Reduce-scatter returns the sums. Post-quantization dispatch is supported.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class AllGatherReduceScatter:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._sizes: list[int] = []

    def supports_post_quant_dispatch(self) -> bool:
        return True

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        hidden_states_sf: torch.Tensor | None,
        token_selected_slots: torch.Tensor,
        token_final_scales: torch.Tensor | None,
        all_rank_num_tokens: list[int],
        use_dp_padding: bool | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        """Gather the rows of all ranks, in rank order. None stays None."""
        self._sizes = all_rank_num_tokens
        tensors = hidden_states, hidden_states_sf, token_selected_slots, token_final_scales
        return tuple(None if rows is None else self._gather(rows) for rows in tensors)

    def combine(self, final_hidden_states: torch.Tensor, all_rank_max_num_tokens: int | None = None) -> torch.Tensor:
        """Sum over the ranks and keep this rank's rows."""
        return all_reduce(final_hidden_states).split(self._sizes)[self.rank]

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        padded = rows.new_zeros(max(self._sizes), *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        parts = [torch.empty_like(padded) for _ in self._sizes]
        dist.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, self._sizes, strict=True)])


def all_reduce(values: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks in float32. Return the dtype of ``values``."""
    total = values.float()
    dist.all_reduce(total)
    return total.to(values.dtype)
