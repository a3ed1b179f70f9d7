// SPDX-License-Identifier: Apache-2.0
// A GPU on one CPU core: blocks of fibers, one for each CUDA thread, and a scheduler that draws whose turn it is.
// `ptx.cuh` is the kernel's view of it, `machine.cpp` the machine. Threads of a warp meet where a warp must be
// together; elsewhere each runs on its own.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

namespace emulator {

// A line of the kernel's source. As a default argument it is the caller's.
struct Line {
  const char* file;
  int number;
  Line(const char* file = __builtin_FILE(), int number = __builtin_LINE()) : file(file), number(number) {}
};

// How turns are drawn, and the rules of one run. `emulator/__init__.py` has the same fields.
struct Order {
  u64 seed;
  int resident;    // blocks that run at once, of all launches together
  int burst;       // most turns of a warp in a row
  int apart;       // 0: threads of a warp read what others write at once, else each of them one in so many times late
  int freeze;      // most turns for which a warp, a block or all other blocks stand still; 0: none does
  int late;        // most turns after which a free multiprocessor takes a block; 0: at once
  int races;       // accesses of different warps to shared memory that nothing orders are a fault
  int clock_runs;  // a launch that waits forever sees the time pass, and may stop itself
};

struct Range {
  const u8* begin;
  u64 bytes;
};

struct Launch {
  void (*kernel)(const void*, const void*);
  const void *layer, *call;
  int blocks, threads, shared_bytes;
  const Range* readable;  // what cp.async may read
  int ranges, stream;     // launches of a stream follow each other, as with programmatic stream serialization
};

enum Meeting { SYNC, SHUFFLE, BALLOT, MATCH, MMA_BF16, MMA_F16 };

// What the kernel sees of the thread that runs.
struct Thread {
  u32 number, lane, block, blocks, threads;
  u8* memory;  // shared memory of the block
  // For a meeting: a value and the lane to read, its result; operands of mma.
  u32 value, source, result, operands[6];
  float* sums;
};
extern Thread* self;

void stop();                                  // another thread runs
void look(const char* what, Line line);       // before memory that others write is read or written: may stop
void wait_turn(const char* what, Line line);  // stops
void meet(Meeting meeting, const char* what, Line line);  // waits for the other threads of the warp
void wait_barrier(int id, int threads, Line line);        // waits for other threads of the block
void changed(bool everywhere);        // a word was written that others wait for: in this block or everywhere
void store_late(u32* at, u32 value);  // a relaxed store
void deliver();                       // this block's relaxed stores are seen by all
// Shared memory of the thread's block. Checks bounds, alignment, and that another warp's accesses lie before or behind:
// a barrier, or a release and an acquire, must lie between a write and another access.
enum Access { READ, WRITE, WRITE_PART, SYNCHRONIZE };
u8* shared(u32 at, int bytes, Access access, const char* what, Line line);
void release(u32 at);  // what the warp did until here lies before what others do behind an acquire
void acquire(u32 at);
void add_copy(u32 to, const u8* from, int bytes,
              Line line);  // cp.async; the destination is garbage until it is waited for
void commit_copies();
void wait_copies(u32 groups);
bool launch_ahead_ended();
void let_next();
u32 time_in_ms();
u64 random();
[[noreturn]] void fail(const char* message, Line line);

u16 bf16_of(double v);  // rounded once, to nearest even; NaN is 0x7fff
u16 f16_of(double v);
float of_f16(u16 v);
u32 fma_bf16(u16 a, u16 b, u16 c);

}  // namespace emulator
