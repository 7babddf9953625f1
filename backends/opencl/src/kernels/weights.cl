// Rows of weights, as `weight/layout.rs` lays them out, 32 elements at a time.
//
// A row is a few planes, each padded to 16 bytes: the quants of 32 elements (a group) together, where one aligned load fetches them; then
// what scales them. `raw32` gives a group's elements as `s.x * a + s.y` for the first 16 and `s.z * b + s.w` for the others: a product
// with activations multiplies by scales once a group. `G` is the groups of a row, padded up. WEIGHT is one of the numbers below.

#define W_F32 0
#define W_F16 1
#define W_BF16 2
#define W_Q4_0 3
#define W_Q4_1 4
#define W_Q5_0 5
#define W_Q5_1 6
#define W_Q8_0 7
#define W_Q2_K 8
#define W_Q3_K 9
#define W_Q4_K 10
#define W_Q5_K 11
#define W_Q6_K 12
#define W_IQ4_NL 13
#define W_IQ4_XS 14
#define W_MXFP4 15
#define W_NVFP4 16
#define W_TERNARY 17
#define W_Q2_0 18
#define W_Q1_0 19
#define W_IQ1_S 20
#define W_IQ1_M 21
#define W_IQ2_XXS 22
#define W_IQ2_XS 23
#define W_IQ2_S 24
#define W_IQ3_XXS 25
#define W_IQ3_S 26

// Whether elements have an offset, so that sums of activations are needed.
#define HAS_OFFSET (WEIGHT == W_Q4_1 || WEIGHT == W_Q5_1 || WEIGHT == W_Q2_K || WEIGHT == W_Q4_K || WEIGHT == W_Q5_K)

#define PAD16(n) (((n) + 15u) & ~15u)
#define QUANTS(row, g) as_uchar16(((__global const uint4*)(row))[g])
#define LOAD8(row, g) as_uchar8(((__global const uint2*)(row))[g])

// The fifth bits of 16 elements, at bit 4 of each byte.
inline uchar16 fifth_bits(const uint bits) {
    const uchar16 spread = (uchar16)((uchar8)((uchar)bits), (uchar8)((uchar)(bits >> 8)));
    const uchar16 mask = (uchar16)(1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128);
    // True is minus one.
    return as_uchar16((spread & mask) != (uchar16)(0)) & (uchar16)(16);
}

// 32 values of two bits; byte k has elements k, k + 8, k + 16 and k + 24.
inline void two_bits(const uchar8 q, uchar16* a, uchar16* b) {
    *a = (uchar16)(q & (uchar8)(3), (q >> (uchar8)(2)) & (uchar8)(3));
    *b = (uchar16)((q >> (uchar8)(4)) & (uchar8)(3), q >> (uchar8)(6));
}

#if WEIGHT == W_IQ4_NL || WEIGHT == W_IQ4_XS
__constant float table16[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f,
                                1.0f, 13.0f, 25.0f, 38.0f, 53.0f, 69.0f, 89.0f, 113.0f};
#elif WEIGHT == W_MXFP4 || WEIGHT == W_NVFP4
__constant float table16[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 6.0f, 8.0f, 12.0f,
                                0.0f, -1.0f, -2.0f, -3.0f, -4.0f, -6.0f, -8.0f, -12.0f};
#endif
#if WEIGHT == W_IQ4_NL || WEIGHT == W_IQ4_XS || WEIGHT == W_MXFP4 || WEIGHT == W_NVFP4
inline float16 look_up(const uchar16 q) {
    return (float16)(
        table16[q.s0], table16[q.s1], table16[q.s2], table16[q.s3], table16[q.s4], table16[q.s5], table16[q.s6], table16[q.s7],
        table16[q.s8], table16[q.s9], table16[q.sa], table16[q.sb], table16[q.sc], table16[q.sd], table16[q.se], table16[q.sf]);
}
#endif

#if WEIGHT == W_MXFP4
// 2^(e - 128); the two smallest are subnormal.
inline float half_exponent(const uchar e) {
    return as_float(e < 2 ? 0x00200000u << e : ((uint)e - 1u) << 23);
}
#elif WEIGHT == W_NVFP4
// Half of an unsigned E4M3 number.
inline float half_e4m3(const uchar code) {
    const uint exponent = code >> 3 & 15, mantissa = code & 7;
    if (code == 0x7f) return 0.0f;
    return exponent == 0 ? (float)mantissa * (1.0f / 1024.0f) : as_float((exponent + 119u) << 23 | mantissa << 20);
}
#endif

#if WEIGHT >= W_IQ1_S
// The types with codebooks stay as GGUF has them, in blocks of 256 without alignment.
inline uint u16_at(__global const uchar* p) { return p[0] | (uint)p[1] << 8; }
inline uint u32_at(__global const uchar* p) { return u16_at(p) | u16_at(p + 2) << 16; }
inline uint nibble(__global const uchar* p, const uint i) { return p[i / 2] >> (i % 2 * 4) & 15u; }
inline float half_at(const uint bits) {
    const uint sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    const float subnormal = (float)(int)magnitude * 5.9604644775390625e-8f;
    const uint finite = magnitude < 0x400u ? as_uint(subnormal) : (magnitude << 13) + (112u << 23);
    return as_float(sign | (magnitude >= 0x7c00u ? magnitude << 13 | 0x7f800000u : finite));
}
// A sign byte of seven bits and their parity.
inline uint signs_of(const uint code) { return code | (popcount(code) & 1u) << 7; }
inline float8 grid8(__constant const uint* grid, const uint row) {
    return convert_float8(as_char8((uint2)(grid[2 * row], grid[2 * row + 1])));
}
inline float8 grid4(__constant const uint* grid, const uint row0, const uint row1) {
    return convert_float8(as_char8((uint2)(grid[row0], grid[row1])));
}
inline float8 with_signs(const float8 v, const uint signs) {
    const int8 mask = (int8)(1, 2, 4, 8, 16, 32, 64, 128);
    return select(v, -v, ((int8)((int)signs) & mask) != (int8)(0));
}
#endif

inline void raw32(__global const uchar* row, const uint G, const uint g, float16* a, float16* b, float4* s) {
#if WEIGHT == W_F32
    __global const float4* p = (__global const float4*)row + 8 * g;
    *a = (float16)(p[0], p[1], p[2], p[3]);
    *b = (float16)(p[4], p[5], p[6], p[7]);
    *s = (float4)(1.0f, 0.0f, 1.0f, 0.0f);
#elif WEIGHT == W_F16
    // Rows of f16 begin at multiples of 64 bytes.
    __global const half* p = (__global const half*)(row + 64 * g);
    *a = vloada_half16(0, p);
    *b = vloada_half16(1, p);
    *s = (float4)(1.0f, 0.0f, 1.0f, 0.0f);
#elif WEIGHT == W_BF16
    __global const uint4* p = (__global const uint4*)row + 4 * g;
    const ushort16 u = (ushort16)(as_ushort8(p[0]), as_ushort8(p[1]));
    const ushort16 v = (ushort16)(as_ushort8(p[2]), as_ushort8(p[3]));
    *a = as_float16(convert_uint16(u) << (uint16)(16));
    *b = as_float16(convert_uint16(v) << (uint16)(16));
    *s = (float4)(1.0f, 0.0f, 1.0f, 0.0f);
#elif WEIGHT == W_Q4_0
    const uchar16 q = QUANTS(row, g);
    const float d = HALF1(row + 16 * G, g);
    *a = convert_float16(q & (uchar16)(15)) - 8.0f;
    *b = convert_float16(q >> (uchar16)(4)) - 8.0f;
    *s = (float4)(d, 0.0f, d, 0.0f);
#elif WEIGHT == W_Q4_1
    const uchar16 q = QUANTS(row, g);
    const float d = HALF1(row + 16 * G, 2 * g), m = HALF1(row + 16 * G, 2 * g + 1);
    *a = convert_float16(q & (uchar16)(15));
    *b = convert_float16(q >> (uchar16)(4));
    *s = (float4)(d, m, d, m);
#elif WEIGHT == W_Q5_0 || WEIGHT == W_Q5_1
    const uchar16 q = QUANTS(row, g);
    const uint high = ((__global const uint*)(row + 16 * G))[g];
    __global const uchar* scales = row + 16 * G + PAD16(4 * G);
    *a = convert_float16((q & (uchar16)(15)) | fifth_bits(high));
    *b = convert_float16((q >> (uchar16)(4)) | fifth_bits(high >> 16));
#if WEIGHT == W_Q5_0
    const float d = HALF1(scales, g);
    *a -= 16.0f;
    *b -= 16.0f;
    *s = (float4)(d, 0.0f, d, 0.0f);
#else
    const float d = HALF1(scales, 2 * g), m = HALF1(scales, 2 * g + 1);
    *s = (float4)(d, m, d, m);
#endif
#elif WEIGHT == W_Q8_0
    __global const uint4* p = (__global const uint4*)row + 2 * g;
    const float d = HALF1(row + 32 * G, g);
    *a = convert_float16(as_char16(p[0]));
    *b = convert_float16(as_char16(p[1]));
    *s = (float4)(d, 0.0f, d, 0.0f);
#elif WEIGHT == W_Q2_K
    uchar16 u, v;
    two_bits(LOAD8(row, g), &u, &v);
    *a = convert_float16(u);
    *b = convert_float16(v);
    __global const uchar* scales = row + PAD16(8 * G);
    const uchar2 sc = ((__global const uchar2*)scales)[g];
    __global const uchar* d = scales + PAD16(2 * G);
    const float scale = HALF1(d, g / 8 * 2), min_scale = HALF1(d, g / 8 * 2 + 1);
    *s = (float4)(scale * (sc.x & 15), -(min_scale * (sc.x >> 4)), scale * (sc.y & 15), -(min_scale * (sc.y >> 4)));
#elif WEIGHT == W_Q3_K
    uchar16 u, v;
    two_bits(LOAD8(row, g), &u, &v);
    __global const uchar* masks = row + PAD16(8 * G);
    const uint mask = ((__global const uint*)masks)[g];
    // A set bit means that nothing is subtracted: four is added, and taken away from all.
    *a = convert_float16(u | (fifth_bits(mask) >> (uchar16)(2))) - 4.0f;
    *b = convert_float16(v | (fifth_bits(mask >> 16) >> (uchar16)(2))) - 4.0f;
    __global const uchar* scales = masks + PAD16(4 * G);
    const char2 sc = ((__global const char2*)scales)[g];
    const float d = HALF1(scales + PAD16(2 * G), g / 8);
    *s = (float4)(d * sc.x, 0.0f, d * sc.y, 0.0f);
#elif WEIGHT == W_Q4_K || WEIGHT == W_Q5_K
    const uchar16 q = QUANTS(row, g);
    *a = convert_float16(q & (uchar16)(15));
    *b = convert_float16(q >> (uchar16)(4));
    __global const uchar* scales = row + 16 * G;
#if WEIGHT == W_Q5_K
    const uint high = ((__global const uint*)scales)[g];
    *a = convert_float16((q & (uchar16)(15)) | fifth_bits(high));
    *b = convert_float16((q >> (uchar16)(4)) | fifth_bits(high >> 16));
    scales += PAD16(4 * G);
#endif
    const uchar2 sc = ((__global const uchar2*)scales)[g];
    __global const uchar* d = scales + PAD16(2 * G);
    const float scale = HALF1(d, g / 8 * 2) * sc.x, offset = -(HALF1(d, g / 8 * 2 + 1) * sc.y);
    *s = (float4)(scale, offset, scale, offset);
#elif WEIGHT == W_Q6_K
    const uchar16 q = QUANTS(row, g);
    uchar16 u, v;
    two_bits(LOAD8(row + 16 * G, g), &u, &v);
    *a = convert_float16((q & (uchar16)(15)) | (u << (uchar16)(4))) - 32.0f;
    *b = convert_float16((q >> (uchar16)(4)) | (v << (uchar16)(4))) - 32.0f;
    __global const uchar* scales = row + 16 * G + PAD16(8 * G);
    const char2 sc = ((__global const char2*)scales)[g];
    const float d = HALF1(scales + PAD16(2 * G), g / 8);
    *s = (float4)(d * sc.x, 0.0f, d * sc.y, 0.0f);
#elif WEIGHT == W_IQ4_NL
    const uchar16 q = QUANTS(row, g);
    const float d = HALF1(row + 16 * G, g);
    *a = look_up(q & (uchar16)(15));
    *b = look_up(q >> (uchar16)(4));
    *s = (float4)(d, 0.0f, d, 0.0f);
#elif WEIGHT == W_IQ4_XS
    const uchar16 q = QUANTS(row, g);
    __global const uchar* scales = row + 16 * G;
    const float d = HALF1(scales + PAD16(G), g / 8) * ((__global const char*)scales)[g];
    *a = look_up(q & (uchar16)(15));
    *b = look_up(q >> (uchar16)(4));
    *s = (float4)(d, 0.0f, d, 0.0f);
#elif WEIGHT == W_MXFP4
    const uchar16 q = QUANTS(row, g);
    const float d = half_exponent(row[16 * G + g]);
    *a = look_up(q & (uchar16)(15));
    *b = look_up(q >> (uchar16)(4));
    *s = (float4)(d, 0.0f, d, 0.0f);
#elif WEIGHT == W_NVFP4
    const uchar16 q = QUANTS(row, g);
    const uchar2 codes = ((__global const uchar2*)(row + 16 * G))[g];
    *a = look_up(q & (uchar16)(15));
    *b = look_up(q >> (uchar16)(4));
    *s = (float4)(half_e4m3(codes.x), 0.0f, half_e4m3(codes.y), 0.0f);
#elif WEIGHT == W_TERNARY || WEIGHT == W_Q2_0
    uchar16 u, v;
    two_bits(LOAD8(row, g), &u, &v);
    const float d = HALF1(row + PAD16(8 * G), g / (WEIGHT == W_Q2_0 ? 2 : 8));
    *a = convert_float16(u) - 1.0f;
    *b = convert_float16(v) - 1.0f;
    *s = (float4)(d, 0.0f, d, 0.0f);
#elif WEIGHT == W_Q1_0
    const uint bits = ((__global const uint*)row)[g];
    const float d = HALF1(row + PAD16(4 * G), g / 4);
    *a = convert_float16(fifth_bits(bits)) * 0.125f - 1.0f;
    *b = convert_float16(fifth_bits(bits >> 16)) * 0.125f - 1.0f;
    *s = (float4)(d, 0.0f, d, 0.0f);
#else
    const uint k = g % 8;
    float8 v0, v1, v2, v3;
#if WEIGHT == W_IQ2_XXS
    __global const uchar* p = row + g / 8 * 66;
    const float d = half_at(u16_at(p));
    __global const uchar* q = p + 2 + 8 * k;
    const uint codes = u32_at(q + 4);
    const float scale = d * (0.5f + (float)(codes >> 28)) * 0.25f;
    v0 = with_signs(grid8(GRID, q[0]), signs_of(codes & 127u));
    v1 = with_signs(grid8(GRID, q[1]), signs_of(codes >> 7 & 127u));
    v2 = with_signs(grid8(GRID, q[2]), signs_of(codes >> 14 & 127u));
    v3 = with_signs(grid8(GRID, q[3]), signs_of(codes >> 21 & 127u));
    *s = (float4)(scale, 0.0f, scale, 0.0f);
#elif WEIGHT == W_IQ2_XS
    __global const uchar* p = row + g / 8 * 74;
    const float d = half_at(u16_at(p));
    const uint q0 = u16_at(p + 2 + 8 * k), q1 = u16_at(p + 4 + 8 * k), q2 = u16_at(p + 6 + 8 * k), q3 = u16_at(p + 8 + 8 * k);
    v0 = with_signs(grid8(GRID, q0 & 511u), signs_of(q0 >> 9));
    v1 = with_signs(grid8(GRID, q1 & 511u), signs_of(q1 >> 9));
    v2 = with_signs(grid8(GRID, q2 & 511u), signs_of(q2 >> 9));
    v3 = with_signs(grid8(GRID, q3 & 511u), signs_of(q3 >> 9));
    *s = (float4)(d * (0.5f + (float)nibble(p + 66, 2 * k)) * 0.25f, 0.0f, d * (0.5f + (float)nibble(p + 66, 2 * k + 1)) * 0.25f, 0.0f);
#elif WEIGHT == W_IQ2_S
    __global const uchar* p = row + g / 8 * 82;
    const float d = half_at(u16_at(p));
    __global const uchar* q = p + 2 + 4 * k;
    __global const uchar* signs = p + 34 + 4 * k;
    const uint high = p[66 + k];
    v0 = with_signs(grid8(GRID, q[0] | (high & 3u) << 8), signs[0]);
    v1 = with_signs(grid8(GRID, q[1] | (high >> 2 & 3u) << 8), signs[1]);
    v2 = with_signs(grid8(GRID, q[2] | (high >> 4 & 3u) << 8), signs[2]);
    v3 = with_signs(grid8(GRID, q[3] | (high >> 6 & 3u) << 8), signs[3]);
    *s = (float4)(d * (0.5f + (float)nibble(p + 74, 2 * k)) * 0.25f, 0.0f, d * (0.5f + (float)nibble(p + 74, 2 * k + 1)) * 0.25f, 0.0f);
#elif WEIGHT == W_IQ3_XXS
    __global const uchar* p = row + g / 8 * 98;
    const uint codes = u32_at(p + 66 + 4 * k);
    const float scale = half_at(u16_at(p)) * (0.5f + (float)(codes >> 28)) * 0.5f;
    __global const uchar* q = p + 2 + 8 * k;
    v0 = with_signs(grid4(GRID, q[0], q[1]), signs_of(codes & 127u));
    v1 = with_signs(grid4(GRID, q[2], q[3]), signs_of(codes >> 7 & 127u));
    v2 = with_signs(grid4(GRID, q[4], q[5]), signs_of(codes >> 14 & 127u));
    v3 = with_signs(grid4(GRID, q[6], q[7]), signs_of(codes >> 21 & 127u));
    *s = (float4)(scale, 0.0f, scale, 0.0f);
#elif WEIGHT == W_IQ3_S
    __global const uchar* p = row + g / 8 * 110;
    const float scale = half_at(u16_at(p)) * (float)(1u + 2u * nibble(p + 106, k));
    __global const uchar* q = p + 2 + 8 * k;
    __global const uchar* signs = p + 74 + 4 * k;
    const uint high = p[66 + k];
    v0 = with_signs(grid4(GRID, q[0] | (high & 1u) << 8, q[1] | (high >> 1 & 1u) << 8), signs[0]);
    v1 = with_signs(grid4(GRID, q[2] | (high >> 2 & 1u) << 8, q[3] | (high >> 3 & 1u) << 8), signs[1]);
    v2 = with_signs(grid4(GRID, q[4] | (high >> 4 & 1u) << 8, q[5] | (high >> 5 & 1u) << 8), signs[2]);
    v3 = with_signs(grid4(GRID, q[6] | (high >> 6 & 1u) << 8, q[7] | (high >> 7 & 1u) << 8), signs[3]);
    *s = (float4)(scale, 0.0f, scale, 0.0f);
#elif WEIGHT == W_IQ1_S
    __global const uchar* p = row + g / 8 * 50;
    __global const uchar* q = p + 2 + 4 * k;
    const uint high = u16_at(p + 34 + 2 * k);
    const float scale = half_at(u16_at(p)) * (float)(2u * (high >> 12 & 7u) + 1u);
    const float delta = high & 0x8000u ? -0.125f : 0.125f;
    v0 = grid8(GRID, q[0] | (high & 7u) << 8) + delta;
    v1 = grid8(GRID, q[1] | (high >> 3 & 7u) << 8) + delta;
    v2 = grid8(GRID, q[2] | (high >> 6 & 7u) << 8) + delta;
    v3 = grid8(GRID, q[3] | (high >> 9 & 7u) << 8) + delta;
    *s = (float4)(scale, 0.0f, scale, 0.0f);
#else
    __global const uchar* p = row + g / 8 * 56;
    __global const uchar* q = p + 4 * k;
    const float d = half_at(u16_at(p + 48) >> 12 | u16_at(p + 50) >> 12 << 4 | u16_at(p + 52) >> 12 << 8 | u16_at(p + 54) >> 12 << 12);
    const uint h0 = nibble(p + 32, 4 * k), h1 = nibble(p + 32, 4 * k + 1), h2 = nibble(p + 32, 4 * k + 2), h3 = nibble(p + 32, 4 * k + 3);
    // Element groups of 8 are numbered i = 4 k + 0..3; their scale is field i / 2 % 4 of word i / 8.
    const uint word = u16_at(p + 48 + k / 2 * 2), field = k % 2 * 6;
    v0 = grid8(GRID, q[0] | (h0 & 7u) << 8) + (h0 & 8u ? -0.125f : 0.125f);
    v1 = grid8(GRID, q[1] | (h1 & 7u) << 8) + (h1 & 8u ? -0.125f : 0.125f);
    v2 = grid8(GRID, q[2] | (h2 & 7u) << 8) + (h2 & 8u ? -0.125f : 0.125f);
    v3 = grid8(GRID, q[3] | (h3 & 7u) << 8) + (h3 & 8u ? -0.125f : 0.125f);
    *s = (float4)(d * (float)(2u * (word >> field & 7u) + 1u), 0.0f, d * (float)(2u * (word >> (field + 3u) & 7u) + 1u), 0.0f);
#endif
    *a = (float16)(v0, v1);
    *b = (float16)(v2, v3);
#endif
}
