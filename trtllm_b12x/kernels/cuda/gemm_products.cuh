// SPDX-License-Identifier: Apache-2.0
// The products of FC1 or FC2. A block's warps compute its list of tiles together, one tile after the other. A warp
// computes 32 rows of a tile, in FC1 16 of up and the same 16 of gate, for all routes of the group.
//
// Weights are A of mma: a warp copies its own (stage.cuh), and a lane decodes the bytes that it copied. Routes are B:
// the block copies 128 columns of each in the order of products, so 16 bytes of a lane are B of two products.
//
// A stage is 128 columns of all. Weights are copied STAGES stages ahead, since a warp has a stage in registers before
// new weights overwrite it. Routes are copied STAGES - 1 stages ahead. After a stage's one barrier, all warps see its
// routes and have read the previous ones. Stages continue across tiles.
#pragma once
#include "gemm_routes.cuh"
#include "stage.cuh"

// ---- shared memory: each warp's stages of weights, stages of routes, tokens of two tiles' routes, the list of tiles
constexpr int WEIGHT_STAGE = 2 * HALF_BYTES, ROUTE_STAGE = GROUP_ROUTES * 256;
constexpr int ROUTES_AT = WARPS * STAGES * WEIGHT_STAGE, TOKENS_AT = ROUTES_AT + STAGES * ROUTE_STAGE;
constexpr int LIST_AT = TOKENS_AT + 2 * 4 * GROUP_ROUTES, MOST_TASKS = TASKS1 > TASKS2 ? TASKS1 : TASKS2;
// Maximum number of tiles of a block: those of the largest call, or four in a call whose columns of FC2 are halved.
constexpr int MOST_TILES = (MOST_GROUPS * MOST_TASKS + FEWEST_BLOCKS - 1) / FEWEST_BLOCKS;
constexpr int LIST = MOST_TILES < 4 ? 4 : MOST_TILES;
constexpr int PRODUCTS_BYTES = LIST_AT + 8 * LIST;
static_assert(PRODUCTS_BYTES <= 99 * 1024, "a block of SM12x has at most 99 KB of shared memory");
static_assert(STAGES >= 2 && BLOCKS1 >= STAGES - 1, "the tokens of a tile are asked for when the one before it begins");

// A tile of the list.
struct Tile {
  u32 expert_task, place_routes;
  DEVICE u32 expert() const { return expert_task & 0xffff; }
  DEVICE u32 task() const { return expert_task >> 16; }
  DEVICE u32 place() const { return place_routes & 0xffff; }
  DEVICE u32 routes() const { return place_routes >> 16; }
};

// A stage: its tile, its block of columns, the end of the tile's blocks, and the stage's number modulo STAGES.
struct Cursor {
  int tile = 0, block = 0, end = 0, slot = 0;
};

template <u32 phase>
struct Products {
  static constexpr int BLOCKS = phase == FC1 ? BLOCKS1 : BLOCKS2, COLUMNS = phase == FC1 ? HIDDEN : INTERMEDIATE;
  static constexpr int TASKS = phase == FC1 ? TASKS1 : TASKS2, ROW = phase == FC1 ? ROW_OF_X : ROW_OF_H;
  static constexpr bool WHOLE = COLUMNS == BLOCKS * 128;    // all columns of all blocks are columns of x or h
  static constexpr bool float16 = FLOAT16 && phase == FC1;  // h is bfloat16
  static constexpr int ROWS_AT_ONCE = THREADS / 16;         // routes that the block copies at once, 16 bytes a thread
  static constexpr int TURNS = (GROUP_ROUTES + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;

  const Layer& layer;
  const Call& call;
  const Workspace w{call};
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const u32 base = shared_address(shared_memory());
  Stage weights{layer, lane};
  int tiles = 0, parts = 1;      // tiles of this block; parts of the columns, each a separate tile
  Cursor of_weights, of_routes;  // stages to copy next
  uint4 from;                    // start of this warp's weights in the tile of `of_weights`
  int copied = 0;                // routes to copy in the tile of `of_routes`, a multiple of 8
  u32 row_at[TURNS];             // start of this thread's rows of those routes in x or h
  int used = 0;                  // number of the stage to use next, modulo STAGES

  DEVICE Products(const Layer& layer, const Call& call) : layer(layer), call(call) {}

  DEVICE Tile tile_at(int i) const {
    return {load_shared(base + LIST_AT + 8 * i), load_shared(base + LIST_AT + 8 * i + 4)};
  }
  // ---- which tiles
  // Lists the block's tiles. Blocks take turns, from the first to the last and back.
  DEVICE void list_tiles() {
    int all = *w.groups() * TASKS;
    const int blocks = gridDim.x;
    // Halve the columns if that takes less than twice as many turns, each half as long.
    if (phase == FC2 && BLOCKS > 1 && w.routes() <= HALVED_ROUTES && all < 2 * blocks &&
        (2 * all + blocks - 1) / blocks < 2 * ((all + blocks - 1) / blocks))
      parts = 2;
    if (phase == FC2 && blockIdx.x == 0 && tid == 0) *w.parts() = parts;
    all *= parts;
    const int tasks = TASKS * parts;
    auto number = [&](int i) { return i * blocks + (i & 1 ? blocks - 1 - (int)blockIdx.x : (int)blockIdx.x); };
    tiles = all / blocks;
    tiles += number(tiles) < all;
    for (int i = tid; i < tiles; i += THREADS) {
      // The groups of an expert follow each other within a task, so its weights are in L2.
      const uint4 a = w.table()[number(i) / tasks];
      const Group any = {a.x, a.y, a.z, a.w};
      const int rest = number(i) - tasks * any.first();
      const uint4 mine = w.table()[any.first() + rest % any.count()];
      store_shared(base + LIST_AT + 8 * i, mine.x | rest / any.count() << 16);
      store_shared(base + LIST_AT + 8 * i + 4, mine.z | mine.w << 16);
    }
    __syncthreads();
  }

  // Number of this warp's 32 rows, and the blocks of columns of the tile.
  DEVICE int rows_of(const Tile& of) const { return (phase == FC2 ? of.task() / parts : of.task()) * WARPS + warp; }
  DEVICE int part_of(const Tile& of) const { return phase == FC2 ? of.task() % parts : 0; }
  DEVICE int first_block(int part) const { return part ? BLOCKS / 2 : 0; }
  DEVICE int end_block(int part) const { return phase == FC2 && part + 1 < parts ? BLOCKS / 2 : BLOCKS; }

  // ---- copies
  // Advances to the next stage. Returns whether that stage begins another tile of the list.
  DEVICE bool advance(Cursor& at) const {
    at.slot = at.slot + 1 == STAGES ? 0 : at.slot + 1;
    return ++at.block == at.end && ++at.tile < tiles;
  }
  DEVICE Tile enter(Cursor& at) const {
    const Tile of = tile_at(at.tile);
    at.block = first_block(part_of(of)), at.end = end_block(part_of(of));
    return of;
  }
  DEVICE void find_weights() {
    const Tile of = enter(of_weights);
    from = phase == FC1 ? tile1(of.expert(), rows_of(of)) : tile2(of.expert(), rows_of(of));
  }
  // Starts copying the warp's next stage of weights, if tiles are left.
  DEVICE void ask_for_weights() {
    if (of_weights.tile < tiles) {
      const u32 to = base + (warp * STAGES + of_weights.slot) * WEIGHT_STAGE, block = of_weights.block;
      if (phase == FC1)
        weights.copy1(to, from, 0, block);
      else
        weights.copy2(to, from, weights.codes2 + block * (16 * CODE_BITS), weights.scales2 + block * (2 * BLOCK_SCALES),
                      block);
      if (advance(of_weights)) find_weights();
    }
    copy_commit();
  }
  // `begin`: shared memory does not have the tokens of this tile yet.
  DEVICE void find_routes(bool begin) {
    const Tile of = enter(of_routes);
    const int routes = of.routes(), row = tid >> 4;
    copied = (routes + 7) & ~7;
    EACH (i, TURNS) {
      const int number = min(row + i * ROWS_AT_ONCE, routes - 1);
      const u32 place = of.place() + number;
      if (phase == FC2)
        row_at[i] = place * ROW;
      else
        row_at[i] = ROW * (begin ? w.tokens_at()[place] : load_shared(token_at(of_routes.tile, number)));
    }
    if (phase == FC2 || of_routes.tile + 1 >= tiles) return;
    const Tile next = tile_at(of_routes.tile + 1);
    for (int i = tid; i < (int)next.routes(); i += THREADS)
      copy_bytes<4>(token_at(of_routes.tile + 1, i), (const u8*)(w.tokens_at() + next.place() + i));
  }
  DEVICE u32 token_at(int of, int number) const { return base + TOKENS_AT + ((of & 1) * GROUP_ROUTES + number) * 4; }
  // Starts copying the block's next stage of routes, if tiles are left. Rows are 256 bytes. Odd rows swap the 64-byte
  // halves of each 128 bytes, so the same halves of two rows are in different banks.
  DEVICE void ask_for_routes() {
    if (of_routes.tile < tiles) {
      const int row = tid >> 4, chunk = tid & 15, block = of_routes.block;
      const u8* source = (phase == FC1 ? w.x() : w.h()) + block * 256 + chunk * 16;
      const u32 to = base + ROUTES_AT + of_routes.slot * ROUTE_STAGE + row * 256 + (chunk ^ (row & 1) * 4) * 16;
      const bool there = WHOLE || block * 128 + column8(chunk & 3, chunk >> 2) < COLUMNS;
      EACH (i, TURNS) {
        if (row + i * ROWS_AT_ONCE >= copied) continue;
        if (WHOLE)
          copy16(to + i * (ROWS_AT_ONCE * 256), source + row_at[i]);
        else
          copy16(to + i * (ROWS_AT_ONCE * 256), there ? source + row_at[i] : source, there);
      }
      if (advance(of_routes)) find_routes(false);
    }
    copy_commit();
  }

  DEVICE void run() {
    weights.template begin<false, false>(0);
    if (phase == FC1) wait_for_launch_ahead();
    let_next_launch_begin();
    list_tiles();  // FC2: `prepare`, which wrote the table, ended before FC1 let this launch begin
    if (tiles > 0) {
      find_weights();
      EACH (i, STAGES) ask_for_weights();
    }
    if (phase == FC2) wait_for_launch_ahead();
    if (tiles > 0) find_routes(true);
    EACH (i, STAGES - 1) {
      ask_for_routes();
      copy_commit();  // an empty group in place of the weights, which are requested above
    }
    ROLLED
    for (int i = 0; i < tiles; i++) multiply_at_least<1>(tile_at(i));
    copy_wait<0>();
  }
  // Picks `eights`, the number of products of 8 columns, as a compile-time constant: 1 to 8, 10 or 12.
  template <int eights>
  DEVICE void multiply_at_least(const Tile& of) {
    constexpr int most = GROUP_ROUTES / 8;
    if constexpr (eights < most) {
      if ((int)of.routes() > 8 * eights)
        return multiply_at_least<eights + (eights < 8 ? 1 : 2) < most ? eights + (eights < 8 ? 1 : 2) : most>(of);
    }
    multiply<eights>(of);
  }
  // Computes the tile's products with 8 * eights routes.
  template <int eights>
  DEVICE void multiply(const Tile& of) {
    float sums[2][eights][4] = {};
    const int last = end_block(part_of(of));
    ROLLED
    for (int block = first_block(part_of(of)); block < last; block++) {
      copy_wait<2 * STAGES - 3>();
      __syncwarp();
      Rows rows[2][2];
      weights.template read<phase, false>(rows, base + (warp * STAGES + used) * WEIGHT_STAGE, block);
      __syncthreads();
      ask_for_routes();
      ask_for_weights();
      const u32 x = base + ROUTES_AT + used * ROUTE_STAGE + g * 256;
      EACH (i, 4) {
        u32 a[2][2][4];
        EACH (half, 2)
          EACH (j, 2) decode_part<float16>(rows[half][j], i, a[half][j]);
        EACH (n, eights) {
          const uint4 b = load_shared_16(x + n * 2048 + ((i * 4 + t) ^ (g & 1) * 4) * 16);
          EACH (half, 2) {
            const u32 *low = a[half][0], *high = a[half][1];
            mma<float16>(sums[half][n], low[0], high[0], low[1], high[1], b.x, b.y);
            mma<float16>(sums[half][n], low[2], high[2], low[3], high[3], b.z, b.w);
          }
        }
      }
      used = used + 1 == STAGES ? 0 : used + 1;
    }
    if constexpr (phase == FC1)
      store_h<eights>(of, sums);
    else
      store_shares<eights>(of, sums);
  }

  // ---- results. This lane has routes 8 n + 2 t and 8 n + 2 t + 1, and row g of each piece.
  template <int eights>
  DEVICE void store_h(const Tile& of, float (*sums)[eights][4]) const {
    const FactorsOfFc1 factors(layer, call, of.expert(), CODE_FACTOR);
    const int number = rows_of(of);
    EACH (piece, PIECES1) {
      // A half of 16 rows is 8 of up and 8 of gate, or without a gate two pieces.
      const int half = GATED ? piece : piece >> 1, first = GATED ? 0 : (piece & 1) * 2;
      const int row = piece_row<PIECES1>(number, piece) + g;
      const bool there = EXACT1 || row < INTERMEDIATE, low = !(g & FAR);
      float up_bias = 0, gate_bias = 0;
      if (BIAS && there) {
        const u64 bias = (u64)of.expert() * (MATRICES * INTERMEDIATE) + row * PAIR;
        up_bias = bias_at(layer.bias1, bias + UP_ROW);
        if (GATED) gate_bias = bias_at(layer.bias1, bias + GATE_ROW);
      }
      u8* to = w.h() + (u64)(of.place() + 2 * t + !low) * ROW_OF_H + place8(row) + place_of_pair(g);
      EACH (n, eights) {
        float h[2];
        EACH (j, 2)
          h[j] = X_FACTOR * factors.activated(sums[half][n][first + j] * factors.up_factor + up_bias,
                                              GATED ? sums[half][n][2 + j] * factors.gate_factor + gate_bias : 0);
        // Rows k and k + FAR are a pair. One lane writes the first route's pair, the other lane the second route's.
        const float other = __shfl_xor_sync(~0u, low ? h[1] : h[0], 4 * FAR);
        const u32 pair = low ? pair_of(to_bf16(h[0]), to_bf16(other)) : pair_of(to_bf16(other), to_bf16(h[1]));
        if (there && 8 * n + 2 * t + !low < (int)of.routes()) *(u32*)(to + n * (8 * ROW_OF_H)) = pair;
      }
    }
  }
  // Shares are float16 with one exponent per 32 rows. Rows beyond the matrix have zero codes, so their products are 0
  // or NaN, and fmaxf ignores NaN.
  template <int eights>
  DEVICE void store_shares(const Tile& of, float (*sums)[eights][4]) const {
    const int number = rows_of(of), part = part_of(of);
    if (number >= ALL_TILES2) return;
    const float factor = CODE_FACTOR * (GROUP == 16 ? scale2_of(layer, of.expert()) : 1.f);
    float bias[4] = {};
    EACH (piece, 4) {
      const int row = piece_row<PIECES2>(number, piece) + g;
      if (BIAS && part == 0 && row < STORED_HIDDEN)
        bias[piece] = bias_at(layer.bias2, (u64)of.expert() * STORED_HIDDEN + row);
    }
    // All maxima are exchanged together, since an exchange between lanes takes a while.
    float most[eights][2];
    EACH (n, eights)
      EACH (j, 2) {
        most[n][j] = 0;
        EACH (piece, 4) {
          float& share = sums[piece >> 1][n][2 * (piece & 1) + j];
          share = share * factor + bias[piece];
          most[n][j] = fmaxf(most[n][j], fabsf(share));
        }
      }
    UNROLL
    for (int lanes = 4; lanes < 32; lanes *= 2)
      EACH (n, eights)
        EACH (j, 2) most[n][j] = fmaxf(most[n][j], __shfl_xor_sync(~0u, most[n][j], lanes));
    EACH (n, eights)
      EACH (j, 2) {
        const u32 exponent = min(max(__float_as_uint(most[n][j]) >> 23, 1u), 253u);
        const float scale = __uint_as_float((254 - exponent) << 23);
        const u64 at = (part * w.routes() + of.place() + 8 * n + 2 * t + j) * ALL_TILES2 + number;
        u16 halves[4];
        EACH (piece, 4) halves[piece] = to_f16(sums[piece >> 1][n][2 * (piece & 1) + j] * scale);
        if (8 * n + 2 * t + j < (int)of.routes()) {
          *(uint2*)(w.shares() + at * SHARE_BYTES + g * 8) =
              make_uint2(pair_of(halves[0], halves[1]), pair_of(halves[2], halves[3]));
          if (g == 0) w.exponents()[at] = (u8)exponent;
        }
      }
  }
};
