#version 460
// The gated delta rule. A workgroup has some rows of one head's state; LANES neighbouring invocations share a row and keep it in registers over all tokens
// of the sequence. Keys and queries go through shared memory, TOKENS at a time.
//
// With S the state before a token, y = scale (decay S + d k^T) q is computed as scale (decay (S q) + d (k q)), d = beta (v - decay (S k)): both sums over S
// are taken at once, so that a token waits for one reduction and not for two.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"

layout(local_size_x_id = 20) in;
layout(constant_id = 1) const uint DIM_K = 128;
layout(constant_id = 2) const uint DIM_V = 128;
layout(constant_id = 3) const uint LANES = 8;
layout(constant_id = 4) const uint TOKENS = 16;
layout(constant_id = 5) const uint IS_TILED = 0;
layout(constant_id = 20) const uint THREADS = 256;

layout(push_constant) uniform Push {
    uint64_t q;
    uint64_t k;
    uint64_t v;
    uint64_t g;
    uint64_t beta;
    uint64_t y;
    uint64_t params;
    uint states;
    uint layer;
    uint n_layers;
    uint n_head_k;
    uint n_head_v;
    float scale;
} p;

const uint ROWS = THREADS / LANES;
const uint ROW_GROUPS = (DIM_V + ROWS - 1) / ROWS;
// Elements of a row that an invocation has, LANES apart.
const uint EACH = (DIM_K + LANES - 1) / LANES;

shared float keys[TOKENS * DIM_K];
shared float queries[TOKENS * DIM_K];
shared float values[TOKENS * ROWS];
shared vec2 gates[TOKENS];
// k q of each token.
shared float products[TOKENS];

float row_sum(float v) {
    [[unroll]] for (uint o = LANES / 2; o > 0; o /= 2) v += subgroupShuffleXor(v, o);
    return v;
}

void main() {
    uint tid = gl_LocalInvocationID.x;
    uint lane = tid % LANES;
    uint line = tid / LANES;
    uint head = gl_WorkGroupID.x / ROW_GROUPS;
    uint row0 = gl_WorkGroupID.x % ROW_GROUPS * ROWS;
    uint row = row0 + line;
    uint head_k = IS_TILED == 1 ? head % p.n_head_k : head / (p.n_head_v / p.n_head_k);
    Span s = span_of(p.params, p.states, p.layer, p.n_layers, gl_WorkGroupID.y);
    uint64_t record = s.record + 4 * (uint64_t(head) * DIM_V + row) * DIM_K;
    bool is_row = row < DIM_V;
    float state[EACH];
    [[unroll]] for (uint i = 0; i < EACH; i++) {
        uint e = lane + LANES * i;
        state[i] = is_row && e < DIM_K && !s.begins ? LDF(record + 4 * e) : 0.0;
    }
    for (uint t0 = 0; t0 < s.n; t0 += TOKENS) {
        uint n = min(TOKENS, s.n - t0);
        barrier();
        for (uint i = tid; i < n * DIM_K; i += THREADS) {
            uint64_t token = uint64_t(s.first) + t0 + i / DIM_K;
            uint64_t at = 4 * ((token * p.n_head_k + head_k) * DIM_K + i % DIM_K);
            keys[i] = LDF(p.k + at);
            queries[i] = LDF(p.q + at);
        }
        for (uint i = tid; i < n * ROWS; i += THREADS) {
            uint64_t token = uint64_t(s.first) + t0 + i / ROWS;
            uint r = min(row0 + i % ROWS, DIM_V - 1);
            values[i] = LDF(p.v + 4 * ((token * p.n_head_v + head) * DIM_V + r));
        }
        for (uint i = tid; i < n; i += THREADS) {
            uint64_t at = 4 * ((uint64_t(s.first) + t0 + i) * p.n_head_v + head);
            gates[i] = vec2(exp(LDF(p.g + at)), LDF(p.beta + at));
        }
        barrier();
        for (uint t = line; t < TOKENS; t += ROWS) {
            float sum = 0;
            if (t < n) {
                for (uint e = lane; e < DIM_K; e += LANES) sum = fma(keys[t * DIM_K + e], queries[t * DIM_K + e], sum);
            }
            sum = row_sum(sum);
            if (lane == 0) products[t] = sum;
        }
        barrier();
        for (uint t = 0; t < n; t++) {
            float key[EACH];
            float sk = 0;
            float sq = 0;
            [[unroll]] for (uint i = 0; i < EACH; i++) {
                uint e = lane + LANES * i;
                bool is_inside = DIM_K % LANES == 0 || e < DIM_K;
                key[i] = is_inside ? keys[t * DIM_K + e] : 0.0;
                float query = is_inside ? queries[t * DIM_K + e] : 0.0;
                sk = fma(state[i], key[i], sk);
                sq = fma(state[i], query, sq);
            }
            sk = row_sum(sk);
            sq = row_sum(sq);
            vec2 gate = gates[t];
            float d = gate.y * (values[t * ROWS + line] - gate.x * sk);
            [[unroll]] for (uint i = 0; i < EACH; i++) state[i] = fma(d, key[i], gate.x * state[i]);
            if (lane == 0 && is_row) {
                uint64_t token = uint64_t(s.first) + t0 + t;
                LDF(p.y + 4 * ((token * p.n_head_v + head) * DIM_V + row)) = p.scale * fma(d, products[t], gate.x * sq);
            }
        }
    }
    [[unroll]] for (uint i = 0; i < EACH; i++) {
        uint e = lane + LANES * i;
        if (is_row && e < DIM_K) LDF(record + 4 * e) = state[i];
    }
}
