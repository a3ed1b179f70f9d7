// SPDX-License-Identifier: Apache-2.0
// The workspace, shared memory, and the words by which warps exchange routes and tasks.
#pragma once
#include "call.cuh"
#include "config.cuh"

// ---- workspace, one for each stream or graph: HEADER bytes that begin as zeros; two buffers of h that begin as 0xff;
// shares.
constexpr int HEADER = 1024;
constexpr u64 ROW_OF_H = (u64)BLOCKS2 * 256;      // bytes of a route's h in bfloat16
constexpr u64 H_BUFFER = (u64)ROUTES * ROW_OF_H;  // launch n writes buffer n % 2
constexpr u64 ALL_SHARES = GATHER ? (u64)ROUTES * STORED_HIDDEN * 4 : 0;
static_assert(512 + 2 * 4 * MAX_TOKENS <= HEADER, "the tokens' counts, twice, end beyond the header");
extern "C" __device__ const int shared_bytes = SHARED_BYTES, threads = THREADS;
extern "C" __device__ const int filled_bytes = HEADER + 2 * H_BUFFER, workspace_bytes = filled_bytes + ALL_SHARES;

struct Workspace {
  u8* base;
  DEVICE u32* ticket() const { return (u32*)base; }         // GATHER: the next ticket
  DEVICE u32* taken() const { return (u32*)base; }          // else a bit for each taken virtual block
  DEVICE u32* done() const { return (u32*)(base + 128); }   // number of blocks that have taken their last task
  DEVICE u32* epoch() const { return (u32*)(base + 256); }  // number of the launch, and tokens of the last one
  DEVICE u32* added() const { return (u32*)(base + 512); }  // (2, MAX_TOKENS): number of a token's finished shares
  DEVICE u8* h() const { return base + HEADER; }            // (2, route, column), columns in the order of products
  DEVICE float* shares() const { return (float*)(h() + 2 * H_BUFFER); }  // (route, column): products of FC2
};

// ---- words
// A group: up to 8 routes of an expert, neighbors in the list of routes by expert.
struct Group {
  u32 word;
  DEVICE static u32 make(u32 expert, u32 first, u32 last) { return expert | first << 12 | last << 25; }
  DEVICE u32 expert() const { return word & 4095; }
  DEVICE u32 first() const { return word >> 12 & 8191; }  // place of its first route
  DEVICE u32 last() const { return word >> 25; }          // number of routes minus one
};
// A slot: an expert with routes, and a bit for each of their tokens.
struct Slot {
  static constexpr int TOKENS = 16;  // bit of token 0
  DEVICE static u32 make(u32 expert, int token) { return expert | 1u << TOKENS << token; }
  u32 word;
  DEVICE u32 expert() const { return word & 4095; }
  DEVICE u32 tokens_from(int token) const { return word >> (TOKENS + token); }
};
// The first word of an entry is the task's kind. Info is the second, in halves. FC1: number of the slot or group,
// number of the task among its TASKS1. FC2: token (0 if GATHER), number of the task among TASKS2. SUM: the whole word
// is the token.
struct Info {
  u32 word;
  DEVICE static u32 make(u32 high, u32 low) { return high << 16 | low; }
  DEVICE int high() const { return word >> 16; }
  DEVICE int low() const { return word & 0xffff; }
};
// Byte offsets in an entry. The third word is a Group or a Slot. From byte 16 on, each tile of the task has four words.
// They are codes in units of 16 bytes, scales of up and of gate (FC2: scales, 0) in units of 2 bytes, first row.
constexpr u32 INFO_AT = 4, WORD_AT = 8, TILES_AT = 16;
// A route of a call that does not gather has four words. They are the start of its expert's codes and of its scales in
// FC2, in the same units; its factor; its number.
constexpr u32 ROUTE_SCALES = 4, ROUTE_FACTOR = 8, ROUTE_NUMBER = 12;
// ONE_TOKEN: a unit of FC2 is a route's block of columns. Its words: start of its codes, start of its scales, its
// factor, byte offset of its h in a buffer.
constexpr u32 UNIT_SCALES = 4, UNIT_FACTOR = 8, UNIT_H = 12;

// ---- shared memory: consecutive areas, stages first. variant.py computes SHARED_BYTES.
// mbarriers: full and empty of each buffer of sums, ended, published and given back of each entry.
constexpr int ENDED = 2 * BUFFERS, PUBLISHED = ENDED + 1, GIVEN_BACK = PUBLISHED + ENTRIES;
constexpr int BARRIERS = GIVEN_BACK + ENTRIES;
constexpr int SUMS_AT = WARPS * RING_BYTES;
constexpr int BARRIERS_AT = SUMS_AT + BUFFERS * BUFFER_BYTES;
constexpr int EPOCH_AT = BARRIERS_AT + 8 * BARRIERS;
constexpr int TAKEN_AT = EPOCH_AT + 8;
constexpr int ENTRIES_AT = (TAKEN_AT + 2 * MOST_BLOCKS + 15) / 16 * 16;
constexpr int ROUTES_AT = ENTRIES_AT + ENTRIES * ENTRY_BYTES, NUMBERS_AT = ROUTES_AT;
constexpr int UNITS_AT = ROUTES_AT + 16 * ROUTES;
constexpr int SLOTS_AT = GATHER ? NUMBERS_AT + 2 * ROUTES : UNITS_AT + (ONE_TOKEN ? 16 * TOP_K * UNITS2 : 0);
constexpr int MASKS_AT = SLOTS_AT + 4 * ROUTES;  // set_up clears slots, masks and bits of experts at once
constexpr int HIT_AT = MASKS_AT + 4 * ROUTES * ROUTE_WORDS;
constexpr int HELD_AT = SLOTS_AT + 4 * MOST_GROUPS;
constexpr int WEIGHTS_AT = GATHER ? HELD_AT + 4 * MAX_TOKENS : HIT_AT + 4 * EXPERT_WORDS + 64;
constexpr int CHOSEN_AT = WEIGHTS_AT + (FROM_LOGITS ? 4 * ROUTES : 0);
static_assert(SHARED_BYTES == CHOSEN_AT + (FROM_LOGITS && GATHER ? 4 * ROUTES : 0), "the host computes another size");
static_assert(SHARED_BYTES <= 99 * 1024, "a block of SM12x has at most 99 KB of shared memory");

struct Shared {
  u32 base;
  u8* memory;
  DEVICE u32 stages(int warp) const { return base + warp * RING_BYTES; }
  DEVICE u32 sums() const { return base + SUMS_AT; }
  DEVICE static int arrivals(int i) { return i < BUFFERS || i == ENDED ? WARPS : i >= GIVEN_BACK ? READERS : 1; }
  DEVICE u32 barrier(int i) const { return base + BARRIERS_AT + 8 * i; }
  DEVICE u32 full(int buffer) const { return barrier(buffer); }
  DEVICE u32 empty(int buffer) const { return barrier(BUFFERS + buffer); }
  DEVICE u32 ended() const { return barrier(ENDED); }
  // The entry of the block's task `number`, and the entry's mbarriers.
  DEVICE u32 entry(u32 number) const { return base + ENTRIES_AT + ENTRY_BYTES * (number % ENTRIES); }
  DEVICE u32 published(u32 number) const { return barrier(PUBLISHED + number % ENTRIES); }
  DEVICE u32 given_back(u32 number) const { return barrier(GIVEN_BACK + number % ENTRIES); }
  DEVICE u32 epoch() const { return base + EPOCH_AT; }
  DEVICE u32 factors() const { return base + EPOCH_AT + 4; }  // ONE_TOKEN: 1 once the routes' factors are stored
  DEVICE u32 taken() const { return base + TAKEN_AT; }        // virtual blocks that this block took, 16 bits each
  DEVICE u32 slots() const { return base + SLOTS_AT; }        // GATHER: groups
  // For calls that do not gather.
  DEVICE u32 routes() const { return base + ROUTES_AT; }
  DEVICE u32 unit(u32 unit) const { return base + UNITS_AT + 16 * unit; }
  DEVICE u32* slot_words() const { return (u32*)(memory + SLOTS_AT); }
  DEVICE u32* masks() const { return (u32*)(memory + MASKS_AT); }  // routes of a slot, ROUTE_WORDS each
  DEVICE u32* hit() const { return (u32*)(memory + HIT_AT); }      // a bit for each expert
  DEVICE u32* valid() const { return (u32*)(memory + HIT_AT + EXPERT_WORDS * 4); }  // number of a token's local routes
  // For calls that gather.
  DEVICE u32 numbers() const { return base + NUMBERS_AT; }  // route numbers by expert, 16 bits each
  DEVICE u32 held() const { return base + HELD_AT; }        // a mask of each token's local routes
  // FROM_LOGITS: each route's router weight and, in a call that gathers, local expert, or -1 if not local.
  DEVICE u32 chosen() const { return base + CHOSEN_AT; }
  DEVICE u32 weights() const { return base + WEIGHTS_AT; }
};

// A thread's block, and its warp and lane in the block, for every role.
struct Block {
  const Layer& layer;
  const Call& call;
  Workspace workspace;
  Shared shared;
  int warp, lane;
  // GATHER: returns the number of the route at `place` in the list by expert.
  DEVICE u32 route_at(u32 place) const { return load_shared_u16(shared.numbers() + place * 2); }
};
