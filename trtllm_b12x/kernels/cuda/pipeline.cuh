// SPDX-License-Identifier: Apache-2.0
// A warp's ring of weights in shared memory. A lane copies (cp.async) the 16 bytes that it decodes later, so the ring
// needs no producer and no barrier, only copy_wait and __syncwarp. The ring continues across tasks: FC2's weights are
// in flight while FC1 computes.
//
// Warp (part, split) computes its part of a task's tiles, in blocks of 128 columns: split, split + SPLIT1, ... In FC2
// of a call that does not gather, warp w computes the units w, w + WARPS, ... A unit is a (route, block).
#pragma once
#include "schedule.cuh"
#include "stage.cuh"

struct Stages : Stage {
  static constexpr int ALL_UNITS = TOP_K * UNITS2;  // units of FC2 per token

  const Block& b;
  const int part = b.warp / SPLIT1;
  const int split1 = b.warp % SPLIT1, own1 = (BLOCKS1 - split1 + SPLIT1 - 1) / SPLIT1;  // own: blocks of this warp
  const int split2 = b.warp % SPLIT2, own2 = (BLOCKS2 - split2 + SPLIT2 - 1) / SPLIT2;
  int waiting = 0;  // stages that are requested and not used yet
  int tall = 0;     // those of FC1 among them, if they have more halves than FC2's
  // What is requested next: number of the task; stage of the task, of `units` in FC2; tile of the task.
  u32 number = 0;
  int stage = 0, units = 0, tile = 0;
  u32 slot = 0, used = 0;  // byte offsets in the ring: of the stage to request next, and to use next
  bool ended = false;      // no stages are left to request
  u32 ring;                // shared address of the ring
  // ONE_TOKEN: slot and tile of the block's first task, for expert 0. The block's tasks before `known` are FC1's.
  u32 first_slot;
  uint4 first;
  u32 known = 0;

  DEVICE explicit Stages(const Block& block) : Stage(block.layer, block.lane), b(block) {}

  DEVICE void begin() {
    Stage::begin<ONE_TOKEN, SLICES2>(split1);
    ring = b.shared.stages(b.warp);
    keep(ring);
  }
  // Returns the number of a token's FC2 units that this warp has.
  DEVICE int units_of(u32 token) const { return ((int)b.shared.valid()[token] * UNITS2 - b.warp + WARPS - 1) / WARPS; }

  DEVICE int halves_in_use() const { return waiting * HALVES2 + tall * (HALVES1 - HALVES2); }

  // Requests the next stage if its task is published. With `wait`, waits for the task. Returns whether the warp
  // advanced, by a stage or past a task in which it has no stage.
  DEVICE bool ask(bool wait) {
    if (!wait && !is_published(b, number)) return false;
    const u32 kind = wait ? kind_of(b, number) : load_shared(b.shared.entry(number));
    if (kind == END || kind == SUM) {
      ended = true;
      return false;
    }
    if (kind == FC1 ? waiting >= STAGES1 : halves_in_use() + HALVES2 > RING_HALVES) return false;
    if (kind == FC1)
      asked<FC1>(copy_of_tile(ring + slot, next_tile()));
    else
      asked<FC2>(copy_unit(ring + slot));
    return true;
  }
  // FC1: returns the start of the tile whose stage is requested next.
  DEVICE uint4 next_tile() const {
    return load_shared_16(b.shared.entry(number) + TILES_AT + 16 * (part + (TILES_A_TASK > 1 ? tile * PARTS1 : 0)));
  }
  // Advances after a stage was requested, or after a task of FC2 in which this warp has no stage.
  template <int phase>
  DEVICE void asked(bool task_ends) {
    if (phase == FC1 || units > 0) {
      copy_commit();
      waiting++;
      if (HALVES1 != HALVES2 && phase == FC1) tall++;
      slot += HALVES<phase> * HALF_BYTES;
      if (slot == RING_BYTES) slot = 0;
    }
    if (task_ends) {
      stage = tile = 0;
      number++;
    }
  }
  // Copies a stage of FC1 from a tile. Returns whether it is the task's last.
  DEVICE bool copy_of_tile(u32 to, const uint4& from) {
    copy1(to, from, split1, stage * SPLIT1);
    bool last = ++stage >= own1;
    if (TILES_A_TASK > 1 && last && ++tile < TILES_A_TASK) {
      stage = 0;
      last = false;
    }
    return last;
  }
  // Copies a stage of FC2, if this warp has one.
  DEVICE bool copy_unit(u32 to) {
    const u32 entry = b.shared.entry(number);
    if (!ONE_TOKEN && stage == 0) units = GATHER ? own2 : units_of(load_shared(entry + INFO_AT) >> 16);
    if (units > 0) {
      const uint4 from = load_shared_16(entry + TILES_AT + (GATHER ? 16 * (b.warp / SPLIT2) : 0));
      const u32 unit = b.warp + stage * WARPS;
      const u32 block = GATHER ? split2 + stage * SPLIT2 : unit % UNITS2 * UNIT_BLOCKS;
      u32 codes_at = from.x, scales_at = from.y, codes_in = codes2, scales_in = scales2;
      if (ONE_TOKEN) {
        codes_at += load_shared(b.shared.unit(unit));
        scales_at += load_shared(b.shared.unit(unit) + UNIT_SCALES);
      } else {
        if (!GATHER) {
          const u32 route = b.shared.routes() + ((load_shared(entry + INFO_AT) >> 16) * TOP_K + unit / UNITS2) * 16;
          codes_at += load_shared(route);
          scales_at += load_shared(route + ROUTE_SCALES);
        }
        codes_in += block * (16 * CODE_BITS);
        scales_in += block * (2 * BLOCK_SCALES);
      }
      copy2(to, make_uint4(codes_at, scales_at, 0, from.w), codes_in, scales_in, block);
    }
    return ++stage >= units;
  }

  // Waits for the oldest stage in flight. At least `least` stages are in flight, in total `waiting`.
  template <int least>
  DEVICE void wait_for_oldest() const {
    if constexpr (least < MOST_STAGES) {
      if (waiting > least) return wait_for_oldest<least + 1>();
    }
    copy_wait<least - 1>();
  }
  // Waits until the stage to use next has arrived.
  DEVICE void open() {
    if (waiting == 0) fill<ONE_STAGE>();
    wait_for_oldest<1>();
    __syncwarp();
  }
  // Frees that stage, which is in registers, and requests others in its place.
  template <int phase>
  DEVICE void close() {
    used_up<phase>();
    fill();
  }
  template <int phase>
  DEVICE void used_up() {
    __syncwarp();
    waiting--;
    if (HALVES1 != HALVES2 && phase == FC1) tall--;
    used += HALVES<phase> * HALF_BYTES;
    if (used == RING_BYTES) used = 0;
  }
  // Requests as many stages of published tasks as the ring has room for. FIRST_TASK waits only for the first task,
  // since a warp may have no unit in any other. ONE_STAGE waits for one stage.
  static constexpr int NOTHING = 0, FIRST_TASK = 1, ONE_STAGE = 2;
  template <int waits_for = NOTHING>
  DEVICE void fill() {
    while (!ended && waiting < MOST_STAGES &&
           ask(waits_for == FIRST_TASK ? number == 0 : waits_for == ONE_STAGE && waiting == 0)) {
    }
  }
  // ---- ONE_TOKEN: one phase at a time, each in one place of the code
  // Computes the tile of the block's first task, for expert 0.
  DEVICE void prepare_first() {
    first_slot = blockIdx.x / TASKS1;
    first = tile1(0, blockIdx.x % TASKS1 * TASK_TILES1 + part);
    keep(first_slot), keep(first.x), keep(first.y), keep(first.z), keep(first.w);
  }
  // Requests the first stages of FC1 of the block's own virtual block, before their tasks are published.
  // `expert_of(slot)`: the expert of a slot, -1 beyond the last slot.
  template <class ExpertOf>
  DEVICE void ask_first(ExpertOf expert_of) {
    EACH (i, STAGES1) {
      const int task = blockIdx.x + number * gridDim.x, expert = expert_of(i ? task / TASKS1 : first_slot);
      if (expert < 0) return;
      uint4 from = i ? tile1(0, task % TASKS1 * TASK_TILES1 + part) : first;
      from.x += expert * (u32)(EXPERT_CODES1 / 16);
      from.y += expert * (u32)(EXPERT_SCALES1 / 2);
      from.z += expert * (u32)(EXPERT_SCALES1 / 2);
      asked<FC1>(copy_of_tile(ring + slot, from));
    }
  }
  // Sets `known`, the first tasks of the block's own virtual block, once routes are known. It is less than ENTRIES: the
  // warp waits for the next task, and a parity only distinguishes an entry's first and second task.
  DEVICE void learn(int slots) {
    const int tasks = slots * TASKS1 - blockIdx.x;
    known = tasks <= 0 ? 0 : min(ENTRIES - 1, (tasks - 1) / (int)gridDim.x + 1);
    units = units_of(0);
  }
  // Requests as many stages of a phase's published tasks as the ring has room for. `most`: maximum number of stages to
  // request of a task of FC2.
  template <int phase>
  DEVICE void fill_phase(int most = ALL_UNITS) {
    ROLLED
    while ((phase == FC1 ? waiting < STAGES1 : halves_in_use() + HALVES2 <= RING_HALVES && stage < most) &&
           is_published(b, number) && load_shared(b.shared.entry(number)) == phase) {
      if (phase == FC1)
        asked<FC1>(copy_of_tile(ring + slot, next_tile()));
      else
        asked<FC2>(copy_unit(ring + slot));
    }
  }
  // Calls `read` when the oldest stage has arrived, and requests others of the phase in its place. If its task is
  // published late, waits for the task first.
  template <int phase, class Read>
  DEVICE void take(Read read) {
    for (bool there = false; !there;) {
      if (waiting == 0) {
        kind_of(b, number);
      } else {
        wait_for_oldest<1>();
        __syncwarp();
        read();
        used_up<phase>();
        there = true;
      }
      fill_phase<phase>();
    }
  }
  // Skips a task of FC2 in which this warp has no unit to request.
  DEVICE void pass(u32 task) {
    if (number == task) number++;
  }
  // Reads the stage to use next, with the columns of `block`.
  template <int phase>
  DEVICE void read(Rows (*rows)[2], int block) const {
    Stage::read<phase, phase == FC1 ? ONE_TOKEN : SLICES2>(rows, ring + used, block);
  }
};
