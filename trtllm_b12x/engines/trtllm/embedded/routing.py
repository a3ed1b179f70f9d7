# SPDX-License-Identifier: Apache-2.0
"""Route tokens: router logits to int32 expert ids and float32 weights (``fused_moe/routing.py`` of TensorRT-LLM)."""

from __future__ import annotations

import torch


class RenormalizeMoeRoutingMethod:
    """Top-k followed by softmax over the selected logits (Qwen3-MoE)."""

    def __init__(self, top_k: int) -> None:
        self.top_k = self.experts_per_token = top_k

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map ``[T, E]`` to ids ``[T, top_k]`` int32 and router weights ``[T, top_k]`` float32."""
        values, ids = router_logits.float().topk(self.top_k, dim=-1)
        return ids.to(torch.int32), values.softmax(-1)
