// SPDX-License-Identifier: Apache-2.0
// Decodes codes and block scales to operands of mma, bit for bit like triton/operands.py. Decoded values are exact in
// bfloat16, and for NVFP4 in float16. FP4 comes out 2^-8 times as large, and sums are multiplied by 256. Slices take
// undecoded codes: slices.cuh.
#pragma once
#include "matrix.cuh"

constexpr float CODE_FACTOR = CODE_BITS == 4 ? 256.f : 1.f;

// A block scale as a pair, and the addend: NaN if the scale is E8M0's NaN, else minus 0. In bfloat16, scales of FP4 are
// 2^118 times as large.
struct Scale {
  u32 pair, added;
};
constexpr u32 MINUS_ZEROS = 0x80008000u, TWO_TO_60 = 0x5d805d80u, TWO_TO_120 = 0x7b807b80u;  // pairs
// SCALED_X (E8M0): x and h are 2^60 times as large (FP4: 2^58), and a block scale is 2^60 times as large. So E4M3 needs
// one multiplication instead of two, and FP4 takes scales of up to 2^67 instead of 2^9. A larger scale becomes NaN. |x|
// or |h| of 2^68 or more (FP4: 2^70) becomes infinite. Scales below 2^-59 lose bits.
constexpr float X_FACTOR = !SCALED_X ? 1.f : CODE_BITS == 8 ? 0x1p60f : 0x1p58f;
constexpr u32 X_FACTORS = CODE_BITS == 8 ? TWO_TO_60 : 0x5c805c80u;
static_assert(!SCALED_X || GROUP == 32, "scales of other formats have a smaller range");

// Returns the first or the second of two E4M3 scales. In float16, FP4's codes are 2^-14 times as large and must become
// 2^-8, so the scale is 64 (0x5400) times as large.
template <bool float16>
DEVICE Scale nvfp4_scale(u32 bytes, bool second) {
  const u32 halves = e4m3x2_to_f16x2(bytes);
  if (float16) return {mul_f16x2(__byte_perm(halves, halves, second ? 0x3232 : 0x1010), 0x54005400u), 0};
  return {to_bf16x2(from_f16((u16)(second ? halves >> 16 : halves)) * 0x1p118f), MINUS_ZEROS};
}
// Returns an E8M0 scale. 255 is NaN, and 0 is 2^-127, a subnormal.
DEVICE Scale mx_scale(u32 byte) {
  const u32 pair = CODE_BITS == 4 || SCALED_X ? min(byte + (SCALED_X ? 60 : 118), 255u) * 0x00800080u
                                              : max(byte * 0x00800080u, 0x00400040u);
  return {pair, fma_bf16x2(pair, MINUS_ZEROS, MINUS_ZEROS)};
}

// Moves eight FP4 codes of 4 bits to the pairs (k, k + 4), each to its place in a float's bits. In bfloat16 the
// multiplications move sign and value of two codes at once.
template <bool float16>
DEVICE void codes4(u32 word, u32* pairs) {
  const u32 high = word >> 8;
  pairs[0] =
      float16 ? (word << 12 & MINUS_ZEROS) | (word << 9 & 0x0e000e00) : (word & 0x000f000f) * 0x1040 & 0x81c081c0;
  pairs[1] = float16 ? (word << 8 & MINUS_ZEROS) | (word << 5 & 0x0e000e00) : (word & 0x00f000f0) * 0x0104 & 0x81c081c0;
  pairs[2] = float16 ? (word << 4 & MINUS_ZEROS) | (word << 1 & 0x0e000e00) : (high & 0x000f000f) * 0x1040 & 0x81c081c0;
  pairs[3] = float16 ? (word & MINUS_ZEROS) | (word >> 3 & 0x0e000e00) : (high & 0x00f000f0) * 0x0104 & 0x81c081c0;
}
template <bool float16>
DEVICE void decode4(u32 word, const Scale& scale, u32* pairs) {
  codes4<float16>(word, pairs);
  EACH (i, 4) pairs[i] = float16 ? mul_f16x2(pairs[i], scale.pair) : fma_bf16x2(pairs[i], scale.pair, scale.added);
}
// Moves four FP8 codes to the pairs (k, k + 2). E4M3 in bfloat16's bits is 2^-120 times as large.
DEVICE void codes8(u32 word, u32* pairs) {
  pairs[0] = (word << 8 & MINUS_ZEROS) | (word << 4 & 0x07f007f0);
  pairs[1] = (word & MINUS_ZEROS) | (word >> 4 & 0x07f007f0);
}
DEVICE void decode8(u32 word, const Scale& scale, u32* pairs) {
  codes8(word, pairs);
  EACH (i, 2) {
    if (!SCALED_X) pairs[i] = fma_bf16x2(pairs[i], TWO_TO_120, MINUS_ZEROS);
    pairs[i] = fma_bf16x2(pairs[i], scale.pair, scale.added);
  }
}

// A lane has 32 of a block's 128 columns, eight at a time. In FP4 these are 32t .. 32t + 31. In FP8 they are 16t .. 16t
// + 15 and the same 64 later, so four lanes copy 64 contiguous bytes. `column8` is the first of its columns i,
// `column16` that of its 16 bytes of codes j.
DEVICE int column8(int t, int i) { return CODE_BITS == 4 ? 32 * t + 8 * i : (i >> 1) * 64 + 16 * t + 8 * (i & 1); }
DEVICE int column16(int t, int j) { return CODE_BITS == 4 ? 32 * t : 64 * j + 16 * t; }

// In the order of products, 8 columns of x or h are 16 bytes of one lane. Returns their byte offset in a row. In them
// the columns k and k + FAR are a pair at byte `place_of_pair(k)`.
DEVICE u32 place8(int column) {
  const int i = CODE_BITS == 4 ? column >> 3 & 3 : (column >> 5 & 2) | (column >> 3 & 1);
  const int t = CODE_BITS == 4 ? column >> 5 & 3 : column >> 4 & 3;
  return (column >> 7) * 256 + i * 64 + t * 16;
}
constexpr int FAR = CODE_BITS == 4 ? 4 : 2;
DEVICE u32 place_of_pair(int k) { return (CODE_BITS == 4 ? k & 3 : (k & 1) | k >> 2 << 1) * 4; }

// 32 columns of a row. `scales`: one (MXFP4), or two in a byte each; for slices the result of `Stage::column_scales`.
struct Rows {
  uint4 codes[LOADS];
  u32 scales;
};
DEVICE u32 word_of(const uint4& q, int i) { return i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w; }
// Decodes the lane's eight columns i to four pairs.
template <bool float16>
DEVICE void decode_part(const Rows& rows, int i, u32* pairs) {
  const uint4& codes = rows.codes[LOADS == 2 ? i >> 1 : 0];
  if (CODE_BITS == 4) {
    decode4<float16>(word_of(codes, i), GROUP == 32 ? mx_scale(rows.scales) : nvfp4_scale<float16>(rows.scales, i > 1),
                     pairs);
  } else {
    const Scale scale = mx_scale(i < 2 ? rows.scales & 255 : rows.scales >> 8);
    decode8(i & 1 ? codes.z : codes.x, scale, pairs);
    decode8(i & 1 ? codes.w : codes.y, scale, pairs + 2);
  }
}

// Adds the products of 16 rows (`low`: rows 0 to 7, `high`: 8 to 15), 128 columns and 8 columns of x to two chains of
// sums.
template <bool float16>
DEVICE void multiply(float (*sums)[4], const Rows& low, const Rows& high, const u32* x) {
  EACH (i, 4) {
    u32 a[4], b[4];
    decode_part<float16>(low, i, a);
    decode_part<float16>(high, i, b);
    mma<float16>(sums[0], a[0], b[0], a[1], b[1], x[4 * i], x[4 * i + 1]);
    mma<float16>(sums[1], a[2], b[2], a[3], b[3], x[4 * i + 2], x[4 * i + 3]);
  }
}

// Rearranges x or h in bfloat16 or float16 from memory order to the order of decoded pairs.
template <int words = 16>
DEVICE void to_pairs(u32* x) {
  UNROLL
  for (int i = 0; i < words; i += 4) {
    const u32 a = x[i], b = x[i + (CODE_BITS == 4 ? 2 : 1)], c = x[i + (CODE_BITS == 4 ? 1 : 2)], d = x[i + 3];
    x[i] = __byte_perm(a, b, 0x5410);
    x[i + 1] = __byte_perm(a, b, 0x7632);
    x[i + 2] = __byte_perm(c, d, 0x5410);
    x[i + 3] = __byte_perm(c, d, 0x7632);
  }
}
// Decodes 32 columns of x that the engine quantized to FP4.
DEVICE void to_pairs(const Rows& rows, u32* x) {
  EACH (i, 4) decode_part<FLOAT16>(rows, i, x + 4 * i);
}

DEVICE u32 pair_of(u16 low, u16 high) { return low | (u32)high << 16; }
DEVICE u16 to_output(float v) { return FLOAT16 ? to_f16(v) : to_bf16(v); }
DEVICE float bias_at(const void* bias, u64 i) {
  if (BIAS == FLOAT32_BIAS) return ((const float*)bias)[i];
  const u16 bits = ((const u16*)bias)[i];
  return BIAS == FLOAT16_BIAS ? from_f16(bits) : from_bf16(bits);
}
