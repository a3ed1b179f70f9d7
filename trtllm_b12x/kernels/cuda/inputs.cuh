// SPDX-License-Identifier: Apache-2.0
// Columns of a product: x (FC1) and h (FC2), in the registers of a warp that multiplies. Slices have separate code: h
// in slices.cuh, x of ONE_TOKEN in one_token.cuh.
//
// A pair of h is its own flag. It begins as the sentinel 0xffffffff, which rounding never makes. FC2 loads pairs in the
// size in which they are written (32 bits, relaxed) until all differ from the sentinel, so addresses need no order.
#pragma once
#include "records.cuh"

struct Inputs {
  const Block& b;
  const int g = b.lane >> 2, t = b.lane & 3;    // this lane has row g of x, and the columns of `column8`
  const bool quantized = NVFP4 && b.call.x_sf;  // x is FP4
  const u8* row = nullptr;                      // row g: its token's x, or this lane's share of its route's h
  u32 token = min(g, b.call.tokens - 1);
  bool asked = false;  // GATHER: loads of the next stage, or of the next task's first, are in flight
  u32 x[RESIDENT ? BLOCKS_A_WARP : 1][16];  // in memory order until `arrange`

  DEVICE explicit Inputs(const Block& block) : b(block) {}

  DEVICE void to_token() { row = b.call.x + (u64)token * (quantized ? HIDDEN / 2 : 2 * HIDDEN); }
  // Finds row g of a task that gathers: the route of column g.
  template <int phase>
  DEVICE void find(u32 entry) {
    const Group group = {load_shared(entry + WORD_AT)};
    const u32 route = b.route_at(group.first() + min(g, (int)group.last()));
    if (phase == FC2) {
      row = b.workspace.h() + (load_shared(b.shared.epoch()) & 1) * H_BUFFER + (u64)route * ROW_OF_H + t * 16;
    } else {
      token = route / TOP_K;
      to_token();
    }
  }
  // Loads this lane's 32 columns of a block of 128. If x is FP4, codes go to to[0 .. 3] and two scales to to[4].
  template <int phase>
  DEVICE void load(u32* to, int block) {
    if (phase == FC1 && quantized) {
      const int column = block * 128 + t * 32;
      uint4 q = make_uint4(0, 0, 0, 0);
      to[4] = 0;
      if (column < HIDDEN) {
        q = *(const uint4*)(row + column / 2);
        to[4] = *(const u16*)(b.call.x_sf + scales_of_x(b.call, token, column));
      }
      to[0] = q.x, to[1] = q.y, to[2] = q.z, to[3] = q.w;
      return;
    }
    EACH (i, 4) {
      uint4 q = make_uint4(0, 0, 0, 0);
      if (phase == FC2)
        q = load_relaxed_16(row + block * 256 + 64 * i);
      else if ((HIDDEN % 128 == 0 && BLOCKS1 % SPLIT1 == 0) || block * 128 + column8(t, i) < HIDDEN)
        q = *(const uint4*)(row + (block * 128 + column8(t, i)) * 2);
      to[4 * i] = q.x, to[4 * i + 1] = q.y, to[4 * i + 2] = q.z, to[4 * i + 3] = q.w;
    }
  }
  // Loads x of all blocks of this warp, from block `first` on.
  DEVICE void load_x(int first) {
    EACH (i, BLOCKS_A_WARP) load<FC1>(x[i], first + i * SPLIT1);
  }
  // Rearranges x from memory order to the order of decoded pairs.
  DEVICE void arrange(u32* x) const {
    if (!quantized) return to_pairs(x);
    Rows rows;
    rows.codes[0] = make_uint4(x[0], x[1], x[2], x[3]);
    rows.scales = x[4];
    to_pairs(rows, x);
  }
  // Reloads 128 columns of h until they are written, in lanes with `some`. Columns beyond the matrix become 0.
  template <class Load>
  DEVICE void wait_for_h(u32* h, int column, bool some, Load again) const {
    while (some) {
      u32 most = 0;
      EACH (j, 16)
        if (FULL2 || column + column8(t, j / 4) < INTERMEDIATE) most = max(most, h[j]);
      if (most != ~0u) break;
      again();
    }
    __syncwarp();
    if (FULL2 || !some) return;
    EACH (j, 16)
      if (column + column8(t, j / 4) >= INTERMEDIATE) h[j] = 0;
  }
};
