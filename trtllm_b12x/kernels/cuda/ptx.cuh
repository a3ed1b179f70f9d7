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
#define OFFSET_OF(record, field) __INTADDR__(&((record*)0)->field)  // NVRTC has no offsetof

// ---- launch
// The dynamic shared memory of a block.
DEVICE u8* shared_memory() {
  extern __shared__ __align__(128) u8 memory[];
  return memory;
}
DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
// Waits until the launch ahead in the stream has ended, and all that it wrote can be read.
DEVICE void wait_for_launch_ahead() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the launch behind in the stream begin as soon as multiprocessors are free.
DEVICE void let_next_launch_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEVICE void trap() { asm volatile("trap;"); }
// The time in units of 2^20 ns.
DEVICE u32 time_in_ms() {
  u64 ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return (u32)(ns >> 20);
}
// Makes a value be computed once and kept in a register: ptxas would rather compute it at every use.
DEVICE void keep(u32& value) { asm volatile("" : "+r"(value)); }
DEVICE void keep(const u8*& value) { asm volatile("" : "+l"(value)); }

// ---- barriers
// Barrier number `id` of the block for `threads` threads. Number 0 is __syncthreads().
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
// Returns whether it has ended.
DEVICE bool barrier_test(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed;
}
// Waits for 0.1 ms at most. Returns whether it has ended.
DEVICE bool barrier_try_wait(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity), "r"(100000)
               : "memory");
  return passed;
}

// Brings 32 bytes or more to L2.
DEVICE void prefetch(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ---- copies from global to shared memory
DEVICE void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Writes 16 zeros, and reads nothing, if not `there`.
DEVICE void copy16(u32 to, const u8* from, bool there) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0)
               : "memory");
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
// Waits until at most the last `groups` groups of this thread are on their way.
template <int groups>
DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// ---- shared memory
DEVICE uint4 load_shared_16(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(at)
               : "memory");
  return v;
}
DEVICE u32 load_shared(u32 at) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
DEVICE u32 load_shared_u16(u32 at) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
  return v;
}
DEVICE u32 load_shared_u8(u32 at) {
  u32 v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
DEVICE float load_shared_float(u32 at) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}
DEVICE void store_shared_16(u32 at, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
DEVICE void store_shared(u32 at, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory"); }
DEVICE void store_shared_u16(u32 at, u16 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(v) : "memory"); }
DEVICE void store_shared_float(u32 at, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
DEVICE void or_shared(u32 at, u32 bits) { asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(at), "r"(bits) : "memory"); }
// What a thread wrote ahead of its release can be read by the thread whose acquire sees the value. Lanes of a warp need
// __syncwarp between.
DEVICE u32 acquire_shared(u32 at) {
  u32 v;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
  return v;
}
DEVICE void release_shared(u32 at, u32 v) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

// ---- global memory that other blocks write. Relaxed: a value of 32 bits is whole, and nothing orders it with others.
DEVICE uint4 load_relaxed_16(const u8* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
DEVICE uint2 load_relaxed_8(const u32* at) {
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at) : "memory");
  return v;
}
DEVICE u32 load_relaxed(const u32* at) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void store_relaxed(u8* at, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}
DEVICE u32 acquire_global(const u32* at) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(at) : "memory");
  return v;
}
DEVICE void add_release_global(u32* at, u32 v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(at), "r"(v) : "memory");
}

// ---- arithmetic. A pair of 16-bit floats is a word whose low half is the first.
DEVICE u16 to_bf16(float v) {
  u16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
DEVICE u16 to_f16(float v) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}
DEVICE float from_bf16(u16 v) { return __uint_as_float((u32)v << 16); }
DEVICE float from_f16(u16 v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
}
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
// Two E4M3 of the low 16 bits, in float16: exact.
DEVICE u32 e4m3x2_to_f16x2(u32 pair) {
  u32 r;
  asm("{\n.reg .b16 p;\ncvt.u16.u32 p, %1;\ncvt.rn.f16x2.e4m3x2 %0, p;\n}" : "=r"(r) : "r"(pair));
  return r;
}
// The same number in bfloat16, twice.
DEVICE u32 to_bf16x2(float v) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(r) : "f"(v));
  return r;
}
DEVICE u32 mul_f16x2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// c[0], c[1]: row g, columns 2t and 2t + 1 of a 16 x 8 product, for lane 4g + t; c[2], c[3]: row g + 8. It adds a (16 x
// 16) times b (16 x 8). a0: row g, columns 2t and 2t + 1; a1: row g + 8; a2, a3: columns 8 more. b0: rows 2t and 2t + 1
// of column g; b1: 8 more.
template <bool float16>
DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (float16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
