// SPDX-License-Identifier: Apache-2.0
// Sorts routes into groups, and arranges x in the order of products. A group is up to GROUP_ROUTES routes of an expert,
// the columns of a tile's products. `sizes.cuh` has WARPS and BLOCKS_A_SM of fc1 and fc2, STAGES in flight per warp,
// GROUP_ROUTES, and FEWEST_BLOCKS, the minimum number of blocks of fc1 and fc2.
#pragma once
#include "call.cuh"

constexpr int THREADS = WARPS * 32, SORTERS = 1024, SUMMERS = 256;
constexpr int MOST_ROUTES = 16384;
constexpr int MOST_GROUPS = EXPERTS + MOST_ROUTES / GROUP_ROUTES;
constexpr int ROW_OF_X = BLOCKS1 * 256, ROW_OF_H = BLOCKS2 * 256;  // bytes of a token's x and of a route's h
constexpr int SHARE_BYTES = 64;                                    // per route and tile of FC2: 32 float16
// Calls of up to this many routes halve FC2's columns, with two shares per route, if their tiles leave blocks idle.
constexpr int HALVED_ROUTES = 4096;
static_assert(EXPERTS <= SORTERS, "a thread has an expert");
static_assert(GROUP_ROUTES % 8 == 0 && GROUP_ROUTES <= 96, "a group is columns of whole products, in registers");
static_assert(HALVES1 == 2 && HALVES2 == 2 && PARTS1 == WARPS && PARTS2 == WARPS, "a tile is a warp's, of 32 rows");

// A group: its expert; the expert's first group and number of groups; its first place; its number of routes. A place is
// a route's index in the order by expert.
struct Group {
  u32 expert, of_expert, place, routes;
  DEVICE u32 first() const { return of_expert >> 16; }
  DEVICE u32 count() const { return of_expert & 0xffff; }
};

// The workspace of a call. Each part is read after the launch that writes it has ended.
constexpr u64 PLACES_AT = 256 + 16 * (u64)MOST_GROUPS, X_AT = PLACES_AT + 8 * (u64)MOST_ROUTES;
constexpr u64 SHARE_OF_ROUTE = (u64)ALL_TILES2 * SHARE_BYTES;
extern "C" __device__ const int workspace_bytes = X_AT, token_bytes = ROW_OF_X, route_bytes = ROW_OF_H,
                                share_bytes = SHARE_OF_ROUTE + ALL_TILES2, halved_routes = HALVED_ROUTES;
struct Workspace {
  u8* base;
  u64 tokens;
  DEVICE explicit Workspace(const Call& call) : base(call.workspace), tokens(call.tokens) {}
  DEVICE u32* groups() const { return (u32*)base; }                       // number of groups
  DEVICE u32* parts() const { return (u32*)base + 1; }                    // parts of FC2's columns: 1 or 2
  DEVICE uint4* table() const { return (uint4*)(base + 256); }            // each a Group
  DEVICE int* places() const { return (int*)(base + PLACES_AT); }         // by route; -1 if its expert is not local
  DEVICE u32* tokens_at() const { return (u32*)places() + MOST_ROUTES; }  // by place
  DEVICE u8* x() const { return base + X_AT; }                            // by token
  DEVICE u8* h() const { return x() + tokens * ROW_OF_X; }                // by place, like the shares
  DEVICE u64 routes() const { return tokens * TOP_K; }
  DEVICE u64 shared_routes() const { return routes() <= HALVED_ROUTES ? 2 * routes() : routes(); }
  DEVICE u8* shares() const { return h() + routes() * ROW_OF_H; }                       // by part and place
  DEVICE u8* exponents() const { return shares() + shared_routes() * SHARE_OF_ROUTE; }  // a byte for each share
};

// ---- sorting, by one block
// Memory: counts, first routes and first groups by expert, numbers of experts by size of group, sums by warp, tokens.
constexpr int SIZES = GROUP_ROUTES / 8 + 1;
constexpr int SORTING_BYTES = 4 * (3 * EXPERTS + SIZES + SORTERS / 32) + 2 * MOST_ROUTES;

// `each`: routes per thread. Calls of up to 1,024 routes run short code, since every layer loads its code from memory.
template <int each>
DEVICE void sort_routes(const Layer& layer, const Call& call) {
  u32 *count = (u32*)shared_memory(), *first_route = count + EXPERTS, *first_group = first_route + EXPERTS;
  u32 *of_size = first_group + EXPERTS, *sums = of_size + SIZES;
  u16* tokens = (u16*)(sums + SORTERS / 32);
  const Workspace w(call);
  const int tid = threadIdx.x, lane = tid & 31, routes = call.tokens * TOP_K;
  const bool has_expert = tid < EXPERTS;
  if (has_expert) count[tid] = 0;
  if (tid < SIZES) of_size[tid] = 0;
  __syncthreads();
  int expert[each], rank[each];
  EACH (i, each) {
    const int route = tid + i * SORTERS;
    expert[i] = route < routes ? local_expert_at(layer, id_of(call, route), call.wide_ids) : -1;
  }
  EACH (i, each)
    if (expert[i] >= 0) rank[i] = atomicAdd(count + expert[i], 1);
  __syncthreads();
  // All groups of an expert but the last have the same size. Experts with the largest groups come first, so tiles dealt
  // out in turns cost about the same.
  const int own = has_expert ? count[tid] : 0, groups = (own + GROUP_ROUTES - 1) / GROUP_ROUTES;
  const int size = groups ? ((own + 7) / 8 + groups - 1) / groups : 0;  // in products of 8 columns
  u32 turn = has_expert ? atomicAdd(of_size + size, 1) : 0;
  __syncthreads();
  if (has_expert) {
    for (int larger = size + 1; larger < SIZES; larger++) turn += of_size[larger];
    first_group[turn] = groups;
  }
  __syncthreads();
  // One scan adds up both the routes of earlier experts and the groups of earlier turns.
  const u32 mine = has_expert ? first_group[tid] << 16 | own : 0;
  u32 upto = sum_up_to(mine, lane);
  if (lane == 31) sums[tid >> 5] = upto;
  __syncthreads();
  if (has_expert) {
    for (int warp = 0; warp < tid >> 5; warp++) upto += sums[warp];
    first_route[tid] = (upto - mine) & 0xffff;
    first_group[tid] = (upto - mine) >> 16;
    if (tid == EXPERTS - 1) *w.groups() = upto >> 16;
  }
  __syncthreads();
  if (has_expert) {
    const u32 from = first_group[turn], place = first_route[tid];
    for (int i = 0; i < groups; i++)
      w.table()[from + i] =
          make_uint4(tid, from << 16 | groups, place + i * size * 8, min(size * 8, own - i * size * 8));
  }
  EACH (i, each) {
    const int route = tid + i * SORTERS;
    if (route >= routes) continue;
    const int place = expert[i] < 0 ? -1 : (int)first_route[expert[i]] + rank[i];
    w.places()[route] = place;
    if (place >= 0) tokens[place] = route / TOP_K;
  }
  __syncthreads();
  const int local = first_route[EXPERTS - 1] + count[EXPERTS - 1];
  for (int i = tid; i < local; i += SORTERS) w.tokens_at()[i] = tokens[i];
}

// ---- x, by the other blocks, 32 columns a thread
DEVICE void arrange_x(const Call& call) {
  constexpr int PARTS = HIDDEN / 32;
  static_assert(HIDDEN % 32 == 0, "a thread has 32 columns of x");
  const Workspace w(call);
  const int all = call.tokens * PARTS, step = (gridDim.x - 1) * SORTERS;
  for (int i = (blockIdx.x - 1) * SORTERS + threadIdx.x; i < all; i += step) {
    const int token = i / PARTS, column = i % PARTS * 32;
    u32 x[16];
    if (NVFP4 && call.x_sf) {
      Rows rows;
      rows.codes[0] = *(const uint4*)(call.x + ((u64)token * HIDDEN + column) / 2);
      rows.scales = *(const u16*)(call.x_sf + scales_of_x(call, token, column));
      to_pairs(rows, x);
    } else {
      EACH (j, 4) {
        const uint4 q = *(const uint4*)(call.x + ((u64)token * HIDDEN + column + 8 * j) * 2);
        x[4 * j] = q.x, x[4 * j + 1] = q.y, x[4 * j + 2] = q.z, x[4 * j + 3] = q.w;
      }
      if (SCALED_X)
        EACH (j, 16) x[j] = fma_bf16x2(x[j], X_FACTORS, MINUS_ZEROS);
      to_pairs(x);
    }
    EACH (j, 4)
      *(uint4*)(w.x() + (u64)token * ROW_OF_X + place8(column + 8 * j)) =
          make_uint4(x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
  }
}
