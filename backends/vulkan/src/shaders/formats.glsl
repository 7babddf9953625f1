// Weights as they lie on the device. A row is a plane of codes, then planes of what belongs to them, each padded to 16 bytes, so that
// neighbouring invocations read neighbouring 16 bytes. `layout.rs` writes it; the two belong together.
//
// A *unit* is what 16 bytes of the first plane hold: 4, 8, 16 or 32 elements. An element is `s * code + m`, code being a small whole number
// (or the element itself for plain types), s and m one per 32 elements, or one per half unit.

layout(constant_id = 0) const uint FORMAT = 0;
layout(constant_id = 10) const uint LUT0 = 0;
layout(constant_id = 11) const uint LUT1 = 0;
layout(constant_id = 12) const uint LUT2 = 0;
layout(constant_id = 13) const uint LUT3 = 0;

const uint F_F32 = 0;
const uint F_F16 = 1;
const uint F_BF16 = 2;
const uint F_Q8_0 = 3;
const uint F_Q8F = 4;
const uint F_Q4_0 = 5;
const uint F_Q4_1 = 6;
const uint F_Q5_0 = 7;
const uint F_Q5_1 = 8;
const uint F_Q4_K = 9;
const uint F_Q5_K = 10;
const uint F_Q6_K = 11;
const uint F_LUT = 12;
const uint F_LUT_MIN = 13;

const uint UNIT = FORMAT == F_F32 ? 4 : (FORMAT <= F_BF16 ? 8 : (FORMAT <= F_Q8F ? 16 : 32));
const uint GROUPS = UNIT / 4;
const bool IS_PLAIN = FORMAT <= F_BF16;
const bool HAS_MIN = FORMAT == F_Q4_1 || FORMAT == F_Q5_1 || FORMAT == F_Q4_K || FORMAT == F_Q5_K || FORMAT == F_LUT_MIN;
const bool HAS_HALVES = FORMAT == F_Q6_K || FORMAT == F_LUT || FORMAT == F_LUT_MIN;
const float ZERO = (FORMAT == F_Q4_0) ? 8.0 : (FORMAT == F_Q5_0 ? 16.0 : (FORMAT == F_Q6_K ? 32.0
    : ((FORMAT == F_Q8_0 || FORMAT == F_Q8F) ? 128.0 : 0.0)));

struct Unit {
    uvec4 q;
    uvec2 h;
    vec2 s;
    vec2 m;
};

shared float lut[16];

// Before the first barrier of a kernel that decodes.
void init_lut(uint tid) {
    if (FORMAT == F_LUT && tid < 16) {
        uint word = tid < 4 ? LUT0 : (tid < 8 ? LUT1 : (tid < 12 ? LUT2 : LUT3));
        lut[tid] = float(bitfieldExtract(int(word), int(8 * (tid & 3)), 8));
    }
}

uint pad16(uint n) { return (n + 15) & ~15u; }

Unit load_unit(uint64_t row, uint u, uint n_in) {
    Unit a;
    a.q = LDU4(row + 16 * uint64_t(u));
    a.h = uvec2(0);
    a.s = vec2(1);
    a.m = vec2(0);
    uint n32 = n_in / 32;
    if (FORMAT == F_Q8_0) {
        a.s = vec2(half_at(row + n_in + 2 * (u / 2)));
    } else if (FORMAT == F_Q8F) {
        a.s = vec2(LDF(row + n_in + 4 * (u / 2)));
    } else if (FORMAT == F_Q4_0) {
        a.s = vec2(half_at(row + 16 * n32 + 2 * u));
    } else if (FORMAT == F_Q4_1) {
        vec2 dm = unpackHalf2x16(LDU(row + 16 * n32 + 4 * u));
        a.s = dm.xx;
        a.m = dm.yy;
    } else if (FORMAT == F_Q5_0) {
        uint at = 16 * n32;
        a.h.x = LDU(row + at + 4 * u);
        a.s = vec2(half_at(row + at + pad16(4 * n32) + 2 * u));
    } else if (FORMAT == F_Q5_1) {
        uint at = 16 * n32;
        a.h.x = LDU(row + at + 4 * u);
        vec2 dm = unpackHalf2x16(LDU(row + at + pad16(4 * n32) + 4 * u));
        a.s = dm.xx;
        a.m = dm.yy;
    } else if (FORMAT == F_Q4_K || FORMAT == F_Q5_K) {
        uint at = 16 * n32;
        if (FORMAT == F_Q5_K) {
            a.h.x = LDU(row + at + 4 * u);
            at += pad16(4 * n32);
        }
        uvec4 head = LDU4(row + at + 16 * (u / 8));
        vec2 dm = unpackHalf2x16(head.x);
        uint j = u & 7;
        uint k = 8 * (j & 3);
        uint sc = (head.y >> k) & 0xff;
        uint mn = (head.z >> k) & 0xff;
        uint both = (head.w >> k) & 0xff;
        uint scale = j < 4 ? (sc & 63) : ((both & 15) | ((sc >> 6) << 4));
        uint low = j < 4 ? (mn & 63) : ((both >> 4) | ((mn >> 6) << 4));
        a.s = vec2(dm.x * float(scale));
        a.m = vec2(-dm.y * float(low));
    } else if (FORMAT == F_Q6_K) {
        uint at = 16 * n32;
        a.h = LDU2(row + at + 8 * u);
        at += pad16(8 * n32);
        uint sc = LDH(row + at + 2 * u);
        float d = half_at(row + at + pad16(2 * n32) + 2 * (u / 8));
        a.s = d * vec2(bitfieldExtract(int(sc), 0, 8), bitfieldExtract(int(sc), 8, 8));
    } else if (FORMAT == F_LUT) {
        a.s = uintBitsToFloat(LDU2(row + 16 * n32 + 8 * u));
    } else if (FORMAT == F_LUT_MIN) {
        uvec4 sm = LDU4(row + 16 * n32 + 16 * u);
        a.s = uintBitsToFloat(sm.xy);
        a.m = uintBitsToFloat(sm.zw);
    }
    return a;
}

// A whole number below 2^23 as a float, less ZERO: put into the mantissa of 2^23, which is cheaper than a conversion.
float small(uint q) { return uintBitsToFloat(q | 0x4B000000u) - (8388608.0 + ZERO); }

// The codes of elements 4g .. 4g + 4 of a unit.
vec4 codes(Unit a, uint g) {
    if (FORMAT == F_F32) return uintBitsToFloat(a.q);
    if (FORMAT == F_F16) return vec4(unpackHalf2x16(a.q[2 * g]), unpackHalf2x16(a.q[2 * g + 1]));
    if (FORMAT == F_BF16) {
        uint lo = a.q[2 * g];
        uint hi = a.q[2 * g + 1];
        return uintBitsToFloat(uvec4(lo << 16, lo & 0xffff0000u, hi << 16, hi & 0xffff0000u));
    }
    if (FORMAT == F_Q8_0 || FORMAT == F_Q8F) {
        uint w = a.q[g] ^ 0x80808080u;
        return vec4(small(w & 0xff), small((w >> 8) & 0xff), small((w >> 16) & 0xff), small(w >> 24));
    }
    uint w = a.q[g >> 1] >> (16 * (g & 1));
    uvec4 n = uvec4(w & 15, (w >> 4) & 15, (w >> 8) & 15, (w >> 12) & 15);
    if (FORMAT == F_LUT) return vec4(lut[n.x], lut[n.y], lut[n.z], lut[n.w]);
    if (FORMAT == F_Q5_0 || FORMAT == F_Q5_1 || FORMAT == F_Q5_K) {
        uint h = a.h.x >> (4 * g);
        n |= uvec4((h & 1) << 4, (h & 2) << 3, (h & 4) << 2, (h & 8) << 1);
    } else if (FORMAT == F_Q6_K) {
        uint h = a.h[g >> 2] >> (8 * (g & 3));
        n |= uvec4((h & 3) << 4, (h & 12) << 2, h & 48, (h >> 2) & 48);
    }
    return vec4(small(n.x), small(n.y), small(n.z), small(n.w));
}

// Elements k .. k + 8 of a row, k a multiple of 8; zeros from n_in on.
void weights8(uint64_t row, uint k, uint n_in, out vec4 lo, out vec4 hi) {
    lo = vec4(0);
    hi = vec4(0);
    if (k >= n_in) return;
    if (FORMAT == F_F32) {
        // Rows are padded to 16 bytes, not to 32.
        lo = uintBitsToFloat(LDU4(row + 4 * uint64_t(k)));
        if (k + 4 < n_in) hi = uintBitsToFloat(LDU4(row + 4 * uint64_t(k) + 16));
        return;
    }
    uint u = k / UNIT;
    uint g = (k % UNIT) / 4;
    Unit a = load_unit(row, u, n_in);
    lo = codes(a, g);
    hi = codes(a, g + 1);
    if (IS_PLAIN) return;
    uint half_unit = HAS_HALVES ? g / 4 : 0;
    lo *= a.s[half_unit];
    hi *= a.s[half_unit];
    if (HAS_MIN) {
        lo += a.m[half_unit];
        hi += a.m[half_unit];
    }
}
