# SPDX-License-Identifier: Apache-2.0
"""Convert an engine's routes to local int32 ids and float32 router weights of this rank's experts, in one launch.

The launch also derives activation divisors from the engine's input scales, in graphs too, so that they are always current.

A router whose logits are NaN may return any id, and an all-to-all pads with an id beyond the last expert. CUTLASS skips ids
outside this rank; kernels that index by such an id write out of bounds (FlashInfer issue 5446).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trtllm_b12x.formats.nvfp4 import InputScales

    from .triton.variant import Variant

_BLOCK = 1024
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


def prepare(
    experts: ExpertRange,
    ids: torch.Tensor,
    router_weights: torch.Tensor,
    into: tuple[torch.Tensor, torch.Tensor],
    input_scales: InputScales | None = None,
) -> None:
    """Write local ids and router weights (0 for routes to other ranks) in one launch.

    ``ids`` are contiguous integers of any type and shape, ``router_weights`` as many contiguous floats of any type, ``into`` as
    many int32 and float32 on the same GPU. The launch also derives the divisors of ``input_scales``.
    """
    from .routes_triton import prepare as kernel

    divisors: tuple[Any, ...] = (*(into[1],) * 4, 0, 0, 0)  # pointers that the kernel does not read
    if input_scales is not None:
        fc31, fc2 = input_scales.fc31_input_scale, input_scales.fc2_input_scale
        divided = input_scales.fc1_divisor, input_scales.fc2_divisor
        divisors = fc31, fc2, *divided, int(fc31.numel() > 1), int(fc2.numel() > 1), divided[0].numel()
    size = ids.numel()
    blocks = -(-max(size, experts.count) // _BLOCK)
    limits = experts.first, experts.count, experts.unrouted
    kernel[(blocks,)](ids, router_weights, *into, size, *limits, *divisors, block=_BLOCK)


def variants() -> Iterator[Variant]:
    """Yield the kernels that calls launch, for the dtypes that engines use."""
    from .triton.variant import Variant

    f = torch.float32
    rest = (1, 0, 1, 0, *(f,) * 4, 0, 0, 0)
    for ids in ID_TYPES:
        for floats in ROUTER_WEIGHT_TYPES:
            yield Variant("routes_triton", "prepare", (ids, floats, torch.int32, f, *rest), {"block": _BLOCK}, {})


def warm_up(device: torch.device, remedy: str) -> None:
    """Compile ``variants``, or load them from Triton's cache. Raise PlanError as ``triton.cache.load`` does."""
    if device.type != "cuda":
        return
    from .triton import cache

    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cache.load(list(variants()), 10 * major + minor, remedy)
