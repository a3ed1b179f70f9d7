# SPDX-License-Identifier: Apache-2.0
"""Compare logits, outputs of one layer, and greedy answers. The verdict says which side is nearer to float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

MARGIN = 1.05
"""A side is farther from float32 only beyond this ratio: one bfloat16 rounding moves an error by a few percent."""


def logits(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Compare logits ``a`` ``(B, T, V)`` with the reference ``b``. ``kl``: divergence of a's distribution from b's, in nats."""
    rows: dict[str, list[torch.Tensor]] = {"error": [], "kl": [], "same": []}
    for one, other in zip(a, b, strict=True):  # one request at a time: float32 logits of all requests are large
        one, other = one.float(), other.float().to(one.device)
        rows["error"].append((one - other).norm(dim=-1) / other.norm(dim=-1))
        p, q = one.log_softmax(-1), other.log_softmax(-1)
        rows["kl"].append((q.exp() * (q - p)).sum(-1))
        rows["same"].append((one.argmax(-1) == other.argmax(-1)).float())
    error, kl, same = (torch.cat(values) for values in rows.values())
    return {
        "error": float(error.median()),
        "error_mean": float(error.mean()),
        "error_max": float(error.max()),
        "kl": float(kl.mean()),
        "same_argmax": float(same.mean()),
        "tokens": len(error),
    }


def routes(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Return the share of tokens that have the same set of experts in the last layer; ids ``(T, k)`` for each layer."""
    return float((a[-1].sort(-1).values == b[-1].sort(-1).values).all(-1).float().mean())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative L2 distance of ``a`` from ``b``."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def answers(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare greedy answers, each ``{"tokens": [...], "logprobs": [...]}``.

    ``logprob`` is the largest difference of a token's log-probability before the answers differ. ``parted`` has the differences
    of the two tokens' log-probabilities at the first different token. They are small if both tokens were almost equally likely.
    """
    prefixes, before, parted = [], [0.0], []
    for one, other in zip(a, b, strict=True):
        pairs = list(zip(one["tokens"], other["tokens"], strict=False))
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        prefixes.append(same)
        gaps = [abs(x - y) for x, y in zip(one["logprobs"], other["logprobs"], strict=False)]
        before.append(max(gaps[:same], default=0.0))
        parted += gaps[same : same + 1]
    return {
        "answers": len(a),
        "equal": sum(n == len(one["tokens"]) for n, one in zip(prefixes, a, strict=True)),
        "prefixes": prefixes,
        "logprob": max(before),
        "parted": parted,
    }


def verdict(ours: float, theirs: float) -> str:
    """Say which of two errors against float32 is smaller."""
    nearer = "with" if ours < theirs else "without"
    if max(ours, theirs) <= MARGIN * min(ours, theirs):
        return f"with {ours:.3g}, without {theirs:.3g} from float32: equally near"
    return f"with {ours:.3g}, without {theirs:.3g} from float32: {nearer} is nearer"
