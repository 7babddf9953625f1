#version 460
// Products of few rows of activations: one workgroup for ROWS rows of the weight, its invocations share the row's elements. Codes are
// multiplied as they are and scaled once a unit, so that a weight costs few operations.
//
// PAIR: rows of two weights, gate and up, and their gated product. NORM: x is normalised on the way: every workgroup reads all of x
// anyway, so the sum of squares costs one product an element and saves a dispatch.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "formats.glsl"

layout(local_size_x_id = 20) in;
layout(constant_id = 1) const uint ROWS = 2;
layout(constant_id = 2) const uint COLS = 1;
layout(constant_id = 3) const uint PAIR = 0;
layout(constant_id = 4) const uint TAIL = 0;
layout(constant_id = 5) const uint NORM = 0;
layout(constant_id = 20) const uint THREADS = 128;
layout(constant_id = 21) const uint SUBGROUPS = 16;

layout(push_constant) uniform Push {
    uint64_t w;
    uint64_t w2;
    uint64_t x;
    uint64_t y;
    uint64_t bias;
    uint64_t residual;
    uint64_t norm;
    uint n_in;
    uint n_rows;
    uint row_bytes;
    uint x_stride;
    uint y_stride;
    uint n_cols;
    uint act;
    float eps;
    uint64_t ids;
    uint64_t groups;
    uint64_t slots;
    uint first;
    uint n_tile;
    uint n_expert;
    uint sharing;
} p;

#include "experts.glsl"

const uint R = ROWS * (PAIR + 1);
const uint SUMS = R * COLS + (NORM == 1 ? COLS : 0);
shared float sums[SUMS * SUBGROUPS];

vec4 load_x(uint64_t row, uint e) {
    if (TAIL == 0) return LDF4(row + 4 * e);
    vec4 x = vec4(0);
    [[unroll]] for (uint i = 0; i < 4; i++) {
        if (e + i < p.n_in) x[i] = LDF(row + 4 * (e + i));
    }
    return x;
}

void main() {
    uint tid = gl_LocalInvocationID.x;
    uint row0 = (gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x) * ROWS;
    Share s = share(gl_WorkGroupID.z, COLS);
    if (row0 >= s.end || row0 + ROWS <= s.begin) return;
    if (FORMAT == F_LUT) {
        init_lut(tid);
        barrier();
    }
    uint64_t rows[R];
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        uint64_t at = (s.skip + clamp(row0 + r, s.begin, s.end - 1)) * p.row_bytes;
        rows[r] = p.w + at;
        if (PAIR == 1) rows[r + ROWS * PAIR] = p.w2 + at;
    }
    uint64_t xs[COLS];
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        uint slot = slot_of(min(s.col0 + c, s.n_cols - 1));
        xs[c] = p.x + 4 * uint64_t(row_of(slot)) * p.x_stride;
    }
    float acc[R][COLS];
    float squares[COLS];
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        squares[c] = 0;
        [[unroll]] for (uint r = 0; r < R; r++) acc[r][c] = 0;
    }
    uint n_units = (p.n_in + UNIT - 1) / UNIT;
    for (uint u = tid; u < n_units; u += THREADS) {
        Unit a[R];
        [[unroll]] for (uint r = 0; r < R; r++) a[r] = load_unit(rows[r], u, p.n_in);
        float part[R][COLS];
        float total[COLS];
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            total[c] = 0;
            [[unroll]] for (uint r = 0; r < R; r++) part[r][c] = 0;
        }
        [[unroll]] for (uint g = 0; g < GROUPS; g++) {
            if (HAS_HALVES && g == 4) {
                [[unroll]] for (uint c = 0; c < COLS; c++) {
                    [[unroll]] for (uint r = 0; r < R; r++) {
                        acc[r][c] += a[r].s.x * part[r][c];
                        if (HAS_MIN) acc[r][c] += a[r].m.x * total[c];
                        part[r][c] = 0;
                    }
                    total[c] = 0;
                }
            }
            vec4 w[R];
            [[unroll]] for (uint r = 0; r < R; r++) w[r] = codes(a[r], g);
            uint e = u * UNIT + 4 * g;
            vec4 scale = vec4(1);
            if (NORM == 1) scale = LDF4(p.norm + 4 * e);
            [[unroll]] for (uint c = 0; c < COLS; c++) {
                vec4 x = load_x(xs[c], e);
                if (NORM == 1) {
                    squares[c] += dot(x, x);
                    x *= scale;
                }
                if (HAS_MIN) total[c] += (x.x + x.y) + (x.z + x.w);
                [[unroll]] for (uint r = 0; r < R; r++) {
                    part[r][c] = fma(w[r].x, x.x, fma(w[r].y, x.y, fma(w[r].z, x.z, fma(w[r].w, x.w, part[r][c]))));
                }
            }
        }
        [[unroll]] for (uint c = 0; c < COLS; c++) {
            [[unroll]] for (uint r = 0; r < R; r++) {
                acc[r][c] += IS_PLAIN ? part[r][c] : a[r].s.y * part[r][c];
                if (HAS_MIN) acc[r][c] += a[r].m.y * total[c];
            }
        }
    }
    [[unroll]] for (uint c = 0; c < COLS; c++) {
        [[unroll]] for (uint r = 0; r < R; r++) {
            float sum = subgroupAdd(acc[r][c]);
            if (subgroupElect()) sums[(r * COLS + c) * SUBGROUPS + gl_SubgroupID] = sum;
        }
        if (NORM == 1) {
            float sum = subgroupAdd(squares[c]);
            if (subgroupElect()) sums[(R * COLS + c) * SUBGROUPS + gl_SubgroupID] = sum;
        }
    }
    barrier();
    for (uint i = tid; i < ROWS * COLS; i += THREADS) {
        uint r = i / COLS;
        uint c = i % COLS;
        uint row = row0 + r;
        uint col = s.col0 + c;
        if (row < s.begin || row >= s.end || col >= s.n_cols) continue;
        float y = 0;
        float y2 = 0;
        float square = 0;
        for (uint g = 0; g < gl_NumSubgroups; g++) {
            y += sums[(r * COLS + c) * SUBGROUPS + g];
            if (PAIR == 1) y2 += sums[((r + ROWS * PAIR) * COLS + c) * SUBGROUPS + g];
            if (NORM == 1) square += sums[(R * COLS + c) * SUBGROUPS + g];
        }
        if (NORM == 1) {
            float scale = 1.0 / sqrt(square / float(p.n_in) + p.eps);
            y *= scale;
            y2 *= scale;
        }
        if (PAIR == 1) y = activate(y, p.act) * y2;
        if (p.bias != 0) y += LDF(p.bias + 4 * (s.skip + row));
        uint64_t at = 4 * (uint64_t(slot_of(col)) * p.y_stride + row);
        if (p.residual != 0) y += LDF(p.residual + at);
        LDF(p.y + at) = y;
    }
}
