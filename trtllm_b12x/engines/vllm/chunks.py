"""Decode kernels for calls of any size, in chunks, where no other kernel reads a layer's weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from trtllm_b12x.kernels import Geometry, Kernel, MoECall

_ROWS = 32
"""Routed rows per expert and chunk: Triton's largest block. Each chunk reads the weights once."""
_TOKENS = (64, 512)
"""Fewest and most tokens of a chunk."""


def in_chunks(kernel: type[Kernel]) -> type[Kernel]:
    """Return a class that serves every count by calls of ``kernel``."""

    class InChunks(kernel):  # type: ignore[valid-type, misc]
        features = replace(kernel.features, every_count=True)

        def plan(self, geometry: Geometry, capacity: int, device: torch.device) -> None:
            rows = _ROWS * geometry.num_experts * geometry.ranks // geometry.top_k
            super().plan(geometry, min(capacity, max(_TOKENS[0], min(rows, _TOKENS[1]))), device)

        def serves(self, tokens: int) -> bool:
            return bool(super().serves(min(tokens, self.capacity)))

        def run(self, call: MoECall) -> torch.Tensor:
            if len(call.x) <= self.capacity:
                result: torch.Tensor = super().run(call)
                return result
            out = torch.empty_like(call.x) if call.out is None else call.out
            parts = (tensor.split(self.capacity) for tensor in (call.x, call.ids, call.router_weights, out))
            for x, ids, router_weights, part in zip(*parts, strict=True):
                super().run(MoECall(x, ids, router_weights, out=part))
            return out

    InChunks.__name__ = f"{kernel.__name__}InChunks"
    return InChunks
