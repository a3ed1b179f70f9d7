// SPDX-License-Identifier: Apache-2.0
// One warp of each block takes tasks, and publishes them to the block's other warps in entries.
//
// A launch has phases: FC1, FC2, and in a call that gathers SUM. FC2's tasks wait for FC1's tasks, and SUM's for FC2's.
//
// A call that does not gather has as many virtual blocks as blocks. Virtual block v has every task of FC1 whose number
// is v modulo `blocks`. It has every `blocks`-th task of FC2 or, with BESIDE, consecutive ones. The last virtual blocks
// have the fewest tasks of FC1, so they get the most of FC2. A block takes the virtual block of its own number, and
// goes on to FC2 when all are taken. Until then it takes a virtual block that a late block left, whenever its warps
// have given all tasks back. A late block always computes FC1 of its own virtual block, since it requests those weights
// before it knows whether another block took over. Its products have the same bits.
//
// In a call that gathers, blocks take tickets: numbers of a counter in the workspace, for tasks of FC1, then FC2, then
// SUM. Each of the first `blocks` tickets stands for several tasks of FC1. A block takes tickets a few tasks ahead.
//
// Why every launch ends. When a block begins FC2, running blocks have taken all tasks of FC1, and compute them without
// waiting for another block. So h becomes complete, FC2's tasks stop waiting, and then SUM's tasks do. This holds for
// any number of running blocks: a single block takes all tasks, and a late block finds none left. Two launches with
// separate workspaces never wait for each other. A launch reads the workspace after the launch ahead has ended.
//
// Entries are a ring with an mbarrier in each direction. Entry n % ENTRIES holds the block's task n from the arrival at
// `published` to the arrivals of all readers at `given_back`. A multiplying warp reads an entry when it requests
// weights, at most MOST_STAGES stages ahead, and when it computes. Then it gives the entry back. If it has no unit of a
// task, it first moves its requests past the task. A warp that adds reads an entry and gives it back. So a wait for an
// entry is a wait for earlier tasks of the block, which never wait for later ones.
//
// Errors. The warp that takes tasks stays until the multiplying warps have ended; then the warps that add never wait
// again. If the multiplying warps do not end within SPIN_SECONDS, it writes the number of tokens to host memory and
// traps.
#pragma once
#include "records.cuh"

// ---- readers of entries
// Returns the parity of an entry's mbarriers while the entry holds task `number`.
DEVICE u32 parity_of(u32 number) { return number / ENTRIES & 1; }
DEVICE bool is_published(const Block& b, u32 number) {
  return barrier_test(b.shared.published(number), parity_of(number));
}
// Waits for task `number` of the block. Returns its kind.
DEVICE u32 kind_of(const Block& b, u32 number) {
  barrier_wait(b.shared.published(number), parity_of(number));
  return load_shared(b.shared.entry(number));
}
// Gives back the entry of task `number`, after this warp's last read.
DEVICE void return_task(const Block& b, u32 number) {
  __syncwarp();
  if (b.lane == 0) barrier_arrive(b.shared.given_back(number));
}

struct TaskTaker {
  // A virtual block's tasks of FC2 are consecutive: most are of one token, whose h stays in registers. Otherwise tokens
  // take turns.
  static constexpr bool BESIDE = SLICES2 && !ONE_TOKEN;
  const Block& b;
  // Values of lane 0; `run` broadcasts them to all lanes.
  u32 ticket = 0, epoch = 0, last_tokens = 0;
  bool own = false;            // this block took the virtual block of its own number
  int tasks1 = 0, tasks2 = 0;  // of FC1 and FC2
  u32 polls = 0, began = 0;    // number of all failed polls, and the time of the 256th
  u32 number = 0;              // of the block's task to publish next

  DEVICE explicit TaskTaker(const Block& block) : b(block) {}

  // Takes the block's first ticket, or virtual block, before tasks are known.
  DEVICE void begin() {
    const uint2 both = load_relaxed_8(b.workspace.epoch());
    epoch = both.x;
    last_tokens = both.y;
    if (GATHER)
      ticket = atomicAdd(b.workspace.ticket(), 1);
    else
      own = take_virtual(blockIdx.x);
  }
  // Takes the next ticket, for all lanes.
  DEVICE void take() {
    __syncwarp();
    if (b.lane == 0) ticket = atomicAdd(b.workspace.ticket(), 1);
    ticket = __shfl_sync(~0u, ticket, 0);
  }
  // Takes a virtual block, in one lane. Returns false if it was already taken.
  DEVICE bool take_virtual(u32 block) const {
    const u32 bit = 1u << block % 32;
    return !(atomicOr(b.workspace.taken() + block / 32, bit) & bit);
  }
  // Returns the first virtual block that is not taken; `blocks` if all are taken.
  DEVICE u32 first_left(u32 blocks) const {
    const u32 from = b.lane * 32;
    u32 left = 0;
    if (from < blocks) left = ~load_relaxed(b.workspace.taken() + b.lane);
    if (from < blocks && blocks - from < 32) left &= (1u << (blocks - from)) - 1;
    const u32 lanes = __ballot_sync(~0u, left != 0);
    if (lanes == 0) return blocks;
    const int lane = __ffs(lanes) - 1;
    return lane * 32 + __ffs(__shfl_sync(~0u, left, lane)) - 1;
  }
  // Returns whether all warps have given back the block's first `count` tasks.
  DEVICE bool finished(u32 count) const {
    return !__any_sync(~0u, count && !barrier_test(b.shared.given_back(count - 1), parity_of(count - 1)));
  }
  // Counts a failed poll. The clock is slow to read, so only every 256th poll reads it.
  DEVICE void trap_if_late() {
    if (++polls % 256) return;
    if (polls == 256) began = time_in_ms();
    if (time_in_ms() - began < SPIN_SECONDS * 954u) return;
    *b.layer.stuck = b.call.tokens;
    __threadfence_system();
    trap();
  }
  DEVICE void pause() {
    __nanosleep(50);
    trap_if_late();
  }
  DEVICE void virtual_blocks(u32 blocks) {
    int held = 0;
    auto hold = [&](u32 block) {
      if (b.lane == 0) store_shared_u16(b.shared.taken() + 2 * held, (u16)block);
      held++;
    };
    if (own) hold(blockIdx.x);
    publish(FC1, blockIdx.x, blocks, tasks1);
    for (u32 left; (left = first_left(blocks)) < blocks;) {
      if (!finished(number)) {
        pause();
        continue;
      }
      if (!__any_sync(~0u, b.lane == 0 && take_virtual(left))) continue;
      hold(left);
      publish(FC1, left, blocks, tasks1);
    }
    __syncwarp();
    const int each = tasks2 / (int)blocks, more = tasks2 % (int)blocks;
    for (int i = 0; i < held; i++) {
      const int v = blocks - 1 - load_shared_u16(b.shared.taken() + 2 * i), first = v * each + min(v, more);
      BESIDE ? publish(FC2, first, 1, first + each + (v < more)) : publish(FC2, v, blocks, tasks2);
    }
  }
  DEVICE void single_tasks(u32 blocks) {
    const u32 at_first = max(1, min(STAGES1, tasks1 / (int)blocks)), extra = (at_first - 1) * blocks;
    const u32 end2 = tasks1 + tasks2, end = end2 + b.call.tokens;  // ends of FC2's tasks and of all
    for (;;) {
      u32 task = ticket < blocks ? ticket : extra + ticket;
      if (task >= end) break;
      if (task < (u32)tasks1)
        publish(FC1, task, blocks, ticket < blocks ? min(at_first * blocks, tasks1) : task + 1);
      else if (task < end2)
        publish(FC2, task - tasks1, 1, task - tasks1 + 1);
      else
        publish(SUM, task - end2, 1, task - end2 + 1);
      const u32 ahead = task < (u32)tasks1 ? STAGES1 + 3 : 3;
      while (number > ahead && !finished(number - ahead)) pause();
      take();
    }
  }
  // Takes and publishes all tasks. `slots`: number of experts with routes, or of groups.
  DEVICE void run(int slots) {
    tasks1 = slots * TASKS1;
    tasks2 = (GATHER ? slots : b.call.tokens) * TASKS2;
    epoch = __shfl_sync(~0u, epoch, 0);
    last_tokens = __shfl_sync(~0u, last_tokens, 0);
    ticket = __shfl_sync(~0u, ticket, 0);
    own = __any_sync(~0u, own);
    if (b.lane == 0) store_shared(b.shared.epoch(), epoch);
    __syncwarp();  // any lane may publish the first task
    const u32 blocks = gridDim.x;
    if (GATHER)
      single_tasks(blocks);
    else
      virtual_blocks(blocks);
    if (b.lane == 0) {
      wait_for_entry(number);
      store_shared(b.shared.entry(number), END);
      barrier_arrive(b.shared.published(number));
      __threadfence();
      if (atomicAdd(b.workspace.done(), 1) == blocks - 1) {  // all blocks have taken their last task
        __threadfence();
        for (int i = 0; i < (GATHER ? 1 : (MOST_BLOCKS + 31) / 32); i++)
          (GATHER ? b.workspace.ticket() : b.workspace.taken())[i] = 0;
        *b.workspace.done() = 0;
        b.workspace.epoch()[0] = epoch + 1;
        b.workspace.epoch()[1] = b.call.tokens;
      }
    }
    __syncwarp();
    prepare_next_launch(blocks);
    while (!barrier_try_wait(b.shared.ended(), 0)) trap_if_late();
  }
  // Waits until the entry of a task is free.
  DEVICE void wait_for_entry(u32 task) {
    if (task < ENTRIES) return;
    while (!barrier_try_wait(b.shared.given_back(task), parity_of(task) ^ 1)) trap_if_late();
  }
  // Publishes the tasks first, first + step, ... below `end`. A lane writes an entry: many at once while entries are
  // new.
  DEVICE void publish(u32 kind, int first, int step, int end) {
    for (int from = first; from < end;) {
      const int at_once = number < ENTRIES ? min(ENTRIES - (int)number, 32) : 1, task = from + b.lane * step;
      const bool mine = b.lane < at_once && task < end;
      if (mine) write_entry(kind, task, number + b.lane);
      number += __popc(__ballot_sync(~0u, mine));
      from += at_once * step;
    }
  }
  DEVICE void write_entry(u32 kind, int task, u32 place) {
    wait_for_entry(place);
    const u32 to = b.shared.entry(place);
    if (kind == FC1) {
      const int slot = task / TASKS1, tiles = task % TASKS1;
      const Slot word = {load_shared(b.shared.slots() + slot * 4)};  // or Group: both have the expert in the same bits
      for (int j = 0; j < TASK_TILES1; j++)
        store_shared_16(to + TILES_AT + 16 * j, tile1(word.expert(), tiles * TASK_TILES1 + j));
      store_shared(to + INFO_AT, Info::make(slot, tiles));
      store_shared(to + WORD_AT, word.word);
    } else if (kind == FC2) {
      const int tiles = GATHER || BESIDE ? task % TASKS2 : task / b.call.tokens;
      const Group word = {GATHER ? load_shared(b.shared.slots() + task / TASKS2 * 4) : 0};
      for (int j = 0; j < TASK_TILES2; j++)
        store_shared_16(to + TILES_AT + 16 * j, tile2(word.expert(), tiles * TASK_TILES2 + j));
      store_shared(to + INFO_AT, Info::make(GATHER ? 0 : BESIDE ? task / TASKS2 : task % b.call.tokens, tiles));
      store_shared(to + WORD_AT, word.word);
    } else
      store_shared(to + INFO_AT, task);
    store_shared(to, kind);
    barrier_arrive(b.shared.published(place));
  }
  // Resets the counts and the buffer of h of the next launch. Only the launch before this one used them, and it has
  // ended.
  DEVICE void prepare_next_launch(int blocks) {
    if (GATHER && blockIdx.x == 0)
      for (int i = b.lane; i < MAX_TOKENS; i += 32) b.workspace.added()[(~epoch & 1) * MAX_TOKENS + i] = 0;
    uint4* other = (uint4*)(b.workspace.h() + (~epoch & 1) * H_BUFFER);
    for (int i = blockIdx.x * 32 + b.lane; i < (int)last_tokens * TOP_K * BLOCKS2 * 16; i += blocks * 32)
      other[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
  }
};
