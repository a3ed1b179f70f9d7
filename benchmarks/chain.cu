// SPDX-License-Identifier: Apache-2.0
// What an engine runs ahead of a layer's experts, for benchmarks.chain: RMSNorm, router product, top-k. Each begins
// before the launch ahead of it has ended, and waits for that itself, as the layer's launch does.
#include "ptx.cuh"

struct Fixed {
  const u16 *residual, *router;  // (8, hidden), (experts, hidden), bfloat16
  int hidden, experts, top_k;
};
struct Call {
  const u16* input;  // of the norm: the output of the layer ahead; of the product: x
  u16* x;
  float* logits;  // (tokens, experts)
  int* ids;       // (tokens, top_k)
  float* weights;
  int tokens;
};

constexpr int THREADS = 256, WARPS = THREADS / 32, MOST_TOKENS = 8, MOST_COLUMNS = 16, MOST_A_LANE = 16;
extern "C" __device__ const int threads = THREADS, shared_bytes = 0;

DEVICE void wait() {
  wait_for_launch_ahead();
  let_next_launch_begin();
}
DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE float sum_of_warp(float v) {
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
// x of a token: RMSNorm of its residual. The output ahead is added with a factor so small that x does not depend on
// it: so the layers of a chain have the same routes in every run. A block has a token.
extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const __grid_constant__ Fixed fixed, const __grid_constant__ Call call) {
  __shared__ float parts[WARPS];
  const int token = blockIdx.x, columns = fixed.hidden / THREADS;
  if (token >= call.tokens) return wait();
  const int from = token * fixed.hidden + threadIdx.x;
  float v[MOST_COLUMNS], sum = 0;
#pragma unroll
  for (int i = 0; i < MOST_COLUMNS; i++) v[i] = i < columns ? low(fixed.residual[from + i * THREADS]) : 0.f;
  wait();
#pragma unroll
  for (int i = 0; i < MOST_COLUMNS; i++)
    if (i < columns) {
      v[i] += 1e-30f * low(call.input[from + i * THREADS]);
      sum += v[i] * v[i];
    }
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (int i = 0; i < WARPS; i++) sum += parts[i];
  const float factor = rsqrtf(sum / fixed.hidden + 1e-6f);
#pragma unroll
  for (int i = 0; i < MOST_COLUMNS; i++)
    if (i < columns) call.x[from + i * THREADS] = to_bf16(v[i] * factor);
}

// Logits of all tokens for an expert, in float32. A block has an expert; a thread eight columns in each 2,048. The
// router's weights are asked for ahead of the wait.
extern "C" __global__ void __launch_bounds__(THREADS)
    router(const __grid_constant__ Fixed fixed, const __grid_constant__ Call call) {
  __shared__ float parts[MOST_TOKENS][WARPS];
  constexpr int STEP = THREADS * 8, STEPS = MOST_COLUMNS * THREADS / STEP;
  const int expert = blockIdx.x, column = threadIdx.x * 8;
  uint4 w[STEPS];
#pragma unroll
  for (int i = 0; i < STEPS; i++) {
    w[i] = make_uint4(0, 0, 0, 0);
    if (column + i * STEP < fixed.hidden)
      w[i] = *(const uint4*)(fixed.router + (long long)expert * fixed.hidden + column + i * STEP);
  }
  wait();
  for (int token = 0; token < call.tokens; token++) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      if (column + i * STEP >= fixed.hidden) continue;
      const uint4 x = *(const uint4*)(call.input + token * fixed.hidden + column + i * STEP);
      sum += low(x.x) * low(w[i].x) + high(x.x) * high(w[i].x) + low(x.y) * low(w[i].y) + high(x.y) * high(w[i].y);
      sum += low(x.z) * low(w[i].z) + high(x.z) * high(w[i].z) + low(x.w) * low(w[i].w) + high(x.w) * high(w[i].w);
    }
    sum = sum_of_warp(sum);
    if (threadIdx.x % 32 == 0) parts[token][threadIdx.x / 32] = sum;
  }
  __syncthreads();
  if ((int)threadIdx.x >= call.tokens) return;
  float sum = 0;
  for (int i = 0; i < WARPS; i++) sum += parts[threadIdx.x][i];
  call.logits[threadIdx.x * fixed.experts + expert] = sum;
}

// Softmax over the top_k largest of a token's logits; of equal ones the lower expert. A warp has a token, a lane every
// 32nd expert.
extern "C" __global__ void __launch_bounds__(THREADS)
    top_k(const __grid_constant__ Fixed fixed, const __grid_constant__ Call call) {
  const int token = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  const float none = __int_as_float(0xff800000);
  wait();
  if (token >= call.tokens) return;
  float v[MOST_A_LANE], chosen = none;
  int expert = 0;
#pragma unroll
  for (int i = 0; i < MOST_A_LANE; i++) {
    const int at = lane + 32 * i;
    v[i] = at < fixed.experts ? call.logits[token * fixed.experts + at] : none;
  }
  for (int k = 0; k < fixed.top_k; k++) {
    float most = none;
    int at = fixed.experts;
#pragma unroll
    for (int i = 0; i < MOST_A_LANE; i++)
      if (v[i] > most) most = v[i], at = lane + 32 * i;
    for (int d = 16; d; d /= 2) {
      const float other = __shfl_xor_sync(~0u, most, d);
      const int other_at = __shfl_xor_sync(~0u, at, d);
      if (other > most || (other == most && other_at < at)) most = other, at = other_at;
    }
    if (lane == k) chosen = most, expert = at;
#pragma unroll
    for (int i = 0; i < MOST_A_LANE; i++)
      if (lane + 32 * i == at) v[i] = none;
  }
  const float highest = __shfl_sync(~0u, chosen, 0);
  const float share = lane < fixed.top_k ? __expf(chosen - highest) : 0.f;
  const float all = sum_of_warp(share);
  if (lane >= fixed.top_k) return;
  call.ids[token * fixed.top_k + lane] = expert;
  call.weights[token * fixed.top_k + lane] = share / all;
}
