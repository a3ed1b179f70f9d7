"""Route tokens: router logits to int32 expert ids and float32 weights (``fused_moe/routing.py`` of TensorRT-LLM)."""

from __future__ import annotations

import torch


class BaseMoeRoutingMethod:
    """Routing method. ``apply(router_logits [T, E])`` returns ids ``[T, top_k]`` int32 and scales ``[T, top_k]`` float32."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k

    @property
    def experts_per_token(self) -> int:
        return self.top_k

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class RenormalizeMoeRoutingMethod(BaseMoeRoutingMethod):
    """Top-k followed by softmax over the selected logits (Qwen3-MoE)."""

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = router_logits.float().topk(self.top_k, dim=-1)
        return ids.to(torch.int32), values.softmax(-1)
