// SPDX-License-Identifier: Apache-2.0
// What sm_90a lacks, in terms of what it has.  Called by the PTX that translate.py writes; compiled for sm_90a, no headers.
//
// Every result equals the instruction's by PTX ISA 9.0 but for one thing: mma.sync leaves the order and precision of its float32
// accumulation open, and one k64 product is computed here as four k16 products.

typedef unsigned int u32;

struct Float4 {
    float x, y, z, w;
};

// E2M1 (sign, 2 exponent bits of bias 1, 1 mantissa bit) to float32.
__device__ __forceinline__ float decode_e2m1(u32 code) {
    const u32 magnitude = code & 7u;
    // Exponent 0: 0 or 0.5.  Else (1 + m/2) * 2**(e - 1), whose float32 bits are e + 126 and m.
    const float value = magnitude < 2u ? 0.5f * (float)magnitude : __uint_as_float((magnitude + 252u) << 22);
    return __uint_as_float(__float_as_uint(value) | (code & 8u) << 28);
}

// UE4M3 (4 exponent bits of bias 7, 3 mantissa bits; bit 7 is padding, 0x7F is NaN) to float32.
__device__ __forceinline__ float decode_ue4m3(u32 code) {
    code &= 0x7Fu;
    if (code == 0x7Fu) return __uint_as_float(0x7FC00000u);
    return code < 8u ? (float)code * 0.001953125f : __uint_as_float((code << 20) + (120u << 23));
}

__device__ __forceinline__ u32 pack_f16x2(float low, float high) {
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// mma.sync.m16n8k64.kind::mxf4nvf4.block_scale.scale_vec::4X, e2m1 by e2m1 with ue4m3 scales.
//
// Of lane 4*g + t, register a0 holds row g, columns 8*t..8*t+7; a1 row g+8; a2 and a3 the same 32 columns further; b0 and b1 hold
// column g likewise (PTX ISA 9.0, 9.7.14.5.15).  Scales: the four bytes of sfa are the row's four blocks of 16 columns; those of row g come
// from lane 4*g + 2*tid_a, those of row g+8 from the next lane; those of column g from lane 4*g + tid_b (9.7.14.3).
//
// A product over k does not care in which order k is visited, as long as A and B agree: the k16 product takes "its" columns 2t, 2t+1, 2t+8,
// 2t+9 of a lane from four neighboring columns of the same lane.  Value times scale has at most 6 significant bits and lies
// between 2**-10 and 2688: exact in float16.
extern "C" __device__ __noinline__ Float4 b12x_mma_mxf4nvf4(
    u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3, u32 sfa, u32 tid_a, u32 sfb, u32 tid_b) {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    const u32 first = lane & ~3u;
    const u32 scales_top = __shfl_sync(0xFFFFFFFFu, sfa, first + 2u * tid_a);
    const u32 scales_bottom = __shfl_sync(0xFFFFFFFFu, sfa, first + 2u * tid_a + 1u);
    const u32 scales_column = __shfl_sync(0xFFFFFFFFu, sfb, first + tid_b);
    float d[4] = {c0, c1, c2, c3};
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 top = half ? a2 : a0, bottom = half ? a3 : a1, column = half ? b1 : b0;
        const u32 shift = 8u * (2u * half + ((lane & 3u) >> 1));
        const float scale_top = decode_ue4m3(scales_top >> shift);
        const float scale_bottom = decode_ue4m3(scales_bottom >> shift);
        const float scale_column = decode_ue4m3(scales_column >> shift);
        u32 x[4], y[4], z[4];
#pragma unroll
        for (u32 pair = 0; pair < 4; pair++) {
            const u32 low = 8u * pair, high = low + 4u;
            x[pair] = pack_f16x2(decode_e2m1(top >> low) * scale_top, decode_e2m1(top >> high) * scale_top);
            y[pair] = pack_f16x2(decode_e2m1(bottom >> low) * scale_bottom, decode_e2m1(bottom >> high) * scale_bottom);
            z[pair] = pack_f16x2(decode_e2m1(column >> low) * scale_column, decode_e2m1(column >> high) * scale_column);
        }
        mma_m16n8k16(d, x[0], y[0], x[1], y[1], z[0], z[1]);
        mma_m16n8k16(d, x[2], y[2], x[3], y[3], z[2], z[3]);
    }
    return Float4{d[0], d[1], d[2], d[3]};
}

__device__ __forceinline__ u32 e4m3_to_f16x2(u32 pair) {
    u32 packed;
    asm("{ .reg .b16 codes; cvt.u16.u32 codes, %1; cvt.rn.f16x2.e4m3x2 %0, codes; }" : "=r"(packed) : "r"(pair));
    return packed;
}

// mma.sync.m16n8k32.kind::mxf8f6f4.block_scale.scale_vec::1X, e4m3 by e4m3 with ue8m0 scales.
//
// Of lane 4*g + t, register a0 holds row g, columns 4*t..4*t+3; a1 row g+8; a2 and a3 the same 16 columns further; b0 and b1 hold column g
// likewise (PTX ISA 9.0, 9.7.14.5.10).  A row has one scale: the byte that the byte selector names, of the lane that the thread selector
// names as above (9.7.14.3).
//
// E4M3 is exact in float16, and so are its products in float32.  Scales are powers of two: the sum of 32 columns is multiplied by both at
// once, in two steps so that no factor leaves float32.  255 is NaN.
extern "C" __device__ __noinline__ Float4 b12x_mma_mxf8f6f4_e4m3(
    u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1, float c2, float c3, u32 sfa, u32 tid_a, u32 byte_a, u32 sfb,
    u32 tid_b, u32 byte_b) {
    u32 lane;
    asm("mov.u32 %0, %%laneid;" : "=r"(lane));
    const u32 first = lane & ~3u, column = 2u * (lane & 3u);
    float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_m16n8k16(d, e4m3_to_f16x2(a0), e4m3_to_f16x2(a1), e4m3_to_f16x2(a0 >> 16), e4m3_to_f16x2(a1 >> 16), e4m3_to_f16x2(b0),
                 e4m3_to_f16x2(b0 >> 16));
    mma_m16n8k16(d, e4m3_to_f16x2(a2), e4m3_to_f16x2(a3), e4m3_to_f16x2(a2 >> 16), e4m3_to_f16x2(a3 >> 16), e4m3_to_f16x2(b1),
                 e4m3_to_f16x2(b1 >> 16));
    const float c[4] = {c0, c1, c2, c3};
#pragma unroll
    for (u32 i = 0; i < 4; i++) {  // rows g and g+8, columns 2*t and 2*t+1
        const u32 row = __shfl_sync(0xFFFFFFFFu, sfa, first + 2u * tid_a + (i >> 1)) >> (8u * byte_a) & 0xFFu;
        const u32 col = __shfl_sync(0xFFFFFFFFu, sfb, 4u * (column + (i & 1u)) + tid_b) >> (8u * byte_b) & 0xFFu;
        const int exponent = (int)(row + col) - 254, half = exponent / 2;
        const float scaled = d[i] * __uint_as_float((u32)(half + 127) << 23) * __uint_as_float((u32)(exponent - half + 127) << 23);
        d[i] = row == 255u || col == 255u ? __uint_as_float(0x7FC00000u) : c[i] + scaled;
    }
    return Float4{d[0], d[1], d[2], d[3]};
}

// Nearest E2M1, ties to the even code, saturating at 6; NaN becomes +6 (PTX ISA 9.0, 9.7.9.21, .satfinite).
__device__ __forceinline__ u32 encode_e2m1(float value) {
    const float a = __uint_as_float(__float_as_uint(value) & 0x7FFFFFFFu);
    if (a != a) return 7u;
    const u32 magnitude = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return magnitude | (__float_as_uint(value) >> 31) << 3;
}

// cvt.rn.satfinite.e2m1x2.f32: the first operand goes to the upper four bits.
extern "C" __device__ __noinline__ u32 b12x_cvt_e2m1x2_f32(float high, float low) { return encode_e2m1(high) << 4 | encode_e2m1(low); }

// cvt.rn.f16x2.e2m1x2: the upper four bits go to the upper half.
extern "C" __device__ __noinline__ u32 b12x_cvt_f16x2_e2m1x2(u32 codes) { return pack_f16x2(decode_e2m1(codes), decode_e2m1(codes >> 4)); }

// No instruction: called behind barriers on request.  Every warp sleeps up to 16 microseconds, other every time, so that what hangs on
// timing shows.
extern "C" __device__ __noinline__ void b12x_stagger() {
    u32 thread, clock;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock));
    const u32 nanoseconds = ((thread >> 5) + 1u) * 0x9E3779B9u * (clock >> 8 | 1u) >> 18;
    asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds));
}
