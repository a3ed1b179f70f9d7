// Where the rows of a tile lie in a matrix, its codes and its block scales.
#pragma once
#include "records.cuh"

// The first row of piece j of a tile, in one matrix. In 128x4 tiles of scales, rows 32 apart lie beside each other:
// those are one tile's.
template <int pieces>
DEVICE int piece_row(int tile, int j) {
  if (!TILED_SCALES) return tile * 8 * pieces + 8 * j;
  return tile / (16 / pieces) * 128 + ((tile >> 2) % (4 / pieces) * pieces + j) * 32 + (tile & 3) * 8;
}
// Byte of the scale of a row and a 128x4 tile of columns, of `tiles` in a row of the matrix; its four groups of columns
// lie behind it.
template <int tiles>
DEVICE u32 scale_tile(int row, int tile) {
  return ((row >> 7) * tiles + tile) * 512 + (row & 31) * 16 + (row >> 5 & 3) * 4;
}

// Where a tile begins, as the entry of a task has it; see TILES_AT.
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
