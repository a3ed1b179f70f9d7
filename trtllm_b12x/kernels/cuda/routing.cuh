// SPDX-License-Identifier: Apache-2.0
// Turns ids and router weights into routes, slots and groups. Every block does so itself, and all must get the same
// result. A call that does not gather has routes by token, and slots (experts with routes). A call that gathers has
// groups of up to 8 routes of an expert.
#pragma once
#include "scoring.cuh"

// Returns the local number of a route's expert; -1 if the id is not that of a local expert.
DEVICE int expert_of(const Block& b, u32 route) {
  if (FROM_LOGITS) return (int)load_shared(b.shared.chosen() + route * 4);
  return local_expert_at(b.layer, id_of(b.call, route), b.call.wide_ids);
}
DEVICE float weight_of(const Block& b, u32 route) {
  return FROM_LOGITS ? load_shared_float(b.shared.weights() + route * 4) : router_weight(b.call, route);
}
// ---- a call that does not gather. Warp w reads token w's routes, one per lane. With ONE_TOKEN, a warp that adds reads
// the token's routes.
struct TokenRoutes {
  int token;
  int expert = -1;  // of this lane's route; -1 if not local
  int slot = 0;     // place of the route among all; after `number_slots` the number of its expert's slot
  u32 choice = 0;   // FROM_LOGITS: its expert's global number
  float weight = 0;
  u32 factor_at = 0;  // shared address of its factor

  DEVICE explicit TokenRoutes(const Block& b) : token(ONE_TOKEN ? b.warp - WARPS - 1 : b.warp) {}

  DEVICE void read(const Block& b) {
    if ((u32)token >= (u32)b.call.tokens) return;
    const int route = token * TOP_K + b.lane;
    if (FROM_LOGITS) {
      choice = choose(b, token);
      if (b.lane < TOP_K) expert = local_expert(b.layer, choice);
    } else if (b.lane < TOP_K) {
      expert = expert_of(b, route);
      weight = weight_of(b, route);
    }
    const u32 local = __ballot_sync(~0u, expert >= 0);
    slot = token * TOP_K + __popc(local & ((1u << b.lane) - 1));
    if (expert >= 0) {
      const u32 at = b.shared.routes() + slot * 16;
      const u32 codes = expert * (EXPERT_CODES2 / 16), scales = expert * (EXPERT_SCALES2 / 2);
      factor_at = at + ROUTE_FACTOR;
      store_shared_16(at, make_uint4(codes, scales, 0, route));
      for (int i = 0; ONE_TOKEN && i < UNITS2; i++)
        store_shared_16(b.shared.unit(slot * UNITS2 + i),
                        make_uint4(codes + i * UNIT_BLOCKS * CODE_BITS, scales + i * UNIT_BLOCKS * BLOCK_SCALES, 0,
                                   (route * BLOCKS2 + i * UNIT_BLOCKS) * 256));
      if (!ONE_TOKEN) atomicOr(&b.shared.hit()[expert >> 5], 1u << (expert & 31));
    }
    if (b.lane == 0) b.shared.valid()[token] = __popc(local);
  }
  // After a barrier, numbers the experts with routes in ascending order. Returns the number of such experts.
  DEVICE int number_slots(const Block& b) {
    int slots = 0, rank = 0;
    for (int i = 0; i < EXPERT_WORDS; i++) {
      const u32 word = b.shared.hit()[i];
      if (expert >> 5 == i) rank = slots + __popc(word & ((1u << (expert & 31)) - 1));
      slots += __popc(word);
    }
    slot = rank;
    return slots;
  }
  DEVICE void mark(const Block& b) const {
    if (expert < 0) return;
    const int route = token * TOP_K + b.lane;
    atomicOr(b.shared.slot_words() + slot, Slot::make(expert, token));
    atomicOr(&b.shared.masks()[slot * ROUTE_WORDS + (route >> 5)], 1u << (route & 31));
  }
  // Stores factors late, since only FC2 waits for them, and their loads would delay the first weights.
  DEVICE void store_factor(const Block& b) {
    if ((u32)token >= (u32)b.call.tokens) return;
    if (FROM_LOGITS) {
      weight = weight_of_choice(b, token, choice);
      if (b.lane < TOP_K) store_shared_float(b.shared.weights() + (token * TOP_K + b.lane) * 4, weight);
    }
    if (expert >= 0) {
      const float factor = GROUP == 16 ? weight * scale2_of(b.layer, expert) : weight;
      if (ONE_TOKEN)
        for (int i = 0; i < UNITS2; i++) store_shared_float(b.shared.unit(slot * UNITS2 + i) + UNIT_FACTOR, factor);
      else
        store_shared_float(factor_at, factor);
    }
    if (!ONE_TOKEN) return;
    __syncwarp();
    if (b.lane == 0) release_shared(b.shared.factors(), 1);
  }
};

// ---- more tokens: sorts the routes by expert
// A route's place within its expert is the number of the expert's routes in earlier warps and earlier in its warp. The
// scratch is the memory of the stages: first counts (warp, expert) of 16 bits. Each expert has its first group and
// place (`first`: a word, groups in the high half) and its number of routes. Then each 32 experts have their groups and
// routes in such a word. The number of groups is last.
constexpr int BLOCK_WARPS = THREADS / 32;
constexpr int CHUNKS = (ROUTES + 31) / 32;
constexpr int COUNTERS = GATHER ? (CHUNKS < BLOCK_WARPS ? CHUNKS : BLOCK_WARPS) : 0;  // warps that count
constexpr int CHUNKS_A_WARP = (CHUNKS + BLOCK_WARPS - 1) / BLOCK_WARPS;
constexpr int FIRST_AT = (COUNTERS * EXPERTS * 2 + 3) / 4 * 4, TOTAL_AT = FIRST_AT + EXPERTS * 4,
              TOTALS32_AT = TOTAL_AT + EXPERTS * 4;
static_assert(!GATHER || TOTALS32_AT + EXPERT_WORDS * 4 + 4 <= SUMS_AT, "the scratch is larger than the stages");

// Sorts the routes into groups. Returns the number of groups.
DEVICE int group_routes(const Block& b) {
  const int tid = threadIdx.x, all = b.call.tokens * TOP_K, used = min(COUNTERS, (all + 31) / 32);
  u16* count = (u16*)b.shared.memory;
  u32* first = (u32*)(b.shared.memory + FIRST_AT);
  u32* total = (u32*)(b.shared.memory + TOTAL_AT);
  u32* totals32 = (u32*)(b.shared.memory + TOTALS32_AT);
  if (FROM_LOGITS) {
    for (int token = b.warp; token < b.call.tokens; token += BLOCK_WARPS) {
      const u32 choice = choose(b, token), route = token * TOP_K + b.lane;
      const float weight = weight_of_choice(b, token, choice);
      if (b.lane >= TOP_K) continue;
      store_shared(b.shared.chosen() + route * 4, local_expert(b.layer, choice));  // for `expert_of`
      store_shared_float(b.shared.weights() + route * 4, weight);                  // for `weight_of`
    }
    __syncthreads();
  }
  int expert[CHUNKS_A_WARP], rank[CHUNKS_A_WARP];
  EACH (i, CHUNKS_A_WARP) {
    const int route = (b.warp + i * BLOCK_WARPS) * 32 + b.lane;
    expert[i] = route < all ? expert_of(b, route) : -1;
  }
  EACH (i, CHUNKS_A_WARP) {
    if ((b.warp + i * BLOCK_WARPS) * 32 >= all) continue;
    const u32 same = __match_any_sync(~0u, expert[i]), below = same & ((1u << b.lane) - 1);
    const int n = expert[i] < 0 ? 0 : count[b.warp * EXPERTS + expert[i]];
    rank[i] = n + __popc(below);
    __syncwarp();
    if (expert[i] >= 0 && !below) count[b.warp * EXPERTS + expert[i]] = n + __popc(same);
    __syncwarp();
  }
  __syncthreads();
  for (int part = b.warp; part * 32 < EXPERTS; part += BLOCK_WARPS) {  // one expert per lane
    const int e = part * 32 + b.lane;
    u32 n = 0;
    if (e < EXPERTS) {
      for (int i = 0; i < used; i++) {
        const u32 of_warp = count[i * EXPERTS + e];
        count[i * EXPERTS + e] = n;
        n += of_warp;
      }
      total[e] = n;
    }
    const u32 own = (n + 7) / 8 << 16 | n;
    const u32 upto = sum_up_to(own, b.lane);
    if (e < EXPERTS) first[e] = upto - own;
    if (b.lane == 31) totals32[part] = upto;
  }
  __syncthreads();
  for (int e = tid; e < EXPERTS; e += THREADS) {
    u32 from = first[e];
    for (int i = 0; i < e / 32; i++) from += totals32[i];
    first[e] = from;
    const int n = total[e];
    for (int i = 0; i * 8 < n; i++)
      store_shared(b.shared.slots() + ((from >> 16) + i) * 4,
                   Group::make(e, (from & 0xffff) + 8 * i, min(n - 8 * i, 8) - 1));
    if (e == EXPERTS - 1) totals32[EXPERT_WORDS] = (from >> 16) + (n + 7) / 8;
  }
  __syncthreads();
  const int groups = totals32[EXPERT_WORDS];
  EACH (i, CHUNKS_A_WARP) {
    const int route = (b.warp + i * BLOCK_WARPS) * 32 + b.lane;
    if (expert[i] < 0) continue;
    const u32 place = (first[expert[i]] & 0xffff) + count[b.warp * EXPERTS + expert[i]] + rank[i];
    store_shared_u16(b.shared.numbers() + place * 2, (u16)route);
    or_shared(b.shared.held() + route / TOP_K * 4, 1u << route % TOP_K);
  }
  __syncthreads();
  return groups;
}
