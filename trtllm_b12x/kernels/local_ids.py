"""Global expert ids to this rank's own, in one launch."""

from __future__ import annotations

import functools
from typing import Any

import torch

_BLOCK = 1024


def local_ids(ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """``ids - first`` as int32 where that is one of ``count`` local experts, else -1: another rank's, a padding id, or negative.

    ``ids`` integers of any shape; on a GPU one launch, without compiling once :func:`warm_up` ran.
    """
    if not ids.is_cuda:
        local = ids - first
        return torch.where((local >= 0) & (local < count), local, -1).to(torch.int32)
    ids = ids.contiguous()
    out = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    _kernel()[(-(-ids.numel() // _BLOCK),)](ids, out, ids.numel(), first, count, block=_BLOCK)
    return out


def warm_up(device: torch.device) -> None:
    """Compile for the types that hosts use."""
    if device.type == "cuda":
        for dtype in (torch.int32, torch.int64):
            local_ids(torch.zeros(1, dtype=dtype, device=device), 0, 1)


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    # One compiled kernel per type: neither sizes nor alignment make another.
    names = ["ids", "out", "size", "first", "count"]

    @triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)
    def kernel(ids, out, size, first, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        local = tl.load(ids + at, mask=at < size, other=0).to(tl.int32) - first
        tl.store(out + at, tl.where((local >= 0) & (local < count), local, -1), mask=at < size)

    return kernel
