// SPDX-License-Identifier: Apache-2.0
// Instructions of SM90 and SM12x as functions, and nothing else. All inline assembly of the kernel is in this file:
// another file with the same functions runs the kernel on a CPU (tests/emulator). Addresses of shared memory are 32-bit
// (`shared_address`).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
// An unrolled loop over 0 to count - 1: arrays that it indexes stay in registers.
#define EACH(i, count) \
  UNROLL               \
  for (int i = 0; i < count; i++)

// ---- launch
// Returns the dynamic shared memory of a block.
DEVICE u8* shared_memory() {
  extern __shared__ __align__(128) u8 memory[];
  return memory;
}
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
// Waits until the launch ahead in the stream has ended and its writes are visible.
DEVICE void wait_for_launch_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next launch in the stream begin as soon as multiprocessors are free.
DEVICE void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void trap() { asm volatile("trap;"); }
// Returns the time in units of 2^20 ns.
DEVICE u32 time_in_ms() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return (u32)(ns >> 20);
}
// Keeps a value in a register, since ptxas would compute the value again at every use.
DEVICE void keep(u32& value) { asm volatile("" : "+r"(value)); }
DEVICE void keep(const u8*& value) { asm volatile("" : "+l"(value)); }

// ---- barriers
// Waits at the block's barrier `id` for `threads` threads. Barrier 0 is __syncthreads().
template <int id, int threads>
DEVICE void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(id), "n"(threads) : "memory");
}
DEVICE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits until the phase of this parity has ended.
DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nL_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra L_%=;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Returns whether the phase of this parity has ended.
DEVICE bool barrier_test(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed;
}
// Waits at most 0.1 ms for the phase of this parity. Returns whether that phase has ended.
DEVICE bool barrier_try_wait(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity), "r"(100000)
               : "memory");
  return passed;
}

// Prefetches 32 bytes or more to L2.
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ---- copies from global to shared memory
// Copies 16 bytes, or writes zeros without a read if not `there`. `line`: bytes that L2 fetches at once, 128 or 256.
template <int line = 128>
DEVICE void copy16(u32 to, const u8* from, bool there) {
  const int bytes = there ? 16 : 0;
  if (line == 128)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
template <int line = 128>
DEVICE void copy16(u32 to, const u8* from) {
  if (line == 128)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Copies 4, 8 or 16 bytes.
template <int bytes>
DEVICE void copy_bytes(u32 to, const u8* from) {
  if (bytes == 16)
    copy16(to, from);
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(bytes) : "memory");
}
// Ends a group of this thread's copies.
DEVICE void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most the last `groups` groups of this thread are in flight.
template <int groups>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// ---- loads and stores: name, type of the value and of the address, instruction, their registers
#define LOAD(name, type, pointer, instruction, value_register, address_register)                      \
  DEVICE type name(pointer at) {                                                                      \
    type v;                                                                                           \
    asm volatile(instruction " %0, [%1];" : "=" value_register(v) : address_register(at) : "memory"); \
    return v;                                                                                         \
  }
#define LOAD_16(name, pointer, instruction, address_register) \
  DEVICE uint4 name(pointer at) {                             \
    uint4 v;                                                  \
    asm volatile(instruction ".v4.u32 {%0,%1,%2,%3}, [%4];"   \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) \
                 : address_register(at)                       \
                 : "memory");                                 \
    return v;                                                 \
  }
#define STORE(name, type, pointer, instruction, value_register, address_register)                \
  DEVICE void name(pointer at, type v) {                                                         \
    asm volatile(instruction " [%0], %1;" ::address_register(at), value_register(v) : "memory"); \
  }
// Shared memory.
LOAD_16(load_shared_16, u32, "ld.shared", "r")
LOAD(load_shared, u32, u32, "ld.shared.u32", "r", "r")
LOAD(load_shared_u16, u16, u32, "ld.shared.u16", "h", "r")
LOAD(load_shared_u8, u32, u32, "ld.shared.u8", "r", "r")
LOAD(load_shared_float, float, u32, "ld.shared.f32", "f", "r")
STORE(store_shared, u32, u32, "st.shared.u32", "r", "r")
STORE(store_shared_u16, u16, u32, "st.shared.u16", "h", "r")
STORE(store_shared_float, float, u32, "st.shared.f32", "f", "r")
STORE(or_shared, u32, u32, "red.shared.or.b32", "r", "r")
DEVICE void store_shared_16(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// A thread whose acquire sees the released value can read everything written before the release. Lanes of a warp need
// __syncwarp in between.
LOAD(acquire_shared, u32, u32, "ld.acquire.cta.shared::cta.u32", "r", "r")
STORE(release_shared, u32, u32, "st.release.cta.shared::cta.u32", "r", "r")
// Global memory that other blocks write. Relaxed: a value of 32 bits is whole, without order among values.
LOAD_16(load_relaxed_16, const u8*, "ld.relaxed.gpu.global", "l")
LOAD(load_relaxed, u32, const u32*, "ld.relaxed.gpu.global.u32", "r", "l")
STORE(store_relaxed, u32, u8*, "st.relaxed.gpu.global.u32", "r", "l")
LOAD(acquire_global, u32, const u32*, "ld.acquire.gpu.global.u32", "r", "l")
STORE(add_release_global, u32, u32*, "red.release.gpu.global.add.u32", "r", "l")
DEVICE uint2 load_relaxed_8(const u32* at) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}

// ---- arithmetic. A pair of 16-bit floats is a word whose low half is the first.
#define CONVERT(name, to, from, instruction, to_register, from_register) \
  DEVICE to name(from v) {                                               \
    to r;                                                                \
    asm(instruction : "=" to_register(r) : from_register(v));            \
    return r;                                                            \
  }
CONVERT(to_bf16, u16, float, "cvt.rn.bf16.f32 %0, %1;", "h", "f")
CONVERT(to_f16, u16, float, "cvt.rn.f16.f32 %0, %1;", "h", "f")
CONVERT(from_f16, float, u16, "cvt.f32.f16 %0, %1;", "f", "h")
CONVERT(to_bf16x2, u32, float, "cvt.rn.bf16x2.f32 %0, %1, %1;", "r", "f")  // the same number twice
// Converts the two E4M3 in the low 16 bits to float16, exactly.
CONVERT(e4m3x2_to_f16x2, u32, u32, "{\n.reg .b16 p;\ncvt.u16.u32 p, %1;\ncvt.rn.f16x2.e4m3x2 %0, p;\n}", "r", "r")
DEVICE float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Adds a (16 x 16) times b (16 x 8) to c (16 x 8). Lane 4g + t has c[0], c[1]: row g, columns 2t and 2t + 1; c[2],
// c[3]: row g + 8. a0: row g, columns 2t and 2t + 1; a1: row g + 8; a2, a3: 8 columns later. b0: rows 2t and 2t + 1 of
// column g; b1: 8 rows later.
#define MMA(type)                                                  \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type       \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])             \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
template <bool float16>
DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (float16)
    MMA("f16");
  else
    MMA("bf16");
}
