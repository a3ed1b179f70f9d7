// SPDX-License-Identifier: Apache-2.0
// Undecoded codes as operands of tensor cores, for slices (slices.cuh), and the factors of their sums.
#pragma once
#include "call.cuh"
#include "config.cuh"

// Slices (FC1 of ONE_TOKEN, FC2 if SLICES2) pass codes to the tensor cores in bfloat16's bits: FP4 is then 2^-126 times
// as large, a subnormal, and E4M3 2^-120 times. The other operand, x or h, is 2^60 times as large, so products of 2^-60
// or more are normal in float32. |x| or |h| of 2^68 or more becomes infinite, and sums infinite or NaN. In float16 FP4
// is 2^-14 times as large, and x is not scaled. Block scales multiply sums in float32: results below 2^-83 in FP4, or
// 2^-89 in E4M3, become zero. Without SUBNORMALS the tensor cores take subnormals as zeros. Then codes are first made
// 2^126 or 2^120 times as large, and x and h are not scaled.
constexpr bool RAW_X = FLOAT16 || !SUBNORMALS;
constexpr u32 ONES = 0x3f803f80u, TWO_TO_126 = 0x7e807e80u;  // pairs
// Factors of the sums of FC2 and of FC1, and of h when a warp stores it.
constexpr float FACTOR2 = !SLICES2 ? CODE_FACTOR : !SUBNORMALS ? 1.f : CODE_BITS == 4 ? 0x1p66f : 0x1p60f;
constexpr float FACTOR1 = !ONE_TOKEN ? CODE_FACTOR : FLOAT16 ? 0x1p14f : FACTOR2;
constexpr float H_FACTOR = SLICES2 && SUBNORMALS ? 0x1p60f : 1.f;

template <bool float16>
DEVICE void raw4(u32 word, u32* pairs) {
  if (float16 || SUBNORMALS) return codes4<float16>(word, pairs);
  decode4<false>(word, {TWO_TO_126, MINUS_ZEROS}, pairs);
}
DEVICE void raw8(u32 word, u32* pairs) {
  if (SUBNORMALS) return codes8(word, pairs);
  decode8(word, {ONES, MINUS_ZEROS}, pairs);
}
// Converts two block scales to float32: E4M3, or E8M0, where 255 is NaN and 0 is 2^-127, a subnormal.
DEVICE void scales_of(u32 bytes, float& first, float& second) {
  if (GROUP == 16) {
    const u32 halves = e4m3x2_to_f16x2(bytes);
    first = from_f16((u16)halves);
    second = from_f16((u16)(halves >> 16));
    return;
  }
  auto value = [](u32 byte) { return __uint_as_float(byte == 255 ? 0x7fc00000u : byte ? byte << 23 : 0x00400000u); };
  first = value(bytes & 255);
  second = value(bytes >> 8 & 255);
}
