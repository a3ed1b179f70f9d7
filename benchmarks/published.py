# SPDX-License-Identifier: Apache-2.0
"""Figures that others published for whole models on SM12x cards, to compare with a roofline or with a new run.

No figure was measured with this package.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One figure."""

    model: str
    """Name in :data:`benchmarks.floor.MODELS` and :data:`benchmarks.on_card.recipes.RECIPES`."""
    card: str
    """Name in :data:`benchmarks.floor.CARDS`."""
    recipe: str
    concurrency: int | None
    """Requests at a time; None: as many as the server takes."""
    path: str
    """Backend that computed the experts."""
    metric: str
    value: float
    source: str


TPOT, TTFT, OUTPUT = "TPOT P50, ms", "TTFT P50, ms", "output tokens/s"
_13773 = "TensorRT-LLM pull request 13773 (1.3.0rc14, FlashInfer 0.6.8)"
_15851 = "TensorRT-LLM pull request 15851"
_OVERVIEW = "TensorRT-LLM docs, performance overview (commit 585c7565), one GPU, TP1"
_SUPER, _SPARK = "2048 in, 1024 out, 5 requests, streaming, no KV reuse", "128 out, FP8 KV cache"

FIGURES: tuple[Published, ...] = (
    Published("Nemotron-3-Super", "RTX PRO 6000", _SUPER, 1, "b12x below 64 tokens, CUTLASS above", TPOT, 11.49, _13773),
    Published("Nemotron-3-Super", "RTX PRO 6000", _SUPER, 1, "CUTLASS", TPOT, 13.97, _13773),
    Published("Nemotron-3-Super", "RTX PRO 6000", _SUPER, 1, "both", TTFT, 154.5, _13773),
    Published("Qwen3.6-35B-A3B", "GB10", _SPARK, 1, "b12x", OUTPUT, 61.8, _15851),
    Published("Qwen3.6-35B-A3B", "GB10", _SPARK, 4, "b12x", OUTPUT, 164.0, _15851),
    Published("Qwen3.6-35B-A3B", "GB10", _SPARK, 8, "b12x", OUTPUT, 224.6, _15851),
    Published("Qwen3-30B-A3B", "RTX PRO 6000 Server", "1024 in, 1024 out", None, "the host's", OUTPUT, 9755.0, _OVERVIEW),
    Published("Qwen3-30B-A3B", "RTX PRO 6000 Server", "8192 in, 1024 out", None, "the host's", OUTPUT, 1914.0, _OVERVIEW),
)


def of(model: str, concurrency: int | None, metric: str | None = None) -> list[Published]:
    """Return a model's figures at a concurrency, for one metric or for all."""
    return [f for f in FIGURES if (f.model, f.concurrency) == (model, concurrency) and metric in (None, f.metric)]
