// SPDX-License-Identifier: Apache-2.0
// The two matrices of each expert: sizes, and positions of a tile's codes and scales. `variant.py` writes `sizes.cuh`,
// and chooses the sizes that the layer does not determine. Number 1 in a name is FC1 (gate and up), 2 is FC2 (down).
#pragma once
#include "ptx.cuh"
#include "sizes.cuh"

// Values of GATE_ORDER (BY_TURNS: gate/up interleaved) and of ACTIVATION (all others are GELU).
constexpr int UP_GATE = 0, GATE_UP = 1, BY_TURNS = 2;
constexpr int SWIGLU = 0, SWIGLU_BIAS = 1, GEGLU = 2, RELU2 = 3, SILU = 4;
// Values of BIAS.
constexpr int NO_BIAS = 0, BFLOAT16_BIAS = 1, FLOAT16_BIAS = 2, FLOAT32_BIAS = 3;
// Products of a layer.
constexpr u32 FC1 = 0, FC2 = 1;

constexpr bool NVFP4 = CODE_BITS == 4 && GROUP == 16;  // a block scale is E4M3; else E8M0

// ---- a tile: its rows in pieces of 8; a stage has HALVES1 or HALVES2 times 16 rows
constexpr int MATRICES = GATED ? 2 : 1;
constexpr int PIECES1 = 2 * HALVES1 / MATRICES;    // of rows of up, and as many of gate
constexpr int PIECES2 = NARROW ? 1 : 2 * HALVES2;  // NARROW: the other piece is the same rows, 128 columns later
constexpr int PAIR = GATE_ORDER == BY_TURNS && GATED ? 2 : 1;  // rows from one row of up to the next
constexpr int UP_ROW = !GATED || GATE_ORDER == UP_GATE ? 0 : GATE_ORDER == GATE_UP ? INTERMEDIATE : 1;  // the first
constexpr int GATE_ROW = GATE_ORDER == UP_GATE ? INTERMEDIATE : 0;
constexpr int NEXT_PIECE = TILED_SCALES ? 32 : 8;  // rows from a piece to the next of the same matrix

// ---- columns: blocks of 128, and the units of FC2 in a row
constexpr int BLOCKS1 = (STORED_HIDDEN + 127) / 128, BLOCKS2 = (INTERMEDIATE + 127) / 128;
constexpr int UNIT_BLOCKS = NARROW ? 2 : 1;
constexpr int UNITS2 = (BLOCKS2 + UNIT_BLOCKS - 1) / UNIT_BLOCKS;

// ---- bytes of a row: codes, and scales stored in rows
constexpr int CODE_PITCH1 = STORED_HIDDEN * CODE_BITS / 8, CODE_PITCH2 = INTERMEDIATE * CODE_BITS / 8;
constexpr int SCALE_PITCH1 = STORED_HIDDEN / GROUP, SCALE_PITCH2 = INTERMEDIATE / GROUP;
// Numbers of 128x4 tiles of scales: in 128 columns, and in a row of the matrix.
constexpr int TILES_A_BLOCK = 128 / (4 * GROUP);
constexpr int SCALE_TILES1 = (STORED_HIDDEN + 4 * GROUP - 1) / (4 * GROUP);
constexpr int SCALE_TILES2 = (INTERMEDIATE + 4 * GROUP - 1) / (4 * GROUP);

// ---- bytes of an expert
constexpr u64 EXPERT_CODES1 = (u64)MATRICES * INTERMEDIATE * CODE_PITCH1;
constexpr u64 EXPERT_CODES2 = (u64)STORED_HIDDEN * CODE_PITCH2;
constexpr u64 EXPERT_SCALES1 = TILED_SCALES ? (u64)((MATRICES * INTERMEDIATE + 127) / 128) * SCALE_TILES1 * 512
                                            : (u64)MATRICES * INTERMEDIATE * SCALE_PITCH1;
constexpr u64 EXPERT_SCALES2 =
    TILED_SCALES ? (u64)((STORED_HIDDEN + 127) / 128) * SCALE_TILES2 * 512 : (u64)STORED_HIDDEN * SCALE_PITCH2;

// ---- bytes of a stage: codes, 16 per lane, piece and load; then scales, ROW_SCALES per row. Rows of scales that do
// not begin at multiples of ROW_SCALES are UNEVEN. They are copied in words. The first word may begin 2 bytes early, or
// 1 to 3 if rows have an odd number of scales.
constexpr int LOADS = CODE_BITS / 4;
template <int phase>
constexpr int HALVES = phase == FC1 ? HALVES1 : HALVES2;
constexpr int HALF_CODES = 2 * 512 * LOADS;
constexpr int ROW_SCALES = 128 / GROUP;
constexpr int BLOCK_SCALES = (TILED_SCALES ? TILES_A_BLOCK * 512 : ROW_SCALES) / 2;  // in units of 2 bytes
constexpr bool UNEVEN = !TILED_SCALES && (SCALE_PITCH1 % ROW_SCALES || SCALE_PITCH2 % ROW_SCALES);
constexpr bool ODD_ROWS = !TILED_SCALES && (SCALE_PITCH1 % 2 || SCALE_PITCH2 % 2);
constexpr int SCALE_SLOT = ROW_SCALES + (UNEVEN ? 4 : 0);
constexpr int HALF_BYTES = HALF_CODES + 16 * SCALE_SLOT;

// ---- tiles of a matrix, and tiles of a task, one for each warp or row of warps
constexpr int tiles_of(int rows, int pieces) {
  return TILED_SCALES ? (rows + 127) / 128 * (16 / pieces) : (rows + 8 * pieces - 1) / (8 * pieces);
}
constexpr int TASK_TILES1 = PARTS1 * TILES_A_TASK, TASK_TILES2 = PARTS2;
constexpr int ALL_TILES1 = tiles_of(INTERMEDIATE, PIECES1), ALL_TILES2 = tiles_of(STORED_HIDDEN, PIECES2);
constexpr int TASKS1 = (ALL_TILES1 + TASK_TILES1 - 1) / TASK_TILES1;  // per expert, or per group of its routes
constexpr int TASKS2 = (ALL_TILES2 + TASK_TILES2 - 1) / TASK_TILES2;  // per token, or per group
// EXACT: all rows of all tasks are rows of the matrix. FULL2: all columns of all FC2 units are columns of the matrix.
constexpr bool EXACT1 = ALL_TILES1 * PIECES1 * 8 == INTERMEDIATE && ALL_TILES1 % TASK_TILES1 == 0;
constexpr bool EXACT2 = ALL_TILES2 * PIECES2 * 8 == STORED_HIDDEN && ALL_TILES2 % TASK_TILES2 == 0;
constexpr bool FULL2 = INTERMEDIATE % (128 * UNIT_BLOCKS) == 0;

// ---- positions of a tile's rows, codes and block scales
// Returns the first row of piece j of a tile in one matrix. In 128x4 tiles of scales, rows 32 apart are neighbors, so a
// tile's pieces are 32 rows apart.
template <int pieces>
DEVICE int piece_row(int tile, int j) {
  if (!TILED_SCALES) return tile * 8 * pieces + 8 * j;
  return tile / (16 / pieces) * 128 + ((tile >> 2) % (4 / pieces) * pieces + j) * 32 + (tile & 3) * 8;
}
// Returns the byte offset of a row's scales in the 128x4 tile `tile`, one of `tiles` in a row of the matrix. The scales
// of four groups of columns begin there.
template <int tiles>
DEVICE u32 scale_tile(int row, int tile) {
  return ((row >> 7) * tiles + tile) * 512 + (row & 31) * 16 + (row >> 5 & 3) * 4;
}

// Returns the start of a tile: codes in units of 16 bytes, scales of up and of gate (FC2: scales, 0) in units of 2
// bytes, first row.
DEVICE uint4 tile1(u32 expert, int tile) {
  const int row = piece_row<PIECES1>(tile, 0), up = row * PAIR + UP_ROW, gate = row * PAIR + GATE_ROW;
  const u32 up_scales = TILED_SCALES ? scale_tile<SCALE_TILES1>(up, 0) : up * SCALE_PITCH1;
  const u32 gate_scales = TILED_SCALES ? scale_tile<SCALE_TILES1>(gate, 0) : gate * SCALE_PITCH1;
  const u32 codes = expert * (u32)(EXPERT_CODES1 / 16) + row * PAIR * (CODE_PITCH1 / 16);
  const u32 scales = expert * (u32)(EXPERT_SCALES1 / 2);
  return make_uint4(codes, scales + up_scales / 2, scales + gate_scales / 2, row);
}
DEVICE uint4 tile2(u32 expert, int tile) {
  const int row = piece_row<PIECES2>(tile, 0);
  const u32 codes = expert * (u32)(EXPERT_CODES2 / 16) + row * (CODE_PITCH2 / 16);
  const u32 scales = (TILED_SCALES ? scale_tile<SCALE_TILES2>(row, 0) : row * SCALE_PITCH2) / 2;
  return make_uint4(codes, expert * (u32)(EXPERT_SCALES2 / 2) + scales, 0, row);
}
