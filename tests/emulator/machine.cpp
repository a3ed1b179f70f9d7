// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emulator {

Thread* self;

namespace {

struct Copy {
  u32 to;
  const u8* from;  // null: zeros
  int bytes;
};
struct Warp;
struct Block;

struct Fiber : Thread {
  void* stack_pointer;
  u8* stack;
  Warp* warp;
  const char* what = "begin";  // what it waits for or does, and where
  Line line;
  int barrier = -1;  // number of the block's barrier that it waits for
  std::vector<Copy> copies;
  std::vector<size_t> groups;  // copies up to the end of each group
};

// For each warp of a block, up to when this one knows its accesses.
struct Clock {
  u32 of[32] = {};
  void join(const Clock& other) {
    for (int i = 0; i < 32; i++) of[i] = std::max(of[i], other.of[i]);
  }
};

struct Warp {
  Clock clock;
  Block* block;
  int number;
  Fiber threads[32];
  u32 ready = ~0u, ended = 0, arrived = 0;
  Meeting meeting;
  bool changed = false;  // in this turn it did more than look
  int idle = 0;          // turns without, while nobody else changed a thing either
  u64 seen = 0, frozen_until = 0;
};

struct Started {
  Launch launch;
  Started* ahead;  // in its stream
  int begun = 0, ended = 0, let_next = 0;
};

struct Block {
  Started* launch;
  int number, running;
  std::vector<Warp> warps;
  std::vector<u8> shared;
  int arrived[16] = {};
  struct Word {
    u32 writer, written, readers, read[32];  // the last write; a mask of the warps that have read it; times
  };
  std::unique_ptr<Word[], void (*)(void*)> words{nullptr, free};
  std::map<u32, Clock> released;
  Clock barriers[16];
  u64 version = 0;  // of shared memory through which warps tell each other
  bool lets_next = false;
  std::vector<std::pair<u32*, u32>> late_stores;  // relaxed stores that other blocks do not see yet
};

constexpr size_t STACK = 64 << 10;
constexpr int IDLE_TURNS =
    12;  // a warp that only looked for so long, while nothing changed, sleeps until something does
constexpr u64 MOST_TURNS = 50'000'000;
constexpr int SILENT_ROUNDS = 100;  // rounds of all warps in which nothing changed: a hang

struct Machine {
  Order order;
  u64 state, turns = 0, version = 0, changes = 0, next_start = 0;
  std::vector<std::unique_ptr<Started>> launches;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<Warp*> live;
  void* scheduler = nullptr;
  std::string error;
  bool hung = false;
  u32 time = 0;
};
Machine* machine;
Fiber& fiber() { return *(Fiber*)self; }
std::vector<u8*> stacks;  // not in use

// ---- fibers
#if defined(__x86_64__)
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
void* begin_at(u8* stack, void (*entry)()) {
  void** top = (void**)(stack + STACK) - 8;
  memset(top, 0, 8 * sizeof *top);
  top[6] = (void*)entry;
  return top;
}
#else
void emulator_switch(void** from, void* to) {
  ucontext_t here;
  *from = &here;
  swapcontext(&here, (ucontext_t*)to);
}
void* begin_at(u8* stack, void (*entry)()) {
  ucontext_t* context = (ucontext_t*)stack;
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof *context;
  context->uc_stack.ss_size = STACK - sizeof *context;
  makecontext(context, entry, 0);
  return context;
}
#endif

u8* take_stack() {
  if (stacks.empty()) {
    constexpr int COUNT = 64;
    u8* more =
        (u8*)mmap(nullptr, COUNT * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    for (int i = 0; i < COUNT; i++) stacks.push_back(more + i * STACK);
  }
  u8* stack = stacks.back();
  stacks.pop_back();
  return stack;
}

void run_thread() {
  const Launch& launch = fiber().warp->block->launch->launch;
  launch.kernel(launch.layer, launch.call);
  Warp& warp = *fiber().warp;
  if (!fiber().copies.empty()) fail("a thread ends before its copies have arrived", fiber().line);
  warp.ready &= ~(1u << self->lane);
  warp.ended |= 1u << self->lane;
  warp.block->running--;
  fiber().what = "ended";
  machine->changes++, warp.block->version++;
  stop();
}

// ---- blocks
void start(Started& launch) {
  const Launch& l = launch.launch;
  auto block = std::make_unique<Block>();
  block->launch = &launch;
  block->number = launch.begun++;
  block->running = l.threads;
  block->shared.resize(l.shared_bytes);
  for (u8& byte : block->shared) byte = (u8)random();
  block->words.reset((Block::Word*)calloc(l.shared_bytes / 4 + 1, sizeof(Block::Word)));
  block->warps.resize(l.threads / 32);
  for (size_t w = 0; w < block->warps.size(); w++) {
    Warp& warp = block->warps[w];
    warp.block = block.get();
    warp.number = (int)w;
    warp.clock.of[w] = 1;
    for (int i = 0; i < 32; i++) {
      Fiber& thread = warp.threads[i];
      thread.warp = &warp;
      thread.number = (u32)w * 32 + i;
      thread.lane = i;
      thread.block = block->number;
      thread.blocks = l.blocks;
      thread.threads = l.threads;
      thread.memory = block->shared.data();
      thread.stack = take_stack();
      thread.stack_pointer = begin_at(thread.stack, run_thread);
    }
    machine->live.push_back(&warp);
  }
  machine->blocks.push_back(std::move(block));
  machine->changes++, machine->version++;
}

void deliver_to(Block& block, size_t i) {
  *block.late_stores[i].first = block.late_stores[i].second;
  block.late_stores.erase(block.late_stores.begin() + i);
  machine->changes++, machine->version++;
}

void free_stacks(Block& block) {
  for (Warp& warp : block.warps)
    for (Fiber& thread : warp.threads) stacks.push_back(thread.stack);
}

void end(Block& block) {
  while (!block.late_stores.empty()) deliver_to(block, 0);
  Started& launch = *block.launch;
  launch.ended++;
  if (!block.lets_next) launch.let_next++;
  free_stacks(block);
  auto& live = machine->live;
  live.erase(std::remove_if(live.begin(), live.end(), [&](Warp* warp) { return warp->block == &block; }), live.end());
  auto& blocks = machine->blocks;
  blocks.erase(std::find_if(blocks.begin(), blocks.end(), [&](auto& each) { return each.get() == &block; }));
  machine->changes++, machine->version++;
}

// Starts blocks where a multiprocessor is free. A launch's begin when all blocks of the launch ahead have begun and let
// it.
void start_blocks(bool now) {
  for (;;) {
    if ((int)machine->blocks.size() >= machine->order.resident || (!now && machine->turns < machine->next_start))
      return;
    std::vector<Started*> able;
    for (auto& each : machine->launches)
      if (each->begun < each->launch.blocks && (!each->ahead || each->ahead->let_next == each->ahead->launch.blocks))
        able.push_back(each.get());
    if (able.empty()) return;
    start(*able[random() % able.size()]);
    const int late = machine->order.late;
    machine->next_start = machine->turns + (late && random() % 2 ? random() % late : 0);
    now = false;
  }
}

// ---- turns
bool sleeps(const Warp& warp) {
  return !warp.ready || warp.frozen_until > machine->turns ||
         (warp.idle >= IDLE_TURNS && warp.seen == machine->version + warp.block->version);
}

Warp* pick() {
  auto& live = machine->live;
  for (int i = 0; i < 8; i++)
    if (Warp* warp = live[random() % live.size()]; !sleeps(*warp)) return warp;
  const size_t from = random() % live.size();
  for (size_t i = 0; i < live.size(); i++)
    if (Warp* warp = live[(from + i) % live.size()]; !sleeps(*warp)) return warp;
  return nullptr;
}

void freeze() {
  const Warp& victim = *machine->live[random() % machine->live.size()];
  const u64 until = machine->turns + random() % machine->order.freeze;
  const int kind = random() % 4;  // a warp (twice as often), a block, all blocks but this one
  for (Warp* warp : machine->live)
    if (kind < 2 ? warp == &victim : (warp->block == victim.block) == (kind == 2)) warp->frozen_until = until;
}

// Each thread of the warp runs until it stops.
void turn(Warp& warp) {
  machine->turns++;
  if (const u64 now = machine->version + warp.block->version; warp.seen != now) warp.seen = now, warp.idle = 0;
  warp.changed = false;
  const u32 first = random() % 32, step = random() % 2 ? 1 : 31;
  for (u32 i = 0; i < 32; i++) {
    Fiber& thread = warp.threads[(first + i * step) % 32];
    if (!(warp.ready >> thread.lane & 1)) continue;
    self = &thread;
    emulator_switch(&machine->scheduler, thread.stack_pointer);
    if (!machine->error.empty()) return;
  }
  if (warp.changed)
    warp.idle = 0, machine->changes++;
  else
    warp.idle++;
}

// Says which warps wait where: the threads of a block that wait in the same line.
std::string waiting() {
  std::string text;
  for (auto& block : machine->blocks) {
    std::map<std::pair<std::string, int>, std::set<int>> places;
    for (Warp& warp : block->warps)
      for (Fiber& thread : warp.threads)
        if (!(warp.ended >> thread.lane & 1)) {
          const std::string file = thread.line.file;
          places[{std::string(thread.what) + " (" + file.substr(file.rfind('/') + 1), thread.line.number}].insert(
              warp.number);
        }
    for (auto& [place, warps] : places) {
      text += "\n  block " + std::to_string(block->number) + " of launch ";
      for (size_t i = 0; i < machine->launches.size(); i++)
        if (machine->launches[i].get() == block->launch) text += std::to_string(i);
      text += ": " + place.first + ":" + std::to_string(place.second) + "): warps";
      for (int warp : warps) text += " " + std::to_string(warp);
    }
  }
  return text;
}

void run() {
  int silent = 0;
  u64 changes = 0;
  while (machine->error.empty()) {
    start_blocks(false);
    if (machine->blocks.empty()) {
      start_blocks(true);
      if (machine->blocks.empty()) return;
    }
    if (machine->order.freeze && random() % 64 == 0) freeze();
    Block& block = *machine->blocks[random() % machine->blocks.size()];
    if (!block.late_stores.empty() && random() % 4 == 0) deliver_to(block, random() % block.late_stores.size());
    if (machine->turns > MOST_TURNS) machine->error = "turns without end" + waiting(), machine->hung = true;
    Warp* warp = pick();
    if (!warp) {
      silent = machine->changes == changes ? silent + 1 : 0;
      changes = machine->changes;
      if (silent > SILENT_ROUNDS) {
        if (machine->hung || !machine->order.clock_runs) {
          machine->error = "nothing changes any more" + waiting();
          machine->hung = true;
          return;
        }
        machine->hung = true;
        silent = -10 * SILENT_ROUNDS;
      }
      if (machine->hung) machine->time += 1 << 20;
      for (auto& each : machine->blocks)
        while (!each->late_stores.empty()) deliver_to(*each, 0);
      for (Warp* each : machine->live) each->idle = each->frozen_until = 0;
      start_blocks(true);
      continue;
    }
    Block& its = *warp->block;
    for (int i = machine->order.burst > 1 ? random() % machine->order.burst : 0; i >= 0; i--) {
      turn(*warp);
      if (!machine->error.empty() || sleeps(*warp)) break;
    }
    if (!its.running) end(its);
  }
}

// ---- meetings
// Adds 16 x 16 times 16 x 8: exact products, rounded to float32 once they are added up.
void multiply(Warp& warp, bool float16) {
  auto value = [&](u32 pair, int i) {
    const u16 half = (u16)(pair >> 16 * i);
    if (float16) return of_f16(half);
    const u32 bits = (u32)half << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
  };
  double a[16][16], b[16][8], c[16][8] = {};
  for (int lane = 0; lane < 32; lane++) {
    const u32* o = warp.threads[lane].operands;
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 2; j++) a[g + i % 2 * 8][2 * t + i / 2 * 8 + j] = value(o[i], j);
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) b[2 * t + i * 8 + j][g] = value(o[4 + i], j);
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < 16; k++)
      for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) {
      float& sum = warp.threads[lane].sums[i];
      sum = (float)(sum + c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2]);
    }
  warp.changed = true;
}

void finish_meeting(Warp& warp) {
  if (warp.meeting >= MMA_BF16) return multiply(warp, warp.meeting == MMA_F16);
  u32 votes = 0;
  for (int i = 0; i < 32; i++) votes |= (u32)(warp.threads[i].value != 0) << i;
  for (Fiber& thread : warp.threads) {
    if (warp.meeting == SHUFFLE) thread.result = warp.threads[thread.source].value;
    if (warp.meeting == BALLOT) thread.result = votes;
    if (warp.meeting != MATCH) continue;
    thread.result = 0;
    for (int i = 0; i < 32; i++) thread.result |= (u32)(warp.threads[i].value == thread.value) << i;
  }
}

void finish_copies(size_t count) {
  for (size_t i = 0; i < count; i++) {
    const Copy& copy = fiber().copies[i];
    u8* to = fiber().warp->block->shared.data() + copy.to;
    copy.from ? (void)memcpy(to, copy.from, copy.bytes) : (void)memset(to, 0, copy.bytes);
  }
  fiber().copies.erase(fiber().copies.begin(), fiber().copies.begin() + count);
  if (count) fiber().warp->changed = true;
}

}  // namespace

u64 random() {  // xorshift64*
  u64& s = machine->state;
  s ^= s >> 12, s ^= s << 25, s ^= s >> 27;
  return s * 0x2545f4914f6cdd1dull >> 16;
}

void fail(const char* message, Line line) {
  const std::string file = line.file;
  machine->error = std::string(message) + " at " + file.substr(file.rfind('/') + 1) + ":" +
                   std::to_string(line.number) + " (block " + std::to_string(self->block) + ", warp " +
                   std::to_string(fiber().warp->number) + ", lane " + std::to_string(self->lane) + ")";
  for (;;) stop();
}

void stop() { emulator_switch(&fiber().stack_pointer, machine->scheduler); }

void wait_turn(const char* what, Line line) {
  fiber().what = what, fiber().line = line;
  stop();
}

void look(const char* what, Line line) {
  const int apart = machine->order.apart;
  if (!apart || random() % apart == 0) wait_turn(what, line);
}

void meet(Meeting meeting, const char* what, Line line) {
  Warp& warp = *fiber().warp;
  fiber().what = what, fiber().line = line;
  if (warp.arrived && warp.meeting != meeting) fail("threads of a warp meet in different functions", line);
  warp.meeting = meeting;
  warp.arrived |= 1u << self->lane;
  if (warp.arrived == ~0u) {
    warp.arrived = 0;
    warp.ready = ~0u;
    return finish_meeting(warp);
  }
  warp.ready &= ~(1u << self->lane);
  stop();
}

void wait_barrier(int id, int threads, Line line) {
  Block& block = *fiber().warp->block;
  fiber().what = id ? "named_barrier" : "__syncthreads", fiber().line = line;
  Clock& clock = block.barriers[id];
  clock.join(fiber().warp->clock);
  if (++block.arrived[id] < threads) {
    fiber().barrier = id;
    fiber().warp->ready &= ~(1u << self->lane);
    return stop();
  }
  block.arrived[id] = 0;
  auto pass = [&](Warp& warp) { warp.clock.join(clock), warp.clock.of[warp.number]++; };
  for (Warp& warp : block.warps) {
    for (Fiber& thread : warp.threads)
      if (thread.barrier == id) thread.barrier = -1, warp.ready |= 1u << thread.lane, pass(warp);
  }
  pass(*fiber().warp);
  clock = {};
  changed(false);
}

void changed(bool everywhere) {
  fiber().warp->changed = true;
  everywhere ? machine->version++ : fiber().warp->block->version++;
}

void store_late(u32* at, u32 value) {
  fiber().warp->changed = true;
  auto& stores = fiber().warp->block->late_stores;
  auto same = std::find_if(stores.begin(), stores.end(), [&](auto& each) { return each.first == at; });
  same == stores.end() ? (void)stores.emplace_back(at, value) : (void)(same->second = value);
}

void deliver() {
  Block& block = *fiber().warp->block;
  while (!block.late_stores.empty()) deliver_to(block, 0);
}

u8* shared(u32 at, int bytes, Access access, const char* what, Line line) {
  Warp& warp = *fiber().warp;
  Block& block = *warp.block;
  if (at % bytes || (u64)at + bytes > block.shared.size())
    fail((std::string(what) + " of shared memory at byte " + std::to_string(at)).c_str(), line);
  const u32 me = warp.number, *known = warp.clock.of;
  if (!machine->order.races) access = SYNCHRONIZE;
  for (u32 i = at / 4; access != SYNCHRONIZE && i < (at + bytes + 3) / 4; i++) {
    Block::Word& word = block.words[i];
    bool race = access != WRITE_PART && word.written > known[word.writer];
    if (access == READ) {
      word.readers |= 1u << me, word.read[me] = known[me];
    } else {
      for (u32 left = word.readers & ~(1u << me); left; left &= left - 1) {
        const int reader = __builtin_ctz(left);
        race |= word.read[reader] > known[reader];
      }
      word.writer = me, word.written = known[me], word.readers = 0;
    }
    if (race) fail((std::string("a race: ") + what + " of shared memory at byte " + std::to_string(at)).c_str(), line);
  }
  return block.shared.data() + at;
}

void release(u32 at) {
  Warp& warp = *fiber().warp;
  warp.block->released[at].join(warp.clock);
  warp.clock.of[warp.number]++;
}

void acquire(u32 at) { fiber().warp->clock.join(fiber().warp->block->released[at]); }

void add_copy(u32 to, const u8* from, int bytes, Line line) {
  u8* there = shared(to, bytes, WRITE, "copy", line);
  const Launch& launch = fiber().warp->block->launch->launch;
  auto within = [&](const Range& range) { return from >= range.begin && from + bytes <= range.begin + range.bytes; };
  if (from && launch.ranges && !std::any_of(launch.readable, launch.readable + launch.ranges, within))
    fail("a copy from outside of the layer's tensors", line);
  if ((u64)from % bytes) fail("a copy from an address that is no multiple of its bytes", line);
  for (int i = 0; i < bytes; i += 4) *(u32*)(there + i) = (u32)random();
  fiber().copies.push_back({to, from, bytes});
}

void commit_copies() { fiber().groups.push_back(fiber().copies.size()); }

void wait_copies(u32 pending) {
  auto& groups = fiber().groups;
  if (groups.size() <= pending) return;
  const size_t done = groups.size() - pending, count = groups[done - 1];
  groups.erase(groups.begin(), groups.begin() + done);
  for (size_t& end : groups) end -= count;
  finish_copies(count);
}

bool launch_ahead_ended() {
  const Started* ahead = fiber().warp->block->launch->ahead;
  return !ahead || ahead->ended == ahead->launch.blocks;
}

void let_next() {
  Block& block = *fiber().warp->block;
  if (!block.lets_next) block.lets_next = true, block.launch->let_next++, machine->changes++;
}

u32 time_in_ms() { return machine->time; }

// ---- numbers
u16 bf16_of(double v) {
  if (v != v) return 0x7fff;
  const float near = (float)v;  // double rounding, unless it is exact
  u32 bits;
  memcpy(&bits, &near, 4);
  if (near == v && !(bits & 0xffff)) return bits >> 16;
  int exponent;
  std::frexp(v, &exponent);
  const int quantum = std::max(exponent - 8, -133);
  const float rounded = (float)std::ldexp(std::nearbyint(std::ldexp(v, -quantum)), quantum);
  memcpy(&bits, &rounded, 4);
  return bits >> 16;
}

u16 f16_of(double v) {
  if (v != v) return 0x7fff;
  const u16 sign = std::signbit(v) ? 0x8000 : 0;
  v = std::fabs(v);
  if (v == 0) return sign;
  if (v >= 65520) return sign | 0x7c00;
  int exponent;
  std::frexp(v, &exponent);
  const int quantum = std::max(exponent - 11, -24);
  const int mantissa = (int)std::nearbyint(std::ldexp(v, -quantum));  // of 11 bits; less for a subnormal
  return sign | (u16)(mantissa + ((quantum + 24) << 10));
}

float of_f16(u16 v) {
  const int exponent = v >> 10 & 31, mantissa = v & 1023;
  const float size = exponent == 31
                         ? (mantissa ? NAN : INFINITY)
                         : std::ldexp((float)(exponent ? mantissa + 1024 : mantissa), std::max(exponent, 1) - 25);
  return v >> 15 ? -size : size;
}

u32 fma_bf16(u16 a, u16 b, u16 c) {
  auto value = [](u16 v) {
    const u32 bits = (u32)v << 16;
    float r;
    memcpy(&r, &bits, 4);
    return (double)r;
  };
  const double product = value(a) * value(b), addend = value(c);
  double sum = product + addend;
  if (std::isfinite(sum)) {  // rounded to odd: then bfloat16 is rounded as if the sum were exact
    const double back = sum - product, rest = (product - (sum - back)) + (addend - back);
    u64 bits;
    memcpy(&bits, &sum, 8);
    if (rest != 0 && !(bits & 1)) {
      bits += (rest > 0) == (sum > 0) ? 1 : -1;
      memcpy(&sum, &bits, 8);
    }
  }
  return bf16_of(sum);
}

}  // namespace emulator

// Runs launches. Returns 0, 1 if they hang, 2 for another fault; `message` says what.
extern "C" int emulator_run(const emulator::Launch* launches, int count, const emulator::Order* order, char* message,
                            int size) {
  using namespace emulator;
  Machine here;
  machine = &here;
  here.order = *order;
  here.state = (order->seed + 1) * 0x9e3779b97f4a7c15ull;
  for (int i = 0; i < 16; i++) emulator::random();
  std::map<int, Started*> last;
  for (int i = 0; i < count; i++) {
    here.launches.push_back(std::make_unique<Started>(Started{launches[i], last[launches[i].stream]}));
    last[launches[i].stream] = here.launches.back().get();
  }
  run();
  for (auto& block : here.blocks) free_stacks(*block);
  snprintf(message, size, "%s", here.error.c_str());
  return here.error.empty() ? 0 : here.hung ? 1 : 2;
}
