"""Routing methods: router logits to int32 expert ids and float32 weights (``fused_moe/routing.py`` of TensorRT-LLM)."""

from __future__ import annotations

import torch


class BaseMoeRoutingMethod:
    """``apply(router_logits [T, E])`` returns ids ``[T, top_k]`` int32 and scales ``[T, top_k]`` float32."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k

    @property
    def experts_per_token(self) -> int:
        return self.top_k

    def get_experts_per_token(self) -> int:
        return self.top_k

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError


class RenormalizeMoeRoutingMethod(BaseMoeRoutingMethod):
    """Top-k, then softmax over the chosen ones (Qwen3-MoE)."""

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = router_logits.float().topk(self.top_k, dim=-1)
        return ids.to(torch.int32), values.softmax(-1)


class DeepSeekV3MoeRoutingMethod(BaseMoeRoutingMethod):
    """Sigmoid, bias for the choice only, weights renormalized and scaled (Nemotron-H, DeepSeek-V3 with one group)."""

    def __init__(self, top_k: int, e_score_correction_bias: torch.Tensor, routed_scaling_factor: float = 1.0) -> None:
        super().__init__(top_k)
        self.e_score_correction_bias = e_score_correction_bias
        self.routed_scaling_factor = routed_scaling_factor

    def apply(self, router_logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = router_logits.float().sigmoid()
        ids = (scores + self.e_score_correction_bias.float()).topk(self.top_k, dim=-1).indices
        chosen = scores.gather(-1, ids)
        return ids.to(torch.int32), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * self.routed_scaling_factor
