// A decode layer in one launch: FC1, activation, FC2 and the weighted sum over a token's routes, for 1 to MAXT (at most 64) tokens.
// It needs what an SM12x block has: 99 KB of shared memory, mma.sync, cp.async, mbarriers. It includes nothing.
//
//   tasks, in the order of tickets       up to 8 tokens          more: GATHER, by groups of up to 8 routes of an expert
//     FC1                                expert hit x tile       group x TW tiles
//     FC2                                tile x token            group x tile
//     sum                                (part of FC2)           token
//   a tile of FC1: RG * HALVES * 8 columns of the intermediate size (16 without a gate); of FC2: HALVES * 16 columns of the output,
//   in GATHER RG2 times as many
//   a block: warps 0 .. WARPS-1 copy, decode, multiply; one warp takes tickets and publishes tasks; SUMS warps add and write
//   a stage: HALVES * 16 rows x 128 columns of one matrix, codes and block scales, for one warp
//     warp (rg, ks) takes blocks of 128 columns ks, ks + KS, ... of the rows of part rg of the tile (FC2 in GATHER: RG2, KS2)
//     FC2 of 8 tokens: warp w takes the units w, w + WARPS, ... of (route, 128 columns); where tiles are few (NARROW), a tile has 8
//     rows, and a unit 256 columns: the rows g + 8 of its products are the same rows on the second 128, whose h is in column 1
//
//   Ring: each warp has STAGES stages of its own in shared memory. A lane copies (cp.async) the 16 bytes that it decodes later, so
//   there is no producer and no barrier, only wait_group and __syncwarp. The ring runs on across tasks: FC2's weights are on their
//   way while FC1 computes.
//   Products: mma.m16n8k16. Its columns are the tokens in FC1, whoever the expert's are, and one token in FC2; in GATHER the routes
//   of the group. x and h are in registers.
//     lane (g, t) = (lane / 4, lane % 4) has rows g and g + 8, column g and 32 of the 128 columns of a sum: in FP4
//     32 t .. 32 t + 31, in FP8 16 t .. 16 t + 15 and 64 more, so that four lanes copy 64 bytes beside each other
//   Sums: warps put theirs into red[buffer]; mbarriers full (WARPS arrivals) and empty (1) hand the buffers over. One warp adds the
//   parts of 16 rows in the order of warps: the same bits always.
//   Hand-off of h: a pair of values is its own flag. It begins as 0xffffffff, which no rounding makes; FC2 loads pairs, in the
//   size in which they are written (32 bits, relaxed, gpu scope), until none of them is that, so no order between addresses is
//   needed. Two buffers: launch n writes number n % 2 and puts the other one back, which only launch n - 1 used, and that has ended.
//   Shares (GATHER): FC2's products in float32, by route. Whoever wrote some adds 1 to the token's count (release); its sum waits for
//   all (acquire), and adds in the order of top_k.
//   Entries: the warp that takes tickets writes tasks into ENTRIES entries, over and over. An entry is written again once every warp
//   has read it (free_entry). Of FC1 and FC2 the warps that add tell: a warp that multiplies reads an entry when it asks for weights,
//   up to STAGES stages ahead, and when it computes, and hands its products over after both. A warp that has no unit of a task moves
//   its place for weights past it without a look. Each warp that multiplies counts the sums of tokens that it has finished.
//   Progress: a block takes tickets in order and works tasks off in order. FC1's tasks wait for nothing, FC2's for FC1's, sums for
//   FC2's, whose tickets are lower and hence taken by blocks that run. A ticket that waits for an entry waits for earlier tasks of
//   its own block alone, and those never wait for it. One block alone gets through, and two launches with a workspace of their own
//   never wait for each other.
//   Errors: the warp that takes tickets stays until the others of its block have ended. If they do not within SPIN_SECONDS, it
//   writes the number of tokens to host memory and traps.
//   Workspace, one for each stream or graph: 1 KB of zeros (ticket, count of blocks that are done, epoch, tokens of the last launch,
//   two times MAXT counts), two buffers of h, 0xff everywhere, shares. The last block puts ticket and count of blocks back to 0.
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
#define FI __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define KEEP(v) asm volatile("" : "+r"(v))  // computed once: ptxas would rather compute it anew at every use

template <int V> struct Int { static constexpr int v = V; };

constexpr int UP_GATE = 0, GATE_UP = 1, BY_TURNS = 2;                      // ORDER
constexpr int SWIGLU = 0, SWIGLU_BIAS = 1, GEGLU = 2, RELU2 = 3, SILU = 4;  // ACTIVATION, else GELU
constexpr int THREADS = (WARPS + 1 + SUMS) * 32, KS = WARPS / RG;
constexpr bool NVFP4 = BITS == 4 && GROUP == 16;
// Rows: pieces of 8 rows in a stage, and how many of them are one matrix's own rows, in FC1 (up, or gate) and FC2.
constexpr int MATRICES = GATED ? 2 : 1, PIECES = 2 * HALVES, N1 = PIECES / MATRICES, N2 = NARROW ? 1 : PIECES;
// Columns: blocks of 128, the most that a warp has in FC1, and units of FC2 in a row.
constexpr int KB1 = (STORED + 127) / 128, KB2 = (SIZE + 127) / 128, KPW = (KB1 + KS - 1) / KS;
constexpr int KU2 = NARROW ? (KB2 + 1) / 2 : KB2;
// Bytes of a row of codes, and of scales that lie in rows; 128x4 tiles of scales beside each other, in 128 columns and in a row.
constexpr int PITCH1 = STORED * BITS / 8, PITCH2 = SIZE * BITS / 8, SP1 = STORED / GROUP, SP2 = SIZE / GROUP;
// Bytes of a stage: WIDE times 16 of codes for a lane and piece, and SROW of scales for a row. Rows of scales that do not begin at
// multiples of SROW (UNEVEN) are copied in words, the first of which may begin 2 bytes ahead.
constexpr int WIDE = BITS / 4, CODES = PIECES * 512 * WIDE, SROW = 128 / GROUP;
constexpr bool UNEVEN = !TILED && (SP1 % SROW || SP2 % SROW);
constexpr int SLOT = SROW + (UNEVEN ? 4 : 0), STAGE = CODES + PIECES * 8 * SLOT;
constexpr int CG = 128 / (4 * GROUP), SC1 = (STORED + 4 * GROUP - 1) / (4 * GROUP), SC2 = (SIZE + 4 * GROUP - 1) / (4 * GROUP);
// Bytes of an expert: codes, scales.
constexpr u64 EXPERT1 = (u64)MATRICES * SIZE * PITCH1, EXPERT2 = (u64)STORED * PITCH2;
constexpr u64 SEXPERT1 = TILED ? (u64)((MATRICES * SIZE + 127) / 128) * SC1 * 512 : (u64)MATRICES * SIZE * SP1;
constexpr u64 SEXPERT2 = TILED ? (u64)((STORED + 127) / 128) * SC2 * 512 : (u64)STORED * SP2;
// Tiles, of n pieces each; whether they and blocks of columns are whole.
constexpr int tiles(int rows, int n) { return TILED ? (rows + 127) / 128 * (16 / n) : (rows + 8 * n - 1) / (8 * n); }
constexpr bool GATHER = MAXT > 8;
constexpr int COLUMNS = GATHER ? 8 : MAXT, KS2 = WARPS / RG2, PARTS2 = GATHER ? RG2 : 1;  // of a product; warps of a part of FC2's tile, parts
constexpr int PARTS1 = RG * TW, ALL1 = tiles(SIZE, N1), TILES1 = (ALL1 + PARTS1 - 1) / PARTS1, ALL2 = tiles(STORED, N2), TILES2 = (ALL2 + PARTS2 - 1) / PARTS2;
constexpr bool EXACT1 = ALL1 * N1 * 8 == SIZE && ALL1 % PARTS1 == 0, EXACT2 = ALL2 * N2 * 8 == STORED && ALL2 % PARTS2 == 0;
constexpr bool FULL2 = SIZE % (NARROW ? 256 : 128) == 0;
// Shared memory: rings, sums (PART bytes a buffer), mbarriers and counts, tasks, routes, slots (experts hit), masks of their routes,
// experts.
constexpr int ROUTES = MAXT * TOP_K, WORDS = (ROUTES + 31) / 32, EWORDS = (EXPERTS + 31) / 32;
constexpr int PART = WARPS * COLUMNS * 64;
constexpr int ENTRIES = MAXT >= 8 ? 16 : 32, ENTRY = 16 + 16 * (PARTS1 > PARTS2 ? PARTS1 : PARTS2);  // tasks published, bytes of one
constexpr int LEAD = STAGES + 2;                                                            // most tasks ahead
constexpr int READERS = WARPS + SUMS;                                                        // warps that read entries
constexpr int O_RED = WARPS * STAGES * STAGE, O_BAR = O_RED + NB * PART, O_FINISHED = O_BAR + NB * 16 + 8, O_PROGRESS = O_FINISHED + READERS * 4;
constexpr int O_ENTRY = (O_PROGRESS + 8 + 15) / 16 * 16, O_ROUTE = O_ENTRY + ENTRIES * ENTRY;
constexpr int O_SLOT = O_ROUTE + ROUTES * 16, O_MASK = O_SLOT + ROUTES * 4, O_BIT = O_MASK + ROUTES * WORDS * 4;
// Gathered: numbers of routes, by expert; groups (up to 8 routes of an expert); a mask of routes held for each token.
constexpr int GROUPS = ROUTES < EXPERTS + ROUTES / 8 ? ROUTES : EXPERTS + ROUTES / 8;
constexpr int O_NUMBER = O_ROUTE, O_GROUP = O_NUMBER + ROUTES * 2, O_HELD = O_GROUP + GROUPS * 4;
constexpr int SMEM = GATHER ? O_HELD + MAXT * 4 : O_BIT + EWORDS * 4 + 64;
constexpr u64 HBUF = (u64)ROUTES * KB2 * 256;  // bytes of a buffer of h
constexpr u64 SHARES = GATHER ? (u64)ROUTES * STORED * 4 : 0;
static_assert(READERS <= 32, "the warp that takes tickets reads one count a lane");
static_assert(LEAD < ENTRIES, "a block that is LEAD tasks ahead would wait for an entry");
static_assert(NB % SUMS == 0 && NB <= 6 && NB % HALVES == 0, "a buffer has one warp that adds: a parity passes for a waiter a phase ahead");
static_assert(SMEM <= 101376 && WARPS % RG == 0 && KS <= KB1 && (!NARROW || HALVES == 1) && (TW == 1 || (GATHER && KPW <= 2)), "sizes that do not fit");
static_assert(TOP_K <= 32 && (GATHER ? WARPS % RG2 == 0 && KS2 <= KB2 && !NARROW && MAXT <= 64 : MAXT <= WARPS), "sizes that do not fit");
extern "C" __device__ const int shared_bytes = SMEM, threads = THREADS, workspace_bytes = 1024 + 2 * HBUF + SHARES, filled_bytes = 1024 + 2 * HBUF;

// ---- instructions
FI u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
FI void mb_init(u32 b, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(b), "r"(n)); }
FI void mb_arrive(u32 b) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(b) : "memory"); }
FI void mb_wait(u32 b, u32 parity) {
  asm volatile("{\n.reg .pred p;\nL_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra L_%=;\n}" ::"r"(b), "r"(parity) : "memory");
}
FI bool mb_passed(u32 b, u32 parity) {  // waits for 0.1 ms at most
  u32 passed;
  asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(passed) : "r"(b), "r"(parity), "r"(100000) : "memory");
  return passed;
}
FI u32 now() { u64 ns; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)); return (u32)(ns >> 20); }  // in units of 2**20 ns
FI void copy16(u32 d, const u8* s, bool there) {  // zeros if not there
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(d), "l"(s), "r"(there ? 16 : 0) : "memory");
}
FI void copy16(u32 d, const u8* s) { asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(d), "l"(s) : "memory"); }
template <int N> FI void copy_scales(u32 d, const u8* s) {
  if (N == 16) copy16(d, s);
  else asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(d), "l"(s), "n"(N) : "memory");
}
template <int N> FI void copy_scales(u32 d, const u8* s, int left) {  // of a row that has so many more
  if (!UNEVEN) return copy_scales<N>(d, s);
  const int ahead = (int)((u64)s & 2);
  UNROLL for (int i = 0; i <= N; i += 4)
    if (i < ahead + N && i < ahead + left) copy_scales<4>(d + i, s - ahead + i);
}
FI void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> FI void wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
FI uint4 lds4(u32 a) { uint4 v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory"); return v; }
FI u32 lds(u32 a) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
FI u32 lds_u16(u32 a) { u16 v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(a) : "memory"); return v; }
FI u32 lds_u8(u32 a) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
FI float ldsf(u32 a) { float v; asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory"); return v; }
FI void sts(u32 a, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
FI void stsf(u32 a, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory"); }
FI void sts4(u32 a, u32 x, u32 y, u32 z, u32 w) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w) : "memory"); }
FI u32 lds_acquire(u32 a) { u32 v; asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v; }
FI void sts_release(u32 a, u32 v) { asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(a), "r"(v) : "memory"); }
FI uint4 ldg_relaxed(const u8* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
FI void stg_relaxed(u8* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
FI u32 ldg_acquire(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
FI void add_release(u32* p, u32 v) { asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
FI u16 to_bf16(float v) { u16 r; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(v)); return r; }
FI u16 to_x(float v) { u16 r; if (FLOAT16) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v)); else r = to_bf16(v); return r; }
FI float from16(u16 v, int float16) {
  float r;
  if (float16) asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  else r = __uint_as_float((u32)v << 16);
  return r;
}
FI float bias_at(const void* bias, u64 i) { return BIAS == 3 ? ((const float*)bias)[i] : from16(((const u16*)bias)[i], BIAS == 2); }
template <bool F16> FI void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (F16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- decode: the bits of triton/operands.py. Two words of FP4 to eight pairs, 2**-8 times as large; two of FP8 to four.
struct Scale { u32 s, nan; };  // as a pair; bfloat16's is 2**118 times as large for FP4, and E8M0 255 makes NaN
FI Scale nvfp4_scale(u32 byte) {
  Scale o;
  asm("{\n.reg .b32 t;\nmul.lo.u32 %0, %1, 0x00100010;\nmov.b32 t, 0x7b807b80;\nfma.rn.bf16x2 %0, %0, t, %2;\nmov.b32 t, 0x7a807a80;\nfma.rn.bf16x2 %0, %0, t, %2;\n}"
      : "=&r"(o.s) : "r"(byte), "r"(0x80008000u));
  o.nan = 0x80008000u;
  return o;
}
FI Scale nvfp4_scale_f16(u32 byte) {  // E4M3 at the bottom of float16's exponent is the value times 2**-8: 2**6 times is 2**14 more
  Scale o;
  asm("{\n.reg .b32 t;\nmul.lo.u32 %0, %1, 0x00800080;\nmov.b32 t, 0x70007000;\nmul.rn.f16x2 %0, %0, t;\nadd.rn.f16x2 %0, %0, %0;\n}" : "=&r"(o.s) : "r"(byte));
  o.nan = 0;
  return o;
}
FI Scale mx_scale(u32 byte) {
  Scale o;
  o.s = BITS == 4 ? min(byte + 118, 255u) * 0x00800080u : max(byte * 0x00800080u, 0x00400040u);
  asm("fma.rn.bf16x2 %0, %1, %2, %2;" : "=r"(o.nan) : "r"(o.s), "r"(0x80008000u));
  return o;
}
FI void decode4(u32 w, const Scale& s, u32* o) {  // pairs (k, k + 4)
  asm("{\n.reg .b32 m, h;\nshr.u32 h, %4, 8;\n"
      "and.b32 m, %4, 0x000f000f; mul.lo.u32 m, m, 0x1040; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 %0, m, %5, %6;\n"
      "and.b32 m, %4, 0x00f000f0; mul.lo.u32 m, m, 0x0104; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 %1, m, %5, %6;\n"
      "and.b32 m, h, 0x000f000f; mul.lo.u32 m, m, 0x1040; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 %2, m, %5, %6;\n"
      "and.b32 m, h, 0x00f000f0; mul.lo.u32 m, m, 0x0104; and.b32 m, m, 0x81c081c0; fma.rn.bf16x2 %3, m, %5, %6;\n}"
      : "=&r"(o[0]), "=&r"(o[1]), "=&r"(o[2]), "=&r"(o[3]) : "r"(w), "r"(s.s), "r"(s.nan));
}
FI void decode4_f16(u32 w, const Scale& s, u32* o) {
  asm("{\n.reg .b32 m, t;\n"
      "shl.b32 t, %4, 12; shl.b32 m, %4, 9; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 %0, t, %5;\n"
      "shl.b32 t, %4, 8; shl.b32 m, %4, 5; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 %1, t, %5;\n"
      "shl.b32 t, %4, 4; shl.b32 m, %4, 1; and.b32 m, m, 0x0e000e00; lop3.b32 t, t, 0x80008000, m, 0xea; mul.rn.f16x2 %2, t, %5;\n"
      "shr.u32 m, %4, 3; and.b32 m, m, 0x0e000e00; lop3.b32 t, %4, 0x80008000, m, 0xea; mul.rn.f16x2 %3, t, %5;\n}"
      : "=&r"(o[0]), "=&r"(o[1]), "=&r"(o[2]), "=&r"(o[3]) : "r"(w), "r"(s.s));
}
FI void decode8(u32 w, const Scale& s, u32* o) {  // pairs (k, k + 2)
  asm("{\n.reg .b32 m, t, c, z;\nmov.b32 z, 0x80008000;\nmov.b32 c, 0x7b807b80;\n"
      "shl.b32 t, %2, 8; shl.b32 m, %2, 4; and.b32 m, m, 0x07f007f0; lop3.b32 t, t, z, m, 0xea; fma.rn.bf16x2 t, t, c, z; fma.rn.bf16x2 %0, t, %3, %4;\n"
      "shr.u32 m, %2, 4; and.b32 m, m, 0x07f007f0; lop3.b32 t, %2, z, m, 0xea; fma.rn.bf16x2 t, t, c, z; fma.rn.bf16x2 %1, t, %3, %4;\n}"
      : "=&r"(o[0]), "=&r"(o[1]) : "r"(w), "r"(s.s), "r"(s.nan));
}
// Columns of a lane, eight at a time: the first of number i, and of the 16 bytes number j of codes.
FI int column8(int t, int i) { return BITS == 4 ? 32 * t + 8 * i : (i >> 1) * 64 + 16 * t + 8 * (i & 1); }
FI int column16(int t, int j) { return BITS == 4 ? 32 * t : 64 * j + 16 * t; }
struct Rows { uint4 codes[WIDE]; u32 scales; };  // 32 columns of a row; one scale (MXFP4) or two, of 16 columns each, beside each other
template <bool F16> FI void decode_part(const Rows& r, int i, u32* o) {  // 8 columns number i of the 32: four pairs
  const uint4& c = r.codes[WIDE == 2 ? i >> 1 : 0];
  if (BITS == 4) {
    const u32 w = i == 0 ? c.x : i == 1 ? c.y : i == 2 ? c.z : c.w, byte = GROUP == 16 ? (i < 2 ? r.scales & 255 : r.scales >> 8) : r.scales;
    const Scale s = GROUP == 32 ? mx_scale(byte) : F16 ? nvfp4_scale_f16(byte) : nvfp4_scale(byte);
    if (F16) decode4_f16(w, s, o);
    else decode4(w, s, o);
  } else {
    const Scale s = mx_scale(i < 2 ? r.scales & 255 : r.scales >> 8);
    decode8(i & 1 ? c.z : c.x, s, o);
    decode8(i & 1 ? c.w : c.y, s, o + 2);
  }
}
template <bool F16> FI void multiply(float (*acc)[4], const Rows& a, const Rows& b, const u32* x) {  // two chains of sums
  UNROLL for (int i = 0; i < 4; i++) {
    u32 A[4], B[4];
    decode_part<F16>(a, i, A);
    decode_part<F16>(b, i, B);
    mma<F16>(acc[0], A[0], B[0], A[1], B[1], x[4 * i], x[4 * i + 1]);
    mma<F16>(acc[1], A[2], B[2], A[3], B[3], x[4 * i + 2], x[4 * i + 3]);
  }
}

FI void to_pairs(u32* x) {  // 32 columns, to the order of decoded pairs
  UNROLL for (int i = 0; i < 16; i += 4) {
    const u32 q = x[i], r = x[i + (BITS == 4 ? 2 : 1)], y = x[i + (BITS == 4 ? 1 : 2)], z = x[i + 3];
    x[i] = __byte_perm(q, r, 0x5410); x[i + 1] = __byte_perm(q, r, 0x7632);
    x[i + 2] = __byte_perm(y, z, 0x5410); x[i + 3] = __byte_perm(y, z, 0x7632);
  }
}
FI void from_codes(const Rows& r, u32* x) {  // x that the host has quantized
  UNROLL for (int i = 0; i < 4; i++) {
    decode_part<FLOAT16>(r, i, x + 4 * i);
    if ((r.scales >> (i < 2 ? 0 : 8) & 127) == 127) x[4 * i] = x[4 * i + 1] = x[4 * i + 2] = x[4 * i + 3] = 0x7fff7fff;  // NaN
  }
}

// ---- activations
FI float activate(float up, float gate, float alpha, float beta, float limit) {
  if (ACTIVATION == SWIGLU) return __fdividef(gate, 1.f + __expf(-gate)) * up;
  if (ACTIVATION == SWIGLU_BIAS) {
    gate = gate > limit ? limit : gate;  // NaN stays
    up = up > limit ? limit : up < -limit ? -limit : up;
    return gate / (1.f + __expf(-alpha * gate)) * (up + beta);
  }
  if (ACTIVATION == GEGLU) return 0.5f * gate * (1.f + erff(gate * 0.7071067811865476f)) * up;
  if (ACTIVATION == RELU2) { const float p = up < 0 ? 0.f : up; return p * p; }
  if (ACTIVATION == SILU) return up / (1.f + __expf(-up));
  return 0.5f * up * (1.f + erff(up * 0.7071067811865476f));
}

// ---- rows: which a tile's pieces are. In 128x4 tiles of scales, rows 32 apart lie beside each other.
template <int N> FI int piece_row(int v, int j) {
  return TILED ? v / (16 / N) * 128 + ((v >> 2) % (4 / N) * N + j) * 32 + (v & 3) * 8 : v * 8 * N + 8 * j;
}
constexpr int NEXT = TILED ? 32 : 8, TURN = ORDER == BY_TURNS && GATED ? 2 : 1;  // from a piece to the next, in rows; rows of a row pair
constexpr int UP0 = !GATED || ORDER == UP_GATE ? 0 : ORDER == GATE_UP ? SIZE : 1, GATE0 = ORDER == UP_GATE ? SIZE : 0;  // first rows
template <int SC> FI u32 tiled(int row, int group) { return ((row >> 7) * SC + group) * 512 + (row & 31) * 16 + (row >> 5 & 3) * 4; }

struct Layer {
  const u8 *w1, *s1;
  const float *alpha1, *halves1, *input1;
  const u8 *w2, *s2;
  const float *alpha2, *input2;
  const void *bias1, *bias2;
  const float *swiglu_alpha, *swiglu_beta, *swiglu_limit;
  volatile u32* stuck;  // in host memory
  int step1, step2, first;
};
struct Call {
  const u8 *x, *x_sf;  // x_sf: of x in FP4, as the host has quantized it, else null
  const void *ids, *router_weights;
  u16* out;
  u8* workspace;
  int tokens, wide_ids, weight_type, swizzled;  // int64 ids; 0 float32, 1 bfloat16; x_sf in 128x4 tiles
};

struct Watch { u32 polls, began; };
FI void trap_if_late(Watch& watch, const Layer& L, const Call& C) {  // after every poll that fails; the time is slow to read
  if (++watch.polls % 256) return;
  if (watch.polls == 256) watch.began = now();
  if (now() - watch.began < SPIN_SECONDS * 954u) return;
  *L.stuck = C.tokens;
  __threadfence_system();
  asm volatile("trap;");
}
FI int expert_of(const Layer& L, const Call& C, u32 route) {  // -1: none of this rank's
  const long long id = (C.wide_ids ? ((const long long*)C.ids)[route] : (long long)((const int*)C.ids)[route]) - L.first;
  return id >= 0 && id < EXPERTS ? (int)id : -1;
}
FI float weight_of(const Call& C, u32 route) {
  return C.weight_type ? from16(((const u16*)C.router_weights)[route], 0) : ((const float*)C.router_weights)[route];
}

// Sorts the routes by expert, in groups of up to 8. Every block must get the same groups: a route's place within its expert is
// the number of routes of the expert in warps before, and before it in its own warp. Returns the number of groups, each a word:
// expert (12 bits), first route in that order (13), routes less one (3). The scratch is the rings' memory.
constexpr int CHUNKS = (ROUTES + 31) / 32, COUNTERS = GATHER ? (CHUNKS < THREADS / 32 ? CHUNKS : THREADS / 32) : 0, OWN = (CHUNKS + THREADS / 32 - 1) / (THREADS / 32);
constexpr int O_FIRST = (COUNTERS * EXPERTS * 2 + 3) / 4 * 4, O_ALL = O_FIRST + EXPERTS * 4, O_BEFORE = O_ALL + EXPERTS * 4;
static_assert(!GATHER || (O_BEFORE + EWORDS * 4 + 4 <= O_RED && EXPERTS <= 4096 && ROUTES <= 8192), "sizes that do not fit");
FI int group_routes(u8* sm, const Layer& L, const Call& C, u32 numbers, u32 groups, u32 held) {
  const int tid = threadIdx.x, w = tid >> 5, lane = tid & 31, all = C.tokens * TOP_K, used = min(COUNTERS, (all + 31) / 32);
  u16* count = (u16*)sm;  // (warp, expert)
  u32 *first = (u32*)(sm + O_FIRST), *total = (u32*)(sm + O_ALL), *before = (u32*)(sm + O_BEFORE);
  int e[OWN], rank[OWN];
  UNROLL for (int i = 0; i < OWN; i++) {
    const int r = (w + i * (THREADS / 32)) * 32 + lane;
    e[i] = r < all ? expert_of(L, C, r) : -1;
  }
  UNROLL for (int i = 0; i < OWN; i++) {
    if ((w + i * (THREADS / 32)) * 32 >= all) continue;
    const u32 same = __match_any_sync(~0u, e[i]), below = same & ((1u << lane) - 1);
    const int n = e[i] < 0 ? 0 : count[w * EXPERTS + e[i]];
    rank[i] = n + __popc(below);
    __syncwarp();
    if (e[i] >= 0 && !below) count[w * EXPERTS + e[i]] = n + __popc(same);
    __syncwarp();
  }
  __syncthreads();
  for (int part = w; part * 32 < EXPERTS; part += THREADS / 32) {
    const int expert = part * 32 + lane;
    u32 n = 0;
    if (expert < EXPERTS) {
      for (int i = 0; i < used; i++) { const u32 c = count[i * EXPERTS + expert]; count[i * EXPERTS + expert] = n; n += c; }
      total[expert] = n;
    }
    const u32 own = (n + 7) / 8 << 16 | n;
    u32 upto = own;
    UNROLL for (int d = 1; d < 32; d *= 2) { const u32 v = __shfl_up_sync(~0u, upto, d); if (lane >= d) upto += v; }
    if (expert < EXPERTS) first[expert] = upto - own;
    if (lane == 31) before[part] = upto;
  }
  __syncthreads();
  for (int expert = tid; expert < EXPERTS; expert += THREADS) {
    u32 from = first[expert];
    for (int i = 0; i < expert / 32; i++) from += before[i];
    first[expert] = from;
    const int n = total[expert];
    for (int i = 0; i * 8 < n; i++) sts(groups + ((from >> 16) + i) * 4, expert | ((from & 0xffff) + 8 * i) << 12 | (min(n - 8 * i, 8) - 1) << 25);
    if (expert == EXPERTS - 1) before[EWORDS] = (from >> 16) + (n + 7) / 8;
  }
  __syncthreads();
  const int number = before[EWORDS];
  UNROLL for (int i = 0; i < OWN; i++) {
    const int r = (w + i * (THREADS / 32)) * 32 + lane;
    if (e[i] < 0) continue;
    const u32 to = (first[e[i]] & 0xffff) + count[w * EXPERTS + e[i]] + rank[i];
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(numbers + to * 2), "h"((u16)r) : "memory");
    asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(held + r / TOP_K * 4), "r"(1u << r % TOP_K) : "memory");
  }
  __syncthreads();
  return number;
}
extern "C" __global__ void __launch_bounds__(THREADS, 1) layer(const __grid_constant__ Layer L, const __grid_constant__ Call C) {
  extern __shared__ __align__(128) u8 sm[];
  const int tid = threadIdx.x, w = tid >> 5, lane = tid & 31, G = gridDim.x, T = C.tokens;
  u32 *ticket = (u32*)C.workspace, *done = (u32*)(C.workspace + 128), *epoch = (u32*)(C.workspace + 256), *before = epoch + 1;
  u32* added = (u32*)(C.workspace + 512);
  u8* hall = C.workspace + 1024;
  float* shares = (float*)(hall + 2 * HBUF);  // (route, column)
  const u32 s = shared_address(sm), full = s + O_BAR, empty = full + NB * 8, ended = full + NB * 16, finished = s + O_FINISHED, progress = s + O_PROGRESS, epoch_at = progress + 4;
  const u32 tasks = s + O_ENTRY, routes = s + O_ROUTE, slots = s + (GATHER ? O_GROUP : O_SLOT), numbers = s + O_NUMBER, held = s + O_HELD;
  u32 *mask = (u32*)(sm + O_MASK), *bitmap = (u32*)(sm + O_BIT), *valid = (u32*)(sm + O_BIT + EWORDS * 4);
  if (tid == 0) {
    for (int i = 0; i < NB; i++) { mb_init(full + 8 * i, WARPS); mb_init(empty + 8 * i, 1); }
    mb_init(ended, READERS);
    sts(progress, 0);
  }
  if (tid < READERS) sts(finished + 4 * tid, 0);
  for (int i = tid; i < ENTRIES; i += THREADS) sts(tasks + ENTRY * i, 0);
  if (GATHER) {
    for (int i = tid; i < MAXT; i += THREADS) sts(held + 4 * i, 0);
    for (int i = tid; i < (COUNTERS * EXPERTS + 1) / 2; i += THREADS) ((u32*)sm)[i] = 0;
  } else {
    for (int i = tid; i < ROUTES * (1 + WORDS); i += THREADS) sts(slots + 4 * i, 0);  // and masks
    for (int i = tid; i < EWORDS; i += THREADS) bitmap[i] = 0;
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const int g = lane >> 2, t = lane & 3, rg = w / KS, ks = w % KS, own1 = (KB1 - ks + KS - 1) / KS, ks2 = w % KS2, own2 = (KB2 - ks2 + KS2 - 1) / KS2;
  const bool quantized = NVFP4 && C.x_sf;
  constexpr bool RESIDENT = !GATHER || KPW <= 2;  // FC1's x stays for all tiles of a task, or of all tasks
  u32 x[RESIDENT ? KPW : 1][16];                  // a lane's columns of row g: x, or h, as they are in memory until they are used
  bool asked = false;                             // gathered: they are on their way for the next stage, or the next task's
  const u8* row = nullptr;                        // row g: of token g, or of the route of column g, whose token this is
  u32 token = min(g, T - 1);
  auto to_token = [&] { row = C.x + (u64)token * (quantized ? H / 2 : 2 * H); };
  auto find = [&](auto phase, u32 entry) {
    constexpr int P = decltype(phase)::v;
    const u32 word = lds(entry + 8), r = lds_u16(numbers + ((word >> 12 & 8191) + min(g, (int)(word >> 25))) * 2);
    if (P) row = hall + (lds(epoch_at) & 1) * HBUF + (u64)r * (KB2 * 256) + t * 16;
    else { token = r / TOP_K; to_token(); }
  };
  auto load = [&](auto phase, u32* to, int block) {
    constexpr int P = decltype(phase)::v;
    if (!P && quantized) {
      const int column = block * 128 + t * 32;
      uint4 q = make_uint4(0, 0, 0, 0);
      to[4] = 0;
      if (column < H) {
        q = *(const uint4*)(row + column / 2);
        to[4] = *(const u16*)(C.x_sf + (C.swizzled ? tiled<(H + 63) / 64>(token, column >> 6) + (column >> 4 & 3) : (u32)(token * H + column) / 16));
      }
      to[0] = q.x; to[1] = q.y; to[2] = q.z; to[3] = q.w;
    } else
      UNROLL for (int i = 0; i < 4; i++) {
        uint4 q = make_uint4(0, 0, 0, 0);
        if (P) q = ldg_relaxed(row + block * 256 + 64 * i);
        else if ((H % 128 == 0 && KB1 % KS == 0) || block * 128 + column8(t, i) < H) q = *(const uint4*)(row + (block * 128 + column8(t, i)) * 2);
        to[4 * i] = q.x; to[4 * i + 1] = q.y; to[4 * i + 2] = q.z; to[4 * i + 3] = q.w;
      }
  };
  auto arrange = [&](u32* x) {
    if (quantized) { Rows r; r.codes[0] = make_uint4(x[0], x[1], x[2], x[3]); r.scales = x[4]; from_codes(r, x); }
    else to_pairs(x);
  };
  if (!GATHER && w < WARPS) {  // before anything else is known
    to_token();
    UNROLL for (int b = 0; b < KPW; b++) load(Int<0>(), x[b], ks + b * KS);
  }
  u32 t0 = 0, ep = 0, last = 0;
  if (tid == WARPS * 32) {
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(ep), "=r"(last) : "l"(epoch) : "memory");
    t0 = atomicAdd(ticket, 1);
  }
  // Routes: warp w has token w. A route: from expert 0 to its expert in FC2's codes (16 bytes) and scales (2 bytes); its factor; its number.
  int e = -1, at = 0;
  u32 factor_to = 0;
  float factor = 0;
  if (!GATHER && w < T) {
    const int r = w * TOP_K + lane;
    float weight = 0;
    if (lane < TOP_K) {
      e = expert_of(L, C, r);
      weight = weight_of(C, r);
    }
    const u32 ours = __ballot_sync(~0u, e >= 0);
    at = w * TOP_K + __popc(ours & ((1u << lane) - 1));
    if (e >= 0) {
      factor = weight;
      if (GROUP == 16) factor *= L.alpha2[e] * L.input2[e * L.step2];
      factor_to = routes + at * 16 + 8;
      sts4(routes + at * 16, (u32)(e * (EXPERT2 / 16)), (u32)(e * (SEXPERT2 / 2)), 0, r);
      if (MAXT > 1) atomicOr(&bitmap[e >> 5], 1u << (e & 31));
    }
    if (lane == 0) valid[w] = __popc(ours);
  }
  if (MAXT > 1) __syncthreads();
  int nslots = 0;
  if (GATHER) nslots = group_routes(sm, L, C, numbers, slots, held);
  else if (MAXT > 1) {
    int rank = 0;
    for (int i = 0; i < EWORDS; i++) {
      const u32 word = bitmap[i];
      if (e >> 5 == i) rank = nslots + __popc(word & ((1u << (e & 31)) - 1));
      nslots += __popc(word);
    }
    at = rank;
  }
  if (e >= 0) {  // a slot: an expert hit
    const int r = w * TOP_K + lane;
    atomicOr((u32*)(sm + O_SLOT) + at, e | 65536u << w);
    atomicOr(&mask[at * WORDS + (r >> 5)], 1u << (r & 31));
  }
  __syncthreads();
  if (factor_to) stsf(factor_to, factor * (BITS == 4 ? 256.f : 1.f));  // it may be late: FC2 waits for it
  if (MAXT == 1) nslots = valid[0];
  const int NT1 = nslots * TILES1, NT2 = NT1 + (GATHER ? nslots : T) * TILES2, NT = NT2 + (GATHER ? T : 0);

  if (w == WARPS) {  // ---- tickets
    ep = __shfl_sync(~0u, ep, 0);
    last = __shfl_sync(~0u, last, 0);
    if (lane == 0) sts(epoch_at, ep);
    Watch watch = {};
    int sums = 1 << 30;  // this block's first task that is a sum
    int seq = 0, u = 0, B = 1, t = __shfl_sync(~0u, (int)t0, 0), quota = GATHER ? 1 : (NT - NT1 + G - 1) / G;  // of FC2's tickets: each block takes as many
    const int init = max(1, min(STAGES, NT1 / G));
    auto free_entry = [&]() {  // the one that is written next
      if (seq >= ENTRIES)  // waits until its task, number seq - ENTRIES of the block, has been read by all
        while (__any_sync(~0u, lane < READERS && (int)lds_acquire(finished + 4 * lane) + (lane < WARPS ? sums : 0) <= seq - ENTRIES)) trap_if_late(watch, L, C);
      __syncwarp();
      return tasks + ENTRY * (seq % ENTRIES);
    };
    auto publish = [&](int u) {
      const u32 to = free_entry();
      if (GATHER && u >= NT2) sums = min(sums, seq);
      if (lane == 0) {
        if (u < NT1) {
          const int slot = u / TILES1, v = u % TILES1, word = lds(slots + slot * 4), e = word & 4095;
          for (int j = 0; j < PARTS1; j++) {
            const int row = piece_row<N1>(v * PARTS1 + j, 0), up = row * TURN + UP0, gate = row * TURN + GATE0;
            const u32 s0 = TILED ? tiled<SC1>(up, 0) : up * SP1, s1 = TILED ? tiled<SC1>(gate, 0) : gate * SP1;
            const u32 se = e * (u32)(SEXPERT1 / 2);
            sts4(to + 16 + 16 * j, e * (u32)(EXPERT1 / 16) + row * TURN * (PITCH1 / 16), se + s0 / 2, se + s1 / 2, row);
          }
          sts(to + 4, slot << 16 | v);
          sts(to + 8, word);
        } else if (u < NT2) {
          const int number = u - NT1, v = GATHER ? number % TILES2 : number / T, word = GATHER ? lds(slots + number / TILES2 * 4) : 0;
          for (int j = 0; j < PARTS2; j++) {
            const int row = piece_row<N2>(v * PARTS2 + j, 0), e = word & 4095;
            const u32 codes = e * (u32)(EXPERT2 / 16) + row * (PITCH2 / 16), scales = (TILED ? tiled<SC2>(row, 0) : row * SP2) / 2;
            sts4(to + 16 + 16 * j, codes, e * (u32)(SEXPERT2 / 2) + scales, 0, row);
          }
          sts(to + 4, (GATHER ? 0 : number % T << 16) | v);
          sts(to + 8, word);
        } else sts(to + 4, u - NT2);
        sts_release(to, (u32)(seq + 1) << 2 | (u < NT1 ? 0 : u < NT2 ? 1 : 3));
      }
      seq++;
    };
    while (quota > 0) {
      for (int j = 0; j < B; j++, t++)
        for (int r = 0; r < (t < G ? init : 1); r++) {
          u = t < G ? t + r * G : (init - 1) * G + t;
          if (u >= (GATHER ? NT : NT1)) quota--;
          if (u < NT) publish(u);
        }
      if (quota <= 0) break;
      while ((int)lds_acquire(progress) + (u >= NT1 ? 2 : LEAD) < seq) { __nanosleep(20); trap_if_late(watch, L, C); }
      B = u + 6 * G < NT1 && !GATHER ? 4 : 1;
      if (lane == 0) t = (int)atomicAdd(ticket, B);
      t = __shfl_sync(~0u, t, 0);
    }
    const u32 to = free_entry();
    if (lane == 0) {
      sts_release(to, (u32)(seq + 1) << 2 | 2);
      __threadfence();
      if (atomicAdd(done, 1) == G - 1) { *ticket = 0; *done = 0; *epoch = ep + 1; *before = T; }
    }
    __syncwarp();
    if (GATHER && blockIdx.x == 0)
      for (int i = lane; i < MAXT; i += 32) added[(~ep & 1) * MAXT + i] = 0;
    uint4* other = (uint4*)(hall + (~ep & 1) * HBUF);  // for the next launch
    for (int i = blockIdx.x * 32 + lane; i < (int)last * TOP_K * KB2 * 16; i += G * 32) other[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
    while (!mb_passed(ended, 0)) trap_if_late(watch, L, C);
    return;
  }

  if (w > WARPS) {  // ---- sums
    const int mine = w - WARPS - 1, row16 = lane & 15;
    int item = 0;
    for (int seq = 0;; seq++) {
      const u32 entry = tasks + ENTRY * (seq % ENTRIES);
      u32 v;
      __syncwarp();  // all lanes have read the entry before
      if (lane == 0) sts_release(finished + 4 * (WARPS + mine), seq);
      while ((v = lds_acquire(entry)) >> 2 != (u32)(seq + 1)) __nanosleep(20);
      if (v & 2) {  // the end, or a token's sum: no task is this warp's from here on
        __syncwarp();
        if (lane == 0) { sts_release(finished + 4 * (WARPS + mine), 1u << 30); mb_arrive(ended); }
        return;
      }
      const u32 info = lds(entry + 4), word = lds(entry + 8), group = word >> 12 & 8191, in_group = (word >> 25) + 1;
      const int items = v & 1 ? HALVES : HALVES * TW;
      for (int sub = 0; sub < items; sub++, item++) {
        if (item % SUMS != mine) continue;
        const u32 buf = item % NB, parity = item / NB & 1;
        u32 parts = s + O_RED + buf * PART + row16 * 4;
        auto total = [&](int column, int n, int stride) {
          float sum = 0;
          UNROLL for (int j = lane >> 4; j < n; j += 2) sum += ldsf(parts + (j * stride + column) * 64);
          return sum + __shfl_xor_sync(~0u, sum, 16);
        };
        if (!(v & 1)) {
         for (int part = 0; part < RG; part++, parts += KS * COLUMNS * 64) {
          const int slot = info >> 16, tile = (info & 0xffff) * PARTS1 + sub / HALVES * RG + part, half = sub % HALVES;
          const int e = word & 4095, row = piece_row<N1>(tile, GATED ? half : 2 * half + (row16 >> 3)) + (lane & 7), k = lane & 7;
          const bool there = row < SIZE;
          float up_factor = (BITS == 4 ? 256.f : 1.f) * (NVFP4 && C.x_sf ? 256.f : 1.f), gate_factor = up_factor;
          if (GROUP == 16) {
            const float all = L.alpha1[e], input = L.input1[e * L.step1];
            float u = all, v = all;
            if (GATED) { u = L.halves1[e]; v = L.halves1[EXPERTS + e]; }
            const bool recorded = fmaxf(u, v) == all;  // by the load; else somebody has written alpha since
            up_factor *= (recorded ? u : all) * input;
            gate_factor *= (recorded ? v : all) * input;
          }
          float up_bias = 0, gate_bias = 0, alpha = 1, beta = 0, limit = 0;
          if (BIAS && there) {
            up_bias = bias_at(L.bias1, (u64)e * (MATRICES * SIZE) + row * TURN + UP0);
            if (GATED) gate_bias = bias_at(L.bias1, (u64)e * (MATRICES * SIZE) + row * TURN + GATE0);
          }
          if (ACTIVATION == SWIGLU_BIAS) { alpha = L.swiglu_alpha[e]; beta = L.swiglu_beta[e]; limit = L.swiglu_limit[e]; }
          // where the pair of this lane and the lane 4 (FP8: 2) further lies in 128 columns of h
          constexpr int FAR = BITS == 4 ? 4 : 2;
          const int j = BITS == 4 ? k : (k & 1) | k >> 2 << 1;
          const bool first = (BITS == 4 ? k < 4 : !(k & 2)) && row16 < (GATED ? 8 : 16) && there;
          const int number = BITS == 4 ? row >> 3 & 3 : (row >> 5 & 2) | (row >> 3 & 1), owner = BITS == 4 ? row >> 5 & 3 : row >> 4 & 3;
          u8* to = hall + (lds(epoch_at) & 1) * HBUF + (row >> 7) * 256 + number * 64 + owner * 16 + j * 4;
          if (part == 0) mb_wait(full + 8 * buf, parity);
          auto finish = [&](int r, float up, bool ours) {
            float gate = 0;
            if (GATED) gate = __shfl_down_sync(~0u, up, 8) * gate_factor + gate_bias;
            up = up * up_factor + up_bias;
            const float y = activate(up, gate, alpha, beta, limit), far = __shfl_down_sync(~0u, y, FAR);
            if (first && ours) stg_relaxed(to + (u64)r * (KB2 * 256), (u32)to_bf16(y) | (u32)to_bf16(far) << 16);
          };
          if (GATHER)
            for (int i = lane >> 4; i < (int)in_group + (lane >> 4); i += 2) {  // two routes at once
              float up = 0;
              UNROLL for (int j = 0; j < KS; j++) up += ldsf(parts + (j * 8 + i) * 64);
              finish(lds_u16(numbers + (group + i) * 2), up, i < (int)in_group);
            }
          else
            for (int word = 0; word < WORDS; word++)
              for (u32 q = mask[slot * WORDS + word]; q; q &= q - 1) {
                const int r = word * 32 + __ffs(q) - 1;
                finish(r, total(MAXT == 1 ? 0 : r / TOP_K, KS, COLUMNS), lane < 16);
              }
         }
        } else if (GATHER) {  // products of FC2, not added up over the token's routes
          u32 route = 0;  // of lane 0 to 7
          float factor = BITS == 4 ? 256.f : 1.f;
          if (lane < (int)in_group) {
            const int e = word & 4095;
            route = lds_u16(numbers + (group + lane) * 2);
            factor *= weight_of(C, route);
            if (GROUP == 16) factor *= L.alpha2[e] * L.input2[e * L.step2];
          }
          mb_wait(full + 8 * buf, parity);
          for (int i = lane >> 4; i < (int)in_group + (lane >> 4); i += 2) {
            float* to = shares + (u64)__shfl_sync(~0u, route, i) * STORED;
            const float f = __shfl_sync(~0u, factor, i);
            for (int part = 0; part < PARTS2; part++) {
              const int column = piece_row<N2>((info & 0xffff) * PARTS2 + part, 2 * sub + (row16 >> 3)) + (lane & 7);
              float sum = 0;
              UNROLL for (int j = 0; j < KS2; j++) sum += ldsf(parts + ((part * KS2 + j) * 8 + i) * 64);
              if (column < STORED && i < (int)in_group) to[column] = sum * f;
            }
          }
        } else {
          const int tok = info >> 16, c = info & 0xffff, column = piece_row<N2>(c, NARROW ? 0 : 2 * sub + (row16 >> 3)) + (lane & 7);
          float bias = 0;
          if (BIAS && column < H)
            for (int i = 0; i < (int)valid[tok]; i++) {
              const u32 r = lds(routes + (tok * TOP_K + i) * 16 + 12), e = lds(routes + (tok * TOP_K + i) * 16) / (u32)(EXPERT2 / 16);
              bias += weight_of(C, r) * bias_at(L.bias2, (u64)e * STORED + column);
            }
          mb_wait(full + 8 * buf, parity);
          const float sum = total(0, WARPS, 1) + bias;
          if (lane < (NARROW ? 8 : 16) && column < H) C.out[(u64)tok * H + column] = to_x(sum);
        }
        __syncwarp();
        if (lane == 0) mb_arrive(empty + 8 * buf);
        if (GATHER && v & 1 && lane < (int)in_group)
          add_release(added + (lds(epoch_at) & 1) * MAXT + lds_u16(numbers + (group + lane) * 2) / TOP_K, 1);
      }
    }
  }

  // ---- products
  constexpr int NL1 = TILED ? MATRICES * CG * 8 : PIECES * 8, NL2 = TILED ? (NARROW ? 2 : 1) * CG * 8 : PIECES * 8;  // lanes that copy scales
  constexpr int SB1 = TILED ? 4 * N1 : SLOT, SB2 = TILED ? 4 * N2 : SLOT;                        // bytes of each
  constexpr int ODD1 = UNEVEN && SP1 % 4 ? 2 : 0, ODD2 = UNEVEN && SP2 % 4 ? 2 : 0;             // bytes ahead of an odd row's
  // This lane's bytes within a task's: codes, and the scales that it copies for the warp.
  u32 c1 = g * TURN * PITCH1 + ks * 16 * BITS + t * 16, c2 = g * PITCH2 + t * 16;
  const int part1 = !GATED ? 0 : TILED ? lane / (CG * 8) & 1 : lane >> 3 & 1;
  u32 q1 = TILED ? (ks * CG + (lane >> 3) % CG) * 512 + (lane & 7) * 16 : ((GATED ? lane >> 4 : lane >> 3) * 8 + (lane & 7)) * TURN * SP1 + ks * SROW;
  u32 q2 = TILED ? (lane >> 3) % (NL2 / 8) * 512 + (lane & 7) * 16 : NARROW ? (lane & 7) * SP2 + (lane >> 3) * SROW : lane * SP2;
  u32 ring = s + w * (STAGES * STAGE);
  // Where it reads scales of piece 0, and from there to the next half and to the other piece of the half.
  const u32 sub = GROUP == 16 ? 2 * t : BITS == 4 ? t : t >> 1, csub = GROUP == 16 ? (t & 1) * 2 : sub, cgrp = CG == 2 ? t >> 1 : 0;
  u32 r1 = CODES + (TILED ? (cgrp * 8 + g) * SB1 + csub : g * SLOT + sub + (TURN == 2 ? UP0 : g & 1) * ODD1);
  u32 r2 = CODES + (TILED ? (cgrp * 8 + g) * SB2 + csub : g * SLOT + sub + (g & 1) * ODD2);
  constexpr u32 HALF1 = TILED ? (GATED ? 4 : 8) : 16 * SLOT, OTHER1 = TILED ? (GATED ? CG * 8 * SB1 : 4) : 8 * SLOT + (TURN == 2 ? (GATE0 - UP0) * ODD1 : 0);
  constexpr u32 HALF2 = TILED ? 8 : 16 * SLOT, OTHER2 = !TILED ? 8 * SLOT : NARROW ? CG * 8 * SB2 : 4;
  KEEP(c1); KEEP(c2); KEEP(q1); KEEP(q2); KEEP(r1); KEEP(r2); KEEP(ring);
  const u32 red = s + O_RED;
  int n = 0, isub = 0, itile = 0, units = 0;  // stages asked for and not used; stage of the task, and stages of it, asked for next
  u32 islot = 0, cslot = 0, ient = tasks, cent = tasks, tag = 4;
  bool iend = false;
  auto units_of = [&](u32 tok) { return ((int)valid[tok] * KU2 - w + WARPS - 1) / WARPS; };
  // Asks for the stage that is next, if its task is published.
  auto ask = [&](bool block) -> bool {
    u32 v = lds_acquire(ient);
    while (block && (v & ~3u) != tag) v = lds_acquire(ient);
    if ((v & ~3u) != tag) return false;
    if (v & 2) { iend = true; return false; }
    const u32 to = ring + islot;
    bool next;
    if (!(v & 1)) {
      const uint4 from = lds4(ient + 16 + 16 * (rg + (TW > 1 ? itile * RG : 0)));
      const int later = isub * KS, column = (ks + later) * 128;  // blocks from ks on
      const u8* p = L.w1 + ((u64)from.x << 4) + (c1 + later * (16 * BITS));
      UNROLL for (int n = 0; n < PIECES * WIDE; n++) {
        const int i = n % WIDE, piece = n / WIDE, j = GATED ? piece >> 1 : piece;
        const u8* at = p + (j * NEXT * TURN + (GATED && piece & 1 ? GATE0 : UP0)) * PITCH1 + i * 64;
        const bool there = (EXACT1 || (int)from.w + j * NEXT < SIZE) && (STORED % 128 == 0 || column + column16(t, i) < STORED);
        if (EXACT1 && STORED % 128 == 0) copy16(to + lane * 16 + n * 512, at);
        else copy16(to + lane * 16 + n * 512, there ? at : L.w1, there);
      }
      const bool group = !TILED || SC1 % CG == 0 || (ks + later) * CG + (lane >> 3) % CG < SC1;
      const bool row = EXACT1 || (int)from.w + (TILED ? 0 : (GATED ? lane >> 4 : lane >> 3) * 8) < SIZE;
      if ((NL1 == 32 || lane < NL1) && group && row)
        copy_scales<TILED ? SB1 : SROW>(to + CODES + lane * SB1, L.s1 + ((u64)(part1 ? from.z : from.y) << 1) + (q1 + later * (TILED ? CG * 512 : SROW)), SP1 - (ks + later) * SROW);
      next = ++isub >= own1;
      if (TW > 1 && next && ++itile < TW) { isub = 0; next = false; }
    } else {
      if (isub == 0) units = GATHER ? own2 : units_of(lds(ient + 4) >> 16);
      if (units > 0) {
        const uint4 from = lds4(ient + 16 + (GATHER ? 16 * (w / KS2) : 0));
        const u32 u = w + isub * WARPS, pos = u / KU2, at_route = routes + ((lds(ient + 4) >> 16) * TOP_K + pos) * 16;
        const u32 kb = GATHER ? ks2 + isub * KS2 : u % KU2 * (NARROW ? 2 : 1);
        const u8* p = L.w2 + ((u64)(from.x + (GATHER ? 0 : lds(at_route))) << 4) + (c2 + kb * (16 * BITS));
        UNROLL for (int n = 0; n < PIECES * WIDE; n++) {
          const int i = n % WIDE, piece = n / WIDE;
          const u8* at = p + piece * (NARROW ? 16 * BITS : NEXT * PITCH2) + i * 64;
          const bool row = EXACT2 || (int)from.w + (NARROW ? 0 : piece * NEXT) < STORED;
          const bool there = row && (FULL2 || (kb + (NARROW ? piece : 0)) * 128 + column16(t, i) < SIZE);
          if (EXACT2 && FULL2) copy16(to + lane * 16 + n * 512, at);
          else copy16(to + lane * 16 + n * 512, there ? at : L.w2, there);
        }
        const bool group = TILED ? SC2 % (NL2 / 8) == 0 || kb * CG + (lane >> 3) % (NL2 / 8) < SC2 : FULL2 || !NARROW || kb + (lane >> 3) < KB2;
        const bool row = EXACT2 || NARROW || (int)from.w + (TILED ? 0 : (lane >> 3) * 8) < STORED;
        if ((NL2 == 32 || lane < NL2) && group && row)
          copy_scales<TILED ? SB2 : SROW>(to + CODES + lane * SB2, L.s2 + ((u64)(from.y + (GATHER ? 0 : lds(at_route + 4))) << 1) + (q2 + kb * (TILED ? CG * 512 : SROW)),
                                          SP2 - (int)(kb + (NARROW ? lane >> 3 : 0)) * SROW);
      }
      next = ++isub >= units;
    }
    if (!(v & 1) || units > 0) {
      commit();
      n++;
      islot = islot == (STAGES - 1) * STAGE ? 0 : islot + STAGE;
    }
    if (next) { isub = itile = 0; tag += 4; ient = ient == tasks + (ENTRIES - 1) * ENTRY ? tasks : ient + ENTRY; }
    return true;
  };
  auto open = [&]() {  // the stage that is used next is there
    while (n == 0) ask(true);
    if (n >= STAGES) wait_group<STAGES - 1>();
    else if (STAGES > 2 && n == STAGES - 1) wait_group<STAGES - 2>();
    else if (n == 2) wait_group<1>();
    else wait_group<0>();
    __syncwarp();
  };
  auto close = [&]() {  // it is in registers: its place is asked for anew
    __syncwarp();
    n--;
    cslot = cslot == (STAGES - 1) * STAGE ? 0 : cslot + STAGE;
    while (!iend && n < STAGES && ask(false)) {}
  };
  // One half of a stage. What lies beyond the matrix has no scale.
  auto read = [&](Rows* r, int half, u32 scales, u32 other, int column, int beside, int columns) {
    const u32 from = ring + cslot;
    UNROLL for (int i = 0; i < 2; i++) {
      UNROLL for (int j = 0; j < WIDE; j++) r[i].codes[j] = lds4(from + lane * 16 + ((2 * half + i) * WIDE + j) * 512);
      if (BITS == 8) r[i].scales = lds_u8(from + scales + i * other) | lds_u8(from + scales + i * other + 2) << 8;
      else r[i].scales = GROUP == 16 ? lds_u16(from + scales + i * other) : lds_u8(from + scales + i * other);
      if (columns % (128 + beside)) {
        if (column + i * beside + column8(t, 0) >= columns) r[i].scales = 0;
        else if (BITS == 8 && column + i * beside + column8(t, 2) >= columns) r[i].scales &= 255;
      }
    }
  };
  u32 buf = 0, turn = 0;
  auto hand = [&](float (*acc)[2][4], bool even, bool odd) {  // columns 2 t and 2 t + 1 of a tile's rows to the warps that add
    UNROLL for (int half = 0; half < HALVES; half++) mb_wait(empty + 8 * ((buf + half) % NB), turn ^ 1);
    UNROLL for (int half = 0; half < HALVES; half++) {
      const float *a = acc[half][0], *b = acc[half][1];
      const u32 at = red + (buf + half) % NB * PART + w * (COLUMNS * 64) + t * 128 + g * 4;
      if (even) { stsf(at, a[0] + b[0]); stsf(at + 32, a[2] + b[2]); }
      if (COLUMNS > 1 && odd) { stsf(at + 64, a[1] + b[1]); stsf(at + 96, a[3] + b[3]); }
    }
    __syncwarp();
    if (lane < HALVES) mb_arrive(full + 8 * ((buf + lane) % NB));
    buf += HALVES;
    if (buf >= NB) { buf -= NB; turn ^= 1; }
  };
  while (!iend && n < STAGES && ask(tag == 4)) {}  // waits for the first task alone: a warp may have no unit of any
  if (!GATHER)
    UNROLL for (int b = 0; b < KPW; b++) arrange(x[b]);
  int seq = 0;
  u32 v;
  auto current = [&]() {  // kind of the task that is next
    while (((v = lds_acquire(cent)) & ~3u) != (u32)(seq + 1) << 2) if (n == 0 && !iend) ask(false);
    return v & 3;
  };
  auto passed = [&]() {
    seq++;
    cent = cent == tasks + (ENTRIES - 1) * ENTRY ? tasks : cent + ENTRY;
    if (tid == 0) sts_release(progress, seq);
  };
  auto wait_for_h = [&](u32* h, int column, auto again) {  // 128 columns
    for (;;) {
      u32 most = 0;
      UNROLL for (int j = 0; j < 16; j++)
        if (FULL2 || column + column8(t, j / 4) < SIZE) most = max(most, h[j]);
      if (most != ~0u) break;
      again();
    }
    __syncwarp();
    if (!FULL2)
      UNROLL for (int j = 0; j < 16; j++)
        if (column + column8(t, j / 4) >= SIZE) h[j] = 0;
  };
  auto next_is = [&](int kind) { return lds_acquire(cent) == ((u32)(seq + 1) << 2 | kind); };
  auto fc1 = [&](bool even, bool odd, auto ready, auto used) {  // a tile; x of block b is needed, x of block b has been used
    float acc[HALVES][2][4] = {};
    UNROLL for (int b = 0; b < KPW; b++) {
      if (KB1 % KS != 0 && b >= own1) break;
      Rows rows[HALVES][2];
      open();
      UNROLL for (int half = 0; half < HALVES; half++) read(rows[half], half, r1 + half * HALF1, OTHER1, (ks + b * KS) * 128, 0, STORED);
      close();
      ready(b);
      UNROLL for (int half = 0; half < HALVES; half++) multiply<FLOAT16>(acc[half], rows[half][0], rows[half][1], x[RESIDENT ? b : 0]);
      used(b);
    }
    hand(acc, even, odd);
  };
  auto resident = [&]() {  // FC1: TW tiles for up to 8 routes of an expert
    const int last_route = lds(cent + 8) >> 25;
    if (!asked) {
      find(Int<0>(), cent);
      UNROLL for (int b = 0; b < KPW; b++) load(Int<0>(), x[b], ks + b * KS);
    }
    passed();
    ROLLED for (int tile = 0; tile < TW; tile++)
      fc1(2 * t <= last_route, 2 * t < last_route, [&](int b) { if (tile == 0) arrange(x[b]); }, [&](int b) {
        if (tile < TW - 1) return;
        if (b == 0 && (asked = next_is(0))) find(Int<0>(), cent);
        if (asked) load(Int<0>(), x[b], ks + b * KS);
      });
  };
  auto streamed = [&](auto phase) {  // a tile for up to 8 routes of an expert
    constexpr int P = decltype(phase)::v, STEP = P ? KS2 : KS;
    const int begin = P ? ks2 : ks, own = P ? own2 : own1, last_route = lds(cent + 8) >> 25;
    if (!asked) { find(phase, cent); load(phase, x[0], begin); }
    passed();
    float acc[HALVES][2][4] = {};
    ROLLED for (int b = 0; b < own; b++) {
      const int block = begin + b * STEP;
      Rows rows[HALVES][2];
      open();
      UNROLL for (int half = 0; half < HALVES; half++)
        read(rows[half], half, P ? r2 + half * HALF2 : r1 + half * HALF1, P ? OTHER2 : OTHER1, block * 128, 0, P ? SIZE : STORED);
      close();
      if (P) wait_for_h(x[0], block * 128, [&] { load(phase, x[0], block); });
      else arrange(x[0]);
      UNROLL for (int half = 0; half < HALVES; half++) {
        u32 now[16];
        UNROLL for (int i = 0; i < 16; i++) now[i] = x[0][i];
        if (half == HALVES - 1) {
          if ((asked = b + 1 < own)) load(phase, x[0], block + STEP);
          else if ((asked = next_is(P))) { find(phase, cent); load(phase, x[0], begin); }
        }
        multiply<FLOAT16 && !P>(acc[half], rows[half][0], rows[half][1], now);
      }
    }
    hand(acc, 2 * t <= last_route, 2 * t < last_route);
  };
  if (GATHER) {
    while (current() == 0) {
      if constexpr (RESIDENT) resident();
      else streamed(Int<0>());
    }
    asked = false;
    while (current() == 1) streamed(Int<1>());
    iend = true;  // there are no weights left
    for (int sum_number = 1; current() == 3; sum_number++) {  // a token's sum, in the order of its routes
      const u32 tok = lds(cent + 4), ours = lds(held + tok * 4);
      passed();
      while (ldg_acquire(added + (lds(epoch_at) & 1) * MAXT + tok) < (u32)(__popc(ours) * TILES2 * HALVES)) __nanosleep(20);
      for (int column = w * 128 + lane * 4; column < H; column += WARPS * 128) {
        float sum[4] = {};
#pragma unroll(TOP_K < 8 ? TOP_K : 8)
        for (int i = 0; i < TOP_K; i++) {
          if (!(ours >> i & 1)) continue;
          const int r = tok * TOP_K + i;
          const uint4 q = ldg_relaxed((const u8*)(shares + (u64)r * STORED + column));
          sum[0] += __uint_as_float(q.x); sum[1] += __uint_as_float(q.y); sum[2] += __uint_as_float(q.z); sum[3] += __uint_as_float(q.w);
          if (BIAS)
            for (int j = 0; j < 4; j++) sum[j] += weight_of(C, r) * bias_at(L.bias2, (u64)expert_of(L, C, r) * STORED + column + j);
        }
        u16* to = C.out + (u64)tok * H + column;
        *(uint2*)to = make_uint2((u32)to_x(sum[0]) | (u32)to_x(sum[1]) << 16, (u32)to_x(sum[2]) | (u32)to_x(sum[3]) << 16);
      }
      __syncwarp();  // all lanes have read the entry
      if (lane == 0) sts_release(finished + 4 * w, sum_number);
    }
    if (lane == 0) mb_arrive(ended);
    return;
  }
  while (current() == 0) {  // FC1
    const u32 tokens = lds(cent + 8) >> (16 + 2 * t);  // that the expert has: number 2 t and on
    passed();
    fc1(tokens & 1, tokens & 2, [](int) {}, [](int) {});
  }
  asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");  // factors of the routes are there
  const u8* hbuf = hall + (lds(epoch_at) & 1) * HBUF + t * 16 + (NARROW ? (g & 1) * 256 : 0);
  while (current() == 1) {  // FC2
    const u32 tok = lds(cent + 4) >> 16;
    const int own = units_of(tok);
    passed();
    if (own <= 0 && tag == (u32)seq << 2) { tag += 4; ient = cent; }  // nothing to ask for in this task
    float sum[HALVES][4] = {};
    auto load_h = [&](int i) {  // of unit i
      const u32 u = w + i * WARPS, route = lds(routes + (tok * TOP_K + u / KU2) * 16 + 12);
      row = hbuf + ((u64)route * KB2 + u % KU2 * (NARROW ? 2 : 1)) * 256;
      load(Int<1>(), x[0], 0);
    };
    if (own > 0) load_h(0);
    ROLLED for (int i = 0; i < own; i++) {
      const u32 u = w + i * WARPS, kb = u % KU2 * (NARROW ? 2 : 1);
      const float f = ldsf(routes + (tok * TOP_K + u / KU2) * 16 + 8);
      Rows rows[HALVES][2];
      open();
      UNROLL for (int half = 0; half < HALVES; half++) read(rows[half], half, r2 + half * HALF2, OTHER2, kb * 128, NARROW ? 128 : 0, SIZE);
      close();
      wait_for_h(x[0], kb * 128 + (NARROW ? (g & 1) * 128 : 0), [&] { load(Int<1>(), x[0], 0); });
      UNROLL for (int half = 0; half < HALVES; half++) {
        float acc[2][4] = {};
        u32 now[16];
        UNROLL for (int j = 0; j < 16; j++) now[j] = x[0][j];
        if (half == HALVES - 1 && i + 1 < own) load_h(i + 1);
        multiply<false>(acc, rows[half][0], rows[half][1], now);
        UNROLL for (int j = 0; j < 4; j += 2) sum[half][j] += f * (acc[0][NARROW && j ? 3 : j] + acc[1][NARROW && j ? 3 : j]);
      }
    }
    UNROLL for (int half = 0; half < HALVES; half++) {
      const u32 at = red + buf * PART + w * 64 + g * 4;
      mb_wait(empty + 8 * buf, turn ^ 1);
      if (t == 0 && NARROW) stsf(at, sum[half][0] + sum[half][2]);
      else if (t == 0) { stsf(at, sum[half][0]); stsf(at + 32, sum[half][2]); }
      __syncwarp();
      if (lane == 0) mb_arrive(full + 8 * buf);
      if (++buf == NB) { buf = 0; turn ^= 1; }
    }
  }
  if (lane == 0) mb_arrive(ended);
}
