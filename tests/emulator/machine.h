// A GPU on one CPU core: blocks of fibers, one for each CUDA thread, and a scheduler that draws whose turn it is.
// `ptx.cuh` is the kernel's view of it, `machine.cpp` the machine. Threads of a warp meet where a warp must be
// together; elsewhere each runs on its own.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

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
  int clock_runs;  // a launch that waits forever sees the time pass, and may stop itself
};

struct Launch {
  void (*kernel)(const void*, const void*);
  const void *layer, *call;
  int blocks, threads, shared_bytes;
  int stream;  // launches of a stream follow each other, as with programmatic stream serialization
};

struct Copy {
  u32 to;
  const u8* from;  // null: zeros
  int bytes;
};

enum Meeting { SYNC, SHUFFLE, BALLOT, MATCH, MMA_BF16, MMA_F16 };
struct Warp;
struct Block;
struct Started;

struct Thread {
  void* stack_pointer;
  u8* stack;
  Warp* warp;
  int number, lane;
  const char* what = "begin";  // what it waits for or does, and where
  Line line;
  int barrier = -1;  // number of the block's barrier that it waits for
  // For a meeting: a value and the lane to read, its result; operands of mma.
  u32 value, source, result, operands[6];
  float* sums;
  std::vector<Copy> copies;
  std::vector<size_t> groups;  // copies up to the end of each group
};

struct Warp {
  Block* block;
  int number;
  Thread threads[32];
  u32 ready = ~0u, ended = 0, arrived = 0;
  Meeting meeting;
  bool changed = false;  // in this turn it did more than look
  int idle = 0;          // turns without, while nobody else changed a thing either
  u64 seen = 0, frozen_until = 0;
};

struct Block {
  Started* launch;
  int number, running;
  std::vector<Warp> warps;
  std::vector<u8> shared;
  int arrived[16] = {};
  u64 version = 0;  // of shared memory through which warps tell each other
  bool lets_next = false;
  std::vector<std::pair<u32*, u32>> late_stores;  // relaxed stores that other blocks do not see yet
};

struct Started {
  Launch launch;
  Started* ahead;  // in its stream
  int begun = 0, ended = 0, let_next = 0;
};

extern Thread* self;  // the thread that runs

void stop();                                  // another thread runs
void look(const char* what, Line line);       // before memory that others write is read or written: may stop
void wait_turn(const char* what, Line line);  // stops
void meet(Meeting meeting, const char* what, Line line);  // waits for the other threads of the warp
void wait_barrier(int id, int threads, Line line);        // waits for other threads of the block
void changed(bool everywhere);        // a word was written that others wait for: in this block or everywhere
void store_late(u32* at, u32 value);  // a relaxed store
void deliver();                       // this block's relaxed stores are seen by all
u8* shared(u32 at, int bytes, const char* what, Line line);  // checks bounds and alignment
void add_copy(u32 to, const u8* from, int bytes,
              Line line);  // cp.async; the destination is garbage until it is waited for
void commit_copies();
void wait_copies(size_t groups);
bool launch_ahead_ended();
void let_next();
u32 time_in_ms();
u64 random();
[[noreturn]] void fail(const std::string& message);

u16 bf16_of(double v);  // rounded once, to nearest even; NaN is 0x7fff
u16 f16_of(double v);
float of_f16(u16 v);
u32 fma_bf16(u16 a, u16 b, u16 c);

}  // namespace emulator
