// A warp's ring of weights in shared memory. A lane copies (cp.async) the 16 bytes that it decodes later, so there is
// no producer and no barrier, only copy_wait and __syncwarp. The ring runs on across tasks: FC2's weights are on their
// way while FC1 computes.
//
// A stage is HALVES1 or HALVES2 times 16 rows x 128 columns of one matrix (NARROW: 8 x 256), codes and block scales.
// Warp (part, split) takes the blocks of 128 columns split, split + SPLIT1, ... of the rows of its part of a task's
// tiles; in FC2 of a call that does not gather, warp w takes the units w, w + WARPS, ... of (route, block).
#pragma once
#include "schedule.cuh"

// Copies ROW_SCALES bytes of a row of scales, of which `left` are left.
template <int bytes>
DEVICE void copy_scales(u32 to, const u8* from, int left) {
  if (!UNEVEN) return copy_bytes<bytes>(to, from);
  const int ahead = (int)((u64)from & (ODD_ROWS ? 3 : 2));
  UNROLL
  for (int i = 0; i <= bytes; i += 4)
    if (i < ahead + bytes && i < ahead + left) copy_bytes<4>(to + i, from - ahead + i);
}

struct Stages {
  // Lanes that copy scales, and bytes of each. In 128x4 tiles a lane copies 16 bytes of a row of rows and four groups
  // of columns.
  static constexpr int LANES1 = TILED_SCALES ? MATRICES * TILES_A_BLOCK * 8 : HALVES1 * 16;
  static constexpr int LANES2 = TILED_SCALES ? (NARROW ? 2 : 1) * TILES_A_BLOCK * 8 : HALVES2 * 16;
  static constexpr int BYTES1 = TILED_SCALES ? 4 * PIECES1 : SCALE_SLOT,
                       BYTES2 = TILED_SCALES ? 4 * PIECES2 : SCALE_SLOT;
  // Bytes ahead of the scales of gate's rows, where they take turns with those of up.
  static constexpr int ODD1 = UNEVEN && SCALE_PITCH1 % 4 ? 2 : 0;
  // From the scales of a half of a stage to the next half's, and from one piece of a half to the other.
  static constexpr u32 HALF1 = TILED_SCALES ? (GATED ? 4 : 8) : 16 * SCALE_SLOT;
  static constexpr u32 HALF2 = TILED_SCALES ? 8 : 16 * SCALE_SLOT;
  static constexpr u32 OTHER1 = TILED_SCALES ? (GATED ? TILES_A_BLOCK * 8 * BYTES1 : 4)
                                             : 8 * SCALE_SLOT + (PAIR == 2 ? (GATE_ROW - UP_ROW) * ODD1 : 0);
  static constexpr u32 OTHER2 = !TILED_SCALES ? 8 * SCALE_SLOT : NARROW ? TILES_A_BLOCK * 8 * BYTES2 : 4;

  static constexpr int ALL_UNITS = TOP_K * UNITS2;  // of FC2, of a token

  const Block& b;
  const int g = b.lane >> 2, t = b.lane & 3;
  const int part = b.warp / SPLIT1;
  const int split1 = b.warp % SPLIT1, own1 = (BLOCKS1 - split1 + SPLIT1 - 1) / SPLIT1;  // own: blocks of this warp
  const int split2 = b.warp % SPLIT2, own2 = (BLOCKS2 - split2 + SPLIT2 - 1) / SPLIT2;
  int waiting = 0;  // stages that are asked for and not used
  int tall = 0;     // of them those of FC1, where they have more halves than FC2's
  // What is asked for next: number of the task; stage of the task, of so many; tile of the task.
  u32 number = 0;
  int stage = 0, units = 0, tile = 0;
  u32 slot = 0, used = 0;  // bytes in the ring: where that stage goes, and the one that is used next
  bool ended = false;      // nothing more is to be asked for
  // This lane's bytes within a task's codes, and scales that it copies for the warp; the ring; where it reads scales of
  // piece 0.
  u32 codes1, codes2, scales1, scales2, read1, read2, ring;
  int gate;  // 1 if this lane copies scales of gate
  // ONE_TOKEN: slot and tile of the block's first task, but for its expert. Its tasks before `known` are FC1's.
  u32 first_slot;
  uint4 first;
  u32 known = 0;

  DEVICE explicit Stages(const Block& block) : b(block) {}

  DEVICE void begin() {
    const int lane = b.lane;
    codes1 = g * PAIR * CODE_PITCH1 + split1 * 16 * CODE_BITS + t * 16;
    codes2 = g * CODE_PITCH2 + t * 16;
    gate = !GATED ? 0 : TILED_SCALES ? lane / (TILES_A_BLOCK * 8) & 1 : lane >> 3 & 1;
    scales1 = TILED_SCALES
                  ? (split1 * TILES_A_BLOCK + (lane >> 3) % TILES_A_BLOCK) * 512 + (lane & 7) * 16
                  : ((GATED ? lane >> 4 : lane >> 3) * 8 + (lane & 7)) * PAIR * SCALE_PITCH1 + split1 * ROW_SCALES;
    scales2 = TILED_SCALES ? (lane >> 3) % (LANES2 / 8) * 512 + (lane & 7) * 16
              : NARROW     ? (lane & 7) * SCALE_PITCH2 + (lane >> 3) * ROW_SCALES
                           : lane * SCALE_PITCH2;
    ring = b.shared.stages(b.warp);
    read1 = HALVES1 * HALF_CODES + own_scales<ONE_TOKEN>(BYTES1, PAIR == 2 ? UP_ROW * ODD1 : ahead<SCALE_PITCH1>());
    read2 = HALVES2 * HALF_CODES + own_scales<SLICES2>(BYTES2, ahead<SCALE_PITCH2>());
    keep(codes1), keep(codes2), keep(scales1), keep(scales2), keep(read1), keep(read2), keep(ring);
  }

  // Bytes ahead of the scales of row g of a tile, whose first row's begin at a word.
  template <int pitch>
  DEVICE int ahead() const {
    return pitch % 2 ? g * pitch & 3 : UNEVEN && pitch % 4 ? (g & 1) * 2 : 0;
  }
  // Where the scales that this lane needs lie in those of a stage. `slices`: of slices.cuh's columns of products.
  // `bytes`: of a lane's copy from 128x4 tiles; `odd`: ahead of its row's else.
  template <bool slices>
  DEVICE u32 own_scales(int bytes, int odd) const {
    u32 in_row = GROUP == 16 ? 2 * t : CODE_BITS == 4 ? t : t >> 1, tile4 = t >> 1;  // tile4: of a block's 128x4 tiles
    if (slices) in_row = CODE_BITS == 8 ? t : (t & 1) * (32 / GROUP) * 2, tile4 = t & 1;
    if (!TILED_SCALES) return g * SCALE_SLOT + in_row + odd;
    return ((TILES_A_BLOCK == 1 ? 0 : tile4) * 8 + g) * bytes + (GROUP == 32 ? in_row : slices ? 0 : (t & 1) * 2);
  }
  // Units of FC2 that this warp has of a token.
  DEVICE int units_of(u32 token) const { return ((int)b.shared.valid()[token] * UNITS2 - b.warp + WARPS - 1) / WARPS; }

  DEVICE int halves_in_use() const { return waiting * HALVES2 + tall * (HALVES1 - HALVES2); }

  // Asks for the next stage if its task is published, or once it is. Returns whether it went on: by a
  // stage, or past a task of which this warp has none.
  DEVICE bool ask(bool wait) {
    if (!wait && !is_published(b, number)) return false;
    const u32 kind = wait ? kind_of(b, number) : load_shared(b.shared.entry(number));
    if (kind == END || kind == SUM) {
      ended = true;
      return false;
    }
    if (kind == FC1 ? waiting >= STAGES1 : halves_in_use() + HALVES2 > RING_HALVES) return false;
    if (kind == FC1)
      asked<FC1>(copy1(ring + slot, next_tile()));
    else
      asked<FC2>(copy2(ring + slot));
    return true;
  }
  // FC1: where the tile lies of which a stage is asked for next.
  DEVICE uint4 next_tile() const {
    return load_shared_16(b.shared.entry(number) + TILES_AT + 16 * (part + (TILES_A_TASK > 1 ? tile * PARTS1 : 0)));
  }
  // A stage was asked for, or none of a task of FC2.
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
  DEVICE bool copy1(u32 to, const uint4& from) {
    const int later = stage * SPLIT1;  // blocks behind the warp's first
    const int column = (split1 + later) * 128;
    const u8* codes = b.layer.w1 + ((u64)from.x << 4) + (codes1 + later * (16 * CODE_BITS));
    EACH (n, 2 * HALVES1 * LOADS) {
      const int i = n % LOADS, piece = n / LOADS, j = GATED ? piece >> 1 : piece;
      const u8* at = codes + (j * NEXT_PIECE * PAIR + (GATED && piece & 1 ? GATE_ROW : UP_ROW)) * CODE_PITCH1 + i * 64;
      const bool there = (EXACT1 || (int)from.w + j * NEXT_PIECE < INTERMEDIATE) &&
                         (STORED_HIDDEN % 128 == 0 || column + column16(t, i) < STORED_HIDDEN);
      if (EXACT1 && STORED_HIDDEN % 128 == 0)
        copy16(to + b.lane * 16 + n * 512, at);
      else
        copy16(to + b.lane * 16 + n * 512, there ? at : b.layer.w1, there);
    }
    const bool group = !TILED_SCALES || SCALE_TILES1 % TILES_A_BLOCK == 0 ||
                       (split1 + later) * TILES_A_BLOCK + (b.lane >> 3) % TILES_A_BLOCK < SCALE_TILES1;
    const bool row =
        EXACT1 || (int)from.w + (TILED_SCALES ? 0 : (GATED ? b.lane >> 4 : b.lane >> 3) * 8) < INTERMEDIATE;
    if ((LANES1 == 32 || b.lane < LANES1) && group && row)
      copy_scales<TILED_SCALES ? BYTES1 : ROW_SCALES>(
          to + HALVES1 * HALF_CODES + b.lane * BYTES1,
          b.layer.s1 + ((u64)(gate ? from.z : from.y) << 1) +
              (scales1 + later * (TILED_SCALES ? TILES_A_BLOCK * 512 : ROW_SCALES)),
          SCALE_PITCH1 - (split1 + later) * ROW_SCALES);
    bool last = ++stage >= own1;
    if (TILES_A_TASK > 1 && last && ++tile < TILES_A_TASK) {
      stage = 0;
      last = false;
    }
    return last;
  }
  // Copies a stage of FC2, if this warp has one.
  DEVICE bool copy2(u32 to) {
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
      const u8* codes = b.layer.w2 + ((u64)codes_at << 4) + codes_in;
      EACH (n, 2 * HALVES2 * LOADS) {
        const int i = n % LOADS, piece = n / LOADS;
        const u8* at = codes + piece * (NARROW ? 16 * CODE_BITS : NEXT_PIECE * CODE_PITCH2) + i * 64;
        const bool row = EXACT2 || (int)from.w + (NARROW ? 0 : piece * NEXT_PIECE) < STORED_HIDDEN;
        const bool there = row && (FULL2 || (block + (NARROW ? piece : 0)) * 128 + column16(t, i) < INTERMEDIATE);
        if (EXACT2 && FULL2)
          copy16(to + b.lane * 16 + n * 512, at);
        else
          copy16(to + b.lane * 16 + n * 512, there ? at : b.layer.w2, there);
      }
      const bool group = TILED_SCALES ? SCALE_TILES2 % (LANES2 / 8) == 0 ||
                                            block * TILES_A_BLOCK + (b.lane >> 3) % (LANES2 / 8) < SCALE_TILES2
                                      : FULL2 || !NARROW || block + (b.lane >> 3) < BLOCKS2;
      const bool row = EXACT2 || NARROW || (int)from.w + (TILED_SCALES ? 0 : (b.lane >> 3) * 8) < STORED_HIDDEN;
      if ((LANES2 == 32 || b.lane < LANES2) && group && row)
        copy_scales<TILED_SCALES ? BYTES2 : ROW_SCALES>(
            to + HALVES2 * HALF_CODES + b.lane * BYTES2, b.layer.s2 + ((u64)scales_at << 1) + scales_in,
            SCALE_PITCH2 - (int)(block + (NARROW ? b.lane >> 3 : 0)) * ROW_SCALES);
    }
    return ++stage >= units;
  }

  // Waits for the oldest of the stages on their way: `waiting`, at least `least`.
  template <int least>
  DEVICE void wait_for_oldest() const {
    if constexpr (least < MOST_STAGES) {
      if (waiting > least) return wait_for_oldest<least + 1>();
    }
    copy_wait<least - 1>();
  }
  // Waits until the stage that is used next is there.
  DEVICE void open() {
    if (waiting == 0) fill<ONE_STAGE>();
    wait_for_oldest<1>();
    __syncwarp();
  }
  // That stage is in registers: asks for others in its place.
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
  // Asks for as many stages as there is room for, of tasks that are published. It waits for the first task, but not for
  // others: a warp may have no unit of any; or for one stage.
  static constexpr int NOTHING = 0, FIRST_TASK = 1, ONE_STAGE = 2;
  template <int waits_for = NOTHING>
  DEVICE void fill() {
    while (!ended && waiting < MOST_STAGES &&
           ask(waits_for == FIRST_TASK ? number == 0 : waits_for == ONE_STAGE && waiting == 0)) {
    }
  }
  // ---- ONE_TOKEN: one phase at a time, each in one place of the code
  // The tile of the block's first task, but for its expert.
  DEVICE void prepare_first() {
    first_slot = blockIdx.x / TASKS1;
    first = tile1(0, blockIdx.x % TASKS1 * TASK_TILES1 + part);
    keep(first_slot), keep(first.x), keep(first.y), keep(first.z), keep(first.w);
  }
  // Asks for the first stages of FC1, before their tasks are published: those of the block's own virtual block.
  // `expert_of(slot)`: the expert of a slot, -1 if there are not so many.
  template <class ExpertOf>
  DEVICE void ask_first(ExpertOf expert_of) {
    EACH (i, STAGES1) {
      const int task = blockIdx.x + number * gridDim.x, expert = expert_of(i ? task / TASKS1 : first_slot);
      if (expert < 0) return;
      uint4 from = i ? tile1(0, task % TASKS1 * TASK_TILES1 + part) : first;
      from.x += expert * (u32)(EXPERT_CODES1 / 16);
      from.y += expert * (u32)(EXPERT_SCALES1 / 2);
      from.z += expert * (u32)(EXPERT_SCALES1 / 2);
      asked<FC1>(copy1(ring + slot, from));
    }
  }
  // Routes are known, and so are the first tasks of the block's own virtual block. Not as many as there are entries:
  // the task behind them is waited for, and a parity tells only whether an entry has its first or its second task.
  DEVICE void learn(int slots) {
    const int tasks = slots * TASKS1 - blockIdx.x;
    known = tasks <= 0 ? 0 : min(ENTRIES - 1, (tasks - 1) / (int)gridDim.x + 1);
    units = units_of(0);
  }
  // Asks for as many stages of a phase as there is room for, of tasks that are published; of a task of FC2 until `most`
  // of its stages are asked for.
  template <int phase>
  DEVICE void fill_phase(int most = ALL_UNITS) {
    ROLLED
    while ((phase == FC1 ? waiting < STAGES1 : halves_in_use() + HALVES2 <= RING_HALVES && stage < most) &&
           is_published(b, number) && load_shared(b.shared.entry(number)) == phase) {
      if (phase == FC1)
        asked<FC1>(copy1(ring + slot, next_tile()));
      else
        asked<FC2>(copy2(ring + slot));
    }
  }
  // Calls `read` when the oldest stage is there, and asks for others of the phase in its place. None is on its way if
  // its task was not published in time.
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
  // A task of FC2 of which this warp has no unit: nothing of it is to be asked for.
  DEVICE void pass(u32 task) {
    if (number == task) number++;
  }
  // Reads the stage that is used next, of the columns of `block`.
  template <int phase>
  DEVICE void read(Rows (*rows)[2], int block) const {
    EACH (half, HALVES<phase>) {
      if (phase == FC1)
        read_half<ONE_TOKEN>(rows[half], half, read1 + half * HALF1, OTHER1, block * 128, 0, STORED_HIDDEN);
      else
        read_half<SLICES2>(rows[half], half, read2 + half * HALF2, OTHER2, block * 128, NARROW ? 128 : 0, INTERMEDIATE);
    }
  }
  // Reads a half: two pieces. `scales`: where this lane's are, `other`: from there to the other piece's. What lies
  // beyond the `columns` of the matrix has no scale; piece 0 begins at `column`, piece 1 `beside` further.
  template <bool slices>
  DEVICE void read_half(Rows* rows, int half, u32 scales, u32 other, int column, int beside, int columns) const {
    const u32 from = ring + used;
    EACH (i, 2) {
      EACH (j, LOADS) rows[i].codes[j] = load_shared_16(from + b.lane * 16 + ((2 * half + i) * LOADS + j) * 512);
      const u32 at = from + scales + i * other;
      if (slices) {
        rows[i].scales = column_scales(at);
        if (columns % (128 + beside)) rows[i].scales &= columns_there(column + i * beside, columns);
        continue;
      }
      if (CODE_BITS == 8)
        rows[i].scales = load_shared_u8(at) | load_shared_u8(at + 2) << 8;
      else
        rows[i].scales = GROUP == 16 ? load_shared_u16(at) : load_shared_u8(at);
      if (columns % (128 + beside)) {
        if (column + i * beside + column8(t, 0) >= columns)
          rows[i].scales = 0;
        else if (CODE_BITS == 8 && column + i * beside + column8(t, 2) >= columns)
          rows[i].scales &= 255;
      }
    }
  }
  // Scales of the slices of products' columns 2t and 2t + 1; see slices.cuh.
  DEVICE u32 column_scales(u32 at) const {
    if (CODE_BITS == 8) return load_shared_u8(at);
    if (GROUP == 32 && ODD_ROWS) return load_shared_u8(at) | load_shared_u8(at + 1) << 8;
    if (GROUP == 32) return load_shared_u16(at);
    return UNEVEN ? load_shared_u16(at) | load_shared_u16(at + 2) << 16 : load_shared(at);
  }
  // A mask of those that are columns of the matrix.
  DEVICE u32 columns_there(int column, int columns) const {
    const int first = column + (CODE_BITS == 8 ? t * 32 : (t & 1) * 64);
    return first >= columns ? 0 : first + 32 < columns ? ~0u : GROUP == 16 ? 0xffff : 255;
  }
};
