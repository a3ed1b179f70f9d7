// SPDX-License-Identifier: Apache-2.0
// The functions of `kernels/cuda/ptx.cuh` and CUDA's builtins on a CPU.
#pragma once
#include "machine.h"

using emulator::Line;
using emulator::self;

#define DEVICE inline
#define UNROLL
#define ROLLED
#define EACH(i, count) for (int i = 0; i < count; i++)
#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __restrict__

// ---- builtins
struct float2 {
  float x, y;
};
struct uint2 {
  u32 x, y;
};
struct uint4 {
  u32 x, y, z, w;
};
struct dim3_of_emulator {
  u32 x, y = 0, z = 0;
};
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
#define threadIdx (dim3_of_emulator{self->number})
#define blockIdx (dim3_of_emulator{self->block})
#define gridDim (dim3_of_emulator{self->blocks, 1, 1})
#define blockDim (dim3_of_emulator{self->threads, 1, 1})

template <class T>
constexpr T min(T a, T b) {
  return a < b ? a : b;
}
template <class T>
constexpr T max(T a, T b) {
  return a > b ? a : b;
}
constexpr u32 min(int a, u32 b) { return min((u32)a, b); }
constexpr u32 min(u32 a, int b) { return min(a, (u32)b); }
constexpr u32 max(int a, u32 b) { return max((u32)a, b); }
constexpr u32 max(u32 a, int b) { return max(a, (u32)b); }

template <class To, class From>
inline To bits_of(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To r;
  __builtin_memcpy(&r, &v, sizeof r);
  return r;
}
inline float __uint_as_float(u32 v) { return bits_of<float>(v); }
inline u32 __float_as_uint(float v) { return bits_of<u32>(v); }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline int __ffs(u32 v) { return __builtin_ffs((int)v); }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 all = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(all >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
inline float expf(float v) { return __builtin_expf(v); }
inline float __expf(float v) { return __builtin_expf(v); }
inline float tanhf(float v) { return __builtin_tanhf(v); }
// As PTX's div.approx: 0 for a divisor beyond 2^126.
inline float __fdividef(float a, float b) {
  const float size = __builtin_fabsf(b);
  return size > 0x1p126f && size < __builtin_inff() ? a * (b < 0 ? -0.f : 0.f) : a / b;
}
inline float erff(float v) { return __builtin_erff(v); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fabsf(float v) { return __builtin_fabsf(v); }

template <class T>
inline T meet_in_shuffle(u32 mask, T value, int source, Line line) {
  static_assert(sizeof(T) == 4);
  if (mask != ~0u) emulator::fail("a shuffle of a part of a warp", line);
  self->value = bits_of<u32>(value);
  self->source = source;
  emulator::meet(emulator::SHUFFLE, "shuffle", line);
  return bits_of<T>(self->result);
}
template <class T>
inline T __shfl_sync(u32 mask, T v, int lane, Line line = {}) {
  return meet_in_shuffle(mask, v, lane & 31, line);
}
template <class T>
inline T __shfl_up_sync(u32 mask, T v, int by, Line line = {}) {
  return meet_in_shuffle(mask, v, (int)self->lane < by ? self->lane : self->lane - by, line);
}
template <class T>
inline T __shfl_down_sync(u32 mask, T v, int by, Line line = {}) {
  return meet_in_shuffle(mask, v, self->lane + by > 31 ? self->lane : self->lane + by, line);
}
template <class T>
inline T __shfl_xor_sync(u32 mask, T v, int with, Line line = {}) {
  return meet_in_shuffle(mask, v, self->lane ^ with, line);
}
template <class T>
inline T __reduce_max_sync(u32 mask, T v, Line line = {}) {
  for (int with = 16; with; with /= 2) v = max(v, __shfl_xor_sync(mask, v, with, line));
  return v;
}
inline u32 __reduce_min_sync(u32 mask, u32 v, Line line = {}) { return ~__reduce_max_sync(mask, ~v, line); }
inline u32 meet_and_vote(emulator::Meeting meeting, u32 mask, u32 value, const char* what, Line line) {
  if (mask != ~0u) emulator::fail("a vote of a part of a warp", line);
  self->value = value;
  emulator::meet(meeting, what, line);
  return self->result;
}
inline u32 __ballot_sync(u32 mask, bool v, Line line = {}) {
  return meet_and_vote(emulator::BALLOT, mask, v, "ballot", line);
}
inline int __any_sync(u32 mask, bool v, Line line = {}) {
  return meet_and_vote(emulator::BALLOT, mask, v, "any", line) != 0;
}
inline u32 __match_any_sync(u32 mask, u32 v, Line line = {}) {
  return meet_and_vote(emulator::MATCH, mask, v, "match", line);
}
inline void __syncwarp(u32 mask = ~0u, Line line = {}) { meet_and_vote(emulator::SYNC, mask, 0, "__syncwarp", line); }
inline void __syncthreads(Line line = {}) { emulator::wait_barrier(0, self->threads, line); }
inline void __nanosleep(u32, Line line = {}) { emulator::wait_turn("__nanosleep", line); }
inline void __threadfence() { emulator::deliver(); }
inline void __threadfence_system() { emulator::deliver(); }
#define ATOMIC(name, operation)                     \
  inline u32 name(u32* at, u32 v, Line line = {}) { \
    emulator::look(#name, line);                    \
    const u32 old = *at;                            \
    *at operation v;                                \
    emulator::changed(true);                        \
    return old;                                     \
  }
ATOMIC(atomicAdd, +=)
ATOMIC(atomicOr, |=)

// ---- launch
inline u8* shared_memory() { return self->memory; }
inline u32 shared_address(const void* pointer) { return (u32)((const u8*)pointer - shared_memory()); }
inline void wait_for_launch_ahead(Line line = {}) {
  while (!emulator::launch_ahead_ended()) emulator::wait_turn("wait_for_launch_ahead", line);
}
inline void let_next_launch_begin() { emulator::let_next(); }
inline void trap(Line line = {}) { emulator::fail("trap", line); }
using emulator::time_in_ms;
inline void keep(u32&) {}
inline void keep(const u8*&) {}

// ---- barriers
template <int id, int threads>
inline void named_barrier(Line line = {}) {
  emulator::wait_barrier(id, threads, line);
}
// An mbarrier: a mark that it was initialized, number of the phase, arrivals of a phase, arrivals that are left.
struct MBarrier {
  u16 mark, phase, arrivals, left;
  static constexpr u16 MARK = 0xba44;
};
inline MBarrier& mbarrier(u32 at, const char* what, Line line) {
  MBarrier& found = *(MBarrier*)emulator::shared(at, 8, emulator::SYNCHRONIZE, what, line);
  if (found.mark != MBarrier::MARK) emulator::fail("an mbarrier that nobody has initialized", line);
  return found;
}
inline void barrier_init(u32 barrier, int arrivals, Line line = {}) {
  *(MBarrier*)emulator::shared(barrier, 8, emulator::SYNCHRONIZE, "barrier_init", line) = {
      MBarrier::MARK, 0, (u16)arrivals, (u16)arrivals};
  emulator::changed(false);
}
inline void barrier_arrive(u32 barrier, Line line = {}) {
  emulator::look("barrier_arrive", line);
  MBarrier& b = mbarrier(barrier, "barrier_arrive", line);
  emulator::release(barrier);
  if (!--b.left) b.phase++, b.left = b.arrivals;
  emulator::changed(false);
}
inline bool barrier_passed(u32 barrier, u32 parity, const char* what, Line line) {
  if ((mbarrier(barrier, what, line).phase & 1) == parity) return false;
  emulator::acquire(barrier);
  return true;
}
#define TEST(name)                                            \
  inline bool name(u32 barrier, u32 parity, Line line = {}) { \
    emulator::look(#name, line);                              \
    return barrier_passed(barrier, parity, #name, line);      \
  }
TEST(barrier_test)
TEST(barrier_try_wait)
inline void barrier_wait(u32 barrier, u32 parity, Line line = {}) {
  emulator::look("barrier_wait", line);
  while (!barrier_passed(barrier, parity, "barrier_wait", line)) emulator::wait_turn("barrier_wait", line);
}

inline void prefetch(const void*) {}

// ---- copies from global to shared memory
template <int = 128>
inline void copy16(u32 to, const u8* from, Line line = {}) {
  emulator::add_copy(to, from, 16, line);
}
template <int = 128>
inline void copy16(u32 to, const u8* from, bool there, Line line = {}) {
  emulator::add_copy(to, there ? from : nullptr, 16, line);
}
template <int bytes>
inline void copy_bytes(u32 to, const u8* from, Line line = {}) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  emulator::add_copy(to, from, bytes, line);
}
inline void copy_commit() { emulator::commit_copies(); }
template <int groups>
inline void copy_wait() {
  emulator::wait_copies(groups);
}

// ---- shared memory
template <class T>
inline T& in_shared(u32 at, emulator::Access access, const char* what, Line line) {
  return *(T*)emulator::shared(at, sizeof(T), access, what, line);
}
#define LOAD(name, type, result) \
  inline result name(u32 at, Line line = {}) { return in_shared<type>(at, emulator::READ, #name, line); }
#define STORE(name, type, access) \
  inline void name(u32 at, type v, Line line = {}) { in_shared<type>(at, access, #name, line) = v; }
LOAD(load_shared_16, uint4, uint4)
LOAD(load_shared, u32, u32)
LOAD(load_shared_u16, u16, u16)
LOAD(load_shared_u8, u8, u32)
LOAD(load_shared_float, float, float)
STORE(store_shared_16, uint4, emulator::WRITE)
STORE(store_shared, u32, emulator::WRITE)
STORE(store_shared_u16, u16, emulator::WRITE_PART)
STORE(store_shared_float, float, emulator::WRITE)
inline void or_shared(u32 at, u32 bits, Line line = {}) {
  in_shared<u32>(at, emulator::WRITE_PART, "or_shared", line) |= bits;
}
inline u32 acquire_shared(u32 at, Line line = {}) {
  emulator::look("acquire_shared", line);
  emulator::acquire(at);
  return in_shared<u32>(at, emulator::SYNCHRONIZE, "acquire_shared", line);
}
inline void release_shared(u32 at, u32 v, Line line = {}) {
  emulator::look("release_shared", line);
  emulator::release(at);
  in_shared<u32>(at, emulator::SYNCHRONIZE, "release_shared", line) = v;
  emulator::changed(false);
}

// ---- global memory that other blocks write
inline uint4 load_relaxed_16(const u8* at, Line line = {}) {
  emulator::look("load_relaxed_16", line);
  u32 words[4];  // each of them is whole, nothing more
  for (int i = 0; i < 4; i++) words[i] = ((const volatile u32*)at)[i];
  return {words[0], words[1], words[2], words[3]};
}
inline uint2 load_relaxed_8(const u32* at, Line line = {}) {
  emulator::look("load_relaxed_8", line);
  return {at[0], at[1]};
}
inline u32 load_relaxed(const u32* at, Line line = {}) {
  emulator::look("load_relaxed", line);
  return *(const volatile u32*)at;
}
inline void store_relaxed(u8* at, u32 v, Line line = {}) {
  emulator::look("store_relaxed", line);
  emulator::store_late((u32*)at, v);
}
inline u32 acquire_global(const u32* at, Line line = {}) {
  emulator::look("acquire_global", line);
  return *at;
}
inline void add_release_global(u32* at, u32 v, Line line = {}) {
  emulator::look("add_release_global", line);
  emulator::deliver();
  *at += v;
  emulator::changed(true);
}

// ---- arithmetic
inline u16 to_bf16(float v) { return emulator::bf16_of(v); }
inline u16 to_f16(float v) { return emulator::f16_of(v); }
inline float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
inline float from_f16(u16 v) { return emulator::of_f16(v); }
inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  return emulator::fma_bf16((u16)a, (u16)b, (u16)c) | emulator::fma_bf16(a >> 16, b >> 16, c >> 16) << 16;
}
inline u32 e4m3x2_to_f16x2(u32 pair) {
  auto value = [](u32 byte) {
    const u32 exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float size = (byte & 127) == 127 ? __builtin_nanf("")
                       : exponent          ? __builtin_ldexpf(8.f + mantissa, (int)exponent - 10)
                                           : __builtin_ldexpf((float)mantissa, -9);
    return (u32)emulator::f16_of(byte & 128 ? -size : size);
  };
  return value(pair & 255) | value(pair >> 8 & 255) << 16;
}
inline u32 to_bf16x2(float v) { return emulator::bf16_of(v) * 0x00010001u; }
inline u32 mul_f16x2(u32 a, u32 b) {
  auto product = [](u16 x, u16 y) { return (u32)emulator::f16_of((double)emulator::of_f16(x) * emulator::of_f16(y)); };
  return product((u16)a, (u16)b) | product(a >> 16, b >> 16) << 16;
}
template <bool float16>
inline void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Line line = {}) {
  emulator::Thread& thread = *self;
  const u32 operands[6] = {a0, a1, a2, a3, b0, b1};
  __builtin_memcpy(thread.operands, operands, sizeof operands);
  thread.sums = c;
  emulator::meet(float16 ? emulator::MMA_F16 : emulator::MMA_BF16, "mma", line);
}
