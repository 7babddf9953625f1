#version 460
// Turns pairs of elements of each head; the rest of a head is copied. One invocation a pair or a copied element.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "turn.glsl"

layout(local_size_x = 64) in;
layout(constant_id = 1) const uint IS_NEOX = 0;

layout(push_constant) uniform Push {
    uint64_t x;
    uint64_t y;
    uint64_t positions;
    uint64_t table;
    uint head_dim;
    uint n_rot;
    uint n_heads;
    uint n_rows;
    float magnitude;
} p;

void main() {
    uint pairs = p.n_rot / 2;
    uint items = pairs + (p.head_dim - p.n_rot);
    uint64_t n = uint64_t(items) * p.n_heads * p.n_rows;
    uint64_t step = uint64_t(gl_NumWorkGroups.x) * 64;
    for (uint64_t i = gl_GlobalInvocationID.x; i < n; i += step) {
        uint item = uint(i % items);
        uint64_t head = i / items;
        uint64_t at = 4 * head * p.head_dim;
        if (item >= pairs) {
            uint64_t e = at + 4 * (p.n_rot + item - pairs);
            LDF(p.y + e) = LDF(p.x + e);
            continue;
        }
        uint row = uint(head / p.n_heads);
        int pos = LDI(p.positions + 4 * uint64_t(row));
        vec2 cs = cos_sin(LDL(p.table + 8 * item) * uint64_t(int64_t(pos))) * p.magnitude;
        uint64_t e0 = at + 4 * (IS_NEOX == 1 ? item : 2 * item);
        uint64_t e1 = e0 + 4 * (IS_NEOX == 1 ? pairs : 1);
        float a = LDF(p.x + e0);
        float b = LDF(p.x + e1);
        LDF(p.y + e0) = a * cs.x - b * cs.y;
        LDF(p.y + e1) = a * cs.y + b * cs.x;
    }
}
