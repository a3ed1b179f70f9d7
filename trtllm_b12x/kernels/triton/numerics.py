# SPDX-License-Identifier: Apache-2.0
"""Number formats in device code: E2M1, E4M3 and E8M0 to float32 and back, and the quantization of activations."""

# ruff: noqa: N803 (constants of a kernel in capitals, as Triton's own have them)
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""True in Triton's interpreter, which multiplies the bits of bfloat16 as integers."""
E2M1 = tl.constexpr("e2m1")
_LARGEST_EXPONENT = tl.constexpr(8)
NAN = tl.constexpr(255)
_E4M3_NAN = tl.constexpr(127)
_SIXTH = tl.constexpr(1 / 6)


@triton.jit
def e2m1(code):
    """Convert the lowest four bits of integer codes to float32."""
    # The magnitude's bits, moved to the exponent and the mantissa's top, are the value times 2**-126.
    wide = code.to(tl.int32)
    return (((wide & 7) << 22) | ((wide & 8) << 28)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3(byte):
    """Convert the lowest eight bits of int32 to float32, on any card and in Triton's interpreter."""
    # The magnitude's bits, moved to the exponent and the mantissa's top, are the value times 2**-120, subnormals too.
    value = (((byte & 128) << 24) | ((byte & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((byte & 127) == 127, float("nan"), value)


@triton.jit
def e4m3_scales(scales, CONVERTS: tl.constexpr):
    """Convert uint8 to float32. CONVERTS: the card has an instruction for this conversion (8.9 and newer)."""
    if CONVERTS:
        return scales.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return e4m3(scales.to(tl.int32))


@triton.jit
def e8m0(byte):
    """Convert int32 bytes to float32."""
    bits = tl.where(byte == 0, 0x400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Round float32 to the nearest 16-bit float, also in Triton's interpreter, whose own conversion to bfloat16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        values = tl.where(values == values, bits.to(tl.float32, bitcast=True), values)
    return values.to(dtype)


@triton.jit
def to_e4m3(values):
    """Round float32 up to 448 to E4M3, to nearest even, also in Triton's interpreter, whose own conversion truncates."""
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        subnormal = (values + 24576.0) - 24576.0  # float32 has steps of 2**-9 at 24576
        values = tl.where(tl.abs(values) < 0.015625, subnormal, normal)
    return values.to(tl.float8e4nv)


@triton.jit
def to_e2m1(values):
    """Round float32 to E2M1 codes 0 to 15, int32, to nearest even, saturating at 6."""
    size = tl.abs(values)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32) + (size >= 1.75).to(tl.int32)
    code += (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32) + (size > 5.0).to(tl.int32)
    return code | ((values.to(tl.int32, bitcast=True) >> 28) & 8)


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
def _not_numbers(blocks):
    """Return whether each block ``(..., columns)`` holds NaN, which a maximum may lose."""
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
    return to_e4m3(tl.reshape(scaled, (ROWS, COLUMNS))), scale.to(tl.uint8)


@triton.jit
def _to_nvfp4(values, divisor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, NATIVE: tl.constexpr):
    blocks = tl.reshape(values, (ROWS, COLUMNS // 16, 16))
    amax = tl.max(tl.abs(blocks), axis=2)
    reciprocal = tl.div_rn(1.0, divisor)
    wanted = reciprocal * (amax * _SIXTH) if GATED else tl.div_rn(amax, 6.0 * divisor)
    scale = to_e4m3(tl.minimum(wanted, 448.0))
    stored = scale.to(tl.float32)
    inverse = tl.div_rn(1.0, stored) * reciprocal if GATED else tl.div_rn(1.0, stored * divisor)
    inverse = tl.where(stored > 0, inverse, 0.0)
    even, odd = tl.split(tl.reshape(blocks * inverse[:, :, None], (ROWS, COLUMNS // 2, 2)))
    if NATIVE:
        code = tl.inline_asm_elementwise(_PACK, "=r,f,f,f,f,f,f,f,f", [even, odd], tl.uint8, is_pure=True, pack=4)
    else:
        code = (to_e2m1(even) | (to_e2m1(odd) << 4)).to(tl.uint8)
    return code, tl.where(_not_numbers(blocks), _E4M3_NAN, scale.to(tl.uint8, bitcast=True)).to(tl.uint8)


@triton.jit
def quantized(
    values, divisor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATED: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr
):  # fmt: skip
    """Quantize float32 ``(ROWS, COLUMNS)``. Return codes ``(ROWS, bytes)`` and scale bytes ``(ROWS, blocks)``."""
    if FORMAT == E2M1:
        return _to_nvfp4(values, divisor, ROWS, COLUMNS, GATED, NATIVE)
    else:  # noqa: RET505 (without it Triton compiles both returns, whose dtypes differ)
        return _to_mxfp8(values, ROWS, COLUMNS)
