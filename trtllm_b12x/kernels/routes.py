# SPDX-License-Identifier: Apache-2.0
"""Types of routes that kernels take, and the experts of a rank.

A router whose logits are NaN may return any id, and an all-to-all pads with an id beyond the last expert. CUTLASS skips ids
outside this rank; kernels that index by such an id write out of bounds (FlashInfer issue 5446).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ID_TYPES, ROUTER_WEIGHT_TYPES = (torch.int32, torch.int64), (torch.float32, torch.bfloat16)
"""Types of routes that kernels are compiled for."""


def of_known_types(ids: torch.Tensor, router_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert to contiguous tensors of types that kernels are compiled for. Raise ValueError for float ids or integer weights.

    Ids of another integer type become int64, which represents every id: 32 bits would turn 2**32 + 3 into 3.
    """
    if ids.is_floating_point() or ids.dtype is torch.bool:  # NaN would become an id
        raise ValueError(f"ids is {ids.dtype}, expected integers")
    if not router_weights.is_floating_point():
        raise ValueError(f"router_weights is {router_weights.dtype}, expected floats")
    ids = ids if ids.dtype in ID_TYPES else ids.to(torch.int64)
    known = router_weights.dtype in ROUTER_WEIGHT_TYPES
    return ids.contiguous(), (router_weights if known else router_weights.to(ROUTER_WEIGHT_TYPES[0])).contiguous()


@dataclass(frozen=True)
class ExpertRange:
    """The experts of this rank."""

    first: int
    """Global id of the first expert."""
    count: int
    unrouted: int = -1
    """Id that replaces a route to another rank's expert: -1 if the kernel skips it, else a local expert, with weight 0."""

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert ``ids``, int32 or int64 of any shape, to local int32 ids with torch operators."""
        held = (ids >= self.first) & (ids < self.first + self.count)
        return torch.where(held, ids - self.first, self.unrouted).to(torch.int32)
