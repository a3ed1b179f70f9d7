// SPDX-License-Identifier: Apache-2.0
// A layer with many routes per expert (mma.sync, cp.async). Weights are decoded once for up to GROUP_ROUTES routes.
//
//   launch      is
//     prepare   sorts routes by expert, splits an expert's routes into groups, and arranges x in the order of products
//     fc1, fc2  multiply tiles, dealt to the blocks; a tile is 32 rows per warp of an expert's matrix by a group
//     sum       adds up a token's output
//   Launches overlap (programmatic dependent launch). A launch begins once all blocks of the launch ahead allow it, and
//   waits before it reads that launch's results. No block waits for another block of its launch, so every launch ends.
//
//   file                  what it is
//     gemm_routes.cuh     workspace; sorting
//     gemm_products.cuh   products
//     others              shared with the decode launch: see layer.cu
#include "gemm_products.cuh"

extern "C" __device__ const int prepare_threads = SORTERS, prepare_shared_bytes = SORTING_BYTES;
extern "C" __device__ const int fc1_threads = THREADS, fc1_shared_bytes = PRODUCTS_BYTES;
extern "C" __device__ const int fc2_threads = THREADS, fc2_shared_bytes = PRODUCTS_BYTES;
extern "C" __device__ const int sum_threads = SUMMERS, sum_shared_bytes = 0;

extern "C" __global__ void __launch_bounds__(SORTERS)
    prepare(const __grid_constant__ Layer layer, const __grid_constant__ Call call) {
  wait_for_launch_ahead();
  let_next_launch_begin();
  if (blockIdx.x)
    arrange_x(call);
  else if (call.tokens * TOP_K <= SORTERS)
    sort_routes<1>(layer, call);
  else
    sort_routes<MOST_ROUTES / SORTERS>(layer, call);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_SM)
    fc1(const __grid_constant__ Layer layer, const __grid_constant__ Call call) {
  Products<FC1>(layer, call).run();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_A_SM)
    fc2(const __grid_constant__ Layer layer, const __grid_constant__ Call call) {
  Products<FC2>(layer, call).run();
}

// Adds the shares of a token's routes in the order of top_k. A thread has two rows of each piece of a tile.
extern "C" __global__ void __launch_bounds__(SUMMERS)
    sum(const __grid_constant__ Layer, const __grid_constant__ Call call) {
  constexpr int QUARTERS = ALL_TILES2 * 4;
  const Workspace w(call);
  wait_for_launch_ahead();
  let_next_launch_begin();
  const int all = call.tokens * QUARTERS, parts = *w.parts();
  for (int i = blockIdx.x * SUMMERS + threadIdx.x; i < all; i += gridDim.x * SUMMERS) {
    const int token = i / QUARTERS, tile = i % QUARTERS / 4, quarter = i % 4;
    float sums[8] = {};
#pragma unroll(TOP_K < 8 ? TOP_K : 8)
    for (int k = 0; k < TOP_K * parts; k++) {
      const int route = token * TOP_K + k % TOP_K, place = w.places()[route];
      if (place < 0) continue;
      const u64 at = (k / TOP_K * w.routes() + place) * ALL_TILES2 + tile;
      const uint4 q = *(const uint4*)(w.shares() + at * SHARE_BYTES + quarter * 16);
      const float factor = router_weight(call, route) * __uint_as_float((u32)w.exponents()[at] << 23);
      const u32 pairs[4] = {q.x, q.y, q.z, q.w};
      EACH (j, 4) {
        sums[2 * j] += factor * from_f16((u16)pairs[j]);
        sums[2 * j + 1] += factor * from_f16((u16)(pairs[j] >> 16));
      }
    }
    EACH (piece, 4) {
      const int column = piece_row<PIECES2>(tile, piece) + 2 * quarter;
      if (column < HIDDEN)
        *(u32*)(call.out + (u64)token * HIDDEN + column) = pair_of(to_output(sums[piece]), to_output(sums[4 + piece]));
    }
  }
}
