// SPDX-License-Identifier: Apache-2.0
// A decode layer in one launch: FC1, activation, FC2 and the weighted sum over a token's routes, for 1 to MAX_TOKENS
// (at most 64) tokens. It needs only features of SM12x: 99 KB of shared memory a block, mma.sync, cp.async, mbarriers.
//
//   tasks, in the order of their phases  few tokens              more: GATHER, by groups of up to 8 routes of an expert
//     FC1                                expert hit x tiles      group x tiles
//     FC2                                tile x token            group x tiles
//     sum                                (part of FC2)           token
//   A tile of FC1 is HALVES1 * 8 columns of the intermediate size (16 without a gate) of each of PARTS1 parts. A tile
//   of FC2 is HALVES2 * 16 columns of the output (8 if NARROW); in GATHER of each of PARTS2 parts.
//
//   Warps 0 to WARPS - 1 of a block copy, decode and multiply. One warp takes tasks and publishes them. ADDERS warps
//   add and write.
//
//   file             what it is
//     ptx.cuh        instructions
//     matrix.cuh     sizes of a layer, and positions of a tile's codes and scales
//     config.cuh     sizes of one launch, and their limits
//     numbers.cuh    codes and scales to operands of products
//     call.cuh       arguments of a launch; activations
//     records.cuh    workspace, shared memory, words
//     scoring.cuh    logits to ids and router weights
//     routing.cuh    ids to slots or groups
//     schedule.cuh   virtual blocks, tickets, entries: the protocol, and why every launch ends
//     stage.cuh      a stage of a warp's weights
//     pipeline.cuh   the ring of such stages
//     inputs.cuh     x and h in registers
//     slices.cuh     state of every multiplying warp; products for one token, by slices of columns
//     products.cuh   calls of several tokens
//     one_token.cuh  a call of one token
//     sums.cuh       the warps that add
#include "one_token.cuh"
#include "products.cuh"
#include "routing.cuh"
#include "schedule.cuh"
#include "sums.cuh"

// Stores zeros to `words` words from `at` on.
template <int words>
DEVICE void clear(u32 at) {
  ROLLED
  for (int i = threadIdx.x; i < words; i += THREADS) {
    store_shared(at + 4 * i, 0);
    if (words <= THREADS) break;
  }
}
// Initializes barriers, counts and masks. Reads nothing that the launch ahead writes.
DEVICE void set_up(const Block& b) {
  const Shared& shared = b.shared;
  // Lanes of one warp initialize mbarriers one after the other, 35 ns each on an H100, so each warp uses one lane.
  const int warp = __shfl_sync(~0u, b.warp, 0);  // in a uniform register
  if (b.lane == 0) {
    ROLLED
    for (int i = warp; i < BARRIERS; i += THREADS / 32) barrier_init(shared.barrier(i), Shared::arrivals(i));
  }
  if (threadIdx.x == 0) store_shared(shared.factors(), 0);
  if (GATHER) {
    clear<MAX_TOKENS>(shared.held());
    clear<(COUNTERS * EXPERTS + 1) / 2>(shared.base);
  } else {
    clear<ROUTES * (1 + ROUTE_WORDS) + EXPERT_WORDS>(shared.slots());  // also masks, and bits of experts
  }
  __syncthreads();
}

// Prefetches scales of all experts to L2, since they would arrive late after the weights. Memory that the launch ahead
// writes is prefetched only to translate its addresses.
DEVICE void prefetch_inputs(const Block& b) {
  const int lane = threadIdx.x - (WARPS + 1) * 32;
  if (lane == -32) prefetch(b.call.workspace);
  if (lane == 0) prefetch(b.call.router_weights);
  if (threadIdx.x == 0) prefetch(b.call.ids);
  if (threadIdx.x == 32) prefetch(b.call.x);
  if (GROUP != 16 || lane < 32) return;
  auto fetch = [&](const float* from, int count) {
    ROLLED
    for (int i = (lane - 32) * 32; i < count; i += (ADDERS - 1) * 32 * 32) prefetch(from + i);
  };
  fetch(b.layer.alpha1, EXPERTS);
  if (GATED) fetch(b.layer.halves1, 2 * EXPERTS);
  fetch(b.layer.input1, b.layer.step1 ? EXPERTS : 1);
  fetch(b.layer.alpha2, EXPERTS);
  fetch(b.layer.input2, b.layer.step2 ? EXPERTS : 1);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    layer(const __grid_constant__ Layer arguments, const __grid_constant__ Call call) {
  u8* memory = shared_memory();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const Block block = {arguments, call, {call.workspace}, {shared_address(memory), memory}, warp, lane};
  set_up(block);
  Inputs inputs(block);
  OneToken one(block);
  TaskTaker taker(block);
  if (ONE_TOKEN && warp < WARPS) one.prepare();
  prefetch_inputs(block);
  wait_for_launch_ahead();
  let_next_launch_begin();

  if (threadIdx.x == WARPS * 32) taker.begin();
  if (ONE_TOKEN && warp < WARPS) {  // before tasks are known
    one.begin();
  } else if (!GATHER && warp < WARPS) {
    inputs.to_token();
    inputs.load_x(warp % SPLIT1);
  }

  TokenRoutes routes(block);
  if (!GATHER) routes.read(block);
  int slots = 0;
  if constexpr (ONE_TOKEN) {
    routes.mark(block);
    if (warp >= WARPS) named_barrier<1, (ADDERS + 1) * 32>();
  } else {
    __syncthreads();
    slots = GATHER ? group_routes(block) : routes.number_slots(block);
    routes.mark(block);
    __syncthreads();
  }

  if (warp == WARPS) {
    taker.run(ONE_TOKEN ? block.shared.valid()[0] : slots);
  } else if (warp > WARPS) {
    if (ONE_TOKEN) routes.store_factor(block);
    Adder(block).run();
  } else if constexpr (ONE_TOKEN) {
    one.run();
  } else {
    Multiplier multiplier(block, inputs);
    multiplier.begin();
    if (!GATHER) routes.store_factor(block);
    multiplier.run();
  }
}
