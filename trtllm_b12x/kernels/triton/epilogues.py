"""What becomes of sums: activations, and the shares of a token's routes."""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .operands import INTERPRETED
from .routing import localized

SWIGLU = tl.constexpr(0)
SWIGLU_BIAS = tl.constexpr(1)
GEGLU = tl.constexpr(2)
RELU2 = tl.constexpr(3)
SILU = tl.constexpr(4)
GELU = tl.constexpr(5)


@triton.jit
def activate(fc1, gate, alpha, beta, limit, ACTIVATION: tl.constexpr):
    """float32; ``fc1`` is up's half where there is a ``gate``."""
    if ACTIVATION == SWIGLU:
        return gate / (1 + tl.exp(-gate)) * fc1
    if ACTIVATION == SWIGLU_BIAS:
        gate = tl.where(gate > limit, limit, gate)  # NaN stays
        fc1 = tl.where(fc1 > limit, limit, tl.where(fc1 < -limit, -limit, fc1))
        return gate / (1 + tl.exp(-alpha * gate)) * (fc1 + beta)
    if ACTIVATION == GEGLU:
        return 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476)) * fc1
    if ACTIVATION == RELU2:
        positive = tl.where(fc1 < 0, 0.0, fc1)
        return positive * positive
    if ACTIVATION == SILU:
        return fc1 / (1 + tl.exp(-fc1))
    return 0.5 * fc1 * (1 + tl.erf(fc1 * 0.7071067811865476))


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """float32 to a 16-bit float, to the nearest; Triton's interpreter cuts bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def along(values, BM: tl.constexpr):
    """A value of each row, as sums have them: of one route, or of the routes of a block."""
    if BM != 1:
        values = values[:, None]
    return values


@triton.jit
def _weights_of(router_weights, local_ids, routes, route, there, SORTED: tl.constexpr):
    if SORTED:
        found = tl.load(local_ids + routes + route, mask=there, other=0).to(tl.float32, bitcast=True)
    else:
        found = tl.load(router_weights + route, mask=there, other=0.0)
    return found


@triton.jit
def _held(local_ids, at, there, first, experts, SORTED: tl.constexpr):
    """Whether the routes ``at`` are to experts of this rank."""
    local = tl.load(local_ids + at, mask=there, other=-1)
    if not SORTED:
        local = localized(local, first, experts)
    return local >= 0


@triton.jit
def share_of_one(
    sums, router_weights, local_ids, out, partial, workspace, route, tile, rows, routes, first, experts, H: tl.constexpr,
    TOP_K: tl.constexpr, TILES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """``sums (BN,)`` of one route to its share, or to the token's result if no other is missing."""
    there = rows < H
    token = route // TOP_K
    sums *= _weights_of(router_weights, local_ids, routes, route, route >= 0, SORTED)
    tl.store(partial + route * H + rows, sums, mask=there)
    slots: tl.constexpr = triton.next_power_of_2(TOP_K)
    k = tl.arange(0, slots)
    expected = tl.sum(_held(local_ids, token * TOP_K + k, k < TOP_K, first, experts, SORTED).to(tl.int32), axis=0)
    tl.debug_barrier()
    before = tl.atomic_add(workspace + token * TILES + tile, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == expected - 1:
        total = tl.zeros_like(sums)
        for place in tl.static_range(TOP_K):
            other = token * TOP_K + place
            end = tl.where(_held(local_ids, other, other >= 0, first, experts, SORTED), H, 0)
            total += tl.load(partial + other * H + rows, mask=rows < end, other=0.0, cache_modifier=".cg")
        tl.store(out + token * H + rows, rounded(total, out.dtype.element_ty), mask=there)


@triton.jit
def shares_of_block(
    sums, router_weights, local_ids, out, partial, workspace, route, given, tile, rows, routes, first, experts, H: tl.constexpr,
    TOP_K: tl.constexpr, TILES: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """``sums (BN, routes)`` of one expert's to their shares, and to results of tokens of which no other is missing."""
    there = rows < H
    token = route // TOP_K
    sums *= _weights_of(router_weights, local_ids, routes, route, given, SORTED)[None, :]
    tl.store(partial + route[None, :] * H + rows[:, None], sums, mask=there[:, None] & given[None, :])
    expected = tl.zeros_like(token)
    for k in tl.static_range(TOP_K):
        expected += _held(local_ids, token * TOP_K + k, given, first, experts, SORTED).to(tl.int32)
    tl.debug_barrier()
    before = tl.atomic_add(workspace + token * TILES + tile, token * 0 + 1, mask=given, sem="acq_rel")
    last = given & (before == expected - 1)
    tl.debug_barrier()
    if tl.max(last.to(tl.int32), axis=0) > 0:
        total = tl.zeros_like(sums)
        for k in tl.static_range(TOP_K):
            held = there[:, None] & _held(local_ids, token * TOP_K + k, last, first, experts, SORTED)[None, :]
            share = partial + (token * TOP_K + k)[None, :] * H + rows[:, None]
            total += tl.load(share, mask=held, other=0.0, cache_modifier=".cg")
        tl.store(
            out + token[None, :] * H + rows[:, None], rounded(total, out.dtype.element_ty), mask=there[:, None] & last[None, :]
        )
