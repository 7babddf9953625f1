// Products of NT rows of activations with rows of weights, for processors: a work-item computes one row for NT tokens, in wide vectors. Each group of 32
// is decoded once and serves all tokens; neighbouring work-items share the activations, which stay in the cache.

inline float sum16(const float16 v) {
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    return (b.x + b.y) + (b.z + b.w);
}

__kernel void matmul(
    IN(x), const uint n_in, const uint G, const uint stride, const uint n_tokens,
    IN(w), OUT(y), IN(bias), IN(residual), const uint n_rows, const uint first, const uint n_out, const uint flags
    EXPERTS_ARGS
) {
    const uint row = get_global_id(0);
#if EXPERTS
    // `n_tokens` is of no use here: a group says how many slots it has.
    const Share s = SHARE(get_global_id(1));
    if (row < s.begin || row >= s.end) return;
    const uint token0 = s.col0, n_cols = s.n_cols;
    __global const uchar* weights = CAT(uchar, w) + (s.skip + row) * stride;
#else
    const uint token0 = get_global_id(1) * NT, n_cols = n_tokens;
    if (row >= n_rows) return;
    __global const uchar* weights = CAT(uchar, w) + (ulong)row * stride;
#endif
    __global const float* x[NT];
    float16 acc[NT];
    for (uint t = 0; t < NT; t++) {
        // Tokens past the end compute the last one again, and write nothing.
#if EXPERTS
        x[t] = CAT(float, x) + (ulong)ROW_OF(min(token0 + t, n_cols - 1)) * n_in;
#else
        x[t] = CAT(float, x) + (ulong)min(token0 + t, n_cols - 1) * n_in;
#endif
        acc[t] = (float16)(0.0f);
    }
    const uint whole = n_in / 32;
    for (uint g = 0; g < whole; g++) {
        float16 a, b;
        float4 s;
        raw32(weights, G, g, &a, &b, &s);
        a = a * s.x + s.y;
        b = b * s.z + s.w;
#pragma unroll
        for (uint t = 0; t < NT; t++) {
            acc[t] = fma(a, vload16(2 * g, x[t]), acc[t]);
            acc[t] = fma(b, vload16(2 * g + 1, x[t]), acc[t]);
        }
    }
    if (whole < G) {
        float16 a, b;
        float4 s;
        raw32(weights, G, whole, &a, &b, &s);
        a = a * s.x + s.y;
        b = b * s.z + s.w;
        for (uint t = 0; t < NT; t++) {
            float rest[32];
            for (uint k = 0; k < 32; k++) rest[k] = 32 * whole + k < n_in ? x[t][32 * whole + k] : 0.0f;
            acc[t] = fma(a, vload16(0, rest), acc[t]);
            acc[t] = fma(b, vload16(1, rest), acc[t]);
        }
    }
    for (uint t = 0; t < NT && token0 + t < n_cols; t++) {
        float total = sum16(acc[t]);
#if EXPERTS
        const ulong at = (ulong)SLOT_OF(token0 + t) * n_out + row;
        if (flags & 1) total += CAT(float, bias)[s.skip + row];
#else
        const ulong at = (ulong)(token0 + t) * n_out + first + row;
        if (flags & 1) total += CAT(float, bias)[first + row];
#endif
        if (flags & 2) total += CAT(float, residual)[at];
        AT(float, y)[at] = total;
    }
}
