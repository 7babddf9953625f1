#version 460
// The weighted sum of what a row's experts made.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant) uniform Push {
    uint64_t x;
    uint64_t weights;
    uint64_t y;
    uint64_t residual;
    uint n_rows;
    uint m;
    uint k;
} p;

void main() {
    uint64_t n = uint64_t(p.m) * p.n_rows;
    uint64_t step = uint64_t(gl_NumWorkGroups.x) * 256;
    for (uint64_t i = gl_GlobalInvocationID.x; i < n; i += step) {
        uint col = uint(i % p.m);
        uint64_t row = i / p.m;
        uint64_t x = p.x + 4 * (row * p.k * p.m + col);
        uint64_t weights = p.weights + 4 * row * p.k;
        float sum = 0;
        for (uint j = 0; j < p.k; j++) sum = fma(LDF(weights + 4 * j), LDF(x + 4 * uint64_t(j) * p.m), sum);
        if (p.residual != 0) sum += LDF(p.residual + 4 * i);
        LDF(p.y + 4 * i) = sum;
    }
}
