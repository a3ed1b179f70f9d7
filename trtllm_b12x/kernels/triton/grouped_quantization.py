"""Values to the operands of block-scaled products; see :mod:`.source`."""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from trtllm_b12x.kernels.triton.operands import INTERPRETED

E2M1 = tl.constexpr("e2m1")
_LARGEST_EXPONENT = tl.constexpr(8)
NAN = tl.constexpr(255)
E4M3_NAN = tl.constexpr(127)
_SIXTH = tl.constexpr(1 / 6)
_PACK = tl.constexpr(
    """{
    .reg .b8 a, b, c, d;
    cvt.rn.satfinite.e2m1x2.f32 a, $5, $1;
    cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
    cvt.rn.satfinite.e2m1x2.f32 c, $7, $3;
    cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
    mov.b32 $0, {a, b, c, d};
    }"""
)


@triton.jit
def _e4m3(values):
    """float32 up to 448 to E4M3, to nearest even; Triton's interpreter cuts off what does not fit."""
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        subnormal = (values + 24576.0) - 24576.0  # float32's steps there are 2**-9
        values = tl.where(tl.abs(values) < 0.015625, subnormal, normal)
    return values.to(tl.float8e4nv)


@triton.jit
def _e2m1(values):
    """float32 to codes 0 to 15, int32, to nearest even and at most 6."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((values.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _not_numbers(blocks):
    """Return for each block ``(..., columns)`` whether it holds NaN: a maximum may lose it."""
    return tl.max((blocks != blocks).to(tl.int32), axis=2) != 0


@triton.jit
def _to_mxfp8(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    blocks = tl.reshape(values, (ROWS, COLUMNS // 32, 32))
    amax = tl.max(tl.abs(blocks), axis=2)
    exponent = (amax.to(tl.int32, bitcast=True) >> 23) & 255
    unusable = (exponent == 255) | _not_numbers(blocks)
    scale = tl.where(unusable, NAN, tl.maximum(exponent - _LARGEST_EXPONENT, 0))
    inverse = ((254 - scale) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(blocks * inverse[:, :, None], -448.0), 448.0)
    return _e4m3(tl.reshape(scaled, (ROWS, COLUMNS))), scale.to(tl.uint8)


@triton.jit
def _to_nvfp4(values, divisor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, NATIVE: tl.constexpr):
    blocks = tl.reshape(values, (ROWS, COLUMNS // 16, 16))
    amax = tl.max(tl.abs(blocks), axis=2)
    reciprocal = tl.div_rn(1.0, divisor)
    wanted = reciprocal * (amax * _SIXTH) if GATED else tl.div_rn(amax, 6.0 * divisor)
    scale = _e4m3(tl.minimum(wanted, 448.0))
    stored = scale.to(tl.float32)
    inverse = tl.div_rn(1.0, stored) * reciprocal if GATED else tl.div_rn(1.0, stored * divisor)
    inverse = tl.where(stored > 0, inverse, 0.0)
    even, odd = tl.split(tl.reshape(blocks * inverse[:, :, None], (ROWS, COLUMNS // 2, 2)))
    if NATIVE:
        code = tl.inline_asm_elementwise(_PACK, "=r,f,f,f,f,f,f,f,f", [even, odd], tl.uint8, is_pure=True, pack=4)
    else:
        code = (_e2m1(even) | (_e2m1(odd) << 4)).to(tl.uint8)
    return code, tl.where(_not_numbers(blocks), E4M3_NAN, scale.to(tl.uint8, bitcast=True)).to(tl.uint8)


@triton.jit
def quantized(
    values, divisor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """float32 ``(ROWS, COLUMNS)`` to codes in ``(ROWS, bytes)`` and the bytes of scales ``(ROWS, blocks)``."""
    if FORMAT == E2M1:
        code, scale = _to_nvfp4(values, divisor, ROWS, COLUMNS, GATED, NATIVE)
    else:
        code, scale = _to_mxfp8(values, ROWS, COLUMNS)
    return code, scale
