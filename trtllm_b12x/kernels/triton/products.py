"""The two products: FC1 with its activation, FC2 with the weighted sum over a token's routes.

Sums are float32 in a fixed order: no float is added atomically, a route's results depend on nothing but its own token, and the
last program to finish a token's columns adds its routes up in the order of ``top_k``.
"""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

from .operands import FP4, INTERPRETED, SCALE, dot, loaded, matrix, places, rows_of, scale_offsets, split_inputs
from .routing import localized, own_block, route_kernel, start_token

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


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "experts", "step"],
    do_not_specialize_on_alignment=[
        "ids",
        "router_weights",
        "bias",
        "alpha",
        "input_scale",
        "up_to_gate",
        "swiglu_alpha",
        "swiglu_beta",
        "swiglu_limit",
    ],
)
def fc1_kernel(
    x, weight, weight_sf, alpha, input_scale, up_to_gate, bias, swiglu_alpha, swiglu_beta, swiglu_limit, ids, router_weights, out,
    h, workspace, tokens, blocks, first, experts, step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    SORTED: tl.constexpr, ROUTES: tl.constexpr, BLOCK: tl.constexpr, WORD: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of ``BN`` columns of the intermediate size, by blocks of routes (SORTED) or routes (at most ``ROUTES``).

    ``h (routes, SIZE)`` bfloat16 whatever x is: float16 has no room for every product of gate and up.

    Args:
        x: ``(tokens, H)`` bfloat16 or float16.
        weight: int32 words of ``(E, r * SIZE, H)`` codes, WORD in each, r = 2 with GATED (rows [up; gate]).
        alpha: ``(E,)`` float32, ``weight_scale_2`` times input scale; like the next two of NVFP4 alone.
        input_scale: float32, the reciprocal of that scale, of expert ``e`` at ``e * step``; 1 where x is in units of it.
        up_to_gate: ``(E,)`` float32, up's ``weight_scale_2`` over gate's.
        bias: with BIAS, ``(E, r * SIZE)``.
        ids, router_weights: without SORTED, ``(tokens, TOP_K)`` int32 global ids and float32; with it the workspace's.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    if PDL:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    routes = tokens * TOP_K
    width: tl.constexpr = BM if BM > 8 else 8
    m = tl.arange(0, width)
    if SORTED:
        order = workspace + tokens * TILES + 2 * routes
        entry = order + routes + slot * 3
        n = tl.load(entry + 2)
        if n == 0:
            return
        expert = tl.load(entry)
        route = tl.load(order + tl.load(entry + 1) + m, mask=m < n, other=0)
    else:
        if (tile == 0) & (slot % TOP_K == 0):
            start_token(slot // TOP_K, ids, out, workspace, first, experts, H, TOP_K, SLOTS, TILES, BLOCK)
        expert, n, route = own_block(ids, slot, routes, first, experts, BM, width, ROUTES)
        if expert < 0:
            return
    e = expert.to(tl.int64)
    columns: tl.constexpr = 512 // WORD
    halves: tl.constexpr = 2 if GATED else 1
    dtype: tl.constexpr = x.dtype.element_ty
    rows = rows_of(tile, BN, SIZE, 1)
    there = rows < SIZE
    weight += e * (halves * SIZE * (H // WORD))
    weight_sf += e * ((halves * SIZE + 127) // 128 * ((H + columns - 1) // columns) * 512)
    words = rows[:, None] * (H // WORD) + tl.arange(0, BK // WORD)[None, :]
    up_sf_offsets = scale_offsets(tile, 0, BN, BK, SIZE, H, 1, WORD)
    gate_sf_offsets = scale_offsets(tile, 1, BN, BK, SIZE, H, 1, WORD)
    offsets, given, column = places(route // TOP_K * H, n, width, BK, WORD)
    up = tl.zeros((BN, width), tl.float32)
    gate = tl.zeros((BN, width), tl.float32)
    for k in range(0, H, BK):
        operands = split_inputs(loaded(x, offsets, given, column, k, BK, H), width, BK, WORD)
        w = matrix(weight, weight_sf, words, up_sf_offsets, k, there, BN, BK, H, SIZE % BN == 0, WORD, dtype, PTX)
        up = dot(w, operands, up, WORD)
        if GATED:
            half = weight + SIZE * (H // WORD)
            w = matrix(half, weight_sf, words, gate_sf_offsets, k, there, BN, BK, H, SIZE % BN == 0, WORD, dtype, PTX)
            gate = dot(w, operands, gate, WORD)
    if WORD == FP4:
        factor = tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
        gate = gate * factor
        up = up * factor
        if GATED:
            up *= tl.load(up_to_gate + e)
    if BIAS:
        up += tl.load(bias + e * (halves * SIZE) + rows, mask=there, other=0).to(tl.float32)[:, None]
        if GATED:
            gate += tl.load(bias + e * (halves * SIZE) + SIZE + rows, mask=there, other=0).to(tl.float32)[:, None]
    if ACTIVATION == SWIGLU_BIAS:
        result = activate(up, gate, tl.load(swiglu_alpha + e), tl.load(swiglu_beta + e), tl.load(swiglu_limit + e), ACTIVATION)
    else:
        result = activate(up, gate, 1.0, 0.0, 0.0, ACTIVATION)
    tl.store(h + route[None, :] * SIZE + rows[:, None], rounded(result, tl.bfloat16), mask=there[:, None] & (m < n)[None, :])


@triton.jit
def _prefetch(addresses):
    """Lines of 128 bytes into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "experts", "step"],
    do_not_specialize_on_alignment=["ids", "router_weights", "bias", "alpha", "input_scale"],
)
def fc2_kernel(
    h, weight, weight_sf, alpha, input_scale, bias, ids, router_weights, out, partial, workspace, tokens, blocks, first, experts,
    step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, TILES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, ROUTES: tl.constexpr, WORD: tl.constexpr, PTX: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: ``TILES`` tiles of ``BN`` columns of the hidden size, by blocks or routes as :func:`fc1_kernel`.

    ``partial (routes, H)`` float32: each route's share.  Programs that finish a token's columns count; the last adds them up.

    Args:
        h: ``(routes, SIZE)`` bfloat16.
        weight: int32 words of ``(E, H, SIZE)`` codes.
        alpha, input_scale: as :func:`fc1_kernel`.
        bias: with BIAS, ``(E, H)``.
        out: ``(tokens, H)``.
    """
    tile, slot = tl.program_id(0), tl.program_id(1)
    routes = tokens * TOP_K
    width: tl.constexpr = BM if BM > 8 else 8
    m = tl.arange(0, width)
    # The routes are an earlier kernel's than the one before, which has waited for it: they are there already.
    if SORTED:
        local_ids = workspace + tokens * TILES
        order = local_ids + 2 * routes
        entry = order + routes + slot * 3
        n = tl.load(entry + 2)
        expert = tl.where(n == 0, -1, tl.load(entry, mask=n > 0, other=0))
        route = tl.load(order + tl.load(entry + 1, mask=n > 0, other=0) + m, mask=m < n, other=0)
    else:
        local_ids = ids
        expert, n, route = own_block(ids, slot, routes, first, experts, BM, width, ROUTES)
    rows = rows_of(tile, BN, H, 1)
    there = rows < H
    e = tl.maximum(expert, 0).to(tl.int64)
    columns: tl.constexpr = 512 // WORD
    weight += e * (H * (SIZE // WORD))
    weight_sf += e * ((H + 127) // 128 * ((SIZE + columns - 1) // columns) * 512)
    if PDL:
        if expert >= 0:
            lines: tl.constexpr = triton.next_power_of_2((SIZE + 32 * WORD - 1) // (32 * WORD))
            line = tl.arange(0, lines)
            _prefetch(weight + rows[:, None] * (SIZE // WORD) + tl.minimum(line * 32, SIZE // WORD - 1)[None, :])
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    if expert < 0:
        return
    words = rows[:, None] * (SIZE // WORD) + tl.arange(0, BK // WORD)[None, :]
    offsets = scale_offsets(tile, 0, BN, BK, H, SIZE, 1, WORD)
    inputs, given, column = places(route * SIZE, n, width, BK, WORD)
    sums = tl.zeros((BN, width), tl.float32)
    for k in range(0, SIZE, BK):
        hs = split_inputs(loaded(h, inputs, given, column, k, BK, SIZE), width, BK, WORD)
        w = matrix(weight, weight_sf, words, offsets, k, there, BN, BK, SIZE, H % BN == 0, WORD, tl.bfloat16, PTX)
        sums = dot(w, hs, sums, WORD)
    if WORD == FP4:
        sums *= tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
    if BIAS:
        sums += tl.load(bias + e * H + rows, mask=there, other=0).to(tl.float32)[:, None]
    if SORTED:
        scale = tl.load(local_ids + routes + route, mask=m < n, other=0).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(router_weights + route, mask=m < n, other=0.0)
    sums *= scale[None, :]
    inside = there[:, None] & (m < n)[None, :]
    tl.store(partial + route[None, :] * H + rows[:, None], sums, mask=inside)
    token = route // TOP_K
    expected = tl.zeros((width,), tl.int32)
    for k in tl.static_range(TOP_K):
        local = tl.load(local_ids + token * TOP_K + k, mask=m < n, other=-1)
        if not SORTED:
            local = localized(local, first, experts)
        expected += tl.where(local >= 0, 1, 0)
    tl.debug_barrier()
    before = tl.atomic_add(workspace + token * TILES + tile, m * 0 + 1, mask=m < n, sem="acq_rel")
    last = (m < n) & (before == expected - 1)
    tl.debug_barrier()
    if tl.max(last.to(tl.int32), axis=0) > 0:
        total = tl.zeros((BN, width), tl.float32)
        for k in tl.static_range(TOP_K):
            local = tl.load(local_ids + token * TOP_K + k, mask=last, other=-1)
            if not SORTED:
                local = localized(local, first, experts)
            share = partial + (token * TOP_K + k)[None, :] * H + rows[:, None]
            held = there[:, None] & (last & (local >= 0))[None, :]
            total += tl.load(share, mask=held, other=0.0, cache_modifier=".cg")
        tl.store(
            out + token[None, :] * H + rows[:, None], rounded(total, out.dtype.element_ty), mask=there[:, None] & last[None, :]
        )


@triton.jit(
    do_not_specialize=["tokens", "blocks", "first", "experts", "step"],
    do_not_specialize_on_alignment=["ids", "router_weights", "bias", "alpha", "input_scale"],
)
def fc2_token_kernel(
    h, weight, weight_sf, alpha, input_scale, bias, ids, router_weights, out, partial, workspace, tokens, blocks, first, experts,
    step,
    H: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
    WORD: tl.constexpr, PTX: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All routes of a token, at most eight, each with its own expert; arguments as :func:`fc2_kernel`.

    Grid: tiles of ``BN`` columns of the hidden size, by tokens.  The rows of eight experts are one product's rows and the routes
    its columns, of which each row keeps its own expert's: a tensor core instruction has eight columns whether they are used or
    not, and nothing is left to add between programs.
    """
    tile, token = tl.program_id(0), tl.program_id(1)
    m = tl.arange(0, 8)
    part = tl.arange(0, 8 * BN) // BN
    routed = part < TOP_K
    route = token * TOP_K + part
    expert = localized(tl.load(ids + route, mask=routed, other=-1), first, experts)
    e = tl.maximum(expert, 0).to(tl.int64)
    rows = rows_of(tile, BN, H, 8)
    there = (rows < H) & (expert >= 0)
    columns: tl.constexpr = 512 // WORD
    starts = e * (H * (SIZE // WORD)) + rows * (SIZE // WORD)
    if PDL:
        lines: tl.constexpr = triton.next_power_of_2((SIZE + 32 * WORD - 1) // (32 * WORD))
        line = tl.arange(0, lines)
        _prefetch((weight + starts)[:, None] + tl.minimum(line * 32, SIZE // WORD - 1)[None, :])
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    words = starts[:, None] + tl.arange(0, BK // WORD)[None, :]
    factors = e * ((H + 127) // 128 * ((SIZE + columns - 1) // columns) * 512)
    factors = factors[:, None] + scale_offsets(tile, 0, BN, BK, H, SIZE, 8, WORD)
    inputs, given, column = places((token * TOP_K + m) * SIZE, TOP_K, 8, BK, WORD)
    sums = tl.zeros((8 * BN, 8), tl.float32)
    for k in range(0, SIZE, BK):
        hs = split_inputs(loaded(h, inputs, given, column, k, BK, SIZE), 8, BK, WORD)
        w = matrix(weight, weight_sf, words, factors, k, there, 8 * BN, BK, SIZE, False, WORD, tl.bfloat16, PTX)
        sums = dot(w, hs, sums, WORD)
    shares = tl.sum(tl.where(part[:, None] == m[None, :], sums, 0.0), axis=1)
    if WORD == FP4:
        shares *= tl.load(alpha + e) * SCALE * tl.load(input_scale + e * step)
    if BIAS:
        shares += tl.load(bias + e * H + rows, mask=there, other=0).to(tl.float32)
    shares *= tl.load(router_weights + route, mask=routed, other=0.0)
    total = tl.sum(tl.reshape(tl.where(there, shares, 0.0), (8, BN)), axis=0)
    rows = rows_of(tile, BN, H, 1)
    tl.store(out + token * H + rows, rounded(total, out.dtype.element_ty), mask=rows < H)


for _kernel in (route_kernel, fc1_kernel, fc2_kernel, fc2_token_kernel):
    # Triton before 3.8 makes other keys of its cache for kernels that are hashed in another order (``DependenciesFinder``).
    getattr(_kernel, "cache_key", None)
