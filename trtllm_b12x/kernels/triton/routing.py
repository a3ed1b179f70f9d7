# SPDX-License-Identifier: Apache-2.0
"""Sort routes by expert: into blocks of one expert each (decode), or into one list (grouped)."""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from .numerics import e2m1, e4m3


@triton.jit
def listed_block(workspace, blocks, slot, BM: tl.constexpr):
    """Return block ``slot`` of ``route_kernel``: expert, number of routes (0: no block), and the routes, ``(BM,)`` int32."""
    table = workspace + 2 * slot
    members = tl.load(workspace + 2 * blocks + slot * BM + tl.arange(0, BM))
    return tl.load(table), tl.load(table + 1), members


@triton.jit
def _localized(ids, first, count):
    """Convert int32 or int64 ids to local int32 ids; -1 for experts of other ranks."""
    local = ids - first
    if ids.dtype == tl.int64:
        unsigned = local.to(tl.uint64, bitcast=True)
    else:
        unsigned = local.to(tl.uint32, bitcast=True)
    return tl.where(unsigned < count, local, -1).to(tl.int32)


@triton.jit
def _start_token(
    token, tokens, ids, out, counters, first, count, H: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, tiles,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Set a token's counters to its routes to other ranks, and the bits of this rank's routes. Without bits, zero its output."""
    k = tl.arange(0, SLOTS)
    local = _localized(tl.load(ids + token * TOP_K + k, mask=k < TOP_K, other=-1), first, count)
    held = (k < TOP_K) & (local >= 0)
    bit = tl.where(held, 1, 0) << (k % 32)
    words = counters + tokens * tiles + 2 * token
    tl.store(words, tl.sum(tl.where(k < 32, bit, 0), axis=0))
    tl.store(words + 1, tl.sum(tl.where(k < 32, 0, bit), axis=0))
    known = tl.sum(held.to(tl.int32), axis=0)
    at = tl.arange(0, BLOCK)
    for begin in range(0, tiles, BLOCK):
        tl.store(counters + token * tiles + begin + at, at * 0 + TOP_K - known, mask=begin + at < tiles)
    zeros = tl.zeros((BLOCK,), out.dtype.element_ty)
    end = tl.where(known == 0, H, 0)
    for begin in range(0, H, BLOCK):
        tl.store(out + token * H + begin + at, zeros, mask=begin + at < end)


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "tiles", "size", "swizzled"],
    do_not_specialize_on_alignment=["ids", "router_weights", "x_sf"],
)
def route_kernel(
    x, x_sf, ids, router_weights, staged, out, workspace, tokens, blocks, first, tiles, size, swizzled,
    H: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 sorts routes by expert into blocks of at most ``size``, program ``1 + t`` prepares token ``t``.

    ``workspace``, int32:
        ``(blocks, 2)``: expert and number of routes (0: none).
        ``(blocks, size)``: routes. Atomics decide the order of an expert's routes, since a route's results do not depend on its
        place.
        ``(tokens, TOP_K)``: router weights, float32.
        ``(tokens, tiles)``: counters of routes with a written share and of routes to other ranks.
        ``(tokens, 2)``: a bit for each route, 1 for this rank's routes.
        ``(EXPERTS,)``: cursors of program 0.

    Args:
        x, x_sf: with QUANTIZED, FP4 ``(tokens, H / 2)`` and E4M3 bytes ``(tokens, H / 16)``.
        swizzled: 0 if the bytes of ``x_sf`` lie in rows, else they are 128x4-interleaved.
        staged: with QUANTIZED, ``(tokens, H)`` of FC1's input type: code times block scale.
        ids, router_weights: ``(tokens, TOP_K)`` integers and floats of any type.
        blocks: at least the maximum number of blocks, ``min(routes, EXPERTS + routes / size)``.
        first: global id of the first of this rank's EXPERTS.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    routes = tokens * TOP_K
    order = workspace + 2 * blocks
    weights = order + blocks * size
    counters = weights + routes
    if program == 0:
        cursors = counters + tokens * (tiles + 2)
        at = tl.arange(0, BLOCK)
        e = tl.arange(0, PADDED_EXPERTS)
        count = tl.zeros((PADDED_EXPERTS,), tl.int32)
        for begin in range(0, routes, BLOCK):
            r = begin + at
            local = _localized(tl.load(ids + r, mask=r < routes, other=0), first, EXPERTS)
            held = (r < routes) & (local >= 0)
            count += tl.histogram(tl.where(held, local, 0), PADDED_EXPERTS, mask=held)
        own = (count + (size - 1)) // size
        place = tl.cumsum(own, axis=0) - own
        tl.store(cursors + e, place * size, mask=e < EXPERTS)
        tl.debug_barrier()
        for begin in range(0, routes, BLOCK):
            r = begin + at
            local = _localized(tl.load(ids + r, mask=r < routes, other=0), first, EXPERTS)
            held = (r < routes) & (local >= 0)
            place_of = tl.atomic_add(cursors + local, at * 0 + 1, mask=held, sem="relaxed")
            tl.store(order + place_of, r, mask=held)
        for i in range(tl.max(own, axis=0)):
            entry = workspace + (place + i) * 2
            tl.store(entry, e, mask=i < own)
            tl.store(entry + 1, tl.minimum(count - i * size, size), mask=i < own)
        used = tl.sum(own, axis=0)
        for begin in range(0, blocks, BLOCK):
            b = begin + at
            tl.store(workspace + b * 2 + 1, at * 0, mask=(b >= used) & (b < blocks))
    else:
        token = program - 1
        _start_token(token, tokens, ids, out, counters, first, EXPERTS, H, TOP_K, SLOTS, tiles, BLOCK)
        k = tl.arange(0, SLOTS)
        weight = tl.load(router_weights + token * TOP_K + k, mask=k < TOP_K, other=0).to(tl.float32)
        tl.store(weights + token * TOP_K + k, weight.to(tl.int32, bitcast=True), mask=k < TOP_K)
        if QUANTIZED:
            groups: tl.constexpr = (H + 63) // 64
            at = tl.arange(0, BLOCK)
            for begin in range(0, H // 2, BLOCK):
                b = begin + at
                inside = b < H // 2
                code = tl.load(x + token * (H // 2) + b, mask=inside, other=0)
                block = b // 8
                row = token // 128 * (groups * 512) + token % 32 * 16 + token % 128 // 32 * 4
                offset = tl.where(swizzled != 0, row + block // 4 * 512 + block % 4, token * (H // 16) + block)
                scale = e4m3(tl.load(x_sf + offset, mask=inside, other=0).to(tl.int32))
                even = (e2m1(code) * scale).to(staged.dtype.element_ty)
                odd = (e2m1(code >> 4) * scale).to(staged.dtype.element_ty)
                tl.store(staged + token * H + 2 * b, even, mask=inside)
                tl.store(staged + token * H + 2 * b + 1, odd, mask=inside)


@triton.jit(do_not_specialize=["routes", "first"], do_not_specialize_on_alignment=["ids", "router_weights"])
def sort_kernel(
    ids, router_weights, order, starts, sorted_weights, routes, first, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid: experts of this rank. A program counts the routes to earlier experts, then lists its expert's routes in order.

    Args:
        ids: ``(routes,)`` int32 or int64, global expert ids. Ids outside ``first`` to ``first + EXPERTS`` are left out.
        router_weights: ``(routes,)`` float32 or bfloat16.
        order: ``(routes,)`` int32, written: routes sorted by expert.
        starts: ``(EXPERTS + 1,)`` int32, written: where each expert's routes begin in ``order``.
        sorted_weights: ``(routes,)`` float32, written: router weights in the same order.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    # int64, since a difference of int32 may wrap.
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
