// SPDX-License-Identifier: Apache-2.0
// One warp turns router logits into a token's experts and router weights, in float32. Lane i gets route i, best first.
//
// SOFTMAX compares logits, since softmax keeps their order: softmax before or after the choice gives the same experts.
// The two sigmoids differ in their last bits, and scores that round to the same value tie. Of equal values the lower
// expert comes first (HIGHER_FIRST: the higher one); -0 is 0. NaN is chosen first, and no expert is chosen twice. A NaN
// logit makes the token's weights NaN; for a sigmoid without RENORMALIZE, only its own weight.
#pragma once
#include "records.cuh"

constexpr int SOFTMAX = 0, SIGMOID = 1;  // values of SCORING; else SIGMOID_TANH
constexpr int LANE_EXPERTS = (ALL_EXPERTS + 31) / 32;
static_assert(ALL_EXPERTS <= 512, "a lane compares at most 16 experts");
static_assert(!FROM_LOGITS || TOP_K <= ALL_EXPERTS, "a token cannot have more routes than there are experts");
static_assert(!FROM_LOGITS || SCORING != SOFTMAX || !ROUTER_BIAS, "the first choice has the highest logit");

DEVICE float logit_at(const Call& call, int token, int expert) {
  const u64 i = (u64)token * ALL_EXPERTS + expert;
  return call.weight_type ? from_bf16(((const u16*)call.ids)[i]) : ((const float*)call.ids)[i];
}
DEVICE float score_of(float logit) {
  if (SCORING == SOFTMAX) return logit;
  return SCORING == SIGMOID ? 1.f / (1.f + expf(-logit)) : 0.5f * tanhf(0.5f * logit) + 0.5f;
}
// Returns nonzero bits that compare like the value.
DEVICE u32 ordered(float value) {
  const u32 bits = __float_as_uint(value + 0.f);
  return max(bits >> 31 ? ~bits : bits | 0x80000000u, 1u);
}

// Returns the global number of the expert of route `lane`; ~0 after the first `most` routes whose experts are local,
// and in a padding row.
DEVICE u32 choose(const Block& b, int token, int most = TOP_K) {
  u32 keys[LANE_EXPERTS];  // 0: chosen, or no expert
  EACH (i, LANE_EXPERTS) {
    const int expert = i * 32 + b.lane;
    keys[i] = 0;
    if (expert < ALL_EXPERTS) {
      float score = score_of(logit_at(b.call, token, expert));
      if (ROUTER_BIAS) score += ((const float*)b.call.router_weights)[expert];
      keys[i] = ordered(score);
    }
  }
  u32 mine = ~0u;
  if (b.call.padding && b.call.padding[token]) most = 0;
  ROLLED
  for (int route = 0; route < TOP_K && most > 0; route++) {
    u32 best = 0, place = 0;
    EACH (i, LANE_EXPERTS)
      if (HIGHER_FIRST ? keys[i] >= best : keys[i] > best) {
        best = keys[i];
        place = i * 32 + b.lane;
      }
    const bool top = best == __reduce_max_sync(~0u, best);
    const u32 expert =
        HIGHER_FIRST ? __reduce_max_sync(~0u, top ? place : 0) : __reduce_min_sync(~0u, top ? place : ~0u);
    if (b.lane == route) mine = expert;
    most -= expert - (u32)b.layer.first < (u32)EXPERTS;
    EACH (i, LANE_EXPERTS)
      if (i * 32 + b.lane == expert) keys[i] = 0;
  }
  return mine;
}
// Returns the router weight of this lane's route, whose expert is `expert`.
DEVICE float weight_of_choice(const Block& b, int token, u32 expert) {
  const bool one = b.lane < TOP_K && expert != ~0u;
  const float logit = one ? logit_at(b.call, token, expert) : 0;
  float all = 0;  // SOFTMAX without RENORMALIZE: sum over all experts
  float score = score_of(logit);
  if (SCORING == SOFTMAX) {
    const float highest = __shfl_sync(~0u, logit, 0);
    score = expf(logit - highest);
    if (!RENORMALIZE)
      for (int other = b.lane; other < ALL_EXPERTS; other += 32) all += expf(logit_at(b.call, token, other) - highest);
  }
  float sum = SCORING == SOFTMAX && !RENORMALIZE ? all : one ? score : 0;
  UNROLL
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (SCORING == SOFTMAX)
    score /= sum;
  else if (RENORMALIZE)
    score /= sum + 1e-20f;
  return score * ROUTING_FACTOR;
}
