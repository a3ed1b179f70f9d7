// SPDX-License-Identifier: Apache-2.0
// Arguments of a launch. `records.py` reads the fields of Layer and Call here: pointers and int.
#pragma once
#include "numbers.cuh"

struct Layer {
  const u8 *w1, *s1;                       // codes and block scales
  const float *alpha1, *halves1, *input1;  // NVFP4, by expert: scale, scales of up and gate, input scale
  const u8 *w2, *s2;
  const float *alpha2, *input2;
  const void *bias1, *bias2;
  const float *swiglu_alpha, *swiglu_beta, *swiglu_limit;
  volatile u32* stuck;  // in host memory: number of tokens of a stopped launch
  int step1, step2;     // strides of input1 and input2: 1, or 0 if all experts share one scale
  int first;            // this rank's first expert
};

struct Call {
  const u8 *x, *x_sf;                // x_sf: scales of x if the engine quantized it to FP4, else null
  const void *ids, *router_weights;  // (tokens, TOP_K); FROM_LOGITS: logits (tokens, ALL_EXPERTS), float32 router bias
  const u8* padding;                 // FROM_LOGITS: bytes (tokens), nonzero for rows without routes; or null
  u16* out;
  u8* workspace;
  int tokens;
  int wide_ids;     // ids are int64, else int32
  int weight_type;  // router weights, or logits: 0 float32, 1 bfloat16
  int swizzled;     // x_sf lies in 128x4 tiles
};

// ---- routes
DEVICE int local_expert(const Layer& layer, long long id) {
  const long long local = id - layer.first;
  return local >= 0 && local < EXPERTS ? (int)local : -1;
}
// Returns the address of the id of a route's expert.
DEVICE const u8* id_of(const Call& call, u32 route) { return (const u8*)call.ids + route * (call.wide_ids ? 8 : 4); }
DEVICE int local_expert_at(const Layer& layer, const u8* id, bool wide) {
  return local_expert(layer, wide ? *(const long long*)id : (long long)*(const int*)id);
}
DEVICE float router_weight(const Call& call, u32 route) {
  return call.weight_type ? from_bf16(((const u16*)call.router_weights)[route])
                          : ((const float*)call.router_weights)[route];
}

// Returns the sum of the values of this lane and of lower lanes.
DEVICE u32 sum_up_to(u32 sum, int lane) {
  UNROLL
  for (int d = 1; d < 32; d *= 2) {
    const u32 v = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += v;
  }
  return sum;
}

// Returns the offset in x_sf of a token's scale at `column`, a multiple of 16.
DEVICE u32 scales_of_x(const Call& call, int token, int column) {
  return call.swizzled ? scale_tile<(HIDDEN + 63) / 64>(token, column >> 6) + (column >> 4 & 3)
                       : (u32)(token * HIDDEN + column) / 16;
}

// ---- factors of an expert's products, and the activation
// NVFP4: returns the factor of an expert's FC2 products.
DEVICE float scale2_of(const Layer& layer, int expert) {
  return layer.alpha2[expert] * layer.input2[expert * layer.step2];
}
// Applies the activation to up and, if GATED, gate. NaN stays NaN.
DEVICE float activate(float up, float gate, float alpha, float beta, float limit) {
  if (ACTIVATION == SWIGLU) return __fdividef(gate, 1.f + __expf(-gate)) * up;
  if (ACTIVATION == SWIGLU_BIAS) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.f + __expf(-alpha * gate)) * (up + beta);
  }
  if (ACTIVATION == GEGLU) return 0.5f * gate * (1.f + erff(gate * 0.7071067811865476f)) * up;
  if (ACTIVATION == RELU2) {
    const float positive = up < 0 ? 0.f : up;
    return positive * positive;
  }
  if (ACTIVATION == SILU) return up / (1.f + __expf(-up));
  return 0.5f * up * (1.f + erff(up * 0.7071067811865476f));
}
// Factors of an expert's FC1 products, and constants of its activation. `codes`: factor that makes up for the scale of
// decoded codes.
struct FactorsOfFc1 {
  float up_factor, gate_factor, alpha = 1, beta = 0, limit = 0;
  DEVICE FactorsOfFc1(const Layer& layer, const Call& call, int expert, float codes) {
    up_factor = gate_factor = codes * (NVFP4 && call.x_sf ? 256.f : 1.f);
    if (GROUP == 16) {
      const float all = layer.alpha1[expert], input = layer.input1[expert * layer.step1];
      const float up = GATED ? layer.halves1[expert] : all, gate = GATED ? layer.halves1[EXPERTS + expert] : all;
      const bool recorded = fmaxf(up, gate) == all;  // false if alpha was written after weight loading
      up_factor *= (recorded ? up : all) * input;
      gate_factor *= (recorded ? gate : all) * input;
    }
    if (ACTIVATION == SWIGLU_BIAS) {
      alpha = layer.swiglu_alpha[expert];
      beta = layer.swiglu_beta[expert];
      limit = layer.swiglu_limit[expert];
    }
  }
  DEVICE float activated(float up, float gate) const { return activate(up, gate, alpha, beta, limit); }
};
