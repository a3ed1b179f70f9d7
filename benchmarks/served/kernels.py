# SPDX-License-Identifier: Apache-2.0
"""Sort the kernels of a decode step by what they compute, from their names."""

from __future__ import annotations

import re
from typing import Any

PARTS = (
    ("rest", r"^triton_(red|poi|per)_"),  # torch.compile names a fused kernel after all operators in it
    (
        "experts",
        r"^layer$|^(fc1|fc2|route|sort|sum|quantize)_kernel$|moe|Moe|MoE|expert|act_and_mul|topkGating|grouped_topk|_swiglu|"
        r"_matmul_ogs|_topk|_routing|_reduce_grouped|_p_matmul|cutlass.*[Gg]roup|count_and_sort|fused_batched",
    ),
    (
        "attention",
        r"attention|attn|flash|fmha|reduce_segments|reshape_and_cache|rotary|rope|mamba|ssd_|causal_conv|gated_delta|chunk_|selective",
    ),
    ("dense", r"gemm|gemv|Marlin|nvjet|splitK|cutlass|matmul|cublas"),
)
"""Part, and pattern of its kernels' names. The first match counts. Kernels without a match are ``rest``."""
_KEPT = 40


def part_of(name: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, name)), "rest")


def summary(kernels: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Return microseconds a step by part, each part's share, and the longest kernels.

    Args:
        kernels: count and microseconds of all steps, by name.
    """
    us = dict.fromkeys(("experts", "attention", "dense", "rest"), 0.0)
    for name, (_, time_us) in kernels.items():
        us[part_of(name)] += time_us / steps
    total = sum(us.values())
    if not total:
        raise RuntimeError("the profiler saw no kernel")
    rows = sorted(((name, n / steps, t / steps) for name, (n, t) in kernels.items()), key=lambda row: -row[2])
    return {
        "us": us | {"all": total},
        "share": {part: value / total for part, value in us.items()},
        "launches": sum(n for n, _ in kernels.values()) / steps,
        "kernels": [{"name": name, "part": part_of(name), "count": n, "us": t} for name, n, t in rows[:_KEPT]],
    }
