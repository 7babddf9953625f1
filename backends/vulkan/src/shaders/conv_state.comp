#version 460
// Causal convolution over time, each column by itself: an invocation has a column of a sequence and a stretch of its tokens, and keeps what the kernel
// spans in registers. The first stretch alone reads the record, and writes it: what the record shall hold lies in the run's rows when there are
// more stretches than one, since a stretch is no shorter than the kernel.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "state.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 1) const uint KERNEL = 4;
layout(constant_id = 2) const uint W_TYPE = 0;
layout(constant_id = 3) const uint STRETCH = 32;

layout(push_constant) uniform Push {
    uint64_t x;
    uint64_t w;
    uint64_t bias;
    uint64_t y;
    uint64_t params;
    uint states;
    uint layer;
    uint n_layers;
    uint m;
    // Columns whose kernels lie in this tile.
    uint first;
    uint n_tile;
} p;

const uint BEFORE = KERNEL - 1;

float weight(uint i) {
    if (W_TYPE == 0) return LDF(p.w + 4 * uint64_t(i));
    uint bits = LDH(p.w + 2 * uint64_t(i));
    return W_TYPE == 1 ? unpackHalf2x16(bits).x : uintBitsToFloat(bits << 16);
}

void main() {
    uint col = gl_GlobalInvocationID.x;
    if (col < p.first || col - p.first >= p.n_tile) return;
    Span s = span_of(p.params, p.states, p.layer, p.n_layers, gl_WorkGroupID.y);
    uint begin = gl_WorkGroupID.z * STRETCH;
    if (begin >= s.n) return;
    uint end = min(s.n, begin + STRETCH);
    uint64_t x = p.x + 4 * (uint64_t(s.first) * p.m + col);
    uint64_t y = p.y + 4 * (uint64_t(s.first) * p.m + col);
    uint64_t record = s.record + 4 * uint64_t(col);
    uint64_t row = 4 * uint64_t(p.m);
    float w[KERNEL];
    [[unroll]] for (uint j = 0; j < KERNEL; j++) w[j] = weight((col - p.first) * KERNEL + j);
    float bias = p.bias != 0 ? LDF(p.bias + 4 * uint64_t(col)) : 0.0;
    float window[KERNEL];
    window[0] = 0;
    [[unroll]] for (uint j = 0; j < BEFORE; j++) {
        if (begin > 0) window[j + 1] = LDF(x + row * (begin - BEFORE + j));
        else window[j + 1] = s.begins ? 0.0 : LDF(record + row * j);
    }
    for (uint t = begin; t < end; t++) {
        [[unroll]] for (uint j = 0; j < BEFORE; j++) window[j] = window[j + 1];
        window[BEFORE] = LDF(x + row * t);
        float sum = bias;
        [[unroll]] for (uint j = 0; j < KERNEL; j++) sum = fma(w[j], window[j], sum);
        LDF(y + row * t) = sum;
    }
    if (begin > 0) return;
    [[unroll]] for (uint j = 0; j < BEFORE; j++) {
        LDF(record + row * j) = end == s.n ? window[j + 1] : LDF(x + row * (s.n - BEFORE + j));
    }
}
