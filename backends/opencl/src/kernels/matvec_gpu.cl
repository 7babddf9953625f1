// Products of one row of activations with rows of weights, for devices that have work-items to spare: y = W x + bias + residual.
//
// A work-group is TEAMS teams of 32 work-items; a team computes R rows. Activations are staged in local memory, CHUNK groups of 32 at a time, a
// group in PITCH float4 so that neighbours begin in different banks. Work-item `lane` takes groups lane, lane + 32, ...: neighbours load neighbouring
// 16 bytes of quants. Partial sums meet in local memory (or by a sub-group's own sum).
//
// SETS   weights that share x; a set's groups follow the groups of the set before
// GLU    two weights, one output: act(W0 x) * (W1 x)
// NORM   x is the input of an RMS norm: its weight is multiplied while staging, its factor at the end, for sums are linear

#define TEAMS (WG / 32)
#define CHUNK 128
#define PITCH 9

#define SET(i) IN(w##i), OUT(y##i), IN(bias##i), IN(residual##i), const uint n_rows##i, const uint row##i, const uint n_out##i, const uint flags##i

inline float sum4(const float4 v) { return (v.x + v.y) + (v.z + v.w); }
inline float sum16(const float16 v) { return (sum4(v.lo.lo) + sum4(v.lo.hi)) + (sum4(v.hi.lo) + sum4(v.hi.hi)); }
inline float dot16(const float16 a, const float16 b) {
    float4 s = a.lo.lo * b.lo.lo;
    s = fma(a.lo.hi, b.lo.hi, s);
    s = fma(a.hi.lo, b.hi.lo, s);
    s = fma(a.hi.hi, b.hi.hi, s);
    return sum4(s);
}

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void matvec(
    IN(x), const uint n_in, const uint G, const uint stride,
#if NORM
    IN(norm), const float eps,
#endif
#if GLU
    const uint which,
#endif
    SET(0)
#if SETS > 1
    , SET(1)
#endif
#if SETS > 2
    , SET(2)
#endif
    EXPERTS_ARGS
) {
    __local float4 staged[CHUNK * PITCH];
    __local float sums[WG];
    const uint lid = get_local_id(0), lane = lid % 32, team = lid / 32;
    const ulong token = get_group_id(1);
    uint group = get_group_id(0);
    __global const uchar* w = CAT(uchar, w0);
    __global float* y = AT(float, y0);
    __global const float* bias = CAT(float, bias0);
    __global const float* residual = CAT(float, residual0);
    uint n_rows = n_rows0, first = row0, n_out = n_out0, flags = flags0;
#if SETS > 1 && !GLU
    const uint groups0 = (n_rows0 + TEAMS * R - 1) / (TEAMS * R);
    if (group >= groups0) {
        group -= groups0;
        w = CAT(uchar, w1);
        y = AT(float, y1);
        bias = CAT(float, bias1);
        residual = CAT(float, residual1);
        n_rows = n_rows1, first = row1, n_out = n_out1, flags = flags1;
#if SETS > 2
        const uint groups1 = (n_rows1 + TEAMS * R - 1) / (TEAMS * R);
        if (group >= groups1) {
            group -= groups1;
            w = CAT(uchar, w2);
            y = AT(float, y2);
            bias = CAT(float, bias2);
            residual = CAT(float, residual2);
            n_rows = n_rows2, first = row2, n_out = n_out2, flags = flags2;
        }
#endif
    }
#endif
    const uint begin = (group * TEAMS + team) * R;
#if EXPERTS
    // The rows of the expert that the tile holds.
    const Share share = SHARE(get_group_id(1));
    const uint block = group * TEAMS * R;
    // The same for the whole work-group, as its barriers need.
    if (block >= share.end || block + TEAMS * R <= share.begin) return;
#endif
    __global const uchar* rows[R];
    float acc[R];
#if GLU
    __global const uchar* ups[R];
    float up[R];
#endif
    for (uint r = 0; r < R; r++) {
        // Rows past the end compute the last one again, and write nothing.
#if EXPERTS
        const ulong at = (share.skip + clamp(begin + r, share.begin, share.end - 1)) * stride;
#else
        const ulong at = (ulong)min(begin + r, n_rows - 1) * stride;
#endif
        rows[r] = w + at;
        acc[r] = 0.0f;
#if GLU
        ups[r] = CAT(uchar, w1) + at;
        up[r] = 0.0f;
#endif
    }
#if EXPERTS
    __global const float* x = CAT(float, x) + (ulong)ROW_OF((uint)token) * n_in;
#else
    __global const float* x = CAT(float, x) + token * n_in;
#endif
#if NORM
    float squares = 0.0f;
#endif
    for (uint first_group = 0; first_group < G; first_group += CHUNK) {
        const uint count = min((uint)CHUNK, G - first_group);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = lid; i < 8 * count; i += WG) {
            const uint at = 32 * first_group + 4 * i;
            float4 v;
            if (at + 4 <= n_in && (n_in & 3) == 0) {
                v = *(__global const float4*)(x + at);
            } else {
                v.x = at < n_in ? x[at] : 0.0f;
                v.y = at + 1 < n_in ? x[at + 1] : 0.0f;
                v.z = at + 2 < n_in ? x[at + 2] : 0.0f;
                v.w = at + 3 < n_in ? x[at + 3] : 0.0f;
            }
#if NORM
            squares += sum4(v * v);
            __global const float* nw = CAT(float, norm);
            v.x *= at < n_in ? nw[at] : 0.0f;
            v.y *= at + 1 < n_in ? nw[at + 1] : 0.0f;
            v.z *= at + 2 < n_in ? nw[at + 2] : 0.0f;
            v.w *= at + 3 < n_in ? nw[at + 3] : 0.0f;
#endif
            staged[i / 8 * PITCH + i % 8] = v;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint k = lane; k < count; k += 32) {
            __local const float4* p = staged + k * PITCH;
            const float16 xa = (float16)(p[0], p[1], p[2], p[3]), xb = (float16)(p[4], p[5], p[6], p[7]);
#if HAS_OFFSET
            const float sa = sum16(xa), sb = sum16(xb);
#endif
#pragma unroll
            for (uint r = 0; r < R; r++) {
                float16 a, b;
                float4 s;
                raw32(rows[r], G, first_group + k, &a, &b, &s);
                acc[r] = fma(s.x, dot16(xa, a), fma(s.z, dot16(xb, b), acc[r]));
#if HAS_OFFSET
                acc[r] = fma(s.y, sa, fma(s.w, sb, acc[r]));
#endif
#if GLU
                raw32(ups[r], G, first_group + k, &a, &b, &s);
                up[r] = fma(s.x, dot16(xa, a), fma(s.z, dot16(xb, b), up[r]));
#if HAS_OFFSET
                up[r] = fma(s.y, sa, fma(s.w, sb, up[r]));
#endif
#endif
            }
        }
    }
#if NORM
    const float factor = 1.0f / sqrt(group_sum(squares, sums) / (float)n_in + eps);
#else
    const float factor = 1.0f;
#endif
    for (uint r = 0; r < R; r++) {
        float total = team_sum(acc[r], sums);
#if GLU
        const float other = team_sum(up[r], sums) * factor;
#endif
        const uint row = begin + r;
#if EXPERTS
        if (lane == 0 && row >= share.begin && row < share.end) {
            const ulong column = share.skip + row, at = token * n_out + row;
#else
        if (lane == 0 && row < n_rows) {
            const uint column = first + row;
            const ulong at = token * n_out + column;
#endif
            total *= factor;
#if GLU
            total = activate(which, total) * other;
#endif
            if (flags & 1) total += bias[column];
            if (flags & 2) total += residual[at];
            y[at] = total;
        }
    }
}
