"""A host's routes in the form that kernels take, in one launch: local int32 ids, float32 scales, nothing outside the table.

A router whose logits are no number may hand out any id, and an all-to-all pads with one beyond the last expert.  CUTLASS skips
what is not this rank's; kernels that index by it write elsewhere (FlashInfer issue 5446).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

_BLOCK = 1024


@dataclass(frozen=True)
class Table:
    """The experts of this rank."""

    first: int
    """Global id of the first."""
    count: int
    unrouted: int = -1
    """What becomes of a route to another: -1 where the kernel skips that, else an expert of the table, whose scale is then 0."""

    def holds(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids >= self.first) & (ids < self.first + self.count)

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids``, integers of any shape and type, as local int32 ids; in torch, for machines without a GPU."""
        return torch.where(self.holds(ids), ids - self.first, self.unrouted).to(torch.int32)


def prepare(table: Table, ids: torch.Tensor, scales: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Local ids and the scales of routes that are in ``table`` (0 for others), in one launch.

    Args:
        ids: contiguous integers of any type and shape.
        scales: contiguous floats of any type, as many.
        into: int32 and float32, as many; on the same GPU.
    """
    size = ids.numel()
    _kernels().prepare[(-(-size // _BLOCK),)](ids, scales, *into, size, table.first, table.count, table.unrouted, block=_BLOCK)


def compact(
    table: Table, ids: torch.Tensor, scales: torch.Tensor, into: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
) -> None:
    """Number the local experts that occur, in the order of their first route, in one launch of one block.

    Args:
        ids, scales: as for :func:`prepare`; at most a few hundred, since every pair of routes is compared.
        into: number of each route's expert (int32, as many as ``ids``), local id of each number (int32), how many there are
            (one int32), and the scales (float32).  A route outside the table counts as one to ``table.unrouted`` with scale 0.
    """
    size = ids.numel()
    block = 1 << (size - 1).bit_length()
    _kernels().compact[(1,)](ids, scales, *into, size, table.first, table.count, table.unrouted, block=block, num_warps=2)


def warm_up(device: torch.device, sizes: tuple[int, ...] = ()) -> None:
    """Compile for the types that hosts use; ``compact`` for these numbers of routes."""
    if device.type != "cuda":
        return
    table = Table(0, 1, 0)
    for ids_type in (torch.int32, torch.int64):
        for scales_type in (torch.float32, torch.bfloat16):
            for size in (1, *sizes):
                ids = torch.zeros(size, dtype=ids_type, device=device)
                scales = torch.zeros(size, dtype=scales_type, device=device)
                out = torch.empty(3, size, dtype=torch.int32, device=device)
                floats = out[2].view(torch.float32)
                prepare(table, ids, scales, (out[0], floats))
                if size in sizes:
                    compact(table, ids, scales, (out[0], out[1], torch.empty_like(out[0, :1]), floats))


@dataclass(frozen=True)
class _Kernels:
    prepare: Any
    compact: Any


@functools.cache
def _kernels() -> _Kernels:
    import triton
    import triton.language as tl

    # One compiled kernel per pair of types: neither sizes nor alignment make another.
    names = ["ids", "scales", "ids_out", "scales_out", "numbers", "experts", "used", "size", "first", "count", "unrouted"]

    def jit(function: Any) -> Any:
        given = [name for name in names if name in function.__code__.co_varnames]
        return triton.jit(function, do_not_specialize=given, do_not_specialize_on_alignment=given)

    @jit
    def prepare_kernel(ids, scales, ids_out, scales_out, size, first, count, unrouted, block: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * block + tl.arange(0, block)
        inside = at < size
        local = tl.load(ids + at, mask=inside, other=0).to(tl.int64) - first
        held = (local >= 0) & (local < count)
        scale = tl.load(scales + at, mask=inside, other=0).to(tl.float32)
        tl.store(ids_out + at, tl.where(held, local, unrouted).to(tl.int32), mask=inside)
        tl.store(scales_out + at, tl.where(held, scale, 0.0), mask=inside)

    @jit
    def compact_kernel(ids, scales, numbers, experts, used, scales_out, size, first, count, unrouted, block: tl.constexpr):  # type: ignore[no-untyped-def]
        rows, columns = tl.arange(0, block)[:, None], tl.arange(0, block)[None, :]
        row_local = tl.load(ids + rows, mask=rows < size, other=0).to(tl.int64) - first
        column_local = tl.load(ids + columns, mask=columns < size, other=0).to(tl.int64) - first
        row_held = (row_local >= 0) & (row_local < count)
        row_expert = tl.where(row_held, row_local, unrouted)
        column_expert = tl.where((column_local >= 0) & (column_local < count), column_local, unrouted)
        same = (row_expert == column_expert) & (rows < size) & (columns < size)
        # Where an expert occurs first, of each row's and (the relation is symmetric) of each column's.
        of_row = tl.min(tl.where(same, columns, block), axis=1)[:, None]
        of_column = tl.min(tl.where(same, rows, block), axis=0)[None, :]
        begins = of_column == columns
        number = tl.sum(tl.where(begins & (columns < of_row), 1, 0), axis=1)[:, None]
        scale = tl.load(scales + rows, mask=rows < size, other=0).to(tl.float32)
        tl.store(numbers + rows, number, mask=rows < size)
        tl.store(experts + number, row_expert.to(tl.int32), mask=(of_row == rows) & (rows < size))
        tl.store(used, tl.sum(tl.where(begins & (columns < size), 1, 0)))
        tl.store(scales_out + rows, tl.where(row_held, scale, 0.0), mask=rows < size)

    return _Kernels(prepare_kernel, compact_kernel)
