# SPDX-License-Identifier: Apache-2.0
"""Roofline of one decode step: the bytes that it must read over the card's bandwidth. It fills the blocks of docs/floor.md.

A step reads each weight once for every batch size, and of the experts only those that some token goes to. Activations, launches,
synchronization and sampling do not count. So no implementation is faster, and none reaches the roofline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks import published
from benchmarks.geometries import GEOMETRIES, MXFP8
from benchmarks.markdown import table
from trtllm_b12x.dispatch.timing import expected_hits, expert_bytes
from trtllm_b12x.kernels import Geometry

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT = 2560
"""Mean context of a sequence in the published recipe: 2048 tokens in and half of 1024 tokens out."""
_NVFP4, _MXFP8, _FP8, _BF16, _FP32 = 9 / 16, 33 / 32, 1.0, 2.0, 4.0
"""Bytes of a weight, including block scales (one byte per 16 weights in NVFP4, per 32 in MXFP8)."""
CARDS = {
    "RTX 5090": (1792e9, 32e9),
    "RTX PRO 6000": (1792e9, 96e9),
    "RTX PRO 6000 Server": (1597e9, 96e9),
    "GB10": (273e9, 128e9),
}
"""Bytes per second and bytes of memory, from public specifications."""


@dataclass(frozen=True)
class Model:
    """Bytes that a decode step of a model reads. docs/floor.md has the source of every figure, and the assumptions."""

    name: str
    layer: Geometry
    moe_layers: int
    fixed: dict[str, float]
    """Bytes that every step reads, by kind."""
    embedding: float
    """Bytes of the embedding table, of which a step reads one row per token; 0 if the LM head shares the table."""
    cache: Callable[[int], float]
    """Bytes of a sequence's KV cache that a step reads, by context."""
    state: float = 0
    """Bytes of a sequence's recurrent state, read and written."""

    def parts(self, batch: int, context: int = CONTEXT) -> dict[str, float]:
        """Return the bytes of a step by kind."""
        experts = self.moe_layers * expected_hits(self.layer, batch) * expert_bytes(self.layer)
        return {"experts": experts, **self.fixed, "KV cache": batch * self.cache(context), "state": batch * self.state}

    def milliseconds(self, card: str, batch: int) -> float:
        return 1e3 * sum(self.parts(batch).values()) / CARDS[card][0]

    @property
    def weights(self) -> float:
        """Bytes of all weights."""
        experts = self.moe_layers * self.layer.num_experts * expert_bytes(self.layer)
        return experts + sum(self.fixed.values()) + self.embedding


# ---- models --------------------------------------------------------------------------------------------------------------


def _qwen3() -> Model:
    layers, hidden, vocabulary = 48, 2048, 151_936
    attention = hidden * 128 * (32 + 4 + 4) + 32 * 128 * hidden
    head = vocabulary * hidden * _BF16
    return Model(
        "Qwen3-30B-A3B",
        GEOMETRIES["Qwen3-30B-A3B"],
        layers,
        {"attention": layers * attention * _NVFP4, "router": layers * hidden * 128 * _BF16, "LM head": head},
        head,
        lambda context: layers * 2 * 4 * 128 * context * _FP8,
    )


def _qwen36() -> Model:
    full, linear, hidden, vocabulary = 10, 30, 2048, 248_320
    attention = hidden * 256 * (2 * 16 + 2 + 2) + 16 * 256 * hidden
    keys, values = 16 * 128, 32 * 128
    delta = hidden * (2 * keys + 2 * values + 2 * 32) + values * hidden
    return Model(
        "Qwen3.6-35B-A3B",
        GEOMETRIES["Qwen3.6-35B-A3B"],
        full + linear,
        {
            "shared experts": 40 * 3 * hidden * 512 * _NVFP4,
            "attention": full * attention * _FP8,
            "Mamba, linear attention": linear * delta * _FP8,
            "router": 40 * hidden * 256 * _BF16,
            "LM head": vocabulary * hidden * _NVFP4,
        },
        vocabulary * hidden * _BF16,
        lambda context: full * 2 * 2 * 256 * context * _FP8,
        2 * linear * (32 * 128 * 128 * _FP32 + 3 * (2 * keys + values) * _BF16),
    )


def _nemotron() -> Model:
    pattern = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    mamba, moe, attending = (pattern.count(kind) for kind in "ME*")
    hidden, vocabulary, inner, convolved = 4096, 131_072, 128 * 64, 128 * 64 + 2 * 8 * 128
    return Model(
        "Nemotron-3-Super",
        GEOMETRIES["Nemotron-3-Super"],
        moe,
        {
            "shared experts": moe * 2 * hidden * 5376 * _FP8,
            "latent projections": moe * 2 * hidden * 1024 * _BF16,
            "attention": attending * (hidden * 128 * (32 + 2 + 2) + 32 * 128 * hidden) * _BF16,
            "Mamba, linear attention": mamba * (hidden * (inner + convolved + 128) + inner * hidden) * _FP8,
            "router": moe * hidden * 512 * _FP32,
            "LM head": vocabulary * hidden * _BF16,
        },
        vocabulary * hidden * _BF16,
        lambda context: attending * 2 * 2 * 128 * context * _FP8,
        2 * mamba * (128 * 64 * 128 * _FP32 + 3 * convolved * _BF16),
    )


def _gpt_oss() -> Model:
    layers, hidden, head = 36, 2880, 201_088 * 2880 * _BF16
    attention = hidden * 64 * (64 + 8 + 8) + 64 * 64 * hidden
    return Model(
        "gpt-oss-120b",
        replace(GEOMETRIES["gpt-oss-120b-like"], format="MXFP4"),
        layers,
        {"attention": layers * attention * _BF16, "router": layers * hidden * 128 * _BF16, "LM head": head},
        head,
        lambda context: layers // 2 * 2 * 8 * 64 * (context + min(context, 128)) * _FP8,
    )


def _gemma() -> Model:
    sliding, full, hidden, vocabulary = 25, 5, 2816, 262_144
    of_window, of_all = hidden * 256 * (16 + 8 + 8) + 16 * 256 * hidden, hidden * 512 * (16 + 2) + 16 * 512 * hidden
    return Model(
        "gemma-4-26B-A4B",
        replace(MXFP8["gemma-4-26B-A4B"], format="MXFP8"),
        sliding + full,
        {
            "dense MLP": 30 * 3 * hidden * 2112 * _MXFP8,
            "attention": (sliding * of_window + full * of_all) * _MXFP8,
            "router": 30 * hidden * 128 * _BF16,
            "LM head": vocabulary * hidden * _BF16,
        },
        0,
        lambda context: (sliding * 2 * 8 * 256 * min(context, 1024) + full * 2 * 2 * 512 * context) * _FP8,
    )


MODELS = {model.name: model for model in (_qwen3(), _qwen36(), _nemotron(), _gpt_oss(), _gemma())}

# ---- blocks of docs/floor.md ---------------------------------------------------------------------------------------------


def reads() -> list[str]:
    """Return the megabytes of a step at batch 1."""
    parts = {name: model.parts(1) for name, model in MODELS.items()}
    columns = list(dict.fromkeys(column for one in parts.values() for column in one))
    fast = max(bandwidth for bandwidth, _ in CARDS.values())
    rows = []
    for name, one in parts.items():
        size = sum(one.values())
        cells = [f"{one[column] / 1e6:,.0f}" if one.get(column) else "-" for column in columns]
        rows.append([name, *cells, f"{size / 1e6:,.0f}", f"{fast / size:,.0f}", f"{MODELS[name].weights / 1e9:.1f}"])
    return table(["model", *columns, "sum", f"tokens/s at {fast / 1e9:,.0f} GB/s", "all weights, GB"], rows)


def steps() -> list[str]:
    """Return the milliseconds of a step by model, card and batch."""
    rows = []
    for name, model in MODELS.items():
        for card, (_, memory) in CARDS.items():
            fits = model.weights < 0.95 * memory
            times = [f"{model.milliseconds(card, batch):.2f}" for batch in BATCHES]
            rows.append([name, card, *(times if fits else ["does not fit", *"-" * (len(BATCHES) - 1)])])
    return table(["model", "card", *map(str, BATCHES)], rows)


def beside() -> list[str]:
    """Return published figures beside the roofline of the same step."""
    rows = []
    for f in published.FIGURES:
        cells = ["-", "-"]
        if f.concurrency and f.metric != published.TTFT:
            step = f.value if f.metric == published.TPOT else 1e3 * f.concurrency / f.value
            least = MODELS[f.model].milliseconds(f.card, f.concurrency)
            cells = [f"{least:.2f} ms", f"{100 * least / step:.0f} % of {step:.2f} ms"]
        at = str(f.concurrency or "no limit")
        rows.append([f.model, f.card, at, f.path, f"{f.metric} {f.value:g} ({f.recipe})", *cells, f.source])
    return table(["model", "card", "at a time", "experts by", "published", "floor", "floor is", "source"], rows)


if __name__ == "__main__":
    print(__doc__ + "\npython -m benchmarks.results writes it.")
