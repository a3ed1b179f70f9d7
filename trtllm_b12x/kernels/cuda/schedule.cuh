// Tickets and tasks: the warp that takes tickets, and the entries in which it tells the others of the block what to do.
//
// Tasks are numbered FC1, FC2, sums. A ticket is the next number, from a counter in the workspace.
//
// Order. A block takes tickets in ascending order and works its tasks off in that order. FC1's tasks wait for nothing,
// FC2's wait for FC1's, sums wait for FC2's. The tasks that one waits for have lower numbers, so blocks that run have
// taken them. One block alone gets through, and blocks that start late find their tasks taken. Two launches with
// workspaces of their own never wait for each other.
//
// Entries. The block's task number n is written to entry n % ENTRIES, once every reader has read task n - ENTRIES; see
// `free_entry`. A task that waits for an entry waits for earlier tasks of its own block, and those never wait for it.
//
// Readers. A warp that multiplies reads an entry twice: when it asks for weights, up to STAGES stages ahead, and when
// it computes. It hands its products over after both, so the warps that add tell that an entry of FC1 or FC2 has been
// read. A warp that has no unit of a task moves its place for weights past the task's entry and does not read it. Of
// sums each warp that multiplies tells.
//
// Errors. The warp that takes tickets stays until the other warps of its block have ended. If they do not end within
// SPIN_SECONDS, it writes the number of tokens to host memory and traps. So a launch ends even if a rule is wrong.
#pragma once
#include "weights.cuh"

// Time since this warp's 256th poll that failed, whatever it waited for. The clock is slow to read: every 256th poll
// reads it.
struct Watch {
  u32 polls = 0, began = 0;
  DEVICE void trap_if_late(const Block& b) {
    if (++polls % 256) return;
    if (polls == 256) began = time_in_ms();
    if (time_in_ms() - began < SPIN_SECONDS * 954u) return;
    *b.layer.stuck = b.call.tokens;
    __threadfence_system();
    trap();
  }
};

struct Tickets {
  const Block& b;
  // Lane 0's; `run` gives epoch and last_tokens to all lanes.
  u32 first = 0, epoch = 0, last_tokens = 0;
  // The end of FC1's tasks, of FC2's, of all.
  int end1, end2, end;
  Watch watch;
  int sums = 1 << 30;  // this block's first task that is a sum
  int number = 0;      // of the task that is published next

  DEVICE explicit Tickets(const Block& block) : b(block) {}

  // Takes the first ticket before it is known what tasks there are.
  DEVICE void begin() {
    const uint2 both = load_relaxed_8(b.workspace.epoch());
    epoch = both.x;
    last_tokens = both.y;
    first = atomicAdd(b.workspace.ticket(), 1);
  }
  DEVICE void set_tasks(int slots) {
    end1 = slots * TASKS1;
    end2 = end1 + (GATHER ? slots : b.call.tokens) * TASKS2;
    end = end2 + (GATHER ? b.call.tokens : 0);
  }
  // Returns the entry that is written next, once its earlier task, number - ENTRIES, has been read by all.
  DEVICE u32 free_entry() {
    if (number >= ENTRIES)
      while (__any_sync(~0u, b.lane < READERS &&
                                 (int)acquire_shared(b.shared.finished() + 4 * b.lane) + (b.lane < WARPS ? sums : 0) <=
                                     number - ENTRIES))
        watch.trap_if_late(b);
    __syncwarp();
    return b.shared.entries() + ENTRY_BYTES * (number % ENTRIES);
  }
  DEVICE void publish(int task) {
    const u32 to = free_entry();
    if (GATHER && task >= end2) sums = min(sums, number);
    if (b.lane == 0) {
      if (task < end1) {
        const int slot = task / TASKS1, tiles = task % TASKS1;
        const Slot word = {load_shared(b.shared.slots() + slot * 4)};  // or group: the expert lies alike
        for (int j = 0; j < TASK_TILES1; j++)
          store_tile1(to + TILES_AT + 16 * j, word.expert(), tiles * TASK_TILES1 + j);
        store_shared(to + INFO_AT, Info::make(slot, tiles));
        store_shared(to + WORD_AT, word.word);
      } else if (task < end2) {
        const int rest = task - end1, tiles = GATHER ? rest % TASKS2 : rest / b.call.tokens;
        const Group word = {GATHER ? load_shared(b.shared.slots() + rest / TASKS2 * 4) : 0};
        for (int j = 0; j < TASK_TILES2; j++)
          store_tile2(to + TILES_AT + 16 * j, word.expert(), tiles * TASK_TILES2 + j);
        store_shared(to + INFO_AT, Info::make(GATHER ? 0 : rest % b.call.tokens, tiles));
        store_shared(to + WORD_AT, word.word);
      } else
        store_shared(to + INFO_AT, task - end2);
      release_shared(to, tag_of(number, task < end1 ? FC1 : task < end2 ? FC2 : SUM));
    }
    number++;
  }
  DEVICE void run() {
    epoch = __shfl_sync(~0u, epoch, 0);
    last_tokens = __shfl_sync(~0u, last_tokens, 0);
    if (b.lane == 0) store_shared(b.shared.epoch(), epoch);
    const int blocks = gridDim.x;
    int task = 0, tickets = 1, ticket = __shfl_sync(~0u, (int)first, 0);
    int quota = GATHER ? 1 : (end - end1 + blocks - 1) / blocks;  // of FC2's tickets: each block takes as many
    const int at_first = max(1, min(STAGES, end1 / blocks));      // a block's first ticket stands for so many tasks
    while (quota > 0) {
      for (int j = 0; j < tickets; j++, ticket++)
        for (int r = 0; r < (ticket < blocks ? at_first : 1); r++) {
          task = ticket < blocks ? ticket + r * blocks : (at_first - 1) * blocks + ticket;
          if (task >= (GATHER ? end : end1)) quota--;
          if (task < end) publish(task);
        }
      if (quota <= 0) break;
      while ((int)acquire_shared(b.shared.progress()) + (task >= end1 ? 2 : LEAD) < number) {
        __nanosleep(20);
        watch.trap_if_late(b);
      }
      tickets = task + 6 * blocks < end1 && !GATHER ? 4 : 1;
      if (b.lane == 0) ticket = (int)atomicAdd(b.workspace.ticket(), tickets);
      ticket = __shfl_sync(~0u, ticket, 0);
    }
    const u32 to = free_entry();
    if (b.lane == 0) {
      release_shared(to, tag_of(number, END));
      __threadfence();
      if (atomicAdd(b.workspace.done(), 1) == blocks - 1) {  // no block takes another ticket
        *b.workspace.ticket() = 0;
        *b.workspace.done() = 0;
        b.workspace.epoch()[0] = epoch + 1;
        b.workspace.epoch()[1] = b.call.tokens;
      }
    }
    __syncwarp();
    prepare_next_launch(blocks);
    while (!barrier_try_wait(b.shared.ended(), 0)) watch.trap_if_late(b);
  }
  // The counts and the buffer of h that the next launch uses. Only the launch before this one used them, and it has
  // ended.
  DEVICE void prepare_next_launch(int blocks) {
    if (GATHER && blockIdx.x == 0)
      for (int i = b.lane; i < MAX_TOKENS; i += 32) b.workspace.added()[(~epoch & 1) * MAX_TOKENS + i] = 0;
    uint4* other = (uint4*)(b.workspace.h() + (~epoch & 1) * H_BUFFER);
    for (int i = blockIdx.x * 32 + b.lane; i < (int)last_tokens * TOP_K * BLOCKS2 * 16; i += blocks * 32)
      other[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
};
