#version 460
// Moves columns and rows of 4-byte elements: slice, concat and gather_rows. Rows beyond the source are read from its last.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant) uniform Push {
    uint64_t src;
    uint64_t dst;
    uint64_t rows;
    uint n_cols;
    uint n_rows;
    uint src_stride;
    uint src_begin;
    uint dst_stride;
    uint dst_begin;
    uint src_rows;
} p;

void main() {
    uint64_t n = uint64_t(p.n_cols) * p.n_rows;
    uint64_t step = uint64_t(gl_NumWorkGroups.x) * 256;
    for (uint64_t i = gl_GlobalInvocationID.x; i < n; i += step) {
        uint col = uint(i % p.n_cols);
        uint row = uint(i / p.n_cols);
        uint from = row;
        if (p.rows != 0) from = min(uint(max(LDI(p.rows + 4 * uint64_t(row)), 0)), p.src_rows - 1);
        uint v = LDU(p.src + 4 * (uint64_t(from) * p.src_stride + p.src_begin + col));
        LDU(p.dst + 4 * (uint64_t(row) * p.dst_stride + p.dst_begin + col)) = v;
    }
}
