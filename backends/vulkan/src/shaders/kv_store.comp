#version 460
// Stores keys and values at their positions. One invocation a piece of a head: 32 elements where the type has blocks, else 4 (or what
// is left). With ROPE the keys are turned on the way.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "kv.glsl"
#include "turn.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 1) const uint K_TYPE = 1;
layout(constant_id = 2) const uint V_TYPE = 1;
layout(constant_id = 3) const uint ROPE = 0;
layout(constant_id = 4) const uint IS_NEOX = 0;

const uint T_F32 = 0;
const uint T_F16 = 1;
const uint T_BF16 = 2;
const uint T_Q8_0 = 3;
const uint T_Q4_0 = 4;

layout(push_constant) uniform Push {
    uint64_t k;
    uint64_t v;
    uint64_t params;
    uint64_t positions;
    uint64_t table;
    uint tokens;
    uint group;
    uint layer;
    uint n_head_kv;
    uint dk;
    uint dv;
    uint n_tokens;
    uint n_rot;
    float magnitude;
} p;

uint row_bytes(uint type, uint n) {
    return type == T_F32 ? 4 * n : (type <= T_BF16 ? 2 * n : (type == T_Q8_0 ? n / 32 * 34 : n / 32 * 18));
}

uint piece(uint type) { return type >= T_Q8_0 ? 32 : 4; }

uint bf16(float x) {
    uint u = floatBitsToUint(x);
    // Round to nearest even; a NaN stays one.
    if ((u & 0x7fffffffu) > 0x7f800000u) return (u >> 16) | 64;
    return (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// Element e of a head at `x`; keys are turned by the token's position.
float element(uint64_t x, uint e, bool is_key, uint row) {
    if (ROPE == 0 || !is_key || e >= p.n_rot) return LDF(x + 4 * e);
    uint pairs = p.n_rot / 2;
    uint pair = IS_NEOX == 1 ? (e < pairs ? e : e - pairs) : e / 2;
    bool is_second = IS_NEOX == 1 ? e >= pairs : (e & 1) == 1;
    int pos = LDI(p.positions + 4 * uint64_t(row));
    vec2 cs = cos_sin(LDL(p.table + 8 * pair) * uint64_t(int64_t(pos))) * p.magnitude;
    uint e0 = IS_NEOX == 1 ? pair : 2 * pair;
    uint e1 = e0 + (IS_NEOX == 1 ? pairs : 1);
    float a = LDF(x + 4 * e0);
    float b = LDF(x + 4 * e1);
    return is_second ? a * cs.y + b * cs.x : a * cs.x - b * cs.y;
}

// Rounds half away from zero.
float round_away(float x) { return sign(x) * floor(abs(x) + 0.5); }

void store(uint64_t x, uint64_t to, uint type, uint e0, uint n, bool is_key, uint row) {
    if (type < T_Q8_0) {
        for (uint e = e0; e < min(e0 + 4, n); e++) {
            float f = element(x, e, is_key, row);
            if (type == T_F32) LDF(to + 4 * e) = f;
            else RefH(to + 2 * e).v = uint16_t(type == T_F16 ? packHalf2x16(vec2(f, 0)) : bf16(f));
        }
        return;
    }
    float f[32];
    float most = 0;
    float far = 0;
    for (uint i = 0; i < 32; i++) {
        f[i] = element(x, e0 + i, is_key, row);
        if (abs(f[i]) > most) {
            most = abs(f[i]);
            far = f[i];
        }
    }
    if (type == T_Q8_0) {
        float d = most / 127.0;
        float inverse = d != 0 ? 1.0 / d : 0;
        to += 34 * (e0 / 32);
        RefH(to).v = uint16_t(packHalf2x16(vec2(d, 0)));
        for (uint i = 0; i < 32; i += 2) {
            int a = int(round_away(f[i] * inverse));
            int b = int(round_away(f[i + 1] * inverse));
            RefH(to + 2 + i).v = uint16_t((a & 0xff) | ((b & 0xff) << 8));
        }
        return;
    }
    float d = far / -8.0;
    float inverse = d != 0 ? 1.0 / d : 0;
    to += 18 * (e0 / 32);
    RefH(to).v = uint16_t(packHalf2x16(vec2(d, 0)));
    for (uint i = 0; i < 16; i += 2) {
        uint packed = 0;
        for (uint j = 0; j < 2; j++) {
            uint low = uint(min(15, int(f[i + j] * inverse + 8.5)));
            uint high = uint(min(15, int(f[i + j + 16] * inverse + 8.5)));
            packed |= (low | (high << 4)) << (8 * j);
        }
        RefH(to + 2 + i).v = uint16_t(packed);
    }
}

void main() {
    uint k_pieces = (p.dk + piece(K_TYPE) - 1) / piece(K_TYPE);
    uint v_pieces = (p.dv + piece(V_TYPE) - 1) / piece(V_TYPE);
    uint per_head = k_pieces + v_pieces;
    uint64_t n = uint64_t(per_head) * p.n_head_kv * p.n_tokens;
    uint64_t step = uint64_t(gl_NumWorkGroups.x) * 64;
    uint k_row = row_bytes(K_TYPE, p.dk);
    uint v_row = row_bytes(V_TYPE, p.dv);
    for (uint64_t i = gl_GlobalInvocationID.x; i < n; i += step) {
        uint item = uint(i % per_head);
        uint head = uint(i / per_head % p.n_head_kv);
        uint row = uint(i / per_head / p.n_head_kv);
        uvec2 token = words2(p.params, p.tokens + 2 * row);
        Place place;
        uint at = kv_block(p.params, p.group, p.layer, token.x, token.y, p.n_head_kv * k_row, p.n_head_kv * v_row, place);
        uint block_len = word(p.params, 4 * p.group);
        uint64_t line = uint64_t(head) * block_len + at;
        uint64_t from = uint64_t(row) * p.n_head_kv + head;
        if (item < k_pieces) {
            store(p.k + 4 * from * p.dk, place.k + line * k_row, K_TYPE, item * piece(K_TYPE), p.dk, true, row);
        } else {
            store(p.v + 4 * from * p.dv, place.v + line * v_row, V_TYPE, (item - k_pieces) * piece(V_TYPE), p.dv, false, row);
        }
    }
}
