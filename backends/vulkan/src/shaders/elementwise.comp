#version 460
// What treats every element alike. `b` is a matrix, or with BROADCAST one row of `row` elements.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 1) const uint OP = 0;
layout(constant_id = 2) const uint ACT = 0;
layout(constant_id = 3) const uint BROADCAST = 0;

const uint OP_ADD = 0;
const uint OP_MUL = 1;
const uint OP_SCALE = 2;
const uint OP_SOFTCAP = 3;
const uint OP_UNARY = 4;
const uint OP_GLU = 5;
const uint OP_GLU_CLAMPED = 6;

layout(push_constant) uniform Push {
    uint64_t a;
    uint64_t b;
    uint64_t y;
    uint64_t n;
    uint row;
    // Of a clamped gated unit: the steepness.
    float factor;
    float limit;
} p;

void main() {
    uint64_t step = uint64_t(gl_NumWorkGroups.x) * 256;
    for (uint64_t i = gl_GlobalInvocationID.x; i < p.n; i += step) {
        float a = LDF(p.a + 4 * i);
        float b = 0;
        if (OP == OP_ADD || OP == OP_MUL || OP == OP_GLU || OP == OP_GLU_CLAMPED) {
            uint64_t j = BROADCAST == 1 ? i % p.row : i;
            b = LDF(p.b + 4 * j);
        }
        float y;
        if (OP == OP_ADD) y = a + b;
        else if (OP == OP_MUL) y = a * b;
        else if (OP == OP_SCALE) y = a * p.factor;
        else if (OP == OP_SOFTCAP) y = p.factor * tanh_exact(a / p.factor);
        else if (OP == OP_UNARY) y = activate(a, ACT);
        else if (OP == OP_GLU_CLAMPED) {
            float gate = min(a, p.limit);
            y = gate * sigmoid(p.factor * gate) * (clamp(b, -p.limit, p.limit) + 1.0);
        } else y = activate(a, ACT) * b;
        LDF(p.y + 4 * i) = y;
    }
}
