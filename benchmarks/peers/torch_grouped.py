"""``torch._grouped_mm`` (CUTLASS) on bfloat16 experts, W16A16: both products alone, on rows that are sorted by expert.

The error is that of a whole layer, whose activation and sum torch computes outside of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.layers import activated, float_layer
from trtllm_b12x.kernels import Geometry


def lacks(geometry: Geometry, vllm: Path | None) -> str:
    """Return why the layer cannot be measured, or an empty string."""
    return "" if hasattr(torch, "_grouped_mm") else f"torch {torch.__version__} has no _grouped_mm"


class GroupedLayer:
    """One layer with weights of its own, without bias: ``(E, K, N)`` bfloat16, K contiguous."""

    def __init__(self, geometry: Geometry, device: str = "cuda") -> None:
        g = self.geometry = geometry
        columns = (2 if g.gated else 1) * g.intermediate_size

        def drawn(n: int, k: int) -> torch.Tensor:
            return (torch.randn(g.num_experts, n, k, dtype=torch.bfloat16, device=device) * k**-0.5).transpose(1, 2)

        self.first, self.second = drawn(columns, g.hidden_size), drawn(g.hidden_size, g.intermediate_size)
        self.expert_bytes = (self.first.nbytes + self.second.nbytes) / g.num_experts
        self.timed: Mapping[str, Callable[..., Any]] = {"us": self.products}

    def prepare(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> tuple[Any, ...]:
        order = ids.flatten().argsort(stable=True)
        token = order // ids.shape[1]
        ends = torch.bincount(ids.flatten().long(), minlength=self.geometry.num_experts).cumsum(0).int()
        rows = x[token]
        inner = torch.randn(len(rows), self.geometry.intermediate_size, dtype=x.dtype, device=x.device)
        return rows, inner, ends, token, router_weights.flatten()[order], len(x)

    def products(self, rows: torch.Tensor, inner: torch.Tensor, ends: torch.Tensor, *_: Any) -> list[torch.Tensor]:
        return [torch._grouped_mm(a, w, offs=ends) for a, w in ((rows, self.first), (inner, self.second))]

    def output(
        self, rows: torch.Tensor, _: Any, ends: torch.Tensor, token: torch.Tensor, weights: Any, count: int
    ) -> torch.Tensor:
        inner = activated(self.geometry, torch._grouped_mm(rows, self.first, offs=ends).float()).to(rows.dtype)
        shares = torch._grouped_mm(inner, self.second, offs=ends).float() * weights.unsqueeze(1)
        return torch.zeros(count, rows.shape[1], device=rows.device).index_add_(0, token, shares)

    def expected(self, x: torch.Tensor, ids: torch.Tensor, router_weights: torch.Tensor) -> torch.Tensor:
        def expert(rows: torch.Tensor, e: int) -> torch.Tensor:
            return activated(self.geometry, rows @ self.first[e].float()) @ self.second[e].float()

        return float_layer(x, ids, router_weights, expert)


def layers(geometry: Geometry, ours: Sequence[Any], most_tokens: int) -> list[GroupedLayer]:
    """Return at most as many layers as half of the free memory holds."""
    rows = (3 if geometry.gated else 2) * geometry.intermediate_size
    fit = int(0.5 * torch.cuda.mem_get_info()[0]) // (2 * geometry.num_experts * rows * geometry.hidden_size)
    return [GroupedLayer(geometry) for _ in range(max(1, min(len(ours), fit)))]
