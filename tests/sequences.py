"""Sequences of calls whose numbers must not depend on the host's generation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests import layers
from tests.checkpoints import random_experts


def run(tokens: int, gated: bool = True, experts: int = 4, size: int = 192, **arguments: Any) -> torch.Tensor:
    """Output ``(tokens, 128)`` of one loaded layer."""
    tensors = random_experts(experts, 128, size, gated)
    module = layers.load(layers.create(experts, 128, size, gated=gated, **arguments), tensors)
    x, logits = layers.inputs(module, tokens, tensors)
    result: torch.Tensor = module(x, logits)
    return result


def distinct_scales() -> torch.Tensor:
    """gate and up with a ``weight_scale_2`` each."""
    tensors = random_experts(4, 128, 192, up_to_gate=1.7)
    module = layers.load(layers.create(4, 128, 192), tensors)
    x, logits = layers.inputs(module, 9, tensors)
    result: torch.Tensor = module(x, logits)
    return result


def refit() -> torch.Tensor:
    """Loaded twice: the second weights are the ones that run."""
    tensors = random_experts(4, 128, 192)
    module = layers.load(layers.create(4, 128, 192), random_experts(4, 128, 192, seed=3))
    layers.load(module, tensors)
    x, logits = layers.inputs(module, 9, tensors)
    result: torch.Tensor = module(x, logits)
    return result


def _rank(rank: int, tp: int, ep: int) -> dict[str, int]:
    return {"world_size": 2, "rank": rank, "tp_size": 2, "moe_tp_size": tp, "moe_ep_size": ep}


SEQUENCES: dict[str, Callable[[], torch.Tensor]] = {
    "decode": partial(run, 5),
    "prefill": partial(run, 100),
    "prefill, host alone": partial(run, 100, size=256, promote=False),
    "chunks": partial(run, 120, max_num_tokens=200, moe_max_num_tokens=50),
    "chunks on both sides": partial(run, 140, max_num_tokens=200, moe_max_num_tokens=100),
    "ReLU2": partial(run, 7, gated=False),
    "ReLU2 prefill": partial(run, 80, gated=False),
    "distinct scales": distinct_scales,
    "refit": refit,
    **{f"TP rank {r}": partial(run, 6, size=384, mapping=_rank(r, 2, 1)) for r in range(2)},
    **{f"EP rank {r}": partial(run, 6, mapping=_rank(r, 1, 2)) for r in range(2)},
}
"""Name to what makes the numbers; ranks return their partial sums."""
