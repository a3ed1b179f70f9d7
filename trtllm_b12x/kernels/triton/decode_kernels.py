# SPDX-License-Identifier: Apache-2.0
"""The two products of decode: FC1 with its activation, FC2 with the weighted sum over a token's routes.

Sums are float32 in a fixed order, without atomic additions of floats. A route's results depend only on its own token. The last
program to finish a token's columns adds up the token's routes in the order of ``top_k``.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from .epilogues import activate, half_alphas, shares_of_block
from .numerics import rounded
from .operands import FP4, NVFP4_GROUP, SCALE, dot, loaded, matrix, places, split_inputs
from .routing import listed_block, route_kernel
from .scales import first_scale, rows_of, scale_bytes, scale_offsets

_SIZES = ["tokens", "blocks", "experts", "step"]
_ANYWHERE = ["bias", "alpha", "input_scale", "half_alpha", "swiglu_alpha", "swiglu_beta", "swiglu_limit"]
"""Arguments at addresses that need not be multiples of 16."""


UP_GATE = tl.constexpr(0)
GATE_UP = tl.constexpr(1)
BY_TURNS = tl.constexpr(2)
"""Orders of FC1's rows, as ``trtllm_b12x.formats`` names them."""


@triton.jit
def _products(
    x, weight, weight_sf, e, tile, row, n, X: tl.constexpr, N: tl.constexpr, K: tl.constexpr, HEIGHT: tl.constexpr,
    HALVES: tl.constexpr, ORDER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WORD: tl.constexpr,
    GROUP: tl.constexpr, LINEAR: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Multiply ``BN`` rows of each of the HALVES of expert ``e``'s matrix by inputs. Return ``(BN, BM)`` of up and of gate.

    Args:
        x: rows of X columns, at most K.
        row: ``(BM,)``, the row of ``x`` for each route; the first ``n`` are valid.
        N: rows of a half.
        K: columns of the matrix, padding included; the matrix has HEIGHT rows.
        ORDER: order of the halves' rows.
    """
    whole: tl.constexpr = K % BK == 0
    step: tl.constexpr = 2 if HALVES == 2 and ORDER == BY_TURNS else 1
    second: tl.constexpr = 1 if ORDER == BY_TURNS else N
    up_row: tl.constexpr = second if HALVES == 2 and ORDER != UP_GATE else 0
    gate_row: tl.constexpr = second - up_row
    rows = rows_of(tile, BN, N, LINEAR)
    inside = rows < N
    weight += e * (HEIGHT * (K // WORD))
    weight_sf += e * scale_bytes(HEIGHT, K, GROUP, LINEAR)
    words = rows[:, None] * (step * (K // WORD)) + tl.arange(0, BK // WORD)[None, :]
    up_sf_offsets = scale_offsets(tile, up_row, BN, BK, N, K, GROUP, LINEAR, step)
    gate_sf_offsets = scale_offsets(tile, gate_row, BN, BK, N, K, GROUP, LINEAR, step)
    up_sf = weight_sf + first_scale(tile, up_row, BN, N, K, GROUP, LINEAR, step)
    gate_sf = weight_sf + first_scale(tile, gate_row, BN, N, K, GROUP, LINEAR, step)
    offsets, present, column = places(row * X, n, BM, BK, WORD)
    up = tl.zeros((BN, BM), tl.float32)
    gate = tl.zeros((BN, BM), tl.float32)
    for k in range(0, K, BK):
        operands = split_inputs(loaded(x, offsets, present, column, k, X, whole and X == K), BM, BK, WORD)
        w = matrix(
            weight + up_row * (K // WORD), up_sf, words, up_sf_offsets, k, inside, BN, BK, K, N % BN == 0, whole, WORD, GROUP,
            LINEAR, dtype, PTX,
        )  # fmt: skip
        up = dot(w, operands, up, WORD)
        if HALVES == 2:
            w = matrix(
                weight + gate_row * (K // WORD), gate_sf, words, gate_sf_offsets, k, inside, BN, BK, K, N % BN == 0, whole, WORD,
                GROUP, LINEAR, dtype, PTX,
            )  # fmt: skip
            gate = dot(w, operands, gate, WORD)
    return up, gate


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def fc1_kernel(
    x, weight, weight_sf, alpha, input_scale, half_alpha, bias, swiglu_alpha, swiglu_beta, swiglu_limit, h, workspace, blocks,
    experts, step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PADDED: tl.constexpr, ORDER: tl.constexpr,
    WORD: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute FC1 and its activation. Grid: tiles of ``BN`` columns of the intermediate size, by blocks of at most ``BM`` routes.

    ``h (routes, SIZE)`` is bfloat16 for every dtype of ``x``: float16 cannot hold every product of gate and up.

    Args:
        x: ``(tokens, H)`` bfloat16 or float16.
        weight: int32 words of ``(E, r * SIZE, PADDED)`` codes, WORD in each, r = 2 with GATED (rows in ORDER).
        alpha: ``(E,)`` float32, ``weight_scale_2`` times input scale; like the next two, only for NVFP4.
        input_scale: float32, the input scale's reciprocal for expert ``e`` at ``e * step``; 1 if ``x`` is in units of the scale.
        half_alpha: with GATED, ``(2, E)`` float32, the alphas of up and gate (``half_alphas``).
        bias: with BIAS, ``(E, r * SIZE)``.
        workspace: memory that ``route_kernel`` has filled.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    expert, n, route = listed_block(workspace, blocks, slot, BM)
    if n == 0:
        return
    e = expert.to(tl.int64)
    own_alpha = 1.0
    if GROUP == NVFP4_GROUP:
        own_alpha = tl.load(alpha + e)  # used at the end, but loaded there it makes ptxas spill at gemma-4's sizes
    halves: tl.constexpr = 2 if GATED else 1
    up, gate = _products(
        x, weight, weight_sf, e, tile, route // TOP_K, n, H, SIZE, PADDED, halves * SIZE, halves, ORDER, BM, BN, BK, WORD, GROUP,
        LINEAR, x.dtype.element_ty, PTX,
    )  # fmt: skip
    rows = rows_of(tile, BN, SIZE, LINEAR)
    there = rows < SIZE
    if GROUP == NVFP4_GROUP:
        scale = tl.load(input_scale + e * step)
        if GATED:
            up_alpha, gate_alpha = half_alphas(half_alpha, own_alpha, e, experts)
            up *= up_alpha * SCALE * scale
            gate *= gate_alpha * SCALE * scale
        else:
            up *= own_alpha * SCALE * scale
    elif WORD == FP4:
        up *= SCALE
        gate *= SCALE
    if BIAS:
        turns: tl.constexpr = 2 if GATED and ORDER == BY_TURNS else 1
        second: tl.constexpr = 1 if ORDER == BY_TURNS else SIZE
        up_row: tl.constexpr = second if GATED and ORDER != UP_GATE else 0
        bias += e * (halves * SIZE) + rows * turns
        up += tl.load(bias + up_row, mask=there, other=0).to(tl.float32)[:, None]
        if GATED:
            gate += tl.load(bias + (second - up_row), mask=there, other=0).to(tl.float32)[:, None]
    result = activate(up, gate, swiglu_alpha + e, swiglu_beta + e, swiglu_limit + e, ACTIVATION)
    result = rounded(result, tl.bfloat16)
    present = (tl.arange(0, BM) < n)[None, :]
    tl.store(h + route[None, :] * SIZE + rows[:, None], result, mask=there[:, None] & present)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ANYWHERE)
def fc2_kernel(
    h, weight, weight_sf, alpha, input_scale, bias, out, partial, workspace, tokens, blocks, step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, PADDED: tl.constexpr, WORD: tl.constexpr, GROUP: tl.constexpr, LINEAR: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute FC2 and the weighted sum. Grid: tiles of ``BN`` columns of the hidden size, by blocks as in ``fc1_kernel``.

    ``partial (routes, H)`` float32 has each route's share. Programs that finish a token's columns count; the last adds them up.

    Args:
        h: ``(routes, SIZE)`` bfloat16.
        weight: int32 words of ``(E, PADDED, SIZE)`` codes.
        alpha, input_scale: as in ``fc1_kernel``.
        bias: with BIAS, ``(E, PADDED)``.
        out: ``(tokens, H)``.
        workspace: memory that ``route_kernel`` has filled.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    # fc1_kernel has waited for route_kernel, so the routes are complete before this kernel waits for fc1_kernel.
    expert, n, route = listed_block(workspace, blocks, slot, BM)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if n == 0:
        return
    e = expert.to(tl.int64)
    sums, _ = _products(
        h, weight, weight_sf, e, tile, route, n, SIZE, H, SIZE, PADDED, 1, UP_GATE, BM, BN, BK, WORD, GROUP, LINEAR, tl.bfloat16,
        PTX,
    )  # fmt: skip
    if GROUP == NVFP4_GROUP:
        sums *= tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
    elif WORD == FP4:
        sums *= SCALE
    rows = rows_of(tile, BN, H, LINEAR)
    if BIAS:
        sums += tl.load(bias + e * PADDED + rows, mask=rows < H, other=0).to(tl.float32)[:, None]
    tiles: tl.constexpr = (H + BN - 1) // BN
    router_weights = workspace + blocks * (2 + BM)
    counters = router_weights + tokens * TOP_K
    there = tl.arange(0, BM) < n
    shares_of_block(sums, router_weights, out, partial, counters, tokens, route, there, tile, rows, H, TOP_K, tiles)


for _kernel in (route_kernel, fc1_kernel, fc2_kernel):
    # Before 3.8 Triton's cache keys depend on the order in which kernels are hashed (``DependenciesFinder``).
    getattr(_kernel, "cache_key", None)
