// SPDX-License-Identifier: Apache-2.0
// The multiplying warps of a call of one token (ONE_TOKEN). Both products go by slices, see slices.cuh. The warps
// request the first weights before the block knows its tasks.
#pragma once
#include "routing.cuh"
#include "slices.cuh"

struct OneToken : MultiplyingWarp {
  u32 x[BLOCKS_A_WARP][8];  // in memory order until `arrange`
  const u8* id;             // address of the id of this lane's route
  u32 wide;

  DEVICE explicit OneToken(const Block& block) : MultiplyingWarp(block) {}

  // ---- x
  // Loads x of all blocks of columns. If x is FP4, codes go to x[i][0] and [1], and the scale to x[i][2].
  DEVICE void load_x() {
    EACH (i, BLOCKS_A_WARP) {
      const int at = (b.warp % SPLIT1 + i * SPLIT1) * 128 + column();
      EACH (j, 8) x[i][j] = 0;
      if (!has_x || at >= HIDDEN) continue;
      if (NVFP4 && b.call.x_sf) {
        const uint2 q = *(const uint2*)(b.call.x + at / 2);
        x[i][0] = q.x, x[i][1] = q.y;
        x[i][2] = b.call.x_sf[b.call.swizzled ? (at >> 6) * 512 + (at >> 4 & 3) : at >> 4];
      } else {
        const uint4 p = *(const uint4*)(b.call.x + at * 2), q = *(const uint4*)(b.call.x + at * 2 + 16);
        x[i][0] = p.x, x[i][1] = p.y, x[i][2] = p.z, x[i][3] = p.w;
        x[i][4] = q.x, x[i][5] = q.y, x[i][6] = q.z, x[i][7] = q.w;
      }
    }
  }
  // Rearranges x from memory order to the order of decoded pairs.
  DEVICE void arrange(u32* x) const {
    if (NVFP4 && b.call.x_sf) {
      const u32 byte = x[2], second = x[1];
      const Scale scale = nvfp4_scale<FLOAT16>(byte, false);
      decode4<FLOAT16>(x[0], scale, x), decode4<FLOAT16>(second, scale, x + 4);
    } else
      to_pairs<8>(x);
    if (RAW_X) return;
    EACH (j, 8) x[j] = fma_bf16x2(x[j], TWO_TO_60, MINUS_ZEROS);
  }

  // ---- FC1
  DEVICE void fc1() {
    float rows[HALVES1][2] = {};
    wait_for_buffers<HALVES1>();
    EACH (i, BLOCKS_A_WARP) {
      if (BLOCKS1 % SPLIT1 != 0 && i >= stages.own1) break;
      Rows read[HALVES1][2];
      stages.take<FC1>([&] { stages.read<FC1>(read, stages.split1 + i * SPLIT1); });
      EACH (half, HALVES1) {
        const float2 products = multiply_rows<FLOAT16>(read[half], x[i]);
        rows[half][0] = i ? rows[half][0] + products.x : products.x;
        rows[half][1] = i ? rows[half][1] + products.y : products.y;
      }
    }
    hand_over<HALVES1>(rows);
    // Requests come after the products, which other blocks wait for. While weights of FC1 are in flight, they are
    // limited to one stage, except after the first task. On an H100 Qwen3-30B-A3B takes 11.9 us, and 12.6 without the
    // limit. Qwen3.6-35B-A3B takes 9.2, and 9.3 without the exception.
    stages.fill_phase<FC2>(stages.waiting == 0 || number == 0 ? Stages::ALL_UNITS : 1);
    end_task();
  }

  // Prepares everything for `begin` that does not depend on the launch ahead.
  DEVICE void prepare() {
    stages.begin();
    stages.prepare_first();
    id = id_of(b.call, b.lane), wide = b.call.wide_ids;
    keep(id), keep(wide);
  }
  // Loads x, and requests the first weights straight from the ids or logits: shared memory would have the routes later.
  DEVICE void begin() {
    int expert = -1;
    if (FROM_LOGITS) {
      load_x();
      const u32 choice = choose(b, 0, (blockIdx.x + (STAGES1 - 1) * gridDim.x) / TASKS1 + 1);  // for `ask_first`
      if (b.lane < TOP_K) expert = local_expert(b.layer, choice);
    } else {
      if (b.lane < TOP_K) expert = local_expert_at(b.layer, id, wide);
      load_x();
    }
    const u32 local = __ballot_sync(~0u, expert >= 0);
    const int place = __popc(local & ((1u << b.lane) - 1));
    stages.ask_first([&](int slot) { return __reduce_max_sync(~0u, place == slot ? expert : -1); });
  }
  DEVICE void run() {
    EACH (i, BLOCKS_A_WARP) arrange(x[i]);
    kind_of(b, 0);  // after it, routes are known
    stages.learn(b.shared.valid()[0]);
    units = stages.units;
    EACH (i, HELD) h_at[i] = place_of_h(i);
    while (number < stages.known || kind_of(b, number) == FC1) fc1();
    EACH (i, HELD) load_h(h_at[i], h[i]);
    while (!acquire_shared(b.shared.factors())) {
    }
    while (kind_of(b, number) == FC2) fc2_by_slices();
    if (b.lane == 0) barrier_arrive(b.shared.ended());
  }
};
