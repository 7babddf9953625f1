#version 460
// RMS norm, layer norm and norm by length over groups of n elements, one workgroup a group; RESIDUAL adds another value to the result.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x_id = 20) in;
layout(constant_id = 1) const uint KIND = 0;
layout(constant_id = 20) const uint THREADS = 256;

const uint LAYER = 1;
const uint LENGTH = 2;

layout(push_constant) uniform Push {
    uint64_t x;
    uint64_t weight;
    uint64_t bias;
    uint64_t y;
    uint64_t residual;
    uint n;
    uint n_groups;
    float eps;
} p;

shared float sums[128];

float total(float v) {
    v = subgroupAdd(v);
    barrier();
    if (subgroupElect()) sums[gl_SubgroupID] = v;
    barrier();
    float sum = 0;
    for (uint i = 0; i < gl_NumSubgroups; i++) sum += sums[i];
    return sum;
}

void main() {
    uint tid = gl_LocalInvocationID.x;
    uint group = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (group >= p.n_groups) return;
    uint64_t at = 4 * uint64_t(group) * p.n;
    float mean = 0;
    if (KIND == LAYER) {
        float sum = 0;
        for (uint i = tid; i < p.n; i += THREADS) sum += LDF(p.x + at + 4 * uint64_t(i));
        mean = total(sum) / float(p.n);
    }
    float squares = 0;
    for (uint i = tid; i < p.n; i += THREADS) {
        float x = LDF(p.x + at + 4 * uint64_t(i)) - mean;
        squares += x * x;
    }
    squares = total(squares);
    float scale = 1.0 / sqrt((KIND == LENGTH ? squares : squares / float(p.n)) + p.eps);
    for (uint i = tid; i < p.n; i += THREADS) {
        uint64_t e = 4 * uint64_t(i);
        float y = (LDF(p.x + at + e) - mean) * scale;
        if (p.weight != 0) y *= LDF(p.weight + e);
        if (p.bias != 0) y += LDF(p.bias + e);
        if (p.residual != 0) y += LDF(p.residual + at + e);
        LDF(p.y + at + e) = y;
    }
}
