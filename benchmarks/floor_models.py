"""Cards, and what a decode step of a model reads: figures of public configurations, each with its source."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

CONTEXT = 2560
"""Tokens that a sequence has behind it: 2048 in and half of 1024 out, the mean of the published recipe."""
NVFP4, MXFP4, MXFP8, FP8, BF16, FP32 = 9 / 16, 17 / 32, 33 / 32, 1.0, 2.0, 4.0
"""Bytes a weight, block scales included (one byte for 16, 32 and 32 weights)."""


@dataclass(frozen=True)
class Card:
    """A card by what it is sold as."""

    name: str
    bandwidth: float
    """Bytes a second."""
    memory: float
    """Bytes."""
    source: str


CARDS = (
    Card("RTX 5090", 1792e9, 32e9, "Public specifications"),
    Card("RTX PRO 6000", 1792e9, 96e9, "Workstation Edition, public specifications"),
    Card("RTX PRO 6000 Server", 1597e9, 96e9, "Server Edition, public specifications"),
    Card("GB10", 273e9, 128e9, "DGX Spark, public specifications"),
)


@dataclass(frozen=True)
class Model:
    """What a decode step of a model reads."""

    name: str
    geometry: str
    """Of :data:`benchmarks.geometries.GEOMETRIES`, or of ``MXFP8`` there with ", MXFP8" behind it."""
    moe_layers: int
    experts: int
    top_k: int
    expert_bytes: float
    fixed: dict[str, float]
    """Bytes that every step reads, by what they are."""
    embedding: float
    """Bytes of the table, of which a step reads a row per token; 0 where it is the LM head's."""
    cache: Callable[[int], float]
    """Bytes of a sequence's KV cache that a step reads, by context."""
    state: float
    """Bytes of a sequence's recurrent state, read and written."""
    sources: str
    assumed: str

    def hits(self, tokens: int, skewed: bool = False) -> float:
        """Experts of a layer that some of ``tokens`` independent tokens go to, on average."""
        shares = zipf(self.experts, self.top_k) if skewed else [self.top_k / self.experts] * self.experts
        return sum(1 - (1 - share) ** tokens for share in shares)

    def parts(self, batch: int, context: int = CONTEXT, skewed: bool = False, draft: int = 1) -> dict[str, float]:
        """Bytes of a step by what they are. ``draft``: tokens of each sequence in it."""
        routed = self.moe_layers * self.hits(batch * draft, skewed) * self.expert_bytes
        return {"experts": routed, **self.fixed, "KV cache": batch * self.cache(context), "state": batch * self.state}

    def floor(self, card: Card, batch: int, context: int = CONTEXT, skewed: bool = False, draft: int = 1) -> float:
        """Seconds."""
        return sum(self.parts(batch, context, skewed, draft).values()) / card.bandwidth

    @property
    def weights(self) -> float:
        """Bytes of all."""
        return self.moe_layers * self.experts * self.expert_bytes + sum(self.fixed.values()) + self.embedding

    def fits(self, card: Card) -> bool:
        return self.weights < 0.95 * card.memory


def zipf(experts: int, top_k: int) -> list[float]:
    """How probable it is that a token goes to each expert where the expert of rank r is liked by 1 / r.

    ``top_k`` draws without replacement by weights, as the first arrivals of independent clocks; they are cut at the time by
    which ``top_k`` have arrived on average (measured against draws in tests/unittest/test_results.py).
    """
    likes = [1 / rank for rank in range(1, experts + 1)]
    low, high = 0.0, 1.0
    while sum(1 - math.exp(-like * high) for like in likes) < top_k:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(1 - math.exp(-like * middle) for like in likes) < top_k else (low, middle)
    return [1 - math.exp(-like * low) for like in likes]


# ---- models --------------------------------------------------------------------------------------------------------------


def _qwen3() -> Model:
    layers, hidden, vocabulary = 48, 2048, 151_936
    attention = hidden * 128 * (32 + 4 + 4) + 32 * 128 * hidden
    return Model(
        "Qwen3-30B-A3B",
        "Qwen3-30B-A3B",
        layers,
        128,
        8,
        3 * hidden * 768 * NVFP4,
        {"attention": layers * attention * NVFP4, "router": layers * hidden * 128 * BF16, "LM head": vocabulary * hidden * BF16},
        vocabulary * hidden * BF16,
        lambda context: layers * 2 * 4 * 128 * context * FP8,
        0,
        "config.json of Qwen/Qwen3-30B-A3B",
        "NVFP4 attention, BF16 router and LM head (modelopt's default recipe), FP8 KV cache",
    )


def _qwen36() -> Model:
    full, linear, hidden, vocabulary = 10, 30, 2048, 248_320
    attention = hidden * 256 * (2 * 16 + 2 + 2) + 16 * 256 * hidden
    keys, values = 16 * 128, 32 * 128
    delta = hidden * (2 * keys + 2 * values + 2 * 32) + values * hidden
    return Model(
        "Qwen3.6-35B-A3B",
        "Qwen3.6-35B-A3B",
        full + linear,
        256,
        8,
        3 * hidden * 512 * NVFP4,
        {
            "shared experts": 40 * 3 * hidden * 512 * NVFP4,
            "attention": full * attention * FP8,
            "Mamba, linear attention": linear * delta * FP8,
            "router": 40 * hidden * 256 * BF16,
            "LM head": vocabulary * hidden * NVFP4,
        },
        vocabulary * hidden * BF16,
        lambda context: full * 2 * 2 * 256 * context * FP8,
        2 * linear * (32 * 128 * 128 * FP32 + 3 * (2 * keys + values) * BF16),
        "config.json of Qwen3.5-35B-A3B (the defaults of transformers' Qwen3_5MoeTextConfig), whose form 3.6 has; precisions of "
        "nvidia/Qwen3.6-35B-A3B-NVFP4: experts, shared experts and LM head in W4A16_NVFP4 (SGLang issues 27906, 32959). "
        "TensorRT-LLM reads such an LM head as it is since pull request 17976, so published figures before it had a higher floor",
        "FP8 attention and linear attention, BF16 router, FP8 KV cache, float32 state",
    )


def _nemotron() -> Model:
    pattern = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    mamba, moe, attending = (pattern.count(kind) for kind in "ME*")
    hidden, vocabulary, inner, convolved = 4096, 131_072, 128 * 64, 128 * 64 + 2 * 8 * 128
    return Model(
        "Nemotron-3-Super",
        "Nemotron-3-Super",
        moe,
        512,
        22,
        2 * 1024 * 2688 * NVFP4,
        {
            "shared experts": moe * 2 * hidden * 5376 * FP8,
            "latent projections": moe * 2 * hidden * 1024 * BF16,
            "attention": attending * (hidden * 128 * (32 + 2 + 2) + 32 * 128 * hidden) * BF16,
            "Mamba, linear attention": mamba * (hidden * (inner + convolved + 128) + inner * hidden) * FP8,
            "router": moe * hidden * 512 * FP32,
            "LM head": vocabulary * hidden * BF16,
        },
        vocabulary * hidden * BF16,
        lambda context: attending * 2 * 2 * 128 * context * FP8,
        2 * mamba * (128 * 64 * 128 * FP32 + 3 * convolved * BF16),
        "config.json of nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4 (88 layers: 40 Mamba, 40 MoE, 8 attention); precisions of "
        "NVIDIA's Nemotron documentation, quantization of Super and Ultra",
        "FP8 Mamba projections and shared experts as in Ultra's recipe, which carries Super's name; float32 state; no MTP layer",
    )


def _gpt_oss() -> Model:
    layers, hidden, vocabulary = 36, 2880, 201_088
    return Model(
        "gpt-oss-120b",
        "gpt-oss-120b-like",
        layers,
        128,
        4,
        3 * hidden * 2880 * MXFP4 + 3 * hidden * BF16,
        {
            "attention": layers * (hidden * 64 * (64 + 8 + 8) + 64 * 64 * hidden) * BF16,
            "router": layers * hidden * 128 * BF16,
            "LM head": vocabulary * hidden * BF16,
        },
        vocabulary * hidden * BF16,
        lambda context: layers // 2 * 2 * 8 * 64 * (context + min(context, 128)) * FP8,
        0,
        "config.json of openai/gpt-oss-120b (the defaults of transformers' GptOssConfig)",
        "FP8 KV cache",
    )


def _gemma() -> Model:
    sliding, full, hidden, vocabulary = 25, 5, 2816, 262_144
    return Model(
        "gemma-4-26B-A4B",
        "gemma-4-26B-A4B, MXFP8",
        sliding + full,
        128,
        8,
        3 * hidden * 704 * MXFP8,
        {
            "dense MLP": 30 * 3 * hidden * 2112 * MXFP8,
            "attention": (
                sliding * (hidden * 256 * (16 + 8 + 8) + 16 * 256 * hidden) + full * (hidden * 512 * (16 + 2) + 16 * 512 * hidden)
            )
            * MXFP8,
            "router": 30 * hidden * 128 * BF16,
            "LM head": vocabulary * hidden * BF16,
        },
        0,
        lambda context: (sliding * 2 * 8 * 256 * min(context, 1024) + full * 2 * 2 * 512 * context) * FP8,
        0,
        "config.json of google/gemma-4-26B-A4B (25 layers of a window of 1024, 5 whose keys are their values' projection too)",
        "all linear layers in MXFP8, BF16 router and tied LM head, FP8 KV cache",
    )


MODELS = (_qwen3(), _qwen36(), _nemotron(), _gpt_oss(), _gemma())
