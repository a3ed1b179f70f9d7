// SPDX-License-Identifier: Apache-2.0
// The warps that add. They add over warps that share a tile's columns, then activate (FC1) or write the output (FC2).
//
// Multiplying warps write products to buffers. The mbarriers full (WARPS arrivals) and empty (one) hand buffers over.
// One warp adds the parts of 16 rows in a fixed order, so the bits are always the same. In a call that gathers, FC2's
// products go to shares, by route. A warp that wrote shares adds 1 to the token's count (release). The token's sum
// waits for all shares (acquire), and adds in the order of top_k.
#pragma once
#include "routing.cuh"
#include "slices.cuh"

struct Adder {
  const Block& b;
  const int mine = b.warp - WARPS - 1;  // number of this warp among those that add
  const int row16 = b.lane & 15;        // row of a buffer that lanes l and l + 16 add
  u32 kind, parts;                      // of the task; this lane's row in the buffer that is added
  Info info;
  Group group;  // or Slot

  DEVICE explicit Adder(const Block& block) : b(block) {}

  DEVICE void wait_full(u32 buffer, u32 parity) const { barrier_wait(b.shared.full(buffer), parity); }
  // Adds column `column` of `warps` warps, whose parts lie `stride` columns apart. Both lanes of a row get the sum.
  DEVICE float total(int column, int warps, int stride) const {
    float sum = 0;
    UNROLL
    for (int j = b.lane >> 4; j < warps; j += 2) sum += load_shared_float(parts + (j * stride + column) * 64);
    return sum + __shfl_xor_sync(~0u, sum, 16);
  }

  DEVICE void run() {
    int item = 0;  // counts halves of tiles: each warp counts all, and adds every ADDERSth
    for (u32 number = 0;; number++) {
      kind = kind_of(b, number);
      if (kind == END) break;
      info = {load_shared(b.shared.entry(number) + INFO_AT)};
      group = {load_shared(b.shared.entry(number) + WORD_AT)};
      return_task(b, number);
      const int items = kind == FC1 ? HALVES1 * TILES_A_TASK : kind == FC2 ? HALVES2 : 0;
      for (int sub = 0; sub < items; sub++, item++) {
        if (item % ADDERS != mine) continue;
        const u32 buffer = item % BUFFERS, parity = item / BUFFERS & 1;
        parts = b.shared.sums() + buffer * BUFFER_BYTES + row16 * 4;
        if (kind == FC1)
          for (int part = 0; part < PARTS1; part++, parts += SPLIT1 * COLUMNS * 64) add1(sub, part, buffer, parity);
        else if (GATHER)
          add2_gathered(sub, buffer, parity);
        else
          add2(sub, buffer, parity);
        __syncwarp();
        if (b.lane == 0) barrier_arrive(b.shared.empty(buffer));
        if (GATHER && kind == FC2 && b.lane <= (int)group.last())
          add_release_global(b.workspace.added() + (load_shared(b.shared.epoch()) & 1) * MAX_TOKENS +
                                 b.route_at(group.first() + b.lane) / TOP_K,
                             1);
      }
    }
  }

  // Adds a part of a tile of FC1: h of 8 rows (16 without a gate) for each route of the slot or group.
  DEVICE void add1(int sub, int part, u32 buffer, u32 parity) const {
    const int slot = info.high(), tile = info.low() * TASK_TILES1 + sub / HALVES1 * PARTS1 + part, half = sub % HALVES1;
    const int expert = group.expert(), k = b.lane & 7;
    const int row = piece_row<PIECES1>(tile, GATED ? half : 2 * half + (row16 >> 3)) + k;
    const bool there = row < INTERMEDIATE;
    const FactorsOfFc1 of(b.layer, b.call, expert, FACTOR1);
    float up_bias = 0, gate_bias = 0;
    if (BIAS && there) {
      const u64 bias = (u64)expert * (MATRICES * INTERMEDIATE) + row * PAIR;
      up_bias = bias_at(b.layer.bias1, bias + UP_ROW);
      if (GATED) gate_bias = bias_at(b.layer.bias1, bias + GATE_ROW);
    }
    // h is written in pairs of rows k and k + FAR. `to`: start of this lane's pair in route 0.
    const bool writes = !(k & FAR) && row16 < (GATED ? 8 : 16) && there;
    u8* to = b.workspace.h() + (load_shared(b.shared.epoch()) & 1) * H_BUFFER + place8(row) + place_of_pair(k);
    const u32 first_routes = GATHER ? 0 : b.shared.masks()[slot * ROUTE_WORDS];
    if (part == 0) wait_full(buffer, parity);
    auto finish = [&](int route, float up, bool ours) {
      float gate = 0;
      if (GATED) gate = __shfl_down_sync(~0u, up, 8) * of.gate_factor + gate_bias;
      up = up * of.up_factor + up_bias;
      const float y = of.activated(up, gate) * H_FACTOR, far = __shfl_down_sync(~0u, y, FAR);
      if (writes && ours) store_relaxed(to + (u64)route * ROW_OF_H, pair_of(to_bf16(y), to_bf16(far)));
    };
    if (GATHER) {
      const int routes = group.last() + 1;
      for (int i = b.lane >> 4; i < routes + (b.lane >> 4); i += 2) {  // two routes at once
        float up = 0;
        EACH (j, SPLIT1) up += load_shared_float(parts + (j * 8 + i) * 64);
        finish(b.route_at(group.first() + i), up, i < routes);
      }
    } else {
      for (int word = 0; word < ROUTE_WORDS; word++)
        for (u32 left = word ? b.shared.masks()[slot * ROUTE_WORDS + word] : first_routes; left; left &= left - 1) {
          const int route = word * 32 + __ffs(left) - 1;
          finish(route, total(ONE_TOKEN ? 0 : route / TOP_K, SPLIT1, COLUMNS), b.lane < 16);
        }
    }
  }

  // Adds products of FC2 for a group, without a sum over a token's routes.
  DEVICE void add2_gathered(int sub, u32 buffer, u32 parity) const {
    const int routes = group.last() + 1;
    u32 route = 0;  // of lanes 0 to 7, with its factor
    float factor = 1;
    if (b.lane < routes) {
      const int expert = group.expert();
      route = b.route_at(group.first() + b.lane);
      factor *= weight_of(b, route);
      if (GROUP == 16) factor *= scale2_of(b.layer, expert);
    }
    wait_full(buffer, parity);
    for (int i = b.lane >> 4; i < routes + (b.lane >> 4); i += 2) {
      float* to = b.workspace.shares() + (u64)__shfl_sync(~0u, route, i) * STORED_HIDDEN;
      const float f = __shfl_sync(~0u, factor, i);
      for (int part = 0; part < TASK_TILES2; part++) {
        const int column = piece_row<PIECES2>(info.low() * TASK_TILES2 + part, 2 * sub + (row16 >> 3)) + (b.lane & 7);
        float sum = 0;
        EACH (j, SPLIT2) sum += load_shared_float(parts + ((part * SPLIT2 + j) * 8 + i) * 64);
        if (column < STORED_HIDDEN && i < routes) to[column] = sum * FACTOR2 * f;
      }
    }
  }

  // Adds and writes a token's output.
  DEVICE void add2(int sub, u32 buffer, u32 parity) const {
    const int token = info.high();
    const int column = piece_row<PIECES2>(info.low(), NARROW ? 0 : 2 * sub + (row16 >> 3)) + (b.lane & 7);
    float bias = 0;
    if (FROM_LOGITS) wait_full(buffer, parity);  // after it, the routes' weights are in shared memory
    if (BIAS && column < HIDDEN)
      for (int i = 0; i < (int)b.shared.valid()[token]; i++) {
        const u32 at = b.shared.routes() + (token * TOP_K + i) * 16;
        const u32 route = load_shared(at + ROUTE_NUMBER), expert = load_shared(at) / (u32)(EXPERT_CODES2 / 16);
        bias += weight_of(b, route) * bias_at(b.layer.bias2, (u64)expert * STORED_HIDDEN + column);
      }
    if (!FROM_LOGITS) wait_full(buffer, parity);
    const float sum = total(0, WARPS, 1) * FACTOR2 + bias;
    if (b.lane < (NARROW ? 8 : 16) && column < HIDDEN) b.call.out[(u64)token * HIDDEN + column] = to_output(sum);
  }
};

// Computes a token's output in a call that gathers. The multiplying warps share its columns. `local`: a mask of its
// local routes.
DEVICE void sum_token(const Block& b, u32 token, u32 local) {
  const u32* added = b.workspace.added() + (load_shared(b.shared.epoch()) & 1) * MAX_TOKENS + token;
  while (acquire_global(added) < (u32)(__popc(local) * TASKS2 * HALVES2)) __nanosleep(20);
  for (int column = b.warp * 128 + b.lane * 4; column < HIDDEN; column += WARPS * 128) {
    float sum[4] = {};
#pragma unroll(TOP_K < 8 ? TOP_K : 8)
    for (int i = 0; i < TOP_K; i++) {
      if (!(local >> i & 1)) continue;
      const int route = token * TOP_K + i;
      const uint4 q = load_relaxed_16((const u8*)(b.workspace.shares() + (u64)route * STORED_HIDDEN + column));
      sum[0] += __uint_as_float(q.x);
      sum[1] += __uint_as_float(q.y);
      sum[2] += __uint_as_float(q.z);
      sum[3] += __uint_as_float(q.w);
      if (BIAS)
        for (int j = 0; j < 4; j++)
          sum[j] += weight_of(b, route) * bias_at(b.layer.bias2, (u64)expert_of(b, route) * STORED_HIDDEN + column + j);
    }
    u16* to = b.call.out + (u64)token * HIDDEN + column;
    *(uint2*)to =
        make_uint2(pair_of(to_output(sum[0]), to_output(sum[1])), pair_of(to_output(sum[2]), to_output(sum[3])));
  }
}
