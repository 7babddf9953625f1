#version 460
// The experts of a row of logits and their weights, one workgroup a row. The greatest score below the last choice is looked for k times: k and the
// number of experts are small, and a workgroup is one subgroup where the device has them fixed.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "rank.glsl"

layout(local_size_x_id = 20) in;
layout(constant_id = 1) const uint GATING = 0;
layout(constant_id = 20) const uint THREADS = 32;
layout(constant_id = 21) const uint SUBGROUPS = 8;

const uint SOFTMAX = 0;
const uint SIGMOID = 1;
const uint SOFTMAX_SELECTED = 2;

layout(push_constant) uniform Push {
    uint64_t logits;
    uint64_t bias;
    uint64_t ids;
    uint64_t weights;
    uint n;
    uint n_rows;
    uint k;
    uint normalise;
    float scale;
} p;

shared float floats[SUBGROUPS];
shared uvec2 picks[SUBGROUPS];

float greatest(float v) {
    v = subgroupMax(v);
    barrier();
    if (subgroupElect()) floats[gl_SubgroupID] = v;
    barrier();
    for (uint i = 0; i < gl_NumSubgroups; i++) v = max(v, floats[i]);
    return v;
}

float total(float v) {
    v = subgroupAdd(v);
    barrier();
    if (subgroupElect()) floats[gl_SubgroupID] = v;
    barrier();
    float sum = 0;
    for (uint i = 0; i < gl_NumSubgroups; i++) sum += floats[i];
    return sum;
}

// The greatest key, and of equals the least index.
uvec2 first(uvec2 v) {
    uint key = subgroupMax(v.x);
    v = uvec2(key, subgroupMin(v.x == key ? v.y : 0xffffffffu));
    barrier();
    if (subgroupElect()) picks[gl_SubgroupID] = v;
    barrier();
    for (uint i = 0; i < gl_NumSubgroups; i++) {
        uvec2 other = picks[i];
        if (other.x > v.x || (other.x == v.x && other.y < v.y)) v = other;
    }
    return v;
}

// What a logit is worth, before it is divided by the sum.
float worth(float x, float most) {
    if (GATING == SOFTMAX) return exp(x - most);
    if (GATING == SIGMOID) {
        // Close to 1 a difference keeps scores apart that a quotient makes equal.
        float e = exp(-abs(x));
        float rest = e / (1.0 + e);
        return x < 0 ? rest : 1.0 - rest;
    }
    return x;
}

void main() {
    uint tid = gl_LocalInvocationID.x;
    for (uint row = gl_WorkGroupID.x; row < p.n_rows; row += gl_NumWorkGroups.x) {
        uint64_t logits = p.logits + 4 * uint64_t(row) * p.n;
        uint64_t to = 4 * uint64_t(row) * p.k;
        float most = 0;
        float whole = 1;
        if (GATING == SOFTMAX) {
            most = -uintBitsToFloat(0x7f800000u);
            for (uint i = tid; i < p.n; i += THREADS) most = max(most, LDF(logits + 4 * i));
            most = greatest(most);
            float sum = 0;
            for (uint i = tid; i < p.n; i += THREADS) sum += exp(LDF(logits + 4 * i) - most);
            whole = total(sum);
        }
        uvec2 last = uvec2(0xffffffffu, 0);
        float sum = 0;
        float top = 0;
        for (uint j = 0; j < p.k; j++) {
            uvec2 best = uvec2(0, 0xffffffffu);
            for (uint i = tid; i < p.n; i += THREADS) {
                float score = worth(LDF(logits + 4 * i), most) / whole;
                if (p.bias != 0) score += LDF(p.bias + 4 * i);
                uint key = order(score);
                bool is_left = key < last.x || (key == last.x && i > last.y);
                if (is_left && (key > best.x || best.y == 0xffffffffu)) best = uvec2(key, i);
            }
            last = first(best);
            float weight = worth(LDF(logits + 4 * min(last.y, p.n - 1)), most) / whole;
            if (GATING == SOFTMAX_SELECTED) {
                // With a bias the first choice need not have the greatest logit.
                top = j == 0 ? weight : max(top, weight);
            } else {
                sum += weight;
            }
            if (tid == j % THREADS) {
                LDI(p.ids + to + 4 * j) = int(min(last.y, p.n - 1));
                LDF(p.weights + to + 4 * j) = weight;
            }
        }
        // Each invocation reads only what it wrote itself.
        float share = p.normalise != 0 ? max(sum, 1e-20) : 1.0;
        if (GATING == SOFTMAX_SELECTED) {
            float part = 0;
            for (uint j = tid; j < p.k; j += THREADS) part += exp(LDF(p.weights + to + 4 * j) - top);
            share = total(part);
        }
        for (uint j = tid; j < p.k; j += THREADS) {
            float weight = LDF(p.weights + to + 4 * j);
            if (GATING == SOFTMAX_SELECTED) weight = exp(weight - top);
            LDF(p.weights + to + 4 * j) = weight / share * p.scale;
        }
    }
}
