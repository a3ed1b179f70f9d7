// SPDX-License-Identifier: Apache-2.0
// A stage of weights: HALVES1 or HALVES2 times 16 rows x 128 columns of one matrix (NARROW: 8 x 256), codes and block
// scales. A warp copies it to its own shared memory, and reads it from there into registers. A lane copies (cp.async)
// the 16 bytes of codes that it decodes later.
#pragma once
#include "call.cuh"

// Copies `bytes` bytes from a row of scales that has `left` bytes left.
template <int bytes>
DEVICE void copy_scales(u32 to, const u8* from, int left) {
  if (!UNEVEN) return copy_bytes<bytes>(to, from);
  const int ahead = (int)((u64)from & (ODD_ROWS ? 3 : 2));
  UNROLL
  for (int i = 0; i <= bytes; i += 4)
    if (i < ahead + bytes && i < ahead + left) copy_bytes<4>(to + i, from - ahead + i);
}

// L2 fetch size. On an H200 grouped products of MXFP8 take 1.5 % less time with 256, those of FP4 2 % more.
constexpr int LINE = CODE_BITS == 8 && SCALED_X ? 256 : 128;

struct Stage {
  // Lanes that copy scales, and bytes per lane. In 128x4 tiles a lane's bytes are the scales of rows 32 apart, for four
  // groups of columns.
  static constexpr int LANES1 = TILED_SCALES ? MATRICES * TILES_A_BLOCK * 8 : HALVES1 * 16;
  static constexpr int LANES2 = TILED_SCALES ? (NARROW ? 2 : 1) * TILES_A_BLOCK * 8 : HALVES2 * 16;
  static constexpr int BYTES1 = TILED_SCALES ? 4 * PIECES1 : SCALE_SLOT,
                       BYTES2 = TILED_SCALES ? 4 * PIECES2 : SCALE_SLOT;
  // Bytes before the scales of up's rows if gate and up are interleaved: these rows are odd.
  static constexpr int ODD1 = UNEVEN && SCALE_PITCH1 % 4 ? 2 : 0;
  // Bytes from the scales of a half of a stage to the next half's, and from one piece of a half to the other.
  static constexpr u32 HALF1 = TILED_SCALES ? (GATED ? 4 : 8) : 16 * SCALE_SLOT;
  static constexpr u32 HALF2 = TILED_SCALES ? 8 : 16 * SCALE_SLOT;
  static constexpr u32 OTHER1 = TILED_SCALES ? (GATED ? TILES_A_BLOCK * 8 * BYTES1 : 4)
                                             : 8 * SCALE_SLOT + (PAIR == 2 ? (GATE_ROW - UP_ROW) * ODD1 : 0);
  static constexpr u32 OTHER2 = !TILED_SCALES ? 8 * SCALE_SLOT : NARROW ? TILES_A_BLOCK * 8 * BYTES2 : 4;

  const Layer& layer;
  const int lane, g = lane >> 2, t = lane & 3;
  // Byte offsets of this lane: its codes in a tile, the scales that it copies for the warp, the scales of piece 0 that
  // it reads in a stage.
  u32 codes1, codes2, scales1, scales2, read1, read2;
  int gate;  // 1 if this lane copies scales of gate

  DEVICE Stage(const Layer& layer, int lane) : layer(layer), lane(lane) {}

  // `first1`: the warp's first block of columns in a tile of FC1.
  template <bool slices1, bool slices2>
  DEVICE void begin(int first1) {
    codes1 = g * PAIR * CODE_PITCH1 + first1 * 16 * CODE_BITS + t * 16;
    codes2 = g * CODE_PITCH2 + t * 16;
    gate = !GATED ? 0 : TILED_SCALES ? lane / (TILES_A_BLOCK * 8) & 1 : lane >> 3 & 1;
    scales1 = TILED_SCALES
                  ? (first1 * TILES_A_BLOCK + (lane >> 3) % TILES_A_BLOCK) * 512 + (lane & 7) * 16
                  : ((GATED ? lane >> 4 : lane >> 3) * 8 + (lane & 7)) * PAIR * SCALE_PITCH1 + first1 * ROW_SCALES;
    scales2 = TILED_SCALES ? (lane >> 3) % (LANES2 / 8) * 512 + (lane & 7) * 16
              : NARROW     ? (lane & 7) * SCALE_PITCH2 + (lane >> 3) * ROW_SCALES
                           : lane * SCALE_PITCH2;
    read1 = HALVES1 * HALF_CODES + own_scales<slices1>(BYTES1, PAIR == 2 ? UP_ROW * ODD1 : ahead<SCALE_PITCH1>());
    read2 = HALVES2 * HALF_CODES + own_scales<slices2>(BYTES2, ahead<SCALE_PITCH2>());
    keep(codes1), keep(codes2), keep(scales1), keep(scales2), keep(read1), keep(read2);
  }

  // Returns the bytes before the scales of row g of a tile, if those of the tile's first row begin at a word.
  template <int pitch>
  DEVICE int ahead() const {
    return pitch % 2 ? g * pitch & 3 : UNEVEN && pitch % 4 ? (g & 1) * 2 : 0;
  }
  // Returns the offset of this lane's scales in a stage's scales. `slices`: products' columns are slices (slices.cuh).
  // `bytes`: size of a lane's copy from 128x4 tiles; `odd`: otherwise, bytes before its row's scales.
  template <bool slices>
  DEVICE u32 own_scales(int bytes, int odd) const {
    u32 in_row = GROUP == 16 ? 2 * t : CODE_BITS == 4 ? t : t >> 1, tile4 = t >> 1;  // tile4: of a block's 128x4 tiles
    if (slices) in_row = CODE_BITS == 8 ? t : (t & 1) * (32 / GROUP) * 2, tile4 = t & 1;
    if (!TILED_SCALES) return g * SCALE_SLOT + in_row + odd;
    return ((TILES_A_BLOCK == 1 ? 0 : tile4) * 8 + g) * bytes + (GROUP == 32 ? in_row : slices ? 0 : (t & 1) * 2);
  }
  // Copies a stage of FC1 from a tile: block `first1` + `later` of its columns.
  DEVICE void copy1(u32 to, const uint4& from, int first1, int later) const {
    const int column = (first1 + later) * 128;
    const u8* codes = layer.w1 + ((u64)from.x << 4) + (codes1 + later * (16 * CODE_BITS));
    EACH (n, 2 * HALVES1 * LOADS) {
      const int i = n % LOADS, piece = n / LOADS, j = GATED ? piece >> 1 : piece;
      const u8* at = codes + (j * NEXT_PIECE * PAIR + (GATED && piece & 1 ? GATE_ROW : UP_ROW)) * CODE_PITCH1 + i * 64;
      const bool there = (EXACT1 || (int)from.w + j * NEXT_PIECE < INTERMEDIATE) &&
                         (STORED_HIDDEN % 128 == 0 || column + column16(t, i) < STORED_HIDDEN);
      if (EXACT1 && STORED_HIDDEN % 128 == 0)
        copy16<LINE>(to + lane * 16 + n * 512, at);
      else
        copy16<LINE>(to + lane * 16 + n * 512, there ? at : layer.w1, there);
    }
    const bool group = !TILED_SCALES || SCALE_TILES1 % TILES_A_BLOCK == 0 ||
                       (first1 + later) * TILES_A_BLOCK + (lane >> 3) % TILES_A_BLOCK < SCALE_TILES1;
    const bool row = EXACT1 || (int)from.w + (TILED_SCALES ? 0 : (GATED ? lane >> 4 : lane >> 3) * 8) < INTERMEDIATE;
    if ((LANES1 == 32 || lane < LANES1) && group && row)
      copy_scales<TILED_SCALES ? BYTES1 : ROW_SCALES>(
          to + HALVES1 * HALF_CODES + lane * BYTES1,
          layer.s1 + ((u64)(gate ? from.z : from.y) << 1) +
              (scales1 + later * (TILED_SCALES ? TILES_A_BLOCK * 512 : ROW_SCALES)),
          SCALE_PITCH1 - (first1 + later) * ROW_SCALES);
  }
  // Copies a stage of FC2. `from`: start of the tile; `codes_in`, `scales_in`: this lane's byte offsets from it.
  DEVICE void copy2(u32 to, const uint4& from, u32 codes_in, u32 scales_in, u32 block) const {
    const u8* codes = layer.w2 + ((u64)from.x << 4) + codes_in;
    EACH (n, 2 * HALVES2 * LOADS) {
      const int i = n % LOADS, piece = n / LOADS;
      const u8* at = codes + piece * (NARROW ? 16 * CODE_BITS : NEXT_PIECE * CODE_PITCH2) + i * 64;
      const bool row = EXACT2 || (int)from.w + (NARROW ? 0 : piece * NEXT_PIECE) < STORED_HIDDEN;
      const bool there = row && (FULL2 || (block + (NARROW ? piece : 0)) * 128 + column16(t, i) < INTERMEDIATE);
      if (EXACT2 && FULL2)
        copy16<LINE>(to + lane * 16 + n * 512, at);
      else
        copy16<LINE>(to + lane * 16 + n * 512, there ? at : layer.w2, there);
    }
    const bool group = TILED_SCALES ? SCALE_TILES2 % (LANES2 / 8) == 0 ||
                                          block * TILES_A_BLOCK + (lane >> 3) % (LANES2 / 8) < SCALE_TILES2
                                    : FULL2 || !NARROW || block + (lane >> 3) < BLOCKS2;
    const bool row = EXACT2 || NARROW || (int)from.w + (TILED_SCALES ? 0 : (lane >> 3) * 8) < STORED_HIDDEN;
    if ((LANES2 == 32 || lane < LANES2) && group && row)
      copy_scales<TILED_SCALES ? BYTES2 : ROW_SCALES>(
          to + HALVES2 * HALF_CODES + lane * BYTES2, layer.s2 + ((u64)from.y << 1) + scales_in,
          SCALE_PITCH2 - (int)(block + (NARROW ? lane >> 3 : 0)) * ROW_SCALES);
  }
  // Reads the stage at `from`, with the columns of `block`.
  template <int phase, bool slices>
  DEVICE void read(Rows (*rows)[2], u32 from, int block) const {
    EACH (half, HALVES<phase>) {
      if (phase == FC1)
        read_half<slices>(rows[half], from, half, read1 + half * HALF1, OTHER1, block * 128, 0, STORED_HIDDEN);
      else
        read_half<slices>(rows[half], from, half, read2 + half * HALF2, OTHER2, block * 128, NARROW ? 128 : 0,
                          INTERMEDIATE);
    }
  }
  // Reads a half: two pieces. `scales`: offset of this lane's scales; `other`: bytes from them to the other piece's.
  // Piece 0 begins at `column`, piece 1 `beside` columns later. Scales beyond the matrix's `columns` become 0.
  template <bool slices>
  DEVICE void read_half(Rows* rows, u32 from, int half, u32 scales, u32 other, int column, int beside,
                        int columns) const {
    EACH (i, 2) {
      EACH (j, LOADS) rows[i].codes[j] = load_shared_16(from + lane * 16 + ((2 * half + i) * LOADS + j) * 512);
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
  // Returns the scales of the slices in a product's columns 2t and 2t + 1; see slices.cuh.
  DEVICE u32 column_scales(u32 at) const {
    if (CODE_BITS == 8) return load_shared_u8(at);
    if (GROUP == 32 && ODD_ROWS) return load_shared_u8(at) | load_shared_u8(at + 1) << 8;
    if (GROUP == 32) return load_shared_u16(at);
    return UNEVEN ? load_shared_u16(at) | (u32)load_shared_u16(at + 2) << 16 : load_shared(at);
  }
  // Returns a mask of those scales whose columns are in the matrix.
  DEVICE u32 columns_there(int column, int columns) const {
    const int first = column + (CODE_BITS == 8 ? t * 32 : (t & 1) * 64);
    return first >= columns ? 0 : first + 32 < columns ? ~0u : GROUP == 16 ? 0xffff : 255;
  }
};
