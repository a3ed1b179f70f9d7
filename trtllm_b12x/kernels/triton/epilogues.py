# SPDX-License-Identifier: Apache-2.0
"""Turn sums into results: activations, and the shares of a token's routes."""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from .numerics import rounded

SWIGLU = tl.constexpr(0)
SWIGLU_BIAS = tl.constexpr(1)
GEGLU = tl.constexpr(2)
RELU2 = tl.constexpr(3)
SILU = tl.constexpr(4)
GELU = tl.constexpr(5)


@triton.jit
def activate(fc1, gate, alpha, beta, limit, ACTIVATION: tl.constexpr):
    """Activate in float32. ``fc1`` is the up half if ACTIVATION is gated. ``alpha``, ``beta`` and ``limit`` are pointers."""
    if ACTIVATION == SWIGLU:
        return gate / (1 + tl.exp(-gate)) * fc1
    if ACTIVATION == SWIGLU_BIAS:
        alpha, beta, limit = tl.load(alpha), tl.load(beta), tl.load(limit)
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
def half_alphas(recorded, alpha, e, experts):
    """Return expert ``e``'s alphas of up and gate: the recorded ones if the larger is ``alpha``, else ``alpha`` for both.

    ``recorded``: ``(2, experts)`` float32, as in ``NVFP4Weights.half_alphas``.
    """
    up, gate = tl.load(recorded + e), tl.load(recorded + experts + e)
    fresh = tl.maximum(up, gate) == alpha
    return tl.where(fresh, up, alpha), tl.where(fresh, gate, alpha)


@triton.jit
def _held(low, high, k: tl.constexpr):
    """Return True if a token's route ``k`` is to an expert of this rank, by the bits that ``route_kernel`` wrote."""
    if k < 32:
        word = low
    else:
        word = high
    return ((word >> (k % 32)) & 1) != 0


@triton.jit
def shares_of_block(
    sums, router_weights, out, partial, counters, tokens, route, there, tile, rows, H: tl.constexpr, TOP_K: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Turn ``sums (BN, BM)`` of one expert's routes into shares, and into results of tokens whose other shares are complete.

    Args:
        router_weights, counters: parts of the workspace (``route_kernel``).
        there: ``(BM,)``, True for valid routes.
    """
    inside = rows < H
    token = route // TOP_K
    words = counters + tokens * TILES + 2 * token
    low, high = tl.load(words, mask=there, other=0), tl.load(words + 1, mask=there, other=0)
    sums *= tl.load(router_weights + route, mask=there, other=0).to(tl.float32, bitcast=True)[None, :]
    tl.store(partial + route[None, :] * H + rows[:, None], sums, mask=inside[:, None] & there[None, :])
    tl.debug_barrier()
    before = tl.atomic_add(counters + token * TILES + tile, token * 0 + 1, mask=there, sem="acq_rel")
    last = there & (before == TOP_K - 1)
    tl.debug_barrier()
    if tl.max(last.to(tl.int32), axis=0) > 0:
        total = tl.zeros_like(sums)
        for k in tl.static_range(TOP_K):
            held = inside[:, None] & (last & _held(low, high, k))[None, :]
            share = partial + (token * TOP_K + k)[None, :] * H + rows[:, None]
            total += tl.load(share, mask=held, other=0.0, cache_modifier=".cg")
        place = out + token[None, :] * H + rows[:, None]
        tl.store(place, rounded(total, out.dtype.element_ty), mask=inside[:, None] & last[None, :])
