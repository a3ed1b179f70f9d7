"""Routes to blocks of one expert each, by a launch of its own or by every program for itself."""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from .operands import e2m1, e4m3


@triton.jit
def listed_block(workspace, tokens, routes, blocks, slot, TILES: tl.constexpr, BM: tl.constexpr, WIDTH: tl.constexpr):
    """Block ``slot`` of :func:`route_kernel`'s.

    Returns:
        expert (-1: there is none), how many routes, which, ``(WIDTH,)`` int32 (anything beyond), and the first (0: none).
    """
    table = workspace + tokens * (TILES + 2) + routes
    order = table + 2 * blocks + slot * BM
    m = tl.arange(0, WIDTH)
    expert, n = tl.load(table + 2 * slot), tl.load(table + 2 * slot + 1)
    one = tl.load(order)
    if BM == 1:
        members = one + tl.zeros((WIDTH,), tl.int32)
    else:
        members = tl.load(order + m)
    return tl.where(n > 0, expert, -1), n, members, tl.where(n > 0, one, 0)


@triton.jit
def localized(ids, first, count):
    """Local int32 ids; -1 for what is not in the table."""
    local = ids.to(tl.int64) - first
    return tl.where((local >= 0) & (local < count), local, -1).to(tl.int32)


@triton.jit
def own_block(ids, slot, routes, first, count, BM: tl.constexpr, WIDTH: tl.constexpr, ROUTES: tl.constexpr):
    """The block that route ``slot`` leads, from the ids of all (at most ``ROUTES``) routes.

    Of the routes to one expert, every ``BM``-th leads a block of those that follow it: where BM is 1, each.

    Returns:
        expert (-1: it leads none), how many routes, and which, ``(WIDTH,)`` int32 (0 beyond).
    """
    if BM == 1:
        return localized(tl.load(ids + slot), first, count), 1, slot + tl.zeros((WIDTH,), tl.int32)
    r = tl.arange(0, ROUTES)
    local = localized(tl.load(ids + r, mask=r < routes, other=-1), first, count)
    local = tl.where(r < routes, local, -1)
    expert = tl.max(tl.where(r == slot, local, -1), axis=0)
    same = (local == expert).to(tl.int32)
    rank = tl.cumsum(same, axis=0) - 1
    own = tl.max(tl.where(r == slot, rank, 0), axis=0)
    m = tl.arange(0, WIDTH)
    listed = (same[None, :] != 0) & (rank[None, :] == own + m[:, None])
    members = tl.sum(tl.where(listed, r[None, :], 0), axis=1)
    return tl.where(own % BM == 0, expert, -1), tl.minimum(tl.sum(same, axis=0) - own, BM), members


@triton.jit
def start_token(
    token, tokens, ids, out, workspace, first, count, H: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, tiles,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A token's counters to the routes that are not this rank's, which of them are, and zeros as its output where none is.

    Args:
        workspace: counters ``(tokens, tiles)``, then ``(tokens, 2)`` words of a bit for each route.
    """
    k = tl.arange(0, SLOTS)
    local = localized(tl.load(ids + token * TOP_K + k, mask=k < TOP_K, other=-1), first, count)
    held = (k < TOP_K) & (local >= 0)
    bit = tl.where(held, 1, 0) << (k % 32)
    words = workspace + tokens * tiles + 2 * token
    tl.store(words, tl.sum(tl.where(k < 32, bit, 0), axis=0))
    tl.store(words + 1, tl.sum(tl.where(k < 32, 0, bit), axis=0))
    known = tl.sum(held.to(tl.int32), axis=0)
    at = tl.arange(0, BLOCK)
    for begin in range(0, tiles, BLOCK):
        tl.store(workspace + token * tiles + begin + at, at * 0 + TOP_K - known, mask=begin + at < tiles)
    zeros = tl.zeros((BLOCK,), out.dtype.element_ty)
    end = tl.where(known == 0, H, 0)
    for begin in range(0, H, BLOCK):
        tl.store(out + token * H + begin + at, zeros, mask=begin + at < end)


@triton.jit
def _cumulative(values):
    return tl.cumsum(values, axis=0) - values


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "tiles", "size", "swizzled"],
    do_not_specialize_on_alignment=["ids", "router_weights", "x_sf"],
)
def route_kernel(
    x, x_sf, ids, router_weights, staged, out, workspace, tokens, blocks, first, tiles, size, swizzled,
    H: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 sorts routes by expert into blocks of at most ``size``, program ``1 + t`` makes token ``t`` ready.

    ``workspace``, int32: as :func:`start_token`; float32 router weights ``(tokens, TOP_K)``; ``(blocks, 2)``: expert and number
    of routes (0: none); ``(blocks, size)``: routes; a number per expert.

    Which of an expert's routes comes first is left to the order of atomics: a route's results do not depend on its place.

    Args:
        x, x_sf: with QUANTIZED, FP4 ``(tokens, H / 2)`` and E4M3 bytes ``(tokens, H / 16)``.
        swizzled: 0: those bytes lie in rows; else they are 128x4-interleaved.
        staged: with QUANTIZED, ``(tokens, H)`` of FC1's input type: code times block scale.
        ids, router_weights: ``(tokens, TOP_K)`` integers and floats of any type.
        blocks: at least as many as there can be: ``min(routes, EXPERTS + routes / size)``.
        first: global id of the first of EXPERTS.
    """
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    program = tl.program_id(0)
    routes = tokens * TOP_K
    weights = workspace + tokens * (tiles + 2)
    if program == 0:
        table = weights + routes
        order = table + 2 * blocks
        cursors = order + blocks * size
        at = tl.arange(0, BLOCK)
        e = tl.arange(0, PADDED_EXPERTS)
        count = tl.zeros((PADDED_EXPERTS,), tl.int32)
        for begin in range(0, routes, BLOCK):
            r = begin + at
            local = localized(tl.load(ids + r, mask=r < routes, other=0), first, EXPERTS)
            held = (r < routes) & (local >= 0)
            count += tl.histogram(tl.where(held, local, 0), PADDED_EXPERTS, mask=held)
        own = (count + (size - 1)) // size
        place = _cumulative(own)
        tl.store(cursors + e, place * size, mask=e < EXPERTS)
        tl.debug_barrier()
        for begin in range(0, routes, BLOCK):
            r = begin + at
            local = localized(tl.load(ids + r, mask=r < routes, other=0), first, EXPERTS)
            held = (r < routes) & (local >= 0)
            place_of = tl.atomic_add(cursors + local, at * 0 + 1, mask=held, sem="relaxed")
            tl.store(order + place_of, r, mask=held)
        for i in range(tl.max(own, axis=0)):
            entry = table + (place + i) * 2
            tl.store(entry, e, mask=i < own)
            tl.store(entry + 1, tl.minimum(count - i * size, size), mask=i < own)
        used = tl.sum(own, axis=0)
        for begin in range(0, blocks, BLOCK):
            b = begin + at
            tl.store(table + b * 2 + 1, at * 0, mask=(b >= used) & (b < blocks))
    else:
        token = program - 1
        start_token(token, tokens, ids, out, workspace, first, EXPERTS, H, TOP_K, SLOTS, tiles, BLOCK)
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
