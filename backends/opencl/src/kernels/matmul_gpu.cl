// Products of many rows of activations with rows of weights, in blocks of 128 weight rows by BN tokens: both are staged in local memory, 32 columns
// at a time, and each of 128 work-items computes 8 rows by TN tokens in registers.

#define BM 128
#define TN (BN / 8)
#define PITCH_W (BM + 4)
#define PITCH_X (BN + 1)

__kernel __attribute__((reqd_work_group_size(128, 1, 1)))
void matmul(
    IN(x), const uint n_in, const uint G, const uint stride, const uint n_tokens,
    IN(w), OUT(y), IN(bias), IN(residual), const uint n_rows, const uint first, const uint n_out, const uint flags
    EXPERTS_ARGS
) {
    // Read four at a time, which needs more than a float's own alignment.
    __local float ws[32 * PITCH_W] __attribute__((aligned(16)));
    __local float xs[32 * PITCH_X];
    const uint lid = get_local_id(0);
    const uint row0 = get_group_id(0) * BM;
#if EXPERTS
    const Share s = SHARE(get_group_id(1));
    // The same for the whole work-group, as its barriers need.
    if (row0 >= s.end || row0 + BM <= s.begin) return;
    const uint token0 = s.col0, n_cols = s.n_cols;
    __global const uchar* own = CAT(uchar, w) + (s.skip + clamp(row0 + lid, s.begin, s.end - 1)) * stride;
    // Where the rows of activations are, which would be looked up for every element.
    __local uint rows[BN];
    for (uint i = lid; i < BN; i += 128) rows[i] = ROW_OF(min(token0 + i, n_cols - 1));
    barrier(CLK_LOCAL_MEM_FENCE);
#define X_ROW(i) rows[i]
#else
    const uint token0 = get_group_id(1) * BN, n_cols = n_tokens;
    __global const uchar* own = CAT(uchar, w) + (ulong)min(row0 + lid, n_rows - 1) * stride;
#define X_ROW(i) (token0 + (i))
#endif
    __global const float* x = CAT(float, x);
    // Consecutive work-items take the rows of one token block: writes of a column go to consecutive places.
    const uint m = lid % 16 * 8, n = lid / 16 * TN;
    float acc[TN][8];
#pragma unroll
    for (uint j = 0; j < TN; j++) {
#pragma unroll
        for (uint i = 0; i < 8; i++) acc[j][i] = 0.0f;
    }
    for (uint g = 0; g < G; g++) {
        float values[32];
        float16 a, b;
        float4 scales;
        raw32(own, G, g, &a, &b, &scales);
        vstore16(a * scales.x + scales.y, 0, values);
        vstore16(b * scales.z + scales.w, 1, values);
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll
        for (uint k = 0; k < 32; k++) ws[k * PITCH_W + lid] = values[k];
        for (uint i = lid; i < BN * 32; i += 128) {
            const uint token = token0 + i / 32, column = 32 * g + i % 32;
            const bool inside = token < n_cols && column < n_in;
            xs[i % 32 * PITCH_X + i / 32] = inside ? x[(ulong)X_ROW(i / 32) * n_in + column] : 0.0f;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
#pragma unroll 4
        for (uint k = 0; k < 32; k++) {
            const float8 wv = (float8)(*(__local const float4*)(ws + k * PITCH_W + m), *(__local const float4*)(ws + k * PITCH_W + m + 4));
            const float wm[8] = {wv.s0, wv.s1, wv.s2, wv.s3, wv.s4, wv.s5, wv.s6, wv.s7};
#pragma unroll
            for (uint j = 0; j < TN; j++) {
                const float xv = xs[k * PITCH_X + n + j];
#pragma unroll
                for (uint i = 0; i < 8; i++) acc[j][i] = fma(wm[i], xv, acc[j][i]);
            }
        }
    }
    __global float* y = AT(float, y);
    for (uint j = 0; j < TN; j++) {
        const uint token = token0 + n + j;
        if (token >= n_cols) break;
        for (uint i = 0; i < 8; i++) {
            const uint row = row0 + m + i;
            float total = acc[j][i];
#if EXPERTS
            if (row < s.begin) continue;
            if (row >= s.end) break;
            const ulong at = (ulong)SLOT_OF(token) * n_out + row;
            if (flags & 1) total += CAT(float, bias)[s.skip + row];
#else
            if (row >= n_rows) break;
            const ulong at = (ulong)token * n_out + first + row;
            if (flags & 1) total += CAT(float, bias)[first + row];
#endif
            if (flags & 2) total += CAT(float, residual)[at];
            y[at] = total;
        }
    }
}
