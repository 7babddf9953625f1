#version 460
// Products of many rows of activations by cooperative matrices of 16x16x16, f16 into f32. A workgroup has TOKENS tokens by 128 rows of the
// weight, eight subgroups in two by four; 64 elements at a time go through shared memory. What comes next is fetched into registers, codes still
// packed, while the matrices are multiplied. Activations come as f16 with a scale for each token (to_half).
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_cooperative_matrix : require
#extension GL_KHR_memory_scope_semantics : require
#extension GL_EXT_shader_explicit_arithmetic_types_float16 : require
#include "common.glsl"
#include "formats.glsl"

layout(local_size_x = 256) in;
layout(constant_id = 1) const uint TOKENS = 128;

layout(push_constant) uniform Push {
    uint64_t w;
    uint64_t scales;
    uint64_t x;
    uint64_t y;
    uint64_t bias;
    uint64_t residual;
    uint64_t unused0;
    uint n_in;
    uint n_rows;
    uint row_bytes;
    uint x_stride;
    uint y_stride;
    uint n_cols;
    uint unused1;
    uint unused2;
    uint64_t ids;
    uint64_t groups;
    uint64_t slots;
    uint first;
    uint n_tile;
    uint n_expert;
    uint sharing;
} p;

#include "experts.glsl"

const uint ROWS = 128;
const uint K = 64;
// In 16 bytes: 64 elements and 8 that keep rows in different banks.
const uint STRIDE = 9;
const uint FT = TOKENS / 32;
const uint FR = 2;
const uint X_LOADS = TOKENS * 8 / 256;
const uint UNITS = 32 / UNIT;

shared uvec4 sx[TOKENS * STRIDE > 640 ? TOKENS * STRIDE : 640];
shared uvec4 sw[ROWS * STRIDE];

uvec4 halves(vec4 a, vec4 b) {
    return uvec4(packHalf2x16(a.xy), packHalf2x16(a.zw), packHalf2x16(b.xy), packHalf2x16(b.zw));
}

void main() {
    uint tid = gl_LocalInvocationID.x;
    uint row0 = gl_WorkGroupID.x * ROWS;
    Share s = share(gl_WorkGroupID.y, TOKENS);
    if (row0 >= s.end || row0 + ROWS <= s.begin) return;
    uint col0 = s.col0;
    uint warp = gl_SubgroupID;
    uint warp_t = (warp & 1) * (TOKENS / 2);
    uint warp_r = (warp >> 1) * 32;
    init_lut(tid);

    // Loading: 32 elements of one row of the weight, and 8 of a few tokens.
    uint line = tid / 2;
    uint k32 = 32 * (tid & 1);
    uint64_t w_row = p.w + (s.skip + clamp(row0 + line, s.begin, s.end - 1)) * p.row_bytes;
    uint64_t x_rows[X_LOADS];
    [[unroll]] for (uint i = 0; i < X_LOADS; i++) {
        uint token = row_of(slot_of(min(col0 + (tid + 256 * i) / 8, s.n_cols - 1)));
        x_rows[i] = p.x + 2 * (uint64_t(token) * p.x_stride + 8 * (tid % 8));
    }
    uvec4 x_next[X_LOADS];
    Unit w_next[UNITS];

    coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator> acc[FT * FR];
    [[unroll]] for (uint i = 0; i < FT * FR; i++) {
        acc[i] = coopmat<float, gl_ScopeSubgroup, 16, 16, gl_MatrixUseAccumulator>(0.0);
    }

    uint n_steps = (p.n_in + K - 1) / K;
    for (uint step = 0; step <= n_steps; step++) {
        if (step > 0) {
            barrier();
            [[unroll]] for (uint i = 0; i < X_LOADS; i++) {
                uint at = tid + 256 * i;
                sx[at / 8 * STRIDE + at % 8] = x_next[i];
            }
            [[unroll]] for (uint u = 0; u < UNITS; u++) {
                vec4 c[8];
                bool is_inside = (step - 1) * K + k32 + u * UNIT < p.n_in;
                [[unroll]] for (uint g = 0; g < GROUPS; g++) {
                    c[g] = codes(w_next[u], g);
                    uint h = HAS_HALVES ? g / 4 : 0;
                    if (!IS_PLAIN) c[g] *= w_next[u].s[h];
                    if (HAS_MIN) c[g] += w_next[u].m[h];
                    if (!is_inside) c[g] = vec4(0);
                }
                [[unroll]] for (uint g = 0; g + 1 < GROUPS; g += 2) {
                    sw[line * STRIDE + (k32 + u * UNIT + 4 * g) / 8] = halves(c[g], c[g + 1]);
                }
            }
            barrier();
        }
        if (step < n_steps) {
            uint k0 = step * K;
            [[unroll]] for (uint i = 0; i < X_LOADS; i++) {
                x_next[i] = LDU4(x_rows[i] + 2 * k0);
            }
            [[unroll]] for (uint u = 0; u < UNITS; u++) {
                uint k = min(k0 + k32 + u * UNIT, p.n_in - UNIT);
                w_next[u] = load_unit(w_row, k / UNIT, p.n_in);
            }
        }
        if (step > 0) {
            [[unroll]] for (uint k = 0; k < K / 16; k++) {
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseA> a[FT];
                coopmat<float16_t, gl_ScopeSubgroup, 16, 16, gl_MatrixUseB> b[FR];
                [[unroll]] for (uint i = 0; i < FT; i++) {
                    coopMatLoad(a[i], sx, (warp_t + 16 * i) * STRIDE + 2 * k, STRIDE, gl_CooperativeMatrixLayoutRowMajor);
                }
                [[unroll]] for (uint j = 0; j < FR; j++) {
                    coopMatLoad(b[j], sw, (warp_r + 16 * j) * STRIDE + 2 * k, STRIDE, gl_CooperativeMatrixLayoutColumnMajor);
                }
                [[unroll]] for (uint i = 0; i < FT; i++) {
                    [[unroll]] for (uint j = 0; j < FR; j++) {
                        acc[i * FR + j] = coopMatMulAdd(a[i], b[j], acc[i * FR + j]);
                    }
                }
            }
        }
    }
    barrier();

    // Each subgroup brings its results through a piece of shared memory of its own: 16 tokens of 16 floats, padded by 4.
    uint base = warp * 80;
    uint lane = gl_SubgroupInvocationID;
    [[unroll]] for (uint i = 0; i < FT; i++) {
        [[unroll]] for (uint j = 0; j < FR; j++) {
            coopMatStore(acc[i * FR + j], sx, base, 5, gl_CooperativeMatrixLayoutRowMajor);
            subgroupMemoryBarrierShared();
            subgroupBarrier();
            [[unroll]] for (uint h = 0; h < 2; h++) {
                uint at = lane + 32 * h;
                uint col = col0 + warp_t + 16 * i + at / 4;
                uint row = row0 + warp_r + 16 * j + 4 * (at % 4);
                if (col < s.n_cols) {
                    uint slot = slot_of(col);
                    vec4 y = uintBitsToFloat(sx[base + at / 4 * 5 + at % 4]) * LDF(p.scales + 4 * uint64_t(row_of(slot)));
                    [[unroll]] for (uint e = 0; e < 4; e++) {
                        if (row + e >= s.begin && row + e < s.end) {
                            float v = y[e];
                            if (p.bias != 0) v += LDF(p.bias + 4 * (s.skip + row + e));
                            uint64_t to = 4 * (uint64_t(slot) * p.y_stride + row + e);
                            if (p.residual != 0) v += LDF(p.residual + to);
                            LDF(p.y + to) = v;
                        }
                    }
                }
            }
            subgroupBarrier();
        }
    }
}
