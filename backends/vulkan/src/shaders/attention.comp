#version 460
// Attention over paged keys and values. A workgroup has a few tokens of one sequence and the query heads that share one head of keys
// (at most 16 pairs, "rows"), and goes over a range of positions: KEYS keys at a time are decoded into shared memory, scored by all
// rows, and their values added under a running maximum. With several ranges ("splits") the sums are left for attention_combine.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "kv.glsl"

const uint THREADS = 128;
layout(local_size_x = 128) in;
layout(constant_id = 1) const uint K_TYPE = 1;
layout(constant_id = 2) const uint V_TYPE = 1;
layout(constant_id = 3) const uint DK = 64;
layout(constant_id = 4) const uint DV = 64;
layout(constant_id = 5) const uint HEADS = 1;
layout(constant_id = 6) const uint TOKENS = 1;
layout(constant_id = 7) const uint KEYS = 32;
layout(constant_id = 8) const uint CLUSTER = 8;

const uint T_F32 = 0;
const uint T_F16 = 1;
const uint T_BF16 = 2;
const uint T_Q8_0 = 3;

layout(push_constant) uniform Push {
    uint64_t q;
    uint64_t y;
    uint64_t parts;
    uint64_t params;
    uint64_t sinks;
    uint kind;
    uint group;
    uint layer;
    uint n_head;
    uint n_head_kv;
    uint window;
    float scale;
    float softcap;
} p;

const uint ROWS = HEADS * TOKENS;
const uint DK8 = (DK + 7) / 8;
const uint DV8 = (DV + 7) / 8;
const uint K_STRIDE = 2 * DK8 + 1;
const uint ROW_GROUPS = (ROWS + 3) / 4;
const uint KEY_GROUPS = THREADS / DV8 / ROW_GROUPS;
const uint SUMS = 4 * ROW_GROUPS * 2 * DV8;
const uint K_SIZE = KEYS * K_STRIDE > SUMS ? KEYS * K_STRIDE : SUMS;
const uint SCORERS = THREADS / KEYS;
const uint SCORES = (ROWS + SCORERS - 1) / SCORERS;
const uint CLUSTERS = KEYS / CLUSTER;
const float LEAST = -3.0e38;

shared vec4 sq[ROWS * 2 * DK8];
shared vec4 sk[K_SIZE];
shared float sp[ROWS * KEYS];
shared float s_alpha[ROWS];
shared float s_max[ROWS];
shared float s_cluster[ROWS * CLUSTERS];
shared uint64_t k_at[2 * KEYS];
shared uint64_t v_at[2 * KEYS];

uint row_bytes(uint type, uint n) {
    return type == T_F32 ? 4 * n : (type <= T_BF16 ? 2 * n : (type == T_Q8_0 ? n / 32 * 34 : n / 32 * 18));
}

// Elements e .. e + 8 of a stored row of n; zeros from n on.
void load8(uint64_t row, uint type, uint e, uint n, out vec4 lo, out vec4 hi) {
    lo = vec4(0);
    hi = vec4(0);
    if (type == T_F32) {
        if (n % 8 == 0) {
            lo = LDF4(row + 4 * e);
            hi = LDF4(row + 4 * e + 16);
            return;
        }
        [[unroll]] for (uint i = 0; i < 4; i++) {
            if (e + i < n) lo[i] = LDF(row + 4 * (e + i));
            if (e + 4 + i < n) hi[i] = LDF(row + 4 * (e + 4 + i));
        }
        return;
    }
    if (type <= T_BF16) {
        uvec4 w = uvec4(0);
        if (n % 8 == 0) {
            w = LDU4(row + 2 * e);
        } else {
            [[unroll]] for (uint i = 0; i < 8; i++) {
                if (e + i < n) w[i / 2] |= LDH(row + 2 * (e + i)) << (16 * (i & 1));
            }
        }
        if (type == T_F16) {
            lo = vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y));
            hi = vec4(unpackHalf2x16(w.z), unpackHalf2x16(w.w));
        } else {
            lo = uintBitsToFloat(uvec4(w.x << 16, w.x & 0xffff0000u, w.y << 16, w.y & 0xffff0000u));
            hi = uintBitsToFloat(uvec4(w.z << 16, w.z & 0xffff0000u, w.w << 16, w.w & 0xffff0000u));
        }
        return;
    }
    bool is_byte = type == T_Q8_0;
    uint64_t at = row + (is_byte ? 34 : 18) * (e / 32);
    float d = half_at(at);
    uint first = is_byte ? e % 32 : e % 16;
    uvec4 w;
    [[unroll]] for (uint i = 0; i < 4; i++) w[i] = LDH(at + 2 + first + 2 * i);
    if (is_byte) {
        ivec4 s = ivec4(w);
        lo = d * vec4(bitfieldExtract(s.x, 0, 8), bitfieldExtract(s.x, 8, 8), bitfieldExtract(s.y, 0, 8), bitfieldExtract(s.y, 8, 8));
        hi = d * vec4(bitfieldExtract(s.z, 0, 8), bitfieldExtract(s.z, 8, 8), bitfieldExtract(s.w, 0, 8), bitfieldExtract(s.w, 8, 8));
    } else {
        w >>= e % 32 < 16 ? 0 : 4;
        lo = d * (vec4(w.x & 15, (w.x >> 8) & 15, w.y & 15, (w.y >> 8) & 15) - 8.0);
        hi = d * (vec4(w.z & 15, (w.z >> 8) & 15, w.w & 15, (w.w >> 8) & 15) - 8.0);
    }
}

void main() {
    uint tid = gl_LocalInvocationID.x;
    uint kind = p.kind;
    uint at = word(p.params, kind + 3) + 4 * gl_WorkGroupID.x;
    uint seq = word(p.params, at);
    uint row0 = word(p.params, at + 1);
    uint n_tokens = word(p.params, at + 2);
    uint pos0 = word(p.params, at + 3);
    uint n_splits = word(p.params, kind + 7);
    uint split_len = word(p.params, kind + 8);
    uint chunks = p.n_head / p.n_head_kv / HEADS;
    uint head_kv = gl_WorkGroupID.y / chunks;
    uint head0 = gl_WorkGroupID.y * HEADS;

    uint end = pos0 + n_tokens;
    uint begin = p.window > 0 && pos0 + 1 > p.window ? pos0 + 1 - p.window : 0;
    begin += gl_WorkGroupID.z * split_len;
    end = min(end, begin + split_len);

    for (uint i = tid; i < ROWS * 2 * DK8; i += THREADS) {
        uint r = i / (2 * DK8);
        uint e = 4 * (i % (2 * DK8));
        uint token = r / HEADS;
        uint64_t from = p.q + 4 * ((uint64_t(row0 + token) * p.n_head + head0 + r % HEADS) * DK + e);
        vec4 q = vec4(0);
        if (token < n_tokens) {
            [[unroll]] for (uint j = 0; j < 4; j++) {
                if (e + j < DK) q[j] = LDF(from + 4 * j) * p.scale;
            }
        }
        sq[i] = q;
    }

    uint block_len = word(p.params, 4 * p.group);
    uint k_row = row_bytes(K_TYPE, DK);
    uint v_row = row_bytes(V_TYPE, DV);
    if (tid < KEYS && begin + tid < end) {
        Place place;
        uint in_block = kv_block(p.params, p.group, p.layer, seq, begin + tid, p.n_head_kv * k_row, p.n_head_kv * v_row, place);
        uint64_t line = uint64_t(head_kv) * block_len + in_block;
        k_at[tid] = place.k + line * k_row;
        v_at[tid] = place.v + line * v_row;
    }

    uint key = tid % KEYS;
    uint scorer = tid / KEYS;
    float row_max[SCORES];
    float row_sum[SCORES];
    [[unroll]] for (uint i = 0; i < SCORES; i++) {
        row_max[i] = LEAST;
        row_sum[i] = 0;
    }
    uint column = tid % DV8;
    uint row_group = tid / DV8 % ROW_GROUPS;
    uint key_group = tid / DV8 / ROW_GROUPS;
    vec4 lo[4];
    vec4 hi[4];
    [[unroll]] for (uint i = 0; i < 4; i++) {
        lo[i] = vec4(0);
        hi[i] = vec4(0);
    }
    barrier();

    uint side = 0;
    for (uint k0 = begin; k0 < end; k0 += KEYS) {
        for (uint i = tid; i < KEYS * DK8; i += THREADS) {
            uint line = i / DK8;
            uint e = 8 * (i % DK8);
            vec4 a = vec4(0);
            vec4 b = vec4(0);
            if (k0 + line < end) load8(k_at[side * KEYS + line], K_TYPE, e, DK, a, b);
            sk[line * K_STRIDE + e / 4] = a;
            sk[line * K_STRIDE + e / 4 + 1] = b;
        }
        // The addresses of the next keys, while these are on their way.
        uint next = k0 + KEYS + tid;
        bool has_next = tid < KEYS && next < end;
        Place ahead;
        if (has_next) {
            uint in_block = kv_block(p.params, p.group, p.layer, seq, next, p.n_head_kv * k_row, p.n_head_kv * v_row, ahead);
            uint64_t line = uint64_t(head_kv) * block_len + in_block;
            ahead.k += line * k_row;
            ahead.v += line * v_row;
        }
        barrier();
        // Only now: until here others may still add the values before these, whose addresses lie there.
        if (has_next) {
            k_at[(side ^ 1) * KEYS + tid] = ahead.k;
            v_at[(side ^ 1) * KEYS + tid] = ahead.v;
        }

        float score[SCORES];
        [[unroll]] for (uint i = 0; i < SCORES; i++) score[i] = 0;
        for (uint e = 0; e < 2 * DK8; e++) {
            vec4 k = sk[key * K_STRIDE + e];
            [[unroll]] for (uint i = 0; i < SCORES; i++) {
                uint r = min(scorer + i * SCORERS, ROWS - 1);
                vec4 q = sq[r * 2 * DK8 + e];
                score[i] = fma(k.x, q.x, fma(k.y, q.y, fma(k.z, q.z, fma(k.w, q.w, score[i]))));
            }
        }
        uint pos = k0 + key;
        bool is_seen[SCORES];
        float best[SCORES];
        [[unroll]] for (uint i = 0; i < SCORES; i++) {
            uint r = scorer + i * SCORERS;
            uint at_pos = pos0 + r / HEADS;
            is_seen[i] = pos < end && pos <= at_pos && (p.window == 0 || pos + p.window > at_pos);
            if (p.softcap != 0) score[i] = p.softcap * tanh_exact(score[i] / p.softcap);
            best[i] = is_seen[i] ? score[i] : LEAST;
            [[unroll]] for (uint o = CLUSTER / 2; o > 0; o /= 2) best[i] = max(best[i], subgroupShuffleXor(best[i], o));
        }
        if (CLUSTERS > 1) {
            [[unroll]] for (uint i = 0; i < SCORES; i++) {
                uint r = scorer + i * SCORERS;
                if (r < ROWS && key % CLUSTER == 0) s_cluster[r * CLUSTERS + key / CLUSTER] = best[i];
            }
            barrier();
            [[unroll]] for (uint i = 0; i < SCORES; i++) {
                uint r = min(scorer + i * SCORERS, ROWS - 1);
                [[unroll]] for (uint c = 0; c < CLUSTERS; c++) best[i] = max(best[i], s_cluster[r * CLUSTERS + c]);
            }
        }
        [[unroll]] for (uint i = 0; i < SCORES; i++) {
            uint r = scorer + i * SCORERS;
            float most = max(row_max[i], best[i]);
            float alpha = exp(row_max[i] - most);
            float weight = is_seen[i] ? exp(score[i] - most) : 0;
            row_max[i] = most;
            row_sum[i] = row_sum[i] * alpha + weight;
            if (r < ROWS) {
                sp[r * KEYS + key] = weight;
                if (key == 0) s_alpha[r] = alpha;
            }
        }
        barrier();

        if (key_group < KEY_GROUPS) {
            [[unroll]] for (uint i = 0; i < 4; i++) {
                float alpha = s_alpha[min(4 * row_group + i, ROWS - 1)];
                lo[i] *= alpha;
                hi[i] *= alpha;
            }
            for (uint j = key_group; j < KEYS; j += KEY_GROUPS) {
                if (k0 + j >= end) break;
                vec4 a, b;
                load8(v_at[side * KEYS + j], V_TYPE, 8 * column, DV, a, b);
                [[unroll]] for (uint i = 0; i < 4; i++) {
                    float weight = sp[min(4 * row_group + i, ROWS - 1) * KEYS + j];
                    lo[i] = fma(vec4(weight), a, lo[i]);
                    hi[i] = fma(vec4(weight), b, hi[i]);
                }
            }
        }
        side ^= 1;
    }

    // The sums of all key groups, and of all keys' weights.
    barrier();
    [[unroll]] for (uint i = 0; i < SCORES; i++) {
        uint r = scorer + i * SCORERS;
        if (r < ROWS) {
            sp[r * KEYS + key] = row_sum[i];
            if (key == 0) s_max[r] = row_max[i];
        }
    }
    for (uint g = 1; g < KEY_GROUPS; g++) {
        if (key_group == g) {
            [[unroll]] for (uint i = 0; i < 4; i++) {
                sk[((4 * row_group + i) * DV8 + column) * 2] = lo[i];
                sk[((4 * row_group + i) * DV8 + column) * 2 + 1] = hi[i];
            }
        }
        barrier();
        if (key_group == 0) {
            [[unroll]] for (uint i = 0; i < 4; i++) {
                lo[i] += sk[((4 * row_group + i) * DV8 + column) * 2];
                hi[i] += sk[((4 * row_group + i) * DV8 + column) * 2 + 1];
            }
        }
        barrier();
    }
    barrier();
    if (key_group != 0) return;
    [[unroll]] for (uint i = 0; i < 4; i++) {
        uint r = 4 * row_group + i;
        if (r >= ROWS || r / HEADS >= n_tokens) continue;
        uint head = head0 + r % HEADS;
        uint64_t row = uint64_t(row0 + r / HEADS) * p.n_head + head;
        float most = s_max[r];
        float sum = 0;
        for (uint j = 0; j < KEYS; j++) sum += sp[r * KEYS + j];
        uint64_t to;
        float scale = 1;
        if (n_splits == 1) {
            if (p.sinks != 0) {
                float sink = LDF(p.sinks + 4 * uint64_t(head));
                float top = max(most, sink);
                scale = exp(most - top);
                sum = sum * scale + exp(sink - top);
            }
            scale /= sum;
            to = p.y + 4 * row * DV;
        } else {
            to = p.parts + 4 * ((row * n_splits + gl_WorkGroupID.z) * (DV + 2));
            if (column == 0) {
                LDF(to + 4 * DV) = most;
                LDF(to + 4 * DV + 4) = sum;
            }
        }
        [[unroll]] for (uint e = 0; e < 4; e++) {
            if (8 * column + e < DV) LDF(to + 4 * (8 * column + e)) = lo[i][e] * scale;
            if (8 * column + 4 + e < DV) LDF(to + 4 * (8 * column + 4 + e)) = hi[i][e] * scale;
        }
    }
}
