# SPDX-License-Identifier: Apache-2.0
"""Convert router logits to ids and router weights in torch, in float32, as kernels that take logits do."""

from __future__ import annotations

import torch

from trtllm_b12x.formats.geometry import Scoring


def routes_of(
    scoring: Scoring, top_k: int, logits: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids ``(tokens, top_k)`` int32, the best first, and router weights in float32.

    Args:
        logits: ``(tokens, E)``, float32 or bfloat16.
        bias: ``(E,)`` float32 if ``scoring.bias``, added to scores only to choose experts.
    """
    logits = logits.float()
    scores = logits
    if scoring.kind != "softmax":
        scores = torch.sigmoid(logits) if scoring.kind == "sigmoid" else 0.5 * torch.tanh(0.5 * logits) + 0.5
    choice = scores if bias is None else scores + bias
    # torch.topk may choose any of several equal values.
    if scoring.higher_first:
        ids = choice.shape[1] - 1 - choice.flip(1).argsort(dim=1, descending=True, stable=True)[:, :top_k]
    else:
        ids = choice.argsort(dim=1, descending=True, stable=True)[:, :top_k]
    if scoring.kind == "softmax":
        weights = logits.gather(1, ids).softmax(1) if scoring.renormalize else logits.softmax(1).gather(1, ids)
    else:
        weights = scores.gather(1, ids)
        if scoring.renormalize:
            weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return ids.int(), weights * scoring.factor
