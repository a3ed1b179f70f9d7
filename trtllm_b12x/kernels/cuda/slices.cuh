// SPDX-License-Identifier: Apache-2.0
// State of every multiplying warp, and its products for one token at a time: FC2 if SLICES2, and FC1 of ONE_TOKEN. A
// token needs one of a product's eight columns. So the columns take slices of the token's x or h, which needs fewer
// instructions.
//
// Lane 4g + t has slice t, 32 of the 128 columns of a row of weights, in two halves of 16. Column n of x, n < 4, has
// the first half of slice n and zeros elsewhere, and column n + 4 the second half. So a product's sum belongs to one
// half of one slice, which has one block scale. The scale multiplies the sum, and codes go to the tensor cores
// undecoded. The first half of a lane's words has codes of the first half. Their products (`sums[0]`) are right in
// columns 0 to 3, those of the other words (`sums[1]`) in columns 4 to 7.
#pragma once
#include "inputs.cuh"
#include "pipeline.cuh"

// Slices pass codes to the tensor cores in bfloat16's bits: FP4 is then 2^-126 times
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

struct MultiplyingWarp {
  // Maximum number of FC2 units per warp, and of those whose h is in registers (at most 32 registers).
  static constexpr int MOST_UNITS = (Stages::ALL_UNITS + WARPS - 1) / WARPS;
  static constexpr int MOST_HELD = 4 / UNIT_BLOCKS, HELD = MOST_UNITS < MOST_HELD ? MOST_UNITS : MOST_HELD;
  const Block& b;
  Stages stages{b};
  const int g = b.lane >> 2, t = b.lane & 3;
  const bool has_x = (g & 3) == t;  // this lane's column of x has its slice
  u32 buffer = 0, turn = 0;         // the buffer to fill next, and the parity of its phase
  u32 number = 0;                   // of the task to compute next
  u32 h[HELD][8 * UNIT_BLOCKS];     // of the next units
  u32 h_at[HELD];                   // start of this lane's h of those units: see `place_of_h`
  u32 token = ~0u;                  // token of FC2's task; by slices also the token of `h`
  int units = 0;                    // number of this warp's units of FC2 for that token

  DEVICE explicit MultiplyingWarp(const Block& block) : b(block) {}

  // Returns the first of this lane's 16 columns of x in a block of 128.
  DEVICE int column() const { return column8(t, 2 * (g >> 2)); }

  // ---- products
  // Returns sums of products of rows g and g + 8 with this lane's two columns. `apart`: rows g + 8 are the same rows at
  // the next 128 columns, whose x follows. Then each half is multiplied with zeros in the other half.
  template <bool float16, bool apart = false>
  DEVICE float2 multiply_rows(const Rows* rows, const u32* x) const {
    float sums[2][4] = {};
    // Adds the products of four pairs of columns: two of each row.
    auto add = [&](float* to, const u32* low, const u32* high, const u32* columns) {
      if (apart) {
        mma<float16>(to, low[0], 0, low[1], 0, columns[0], columns[1]);
        mma<float16>(to, 0, high[0], 0, high[1], columns[8], columns[9]);
      } else
        mma<float16>(to, low[0], high[0], low[1], high[1], columns[0], columns[1]);
    };
    EACH (i, 4 * LOADS) {
      const u32 word = word_of(rows[0].codes[i / 4], i % 4), below = word_of(rows[1].codes[i / 4], i % 4);
      u32 low[4], high[4];
      if (CODE_BITS == 8) {
        raw8(word, low), raw8(below, high);
        add(sums[i / 4], low, high, x + 2 * (i % 4));
        continue;
      }
      raw4<float16>(word, low), raw4<float16>(below, high);
      add(sums[i >> 1], low, high, x + 4 * (i & 1));
      add(sums[i >> 1], low + 2, high + 2, x + 4 * (i & 1) + 2);
    }
    const bool half = t >> 1;
    float own[4];
    EACH (i, 4) own[i] = half ? sums[1][i] : sums[0][i];
    if (CODE_BITS == 8) {
      float first, second, none;
      scales_of(rows[0].scales, first, none), scales_of(rows[1].scales, second, none);
      return {first * (own[0] + own[1]), second * (own[2] + own[3])};
    }
    // Picks the scales of two slices' halves from the bytes of four groups.
    const u32 picked = half ? 0x7531 : 0x6420;
    const u32 bytes = GROUP == 16 ? __byte_perm(rows[0].scales, rows[1].scales, picked) : 0;
    float scales[4];
    scales_of(GROUP == 16 ? bytes & 0xffff : rows[0].scales, scales[0], scales[1]);
    scales_of(GROUP == 16 ? bytes >> 16 : rows[1].scales, scales[2], scales[3]);
    return {scales[0] * own[0] + scales[1] * own[1], scales[2] * own[2] + scales[3] * own[3]};
  }
  // Adds over two lanes. An even t gets the sum of row g, an odd t that of row g + 8.
  DEVICE float over_two(const float* rows) const {
    const bool odd = t & 1;
    return (odd ? rows[1] : rows[0]) + __shfl_xor_sync(~0u, odd ? rows[0] : rows[1], 1);
  }
  // Waits until the buffers of a task's rows are free.
  template <int halves>
  DEVICE void wait_for_buffers() const {
    EACH (half, halves) barrier_wait(b.shared.empty(buffer + half), turn ^ 1);
  }
  // Passes the filled buffers on to the warps that add.
  template <int halves>
  DEVICE void pass_on() {
    __syncwarp();
    if (b.lane < halves) barrier_arrive(b.shared.full(buffer + b.lane));
    buffer += halves;
    if (buffer == BUFFERS) {
      buffer = 0;
      turn ^= 1;
    }
  }
  // Hands a task's rows over to the warps that add.
  template <int halves>
  DEVICE void hand_over(float (*rows)[2]) {
    if (!ONE_TOKEN) wait_for_buffers<halves>();
    const float low = over_two(rows[0]), high = halves == 2 ? over_two(rows[halves - 1]) : low;
    const bool second = t & 2;  // t of 0 and 1: the first half; 2 and 3: the second
    const float sum = (second ? high : low) + __shfl_xor_sync(~0u, second ? low : high, 2);
    if (t < 2 * halves)
      store_shared_float(b.shared.sums() + (buffer + (t >> 1)) * BUFFER_BYTES + b.warp * 64 + (t & 1) * 32 + g * 4,
                         sum);
    pass_on<halves>();
  }
  DEVICE void end_task() {
    return_task(b, number);
    number++;
  }

  // ---- FC2: warps take turns at units, and each adds its products over the token's routes
  DEVICE u32 route_of(u32 unit) const { return b.shared.routes() + (token * TOP_K + unit / UNITS2) * 16; }
  // Returns the byte offset of this lane's columns of a unit in the two buffers of h. Adds 1 if the second block's
  // columns are beyond the matrix. Returns ~0 if the lane has no columns.
  DEVICE u32 place_of_h(int i) const {
    const u32 unit = b.warp + i * WARPS;
    const int first = unit % UNITS2 * UNIT_BLOCKS * 128 + column();
    if (!has_x || i >= units || (!FULL2 && first >= INTERMEDIATE)) return ~0u;
    const u32 of_epoch = (load_shared(b.shared.epoch()) & 1) * (u32)H_BUFFER,
              alone = !FULL2 && first + 128 >= INTERMEDIATE,
              at = ONE_TOKEN ? load_shared(b.shared.unit(unit) + UNIT_H)
                             : (load_shared(route_of(unit) + ROUTE_NUMBER) * BLOCKS2 + unit % UNITS2) * 256;
    return of_epoch + at + (g >> 2) * 128 + t * 16 + (NARROW ? alone : 0);
  }
  DEVICE void load_h(u32 place, u32* to) const {
    EACH (j, 8 * UNIT_BLOCKS) to[j] = 0;
    if (place == ~0u) return;
    const u8* from = b.workspace.h() + (place & ~1u);
    UNROLL
    for (int block = 0; block < (place & 1 ? 1 : UNIT_BLOCKS); block++, from += 256, to += 8) {
      const uint4 p = load_relaxed_16(from), q = load_relaxed_16(from + 64);
      to[0] = p.x, to[1] = p.y, to[2] = p.z, to[3] = p.w;
      to[4] = q.x, to[5] = q.y, to[6] = q.z, to[7] = q.w;
    }
  }
  // Reloads h of a unit until all of it is written.
  DEVICE void wait_for_h(u32 place, u32* h) const {
    for (;;) {
      u32 most = 0;
      EACH (j, 8 * UNIT_BLOCKS) most = max(most, h[j]);
      if (most != ~0u) break;
      load_h(place, h);
    }
    __syncwarp();
  }
  DEVICE void fc2_by_slices() {
    if (!ONE_TOKEN) {
      const u32 next = load_shared(b.shared.entry(number) + INFO_AT) >> 16;
      if (next != token) {
        token = next, units = stages.units_of(token);
        EACH (i, HELD) {
          h_at[i] = place_of_h(i);
          load_h(h_at[i], h[i]);
        }
      }
    }
    if (units <= 0) stages.pass(number);
    float rows[HALVES2][2] = {};
    if (ONE_TOKEN) wait_for_buffers<1>();
    ROLLED
    for (int from = 0; from < units; from += HELD) {
      UNROLL  // otherwise h moves between registers, and a move waits for the load
      for (int j = 0; j < HELD; j++) {
        const int i = from + j;
        if (i >= units) break;
        const u32 unit = b.warp + i * WARPS;
        Rows read[HALVES2][2];
        auto read_stage = [&] { stages.read<FC2>(read, unit % UNITS2 * UNIT_BLOCKS); };
        if constexpr (ONE_TOKEN) {
          stages.take<FC2>(read_stage);
        } else {
          stages.open();
          read_stage();
          stages.close<FC2>();
        }
        const float factor =
            load_shared_float(ONE_TOKEN ? b.shared.unit(unit) + UNIT_FACTOR : route_of(unit) + ROUTE_FACTOR);
        wait_for_h(h_at[j], h[j]);
        EACH (half, HALVES2) {
          const float2 products = multiply_rows<false, NARROW>(read[half], h[j]);
          rows[half][0] += factor * (NARROW ? products.x + products.y : products.x);
          rows[half][1] += NARROW ? 0.f : factor * products.y;
        }
        // Loads h of the unit that takes these registers next. The token's next task has the same units.
        const int next = i + HELD < units ? i + HELD : j;
        if (MOST_UNITS > HELD && next != i) {
          h_at[j] = place_of_h(next);
          load_h(h_at[j], h[j]);
        }
      }
    }
    hand_over<HALVES2>(rows);
    end_task();
  }
};
