// SPDX-License-Identifier: Apache-2.0
// The warps that multiply: they copy weights, decode them, and hand products over to the warps that add.
//
// Columns of mma.m16n8k16: FC1 multiplies for all tokens of the call, but warps hand over only the columns of the
// expert's tokens. FC2 multiplies for one token at a time: by slices of its h (slices.cuh) or by units. In a call that
// gathers, columns are the routes of the group. ONE_TOKEN has separate code: one_token.cuh.
#pragma once
#include "inputs.cuh"
#include "slices.cuh"
#include "sums.cuh"

struct Multiplier : MultiplyingWarp {
  Inputs& in;

  DEVICE Multiplier(const Block& block, Inputs& inputs) : MultiplyingWarp(block), in(inputs) {}

  DEVICE u32 current() const { return kind_of(b, number); }
  DEVICE u32 entry() const { return b.shared.entry(number); }
  // Returns whether the next task is published and has this kind.
  DEVICE bool next_is(u32 kind) const {
    return is_published(b, number + 1) && load_shared(b.shared.entry(number + 1)) == kind;
  }
  // Hands columns 2t and 2t + 1 of a tile's rows to the warps that add.
  template <int halves>
  DEVICE void hand_over_columns(float (*sums)[2][4], bool even, bool odd) {
    wait_for_buffers<halves>();
    EACH (half, halves) {
      const float *first = sums[half][0], *second = sums[half][1];
      const u32 at = b.shared.sums() + (buffer + half) * BUFFER_BYTES + b.warp * (COLUMNS * 64) + t * 128 + g * 4;
      if (even) {
        store_shared_float(at, first[0] + second[0]);
        store_shared_float(at + 32, first[2] + second[2]);
      }
      if (odd) {
        store_shared_float(at + 64, first[1] + second[1]);
        store_shared_float(at + 96, first[3] + second[3]);
      }
    }
    pass_on<halves>();
  }

  // ---- x in registers for all blocks of columns
  // After this task's last tile, loads x of block i for the next task if that task is of FC1.
  DEVICE void load_next(int i, int tile) {
    if (tile < TILES_A_TASK - 1) return;
    if (i == 0 && (in.asked = next_is(FC1))) in.find<FC1>(b.shared.entry(number + 1));
    if (in.asked) in.load<FC1>(in.x[i], stages.split1 + i * SPLIT1);
  }
  // Computes tile number `tile` of a task of FC1.
  DEVICE void resident_tile(bool even, bool odd, int tile) {
    float sums[HALVES1][2][4] = {};
    EACH (i, BLOCKS_A_WARP) {
      if (BLOCKS1 % SPLIT1 != 0 && i >= stages.own1) break;
      Rows rows[HALVES1][2];
      stages.open();
      stages.read<FC1>(rows, stages.split1 + i * SPLIT1);
      stages.close<FC1>();
      if (GATHER && tile == 0) in.arrange(in.x[i]);
      EACH (half, HALVES1) multiply<FLOAT16>(sums[half], rows[half][0], rows[half][1], in.x[RESIDENT ? i : 0]);
      if (GATHER) load_next(i, tile);
    }
    hand_over_columns<HALVES1>(sums, even, odd);
  }
  // Computes a task of FC1; in a call that gathers, TILES_A_TASK tiles for a group.
  DEVICE void resident_task() {
    const u32 word = load_shared(entry() + WORD_AT);
    if constexpr (!GATHER) {
      const u32 tokens = Slot{word}.tokens_from(2 * t);  // with a route to the expert
      resident_tile(tokens & 1, tokens & 2, 0);
    } else {
      const int last = Group{word}.last();
      if (!in.asked) {
        in.find<FC1>(entry());
        in.load_x(stages.split1);
      }
      ROLLED
      for (int tile = 0; tile < TILES_A_TASK; tile++) resident_tile(2 * t <= last, 2 * t < last, tile);
    }
    end_task();
  }

  // ---- x or h in registers for one block of columns at a time
  // Computes a task of FC1 or FC2 in a call that gathers: a tile for a group.
  template <int phase>
  DEVICE void streamed_task() {
    constexpr bool fc2 = phase == FC2;
    constexpr int STEP = fc2 ? SPLIT2 : SPLIT1, halves = HALVES<phase>;
    const int begin = fc2 ? stages.split2 : stages.split1, own = fc2 ? stages.own2 : stages.own1;
    const int last = load_shared(entry() + WORD_AT) >> 25;
    if (!in.asked) {
      in.find<phase>(entry());
      in.load<phase>(in.x[0], begin);
    }
    float sums[halves][2][4] = {};
    ROLLED
    for (int i = 0; i < own; i++) {
      const int block = begin + i * STEP;
      Rows rows[halves][2];
      stages.open();
      stages.read<phase>(rows, block);
      stages.close<phase>();
      if (fc2)
        in.wait_for_h(in.x[0], block * 128, true, [&] { in.load<phase>(in.x[0], block); });
      else
        in.arrange(in.x[0]);
      EACH (half, halves) {
        u32 now[16];
        EACH (j, 16) now[j] = in.x[0][j];
        if (half == halves - 1) {  // x is free for the next block, or the next task's first
          if ((in.asked = i + 1 < own)) {
            in.load<phase>(in.x[0], block + STEP);
          } else if ((in.asked = next_is(phase))) {
            in.find<phase>(b.shared.entry(number + 1));
            in.load<phase>(in.x[0], begin);
          }
        }
        multiply<FLOAT16 && !fc2>(sums[half], rows[half][0], rows[half][1], now);
      }
    }
    hand_over_columns<halves>(sums, 2 * t <= last, 2 * t < last);
    end_task();
  }

  // ---- a call that does not gather
  // Without SLICES2, warps take turns at a token's units of FC2, and each adds its products over the token's routes.
  // The columns of a product are units: h of up to AT_ONCE units is loaded at once, and column j is right for unit j.
  DEVICE void fc2_by_units(const u8* h) {
    constexpr int AT_ONCE = 8;
    token = load_shared(entry() + INFO_AT) >> 16, units = stages.units_of(token);
    if (units <= 0) stages.pass(number);
    float sums[HALVES2][2] = {};
    ROLLED
    for (int from = 0; from < units; from += AT_ONCE) {
      const int mine = from + g;  // the unit of this lane's column
      const bool some = mine < units;
      const u32 of_mine = b.warp + (some ? mine : 0) * WARPS;
      const int block_of_mine = of_mine % UNITS2;
      in.row = h + ((u64)load_shared(route_of(of_mine) + ROUTE_NUMBER) * BLOCKS2 + block_of_mine) * 256;
      EACH (j, 16) in.x[0][j] = 0;
      if (some) in.load<FC2>(in.x[0], 0);
      ROLLED
      for (int j = 0; j < AT_ONCE && from + j < units; j++) {
        const u32 unit = b.warp + (from + j) * WARPS;
        const float factor = load_shared_float(route_of(unit) + ROUTE_FACTOR);
        Rows rows[HALVES2][2];
        stages.open();
        stages.read<FC2>(rows, unit % UNITS2);
        stages.close<FC2>();
        in.wait_for_h(in.x[0], block_of_mine * 128, g == j, [&] { in.load<FC2>(in.x[0], 0); });
        const bool has = t == j >> 1, odd = j & 1;
        EACH (half, HALVES2) {
          float p[2][4] = {};
          multiply<false>(p, rows[half][0], rows[half][1], in.x[0]);
          if (!has) continue;
          sums[half][0] += factor * (odd ? p[0][1] + p[1][1] : p[0][0] + p[1][0]);
          sums[half][1] += factor * (odd ? p[0][3] + p[1][3] : p[0][2] + p[1][2]);
        }
      }
    }
    hand_over<HALVES2>(sums);
    end_task();
  }

  DEVICE void begin() {
    stages.begin();
    stages.fill<Stages::FIRST_TASK>();
  }
  DEVICE void run() {
    if (GATHER) {
      while (current() == FC1) {
        if constexpr (RESIDENT)
          resident_task();
        else
          streamed_task<FC1>();
      }
      in.asked = false;
      while (current() == FC2) streamed_task<FC2>();
      stages.ended = true;  // no weights are left
      while (current() == SUM) {
        const u32 token = load_shared(entry() + INFO_AT);
        sum_token(b, token, load_shared(b.shared.held() + token * 4));
        end_task();
      }
    } else {
      EACH (i, BLOCKS_A_WARP) in.arrange(in.x[i]);
      while (current() == FC1) resident_task();
      named_barrier<1, WARPS * 32>();  // after it, the routes' factors are in shared memory
      const u8* h = b.workspace.h() + (load_shared(b.shared.epoch()) & 1) * H_BUFFER + t * 16;
      while (current() == FC2) {
        if constexpr (SLICES2)
          fc2_by_slices();
        else
          fc2_by_units(h);
      }
    }
    if (b.lane == 0) barrier_arrive(b.shared.ended());
  }
};
