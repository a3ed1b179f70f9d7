// SPDX-License-Identifier: Apache-2.0
// Tests whether mma.sync multiplies bfloat16 subnormals or takes them as zero. One warp multiplies all of them.
#include "ptx.cuh"

// Exponents of the powers of two that multiply columns 0 to 7 and 8 to 15 of A.
struct Powers {
  int first, second;
};
extern "C" __device__ const int shared_bytes = 0, threads = 32;

// Element (r, c) of A is 16 r + c in units of 2^-133 for r < 8, and row r + 8 is its negative. Column n of B has a
// power of two in rows n and n + 8, so each sum has two products and is exact. A lane writes how many of its four sums
// are right.
extern "C" __global__ void probe(const __grid_constant__ Powers powers, u32* results) {
  const u32 lane = threadIdx.x, row = lane / 4, column = 2 * (lane % 4);
  const u32 units = 16 * row + column, pair = units | (units + 1) << 16, next = pair + 0x00080008;
  const u32 place = column == row ? 1 : column + 1 == row ? 1 << 16 : 0;
  float sums[4] = {0, 0, 0, 0};
  mma<false>(sums, pair, pair | 0x80008000, next, next | 0x80008000, place * ((127 + powers.first) << 7),
             place * ((127 + powers.second) << 7));
  const float first = __uint_as_float((127 - 133 + powers.first) << 23);
  const float second = __uint_as_float((127 - 133 + powers.second) << 23);
  u32 right = 0;
  for (u32 i = 0; i < 2; i++) {
    const float sum = (float)(units + i) * first + (float)(units + i + 8) * second;
    right += (sums[i] == sum) + (sums[2 + i] == -sum);
  }
  wait_for_launch_ahead();
  results[lane] = right;
}
