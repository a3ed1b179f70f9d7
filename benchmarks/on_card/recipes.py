# SPDX-License-Identifier: Apache-2.0
"""Runs of ``trtllm-bench``: recipes of published figures, data sets and options.

Sources in TensorRT-LLM: ``bench/benchmark/throughput.py`` (56851033 of 1.2, 000a01de), ``bench/dataclasses/configuration.py``
(2787769c), ``bench/utils/data.py`` (04276b44), ``bench/dataset/utils.py`` (04b5d973), ``bench/dataclasses/reporting.py``
(02499765), ``docs/source/developer-guide/perf-overview.md`` (585c7565), the commands' reference of 1.3.0rc26.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CUTLASS, CUTEDSL = "CUTLASS", "CUTEDSL"
"""Values of ``moe_config.backend``. From pull request 13773 on, CUTEDSL selects TensorRT-LLM's own b12x class."""
_FIRST_ID, _LAST_ID = 1_000, 100_000
"""Range of prompt ids. It has no special tokens in the vocabularies of the recipes' models (the smallest has 131,072)."""


@dataclass(frozen=True)
class Load:
    """One run: number of requests, their lengths, and requests at a time."""

    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int | None
    """Requests at a time; None: all at once."""
    options: tuple[tuple[str, Any], ...] = ()
    """Options of the LLM API, besides those of :func:`options`."""
    max_num_tokens: int | None = 4096
    cache: float = 0.5
    """KV cache's share of the memory that weights leave: enough for a few sequences. A DGX Spark shares memory with its CPU."""
    minutes: float = 5

    @property
    def name(self) -> str:
        return f"{self.input_tokens}-{self.output_tokens}-c{self.concurrency or 'all'}"

    @property
    def title(self) -> str:
        at_once = f"{self.concurrency} at a time" if self.concurrency else "all at once"
        return f"{self.input_tokens} in, {self.output_tokens} out, {self.requests} requests, {at_once}"


@dataclass(frozen=True)
class Recipe:
    """Runs of a model."""

    model: str
    """Name in :mod:`benchmarks.published`; "" for other models."""
    hf_name: str
    matches: tuple[str, ...]
    loads: tuple[Load, ...]


def _decode(*concurrencies: int, input_tokens: int = 2048, output_tokens: int = 1024, **more: Any) -> tuple[Load, ...]:
    return tuple(Load(input_tokens, output_tokens, max(5, 2 * c), c, **more) for c in concurrencies)


_FP8_CACHE = (("kv_cache_config", {"dtype": "fp8"}),)
RECIPES: tuple[Recipe, ...] = (
    Recipe(
        "Nemotron-3-Super",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
        ("nemotron-3-super",),
        _decode(1, 4, 8),  # the first run is from pull request 13773
    ),
    Recipe(
        "Qwen3.6-35B-A3B",
        "nvidia/Qwen3.6-35B-A3B-NVFP4",
        ("qwen3.6-35b-a3b",),
        # The first three are from pull request 15851. It does not state the input length, which is 1024 here.
        _decode(1, 4, 8, input_tokens=1024, output_tokens=128, options=_FP8_CACHE, minutes=3) + _decode(1),
    ),
    Recipe(
        "Qwen3-30B-A3B",
        "nvidia/Qwen3-30B-A3B-FP4",
        ("qwen3-30b-a3b",),
        (
            *_decode(1, 4, 8),
            # From the performance overview, with CUDA graphs up to 512 sequences.
            Load(
                1024,
                1024,
                3000,
                None,
                (
                    ("enable_attention_dp", True),
                    ("cuda_graph_config", {"enable_padding": True, "batch_sizes": [*(2**i for i in range(9)), 384, 512]}),
                ),
                max_num_tokens=None,
                cache=0.9,
                minutes=12,
            ),
        ),
    ),
)
OTHER = Recipe("", "", (), _decode(1, 4, 8))
"""Recipe of a model without published figures, from pull request 13773."""


def recipe_for(model: str) -> Recipe:
    """Return the recipe by the name of a model, or of its folder."""
    name = Path(model).name.lower()
    return next((recipe for recipe in RECIPES if any(part in name for part in recipe.matches)), OTHER)


def options(load: Load, backend: str = CUTLASS) -> dict[str, Any]:
    """Return options of the LLM API: the backend, no reuse of the KV cache, CUDA graphs at the concurrency."""
    found: dict[str, Any] = {
        "moe_config": {"backend": backend},
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": load.cache},
        "cuda_graph_config": {
            "batch_sizes": _graphs(load.concurrency),
            **({"enable_padding": True} if load.concurrency != 1 else {}),
        },
    }
    for name, value in load.options:
        found[name] = {**found[name], **value} if name == "kv_cache_config" else value
    return found


def _graphs(concurrency: int | None) -> list[int]:
    """Return the batch sizes of CUDA graphs: ``concurrency``, and smaller powers of two up to 8."""
    return sorted({*(2**i for i in range(4) if 2**i <= (concurrency or 1)), concurrency or 1})


def write_dataset(path: Path, load: Load, vocabulary: int | None, seed: int = 420) -> None:
    """Write one request per line, of random tokens. No tokenizer and no network are needed."""
    last = min(_LAST_ID, vocabulary or _LAST_ID)
    draw = random.Random(seed)
    lines = []
    for task in range(load.requests):
        ids = [draw.randrange(min(_FIRST_ID, last // 2), last) for _ in range(load.input_tokens)]
        request = {"task_id": task, "input_ids": ids, "output_tokens": load.output_tokens}
        lines.append(json.dumps(request, separators=(",", ":")))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def vocabulary_of(model: str) -> int | None:
    """Return the vocabulary size in a folder's config.json, or None."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    return int(size) if size else None
