"""Routes sorted by expert, in one launch and without anything that must be zero before."""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["routes", "first"], do_not_specialize_on_alignment=["ids", "router_weights"])
def sort_kernel(
    ids, router_weights, order, starts, sorted_weights, routes, first, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: experts of this rank.  A program counts the routes to experts before its own, then lists its own in their order.

    Args:
        ids: ``(routes,)`` int32 or int64, of experts; this rank's are ``first`` to ``first + EXPERTS``, others are left out.
        router_weights: ``(routes,)`` float32 or bfloat16.
        order: ``(routes,)`` int32, written: routes by expert.
        starts: ``(EXPERTS + 1,)`` int32, written: where each expert's begin in ``order``.
        sorted_weights: ``(routes,)`` float32, written: router weights in that order.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    # 64 bits: a difference of int32 may wrap.
    for begin in range(0, routes, BLOCK):
        local = tl.load(ids + begin + at, mask=begin + at < routes, other=-1).to(tl.int64) - first
        before += ((local >= 0) & (local < expert) & (begin + at < routes)).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(starts + expert, place)
    for begin in range(0, routes, BLOCK):
        local = tl.load(ids + begin + at, mask=begin + at < routes, other=-1).to(tl.int64) - first
        own = (local == expert) & (begin + at < routes)
        count = own.to(tl.int32)
        slot = place + tl.cumsum(count, axis=0) - 1
        tl.store(order + slot, begin + at, mask=own)
        weight = tl.load(router_weights + begin + at, mask=own, other=0.0).to(tl.float32)
        tl.store(sorted_weights + slot, weight, mask=own)
        place += tl.sum(count, axis=0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, place)
