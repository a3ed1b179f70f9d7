# SPDX-License-Identifier: Apache-2.0
"""Draw activations and routes for the calls that verify a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_b12x.engines.trtllm import embedded
from trtllm_b12x.tools.checkpoint import Checkpoint, CheckpointError, MoELayer

from .reference import MoECall, reference_for

MIN_TOKENS = 63
"""A case repeats its call until it has this many tokens, or has read ``MAX_READS`` experts."""

EXPERTS = 16
"""Experts that the tokens of a case choose from, different ones in each case. So a large layer takes seconds."""

MAX_READS = 64
"""Experts that the calls of a case read in all: 8 calls of one token with top 8."""

OUTLIER_CHANNELS = 128
"""One channel in this many carries activations eight times as large as the others, as in real models."""


@dataclass(frozen=True)
class Case:
    """Token count of a call, and its outlier channels in multiples of the calibrated range."""

    tokens: int
    outliers: float = 0.97


@dataclass
class Batch:
    """One call and its results."""

    case: Case
    logits: torch.Tensor
    """Router logits ``(T, E)``."""
    call: MoECall
    output: Any = 0.0
    """Output summed over the ranks, float32 ``(T, H)``."""
    families: set[str] = field(default_factory=set)
    """Families that served the call on at least one rank."""
    rounding: float = 0.0
    """Error that rounding explains (``Kernel.rounding``)."""
    references: list[torch.Tensor] = field(default_factory=list)
    """Outputs of the reference, and of the unquantized model."""


def draw(checkpoint: Checkpoint, layer: MoELayer, cases: Sequence[Case], seed: int, device: str) -> list[Batch]:
    """Return the calls of every case. The model's own router is not tested.

    Raise CheckpointError if the layer's calibration cannot be used.
    """
    routing = embedded.RenormalizeMoeRoutingMethod(layer.top_k)
    dequantizer = reference_for(checkpoint.weights(layer), layer.num_experts, layer.gated, layer.quant_algo)
    try:
        largest = dequantizer.largest_input()
    except ValueError as error:
        raise CheckpointError(checkpoint.directory, f"{layer.name} {error}", "calibrate and export the model again") from None
    generator = torch.Generator().manual_seed(seed * 1_000_003 + layer.index)
    order = torch.randperm(layer.num_experts, generator=generator)
    turns = max(1, layer.top_k // 2)
    pool_size = min(layer.num_experts, max(EXPERTS, 2 * layer.top_k))
    batches = []
    for position, case in enumerate(cases):
        pool = order.roll(-position * pool_size)[:pool_size]
        reads = min(case.tokens * layer.top_k, pool_size)
        calls = min(-(-MIN_TOKENS // case.tokens), max(MAX_READS // reads, -(-pool_size // reads)))
        first = 0
        for _ in range(calls):
            x = draw_activations(case.tokens, layer.hidden_size, largest, case.outliers, generator)
            logits = _router_logits(case.tokens, layer, pool, first, turns, generator).to(device)
            call = MoECall(dequantizer.move_off_ties(x).to(device), *routing.apply(logits))
            batches.append(Batch(case, logits, call))
            first += case.tokens * turns
    return batches


def draw_activations(tokens: int, hidden_size: int, largest: float, outliers: float, generator: torch.Generator) -> torch.Tensor:
    """Draw bf16 activations ``(tokens, hidden_size)`` with a few outlier channels, as in real models.

    The largest value is 0.97 times ``largest``, the calibrated maximum. ``outliers`` above 1 scales outlier channels beyond it.
    """
    x = torch.randn(tokens, hidden_size, generator=generator)
    channels = torch.randperm(hidden_size, generator=generator)[: -(-hidden_size // OUTLIER_CHANNELS)]
    x[:, channels] *= 8
    x *= 0.97 * largest / x.abs().max()
    if outliers > 1:
        x[:, channels] *= outliers / 0.97
    return x.to(torch.bfloat16)


def _router_logits(
    tokens: int, layer: MoELayer, pool: torch.Tensor, first: int, turns: int, generator: torch.Generator
) -> torch.Tensor:
    """Draw router logits ``(tokens, num_experts)`` that choose experts of ``pool`` only.

    ``turns`` experts of each token cycle through ``pool`` from entry ``first`` on. The others are random.
    """
    logits = torch.full((tokens, layer.num_experts), -100.0)
    inside = torch.randn(tokens, len(pool), generator=generator)
    chosen = (first + torch.arange(tokens * turns)).view(tokens, turns) % len(pool)
    inside.scatter_add_(1, chosen, torch.full(chosen.shape, 8.0))
    logits[:, pool] = inside
    return logits
