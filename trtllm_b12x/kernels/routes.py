"""Prepare a call for a kernel in one launch: routes in the form that kernels take, and the divisors of activations.

Routes become local int32 ids and float32 router weights, nothing outside the table.  Divisors are derived from the host's input
scales, in graphs too, so that they are never older than those.

A router whose logits are no number may hand out any id, and an all-to-all pads with one beyond the last expert.  CUTLASS skips
what is not this rank's; kernels that index by it write elsewhere (FlashInfer issue 5446).
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
    """Convert to contiguous tensors of types that kernels are compiled for.

    Ids of another integer type become int64, which holds them all: 32 bits would turn 2**32 + 3 into 3.
    """
    ids = ids if ids.dtype in ID_TYPES else ids.to(torch.int64)
    known = router_weights.dtype in ROUTER_WEIGHT_TYPES
    return ids.contiguous(), (router_weights if known else router_weights.to(ROUTER_WEIGHT_TYPES[0])).contiguous()


@dataclass(frozen=True)
class Table:
    """The experts of this rank."""

    first: int
    """Global id of the first."""
    count: int
    unrouted: int = -1
    """Id that replaces a route to another rank's expert: -1 if the kernel skips it, else an expert of the table with weight 0."""

    def holds(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids >= self.first) & (ids < self.first + self.count)

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """Convert ``ids``, int32 or int64 of any shape, to local int32 ids; in torch."""
        return torch.where(self.holds(ids), ids - self.first, self.unrouted).to(torch.int32)


def prepare(
    table: Table,
    ids: torch.Tensor,
    router_weights: torch.Tensor,
    into: tuple[torch.Tensor, torch.Tensor],
    input_scales: InputScales | None = None,
) -> None:
    """Local ids and the router weights of routes that are in ``table`` (0 for others), in one launch.

    Args:
        ids: contiguous integers of any type and shape.
        router_weights: contiguous floats of any type, as many.
        into: int32 and float32, as many; on the same GPU.
        input_scales: derive its divisors too.
    """
    size = ids.numel()
    blocks = -(-max(size, table.count) // _BLOCK)
    divisors = _divisors(input_scales, into[1])
    experts = table.first, table.count, table.unrouted
    _kernels().prepare[(blocks,)](ids, router_weights, *into, size, *experts, *divisors, block=_BLOCK)


def _divisors(given: InputScales | None, any_floats: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of a kernel that derives divisors for so many experts; for none it gets pointers that it does not read."""
    if given is None:
        return (*(any_floats,) * 4, 0, 0, 0)
    fc31, fc2 = given.fc31_input_scale, given.fc2_input_scale
    steps = int(fc31.numel() > 1), int(fc2.numel() > 1)
    return fc31, fc2, given.fc1_divisor, given.fc2_divisor, *steps, given.fc1_divisor.numel()


def variants() -> Iterator[Variant]:
    """Yield what calls launch, for the types that hosts use."""
    from .triton.variant import Variant

    f = torch.float32
    rest = (1, 0, 1, 0, *(f,) * 4, 0, 0, 0)
    for ids in ID_TYPES:
        for floats in ROUTER_WEIGHT_TYPES:
            yield Variant("routes_triton", "prepare", (ids, floats, torch.int32, f, *rest), {"block": _BLOCK}, {})


def warm_up(device: torch.device, remedy: str) -> None:
    """Compile :func:`variants`, or load them from Triton's cache.

    Raises:
        PlanError: see :func:`trtllm_b12x.kernels.triton.cache.load`, which ``remedy`` is for.
    """
    if device.type != "cuda":
        return
    from .triton import cache

    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cache.load(list(variants()), 10 * major + minor, remedy)


def _kernels() -> Any:
    from . import routes_triton

    return routes_triton
