#version 460
// Index of the greatest element, one workgroup a row.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "rank.glsl"

layout(local_size_x = 512) in;

layout(push_constant) uniform Push {
    uint64_t x;
    uint64_t y;
    uint n;
    uint n_rows;
} p;

shared uint keys[512];
shared uint ids[512];

void main() {
    uint tid = gl_LocalInvocationID.x;
    for (uint row = gl_WorkGroupID.x; row < p.n_rows; row += gl_NumWorkGroups.x) {
        uint best = 0;
        uint at = 0;
        for (uint i = tid; i < p.n; i += 512) {
            uint key = order(LDF(p.x + 4 * (uint64_t(row) * p.n + i)));
            if (key > best) {
                best = key;
                at = i;
            }
        }
        barrier();
        keys[tid] = best;
        ids[tid] = at;
        barrier();
        for (uint half_n = 256; half_n > 0; half_n /= 2) {
            if (tid < half_n) {
                uint k = keys[tid + half_n];
                uint i = ids[tid + half_n];
                if (k > keys[tid] || (k == keys[tid] && i < ids[tid])) {
                    keys[tid] = k;
                    ids[tid] = i;
                }
            }
            barrier();
        }
        if (tid == 0) LDI(p.y + 4 * uint64_t(row)) = int(ids[0]);
    }
}
