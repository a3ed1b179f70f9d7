"""The Triton kernels of :mod:`trtllm_b12x.kernels.routes`, which imports this where there is a GPU."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def jit(function: Any) -> Any:
    """One compiled kernel per pair of types: neither sizes nor alignment make another."""
    code = function.__code__
    given = [name for name in code.co_varnames[: code.co_argcount] if name not in ("block", "wide")]
    return triton.jit(function, do_not_specialize=given, do_not_specialize_on_alignment=given)


@jit
def _derive(at, fc31, fc2, ratio, fc1_divisor, fc2_divisor, fc31_step, fc2_step, divided):  # type: ignore[no-untyped-def]
    # Divisions as torch rounds them, so that the bits are those of InputScales.derive.
    inside = at < divided
    one = tl.full(at.shape, 1.0, tl.float32)
    fc1 = tl.div_rn(one, tl.load(fc31 + at * fc31_step, mask=inside, other=1.0))
    fc2_reciprocal = tl.div_rn(one, tl.load(fc2 + at * fc2_step, mask=inside, other=1.0))
    tl.store(fc1_divisor + at, fc1, mask=inside)
    tl.store(fc2_divisor + at, tl.div_rn(fc2_reciprocal, tl.load(ratio + at, mask=inside, other=1.0)), mask=inside)


@jit
def prepare(  # type: ignore[no-untyped-def]
    ids,
    router_weights,
    ids_out,
    router_weights_out,
    size,
    first,
    count,
    unrouted,
    fc31,
    fc2,
    ratio,
    fc1_divisor,
    fc2_divisor,
    fc31_step,
    fc2_step,
    divided,
    block: tl.constexpr,
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    _derive(at, fc31, fc2, ratio, fc1_divisor, fc2_divisor, fc31_step, fc2_step, divided)
    inside = at < size
    local = tl.load(ids + at, mask=inside, other=0).to(tl.int64) - first
    held = (local >= 0) & (local < count)
    scale = tl.load(router_weights + at, mask=inside, other=0).to(tl.float32)
    tl.store(ids_out + at, tl.where(held, local, unrouted).to(tl.int32), mask=inside)
    tl.store(router_weights_out + at, tl.where(held, scale, 0.0), mask=inside)


@jit
def compact(  # type: ignore[no-untyped-def]
    ids,
    router_weights,
    numbers,
    experts,
    used,
    router_weights_out,
    size,
    first,
    count,
    unrouted,
    fc31,
    fc2,
    ratio,
    fc1_divisor,
    fc2_divisor,
    fc31_step,
    fc2_step,
    divided,
    block: tl.constexpr,
    wide: tl.constexpr,
):
    for begin in range(0, divided, wide):
        at = begin + tl.arange(0, wide)
        _derive(at, fc31, fc2, ratio, fc1_divisor, fc2_divisor, fc31_step, fc2_step, divided)
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
    scale = tl.load(router_weights + rows, mask=rows < size, other=0).to(tl.float32)
    tl.store(numbers + rows, number, mask=rows < size)
    tl.store(experts + number, row_expert.to(tl.int32), mask=(of_row == rows) & (rows < size))
    tl.store(used, tl.sum(tl.where(begins & (columns < size), 1, 0)))
    tl.store(router_weights_out + rows, tl.where(row_held, scale, 0.0), mask=rows < size)
