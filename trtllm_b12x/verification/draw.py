"""Activations and routes for the calls that a layer is measured by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trtllm_b12x.checkpoint import Checkpoint, CheckpointError, MoELayer
from trtllm_b12x.host import embedded
from trtllm_b12x.strict_reference import Call, judge

MIN_TOKENS = 63
"""A case makes as many calls as it takes for this many tokens, or for :data:`MAX_READS`.  Over fewer tokens one code that rounds
the other way shows: 0.07 was seen for 5 tokens where 64 give 0.03."""

EXPERTS = 16
"""Experts that a case's tokens choose among, each case others, so that a large layer takes seconds."""

MAX_READS = 64
"""Experts that the calls of a case read in all: 8 calls of one token with top 8."""

OUTLIER_CHANNELS = 128
"""One channel in so many carries the large activations, eight times the others', as in real models."""


@dataclass(frozen=True)
class Case:
    """Token count of a call, and its outlier channels in multiples of what the layer was calibrated for."""

    tokens: int
    outliers: float = 0.97


@dataclass(frozen=True)
class Batch:
    """One call: the case it belongs to, router logits ``(T, E)``, and what the router makes of them."""

    case: int
    logits: torch.Tensor
    call: Call


def draw(checkpoint: Checkpoint, layer: MoELayer, cases: Sequence[Case], seed: int, device: str) -> tuple[Any, list[Batch]]:
    """A routing method and every call of every case.  The model's own router is not under test, its experts are.

    Raises:
        CheckpointError: the calibration of the layer cannot be used.
    """
    routing = embedded.RenormalizeMoeRoutingMethod(layer.top_k)
    form = judge(checkpoint.weights(layer), layer.num_experts, layer.gated, layer.quant_algo)
    try:
        largest = form.largest_input()
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.directory}: {layer.name} {error}") from None
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer.index)
    order = torch.randperm(layer.num_experts, generator=generator)
    pool_size = min(layer.num_experts, max(EXPERTS, 2 * layer.top_k))
    batches = []
    for position, case in enumerate(cases):
        pool = order.roll(-position * pool_size)[:pool_size]
        reads = min(case.tokens * layer.top_k, pool_size)
        wanted = min(-(-MIN_TOKENS // case.tokens), max(MAX_READS // reads, -(-pool_size // reads)))
        first = 0
        for _ in range(wanted):
            x = form.move_off_ties(draw_activations(case.tokens, layer.hidden_size, largest, case.outliers, generator)).to(device)
            logits = draw_router_logits(case.tokens, layer.num_experts, layer.top_k, pool, first, generator).to(device)
            batches.append(Batch(position, logits, Call(x, *routing.apply(logits))))
            first += case.tokens * _experts_in_turn(layer.top_k)
    return routing, batches


def draw_activations(tokens: int, hidden_size: int, largest: float, outliers: float, generator: torch.Generator) -> torch.Tensor:
    """bf16 activations ``(tokens, hidden_size)`` with a few outlier channels, as the layers of real models see them.

    ``largest`` is the calibration's: the largest value is 0.97 of that, and ``outliers`` times it where that is more, which moves
    the outlier channels alone.
    """
    x = torch.randn(tokens, hidden_size, generator=generator)
    channels = torch.randperm(hidden_size, generator=generator)[: -(-hidden_size // OUTLIER_CHANNELS)]
    x[:, channels] *= 8
    x *= 0.97 * largest / x.abs().max()
    if outliers > 1:
        x[:, channels] *= outliers / 0.97
    return x.to(torch.bfloat16)


def draw_router_logits(
    tokens: int, num_experts: int, top_k: int, pool: torch.Tensor, first: int, generator: torch.Generator
) -> torch.Tensor:
    """Router logits ``(tokens, num_experts)``: experts of ``pool`` only, half of each token's in turn from entry ``first`` on,
    half at random."""
    logits = torch.full((tokens, num_experts), -100.0)
    inside = torch.randn(tokens, len(pool), generator=generator)
    turns = _experts_in_turn(top_k)
    chosen = (first + torch.arange(tokens * turns)).view(tokens, turns) % len(pool)
    inside.scatter_add_(1, chosen, torch.full(chosen.shape, 8.0))
    logits[:, pool] = inside
    return logits


def _experts_in_turn(top_k: int) -> int:
    return max(1, top_k // 2)
