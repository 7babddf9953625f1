#version 460
// Products of many rows of activations in f32: tiles of 64 weight rows by 64 tokens, 32 elements at a time through shared memory, 4 by 4 results
// an invocation. For devices without cooperative matrices, and for weights that f16 does not hold.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "formats.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 4) const uint TAIL = 0;

layout(push_constant) uniform Push {
    uint64_t w;
    uint64_t unused0;
    uint64_t x;
    uint64_t y;
    uint64_t bias;
    uint64_t residual;
    uint64_t unused1;
    uint n_in;
    uint n_rows;
    uint row_bytes;
    uint x_stride;
    uint y_stride;
    uint n_cols;
    uint unused2;
    uint unused3;
    uint64_t ids;
    uint64_t groups;
    uint64_t slots;
    uint first;
    uint n_tile;
    uint n_expert;
    uint sharing;
} p;

#include "experts.glsl"

const uint M = 64;
const uint K = 32;
const uint STRIDE = M + 4;
shared float sw[K * STRIDE];
shared float sx[K * STRIDE];

void main() {
    uint tid = gl_LocalInvocationID.x;
    uint row0 = gl_WorkGroupID.x * M;
    Share s = share(gl_WorkGroupID.y, M);
    if (row0 >= s.end || row0 + M <= s.begin) return;
    uint col0 = s.col0;
    if (FORMAT == F_LUT) {
        init_lut(tid);
        barrier();
    }
    // Loading: 8 elements of one row and of one token.
    uint line = tid / 4;
    uint k8 = 8 * (tid % 4);
    uint64_t w_row = p.w + (s.skip + clamp(row0 + line, s.begin, s.end - 1)) * p.row_bytes;
    uint64_t x_row = p.x + 4 * uint64_t(row_of(slot_of(min(col0 + line, s.n_cols - 1)))) * p.x_stride;
    // Computing.
    uint tr = 4 * (tid % 16);
    uint tc = 4 * (tid / 16);
    vec4 acc[4];
    [[unroll]] for (uint c = 0; c < 4; c++) acc[c] = vec4(0);
    for (uint k0 = 0; k0 < p.n_in; k0 += K) {
        uint k = k0 + k8;
        vec4 lo, hi;
        weights8(w_row, k, p.n_in, lo, hi);
        vec4 x_lo = vec4(0);
        vec4 x_hi = vec4(0);
        if (TAIL == 0) {
            if (k < p.n_in) {
                x_lo = LDF4(x_row + 4 * k);
                x_hi = LDF4(x_row + 4 * k + 16);
            }
        } else {
            [[unroll]] for (uint i = 0; i < 4; i++) {
                if (k + i < p.n_in) x_lo[i] = LDF(x_row + 4 * (k + i));
                if (k + 4 + i < p.n_in) x_hi[i] = LDF(x_row + 4 * (k + 4 + i));
            }
        }
        barrier();
        [[unroll]] for (uint i = 0; i < 4; i++) {
            sw[(k8 + i) * STRIDE + line] = lo[i];
            sw[(k8 + 4 + i) * STRIDE + line] = hi[i];
            sx[(k8 + i) * STRIDE + line] = x_lo[i];
            sx[(k8 + 4 + i) * STRIDE + line] = x_hi[i];
        }
        barrier();
        for (uint i = 0; i < K; i++) {
            uint at = i * STRIDE;
            vec4 w = vec4(sw[at + tr], sw[at + tr + 1], sw[at + tr + 2], sw[at + tr + 3]);
            [[unroll]] for (uint c = 0; c < 4; c++) acc[c] = fma(w, vec4(sx[at + tc + c]), acc[c]);
        }
    }
    [[unroll]] for (uint c = 0; c < 4; c++) {
        uint col = col0 + tc + c;
        if (col >= s.n_cols) continue;
        uint64_t y_row = uint64_t(slot_of(col)) * p.y_stride;
        [[unroll]] for (uint r = 0; r < 4; r++) {
            uint row = row0 + tr + r;
            if (row < s.begin || row >= s.end) continue;
            float y = acc[c][r];
            if (p.bias != 0) y += LDF(p.bias + 4 * (s.skip + row));
            uint64_t at = 4 * (y_row + row);
            if (p.residual != 0) y += LDF(p.residual + at);
            LDF(p.y + at) = y;
        }
    }
}
