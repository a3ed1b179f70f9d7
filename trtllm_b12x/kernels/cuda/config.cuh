// SPDX-License-Identifier: Apache-2.0
// Sizes of one launch that follow from `sizes.cuh`, and their limits, each with its message.
#pragma once
#include "matrix.cuh"

// Phases of a launch after FC1 and FC2. A task's kind is its phase or END.
constexpr u32 SUM = 2, END = 3;

constexpr bool ONE_TOKEN = MAX_TOKENS == 1;       // multiplying warps: one_token.cuh
constexpr bool GATHER = MAX_TOKENS > 8;           // columns of a product are an expert's routes; else the tokens
constexpr int COLUMNS = GATHER ? 8 : MAX_TOKENS;  // columns of a product that are handed over

// ---- warps
constexpr int THREADS = (WARPS + 1 + ADDERS) * 32;
constexpr int SPLIT1 = WARPS / PARTS1, SPLIT2 = WARPS / PARTS2;  // warps that share the columns of a part's rows
constexpr int READERS = WARPS + ADDERS;                          // warps that read tasks

constexpr int BLOCKS_A_WARP = (BLOCKS1 + SPLIT1 - 1) / SPLIT1;
constexpr bool RESIDENT =
    !GATHER || BLOCKS_A_WARP <= 2;  // x of FC1 stays in registers for all tiles of a task, or of all tasks

constexpr int RING_BYTES = RING_HALVES * HALF_BYTES;  // per warp
constexpr int STAGES2 = RING_HALVES / HALVES2;        // maximum number of FC2 stages in flight; FC1: STAGES1
constexpr int MOST_STAGES = STAGES1 > STAGES2 ? STAGES1 : STAGES2;

// ---- routes
constexpr int ROUTES = MAX_TOKENS * TOP_K;
constexpr int ROUTE_WORDS = (ROUTES + 31) / 32, EXPERT_WORDS = (EXPERTS + 31) / 32;
constexpr int MOST_GROUPS = ROUTES < EXPERTS + ROUTES / 8 ? ROUTES : EXPERTS + ROUTES / 8;

// ---- buffers of sums and entries of tasks
constexpr int BUFFER_BYTES = WARPS * COLUMNS * 64;
constexpr int ENTRY_BYTES = 16 + 16 * (TASK_TILES1 > TASK_TILES2 ? TASK_TILES1 : TASK_TILES2);

// ---- limits
static_assert(WARPS % PARTS1 == 0 && (!GATHER || WARPS % PARTS2 == 0), "a part would have a warp more than another");
static_assert(SPLIT1 <= BLOCKS1 && (!GATHER || SPLIT2 <= BLOCKS2), "a warp would have no block of columns");
static_assert(GATHER || MAX_TOKENS <= WARPS, "a token's routes are read by a warp of its own");
static_assert(TOP_K <= 32, "a token's routes are lanes of a warp");
static_assert(EXPERTS <= 4096, "an expert's number has 12 bits in Group and Slot");
static_assert(ROUTES <= 8192, "a route's place has 13 bits in Group");
static_assert(!NARROW || (ONE_TOKEN && CODE_BITS == 4), "NARROW is a call of one token, of FP4");
static_assert(TILES_A_TASK == 1 || (GATHER && RESIDENT), "several tiles a task need x in registers");
static_assert((ENTRIES & (ENTRIES - 1)) == 0, "a task's entry and its parity are bits of its number");
static_assert(!GATHER || STAGES1 + 3 < ENTRIES, "a block would wait for an entry that is in use again");
static_assert(STAGES1 * HALVES1 <= RING_HALVES && HALVES1 % HALVES2 == 0 && RING_HALVES % HALVES1 == 0,
              "a stage would reach over the ring's end");
static_assert(!ONE_TOKEN || SLICES2, "a call of one token multiplies by slices of columns");
static_assert(!GATHER || !SLICES2, "slices are columns of one token's product");
static_assert(!ONE_TOKEN || HALVES2 == 1, "a call of one token has one half of 16 rows in a stage of FC2");
static_assert(BUFFERS % ADDERS == 0, "a buffer would have several warps that add, and a parity tells two phases apart");
static_assert(BUFFERS % HALVES1 == 0 && BUFFERS % HALVES2 == 0, "the halves of a tile would lie apart");
