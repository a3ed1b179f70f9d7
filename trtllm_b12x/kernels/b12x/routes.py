# SPDX-License-Identifier: Apache-2.0
"""Convert an engine's routes to local int32 ids and float32 router weights of this rank's experts, in one launch.

The launch also derives activation divisors from the engine's input scales, in graphs too, so that they are always current.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trtllm_b12x.formats.nvfp4 import InputScales
from trtllm_b12x.kernels.routes import ID_TYPES, ROUTER_WEIGHT_TYPES, ExpertRange
from trtllm_b12x.kernels.triton import cache
from trtllm_b12x.kernels.triton.variant import Variant

_BLOCK = 1024


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
    from .routes_triton import prepare as kernel  # Triton may be missing where no kernel is launched

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
    f = torch.float32
    rest = (1, 0, 1, 0, *(f,) * 4, 0, 0, 0)
    for ids in ID_TYPES:
        for floats in ROUTER_WEIGHT_TYPES:
            yield Variant("b12x.routes_triton", "prepare", (ids, floats, torch.int32, f, *rest), {"block": _BLOCK}, {})


def warm_up(device: torch.device, remedy: str) -> None:
    """Compile ``variants``, or load them from Triton's cache. Raise PlanError as ``triton.cache.load`` does."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    with torch.cuda.device(device):
        cache.load(list(variants()), 10 * major + minor, remedy)
