#version 460
// Rows of a table by id, one tile of it at a time: rows that lie in another tile are left alone. Ids beyond the table give zeros, which
// the first tile writes.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "formats.glsl"

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
    uint64_t ids;
    uint64_t tile;
    uint64_t y;
    uint first_row;
    uint n_rows;
    uint n_rows_all;
    uint n_in;
    uint row_bytes;
    uint n_ids;
} p;

void main() {
    init_lut(gl_LocalInvocationID.x);
    barrier();
    uint pieces = (p.n_in + 7) / 8;
    uint64_t n = uint64_t(pieces) * p.n_ids;
    uint64_t step = uint64_t(gl_NumWorkGroups.x) * 64;
    for (uint64_t i = gl_GlobalInvocationID.x; i < n; i += step) {
        uint k = 8 * uint(i % pieces);
        uint row = uint(i / pieces);
        uint id = uint(LDI(p.ids + 4 * uint64_t(row)));
        bool is_nowhere = id >= p.n_rows_all && p.first_row == 0;
        if (!is_nowhere && (id < p.first_row || id - p.first_row >= p.n_rows)) continue;
        vec4 lo = vec4(0);
        vec4 hi = vec4(0);
        if (!is_nowhere) weights8(p.tile + uint64_t(id - p.first_row) * p.row_bytes, k, p.n_in, lo, hi);
        uint64_t at = p.y + 4 * (uint64_t(row) * p.n_in + k);
        [[unroll]] for (uint e = 0; e < 4; e++) {
            if (k + e < p.n_in) LDF(at + 4 * e) = lo[e];
            if (k + 4 + e < p.n_in) LDF(at + 16 + 4 * e) = hi[e];
        }
    }
}
