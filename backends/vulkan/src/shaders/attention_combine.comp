#version 460
// The results of an attention whose keys were split, from each split's greatest score, sum of weights, and weighted sum of values. One workgroup
// for a token and a query head.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 128) in;

layout(push_constant) uniform Push {
    uint64_t y;
    uint64_t parts;
    uint64_t params;
    uint64_t sinks;
    uint kind;
    uint n_head;
    uint dv;
} p;

const uint SPLITS_MAX = 256;
shared float weights[SPLITS_MAX];

void main() {
    uint tid = gl_LocalInvocationID.x;
    uint n_splits = min(LDU(p.params + 4 * uint64_t(p.kind + 7)), SPLITS_MAX);
    uint head = gl_WorkGroupID.y;
    uint64_t row = uint64_t(gl_WorkGroupID.x) * p.n_head + head;
    uint size = p.dv + 2;
    uint64_t from = p.parts + 4 * (row * n_splits * size);
    float sink = p.sinks != 0 ? LDF(p.sinks + 4 * uint64_t(head)) : -3.0e38;
    // Every invocation finds the same maximum; the sums are read once.
    float most = sink;
    for (uint s = 0; s < n_splits; s++) most = max(most, LDF(from + 4 * uint64_t(s * size + p.dv)));
    for (uint s = tid; s < n_splits; s += 128) {
        uint64_t at = from + 4 * uint64_t(s * size + p.dv);
        weights[s] = exp(LDF(at) - most);
    }
    barrier();
    float sum = p.sinks != 0 ? exp(sink - most) : 0;
    for (uint s = 0; s < n_splits; s++) sum += weights[s] * LDF(from + 4 * uint64_t(s * size + p.dv + 1));
    for (uint e = tid; e < p.dv; e += 128) {
        float y = 0;
        for (uint s = 0; s < n_splits; s++) y += weights[s] * LDF(from + 4 * uint64_t(s * size + e));
        LDF(p.y + 4 * (row * p.dv + e)) = y / sum;
    }
}
