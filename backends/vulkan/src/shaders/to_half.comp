#version 460
// Rows of activations as f16 for cooperative matrices, each scaled by a power of two so that nothing overflows and little is lost to
// subnormals; the reciprocal of the scale goes beside them. One workgroup a row; rows are padded with zeros to the stride.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant) uniform Push {
    uint64_t x;
    uint64_t y;
    uint64_t scales;
    uint n;
    uint x_stride;
    uint y_stride;
    uint n_rows;
} p;

shared float most[64];

void main() {
    uint tid = gl_LocalInvocationID.x;
    uint row = gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x;
    if (row >= p.n_rows) return;
    uint64_t x = p.x + 4 * uint64_t(row) * p.x_stride;
    uint64_t y = p.y + 2 * uint64_t(row) * p.y_stride;
    float m = 0;
    for (uint i = tid; i < p.n; i += 256) m = max(m, abs(LDF(x + 4 * i)));
    m = subgroupMax(m);
    if (subgroupElect()) most[gl_SubgroupID] = m;
    barrier();
    for (uint i = 0; i < gl_NumSubgroups; i++) m = max(m, most[i]);
    // The greatest element becomes 512 to 1024.
    int e = m > 0 && m < 1.0e38 ? clamp(9 - int(floor(log2(m))), -100, 100) : 0;
    float scale = uintBitsToFloat(uint(127 + e) << 23);
    if (tid == 0) LDF(p.scales + 4 * uint64_t(row)) = uintBitsToFloat(uint(127 - e) << 23);
    for (uint i = 2 * tid; i < p.y_stride; i += 512) {
        vec2 v = vec2(0);
        if (i < p.n) v.x = LDF(x + 4 * i) * scale;
        if (i + 1 < p.n) v.y = LDF(x + 4 * i + 4) * scale;
        LDU(y + 2 * i) = packHalf2x16(v);
    }
}
