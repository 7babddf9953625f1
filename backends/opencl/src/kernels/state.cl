// Ops that keep state. There are no addresses in OpenCL, so the buffers with the records of a call's sequences are arguments; each sequence's span
// says which has its record, and from which byte on.

#define STATE_BUFFERS                                                                                   \
    __global uchar* state0, __global uchar* state1, __global uchar* state2, __global uchar* state3, __global uchar* state4, \
        __global uchar* state5, __global uchar* state6, __global uchar* state7
#define STATE_BUFFER(i)                                                                                 \
    ((i) < 4 ? ((i) < 2 ? ((i) == 0 ? state0 : state1) : ((i) == 2 ? state2 : state3))                  \
             : ((i) < 6 ? ((i) == 4 ? state4 : state5) : ((i) == 6 ? state6 : state7)))

// `starts`: the record counts as zeros, whatever it holds.
typedef struct {
    uint first, n, starts, slot;
    ulong offset, unused;
} Span;

#if KERNEL
// Causal convolution over time: a work-item has a column of a sequence and a stretch of its tokens, and keeps what the kernel spans in registers. The
// first stretch alone reads the record, and writes it: what it shall hold lies in the run's rows when there are more stretches than one, since a
// stretch is no shorter than the kernel. WT is GGUF's number of the kernel's type.
inline float tap(__global const uchar* w, const uint i) {
#if WT == 0
    return ((__global const float*)w)[i];
#elif WT == 1
    return vload_half(i, (__global const half*)w);
#else
    return as_float((uint)((__global const ushort*)w)[i] << 16);
#endif
}

__kernel void conv_state(
    IN(x), IN(w), IN(bias), OUT(y), IN(spans), const uint m, const uint columns, const uint tile_first, const uint n_tile, const uint has_bias,
    STATE_BUFFERS
) {
    const uint col = get_group_id(0) % columns * get_local_size(0) + get_local_id(0), begin = get_group_id(0) / columns * STRETCH;
    const Span span = CAT(Span, spans)[get_group_id(1)];
    if (col < tile_first || col - tile_first >= n_tile || begin >= span.n) return;
    const uint end = min(span.n, begin + STRETCH);
    __global const float* x = CAT(float, x) + (ulong)span.first * m + col;
    __global float* y = AT(float, y) + (ulong)span.first * m + col;
    __global float* record = (__global float*)(STATE_BUFFER(span.slot) + span.offset) + col;
    __global const uchar* weights = CAT(uchar, w);
    float taps[KERNEL], window[KERNEL];
    for (uint j = 0; j < KERNEL; j++) taps[j] = tap(weights, (col - tile_first) * KERNEL + j);
    const float start = has_bias ? CAT(float, bias)[col] : 0.0f;
    window[0] = 0.0f;
    for (uint j = 0; j + 1 < KERNEL; j++) {
        if (begin > 0) window[j + 1] = x[(ulong)(begin - KERNEL + 1 + j) * m];
        else window[j + 1] = span.starts ? 0.0f : record[(ulong)j * m];
    }
    for (uint t = begin; t < end; t++) {
#pragma unroll
        for (uint j = 0; j + 1 < KERNEL; j++) window[j] = window[j + 1];
        window[KERNEL - 1] = x[(ulong)t * m];
        float sum = start;
#pragma unroll
        for (uint j = 0; j < KERNEL; j++) sum = fma(taps[j], window[j], sum);
        y[(ulong)t * m] = sum;
    }
    if (begin > 0) return;
    for (uint j = 0; j + 1 < KERNEL; j++) {
        record[(ulong)j * m] = end == span.n ? window[j + 1] : x[(ulong)(span.n - KERNEL + 1 + j) * m];
    }
}
#endif

#if DK
// The gated delta rule. With S the state before a token, y = scale (decay S + d k^T) q is computed as scale (decay (S q) + d (k q)),
// d = beta (v - decay (S k)): both sums over S are taken at once.
#define DELTA_ARGS                                                                                      \
    IN(q), IN(k), IN(v), IN(g), IN(beta), OUT(y), IN(spans), const uint n_head_k, const uint n_head_v, const uint is_tiled, const float scale, \
        STATE_BUFFERS
#define HEAD_K(head) (is_tiled ? (head) % n_head_k : (head) / (n_head_v / n_head_k))

#if LANES == 1
// For processors: a work-item has a row of the state, in wide vectors, over all tokens of the sequence.
#define WIDE (DK / 16)
inline float sum16(const float16 v) {
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    return (b.x + b.y) + (b.z + b.w);
}

__kernel void gated_delta(DELTA_ARGS) {
    const uint groups = (DV + get_local_size(0) - 1) / get_local_size(0);
    const uint head = get_group_id(0) / groups, row = get_group_id(0) % groups * get_local_size(0) + get_local_id(0);
    if (row >= DV) return;
    const Span span = CAT(Span, spans)[get_group_id(1)];
    __global float* record = (__global float*)(STATE_BUFFER(span.slot) + span.offset) + ((ulong)head * DV + row) * DK;
    float16 wide[WIDE + 1];
    float rest[16];
    for (uint i = 0; i < WIDE; i++) wide[i] = span.starts ? (float16)(0.0f) : vload16(i, record);
    for (uint i = 16 * WIDE; i < DK; i++) rest[i - 16 * WIDE] = span.starts ? 0.0f : record[i];
    for (uint t = 0; t < span.n; t++) {
        const ulong token = span.first + t;
        __global const float* k = CAT(float, k) + (token * n_head_k + HEAD_K(head)) * DK;
        __global const float* q = CAT(float, q) + (token * n_head_k + HEAD_K(head)) * DK;
        const ulong at = token * n_head_v + head;
        const float decay = exp(CAT(float, g)[at]);
        float16 sks = 0.0f, sqs = 0.0f, kqs = 0.0f;
        for (uint i = 0; i < WIDE; i++) {
            const float16 key = vload16(i, k), query = vload16(i, q);
            sks = fma(wide[i], key, sks);
            sqs = fma(wide[i], query, sqs);
            kqs = fma(key, query, kqs);
        }
        float sk = sum16(sks), sq = sum16(sqs), kq = sum16(kqs);
        for (uint i = 16 * WIDE; i < DK; i++) {
            sk = fma(rest[i - 16 * WIDE], k[i], sk);
            sq = fma(rest[i - 16 * WIDE], q[i], sq);
            kq = fma(k[i], q[i], kq);
        }
        const float d = CAT(float, beta)[at] * (CAT(float, v)[at * DV + row] - decay * sk);
        for (uint i = 0; i < WIDE; i++) wide[i] = fma((float16)(d), vload16(i, k), decay * wide[i]);
        for (uint i = 16 * WIDE; i < DK; i++) rest[i - 16 * WIDE] = fma(d, k[i], decay * rest[i - 16 * WIDE]);
        AT(float, y)[at * DV + row] = scale * fma(d, kq, decay * sq);
    }
    for (uint i = 0; i < WIDE; i++) vstore16(wide[i], i, record);
    for (uint i = 16 * WIDE; i < DK; i++) record[i] = rest[i - 16 * WIDE];
}
#else
// A work-group has ROWS rows of one head's state; LANES work-items share a row and keep it in registers over all tokens of the sequence. Keys and
// queries go through local memory, TOKENS at a time. A token's sums meet in one of two places in turn, so that it costs one barrier.
#define ROWS (WG / LANES)
#define EACH ((DK + LANES - 1) / LANES)

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void gated_delta(DELTA_ARGS) {
    __local float keys[TOKENS * DK], queries[TOKENS * DK], values[TOKENS * ROWS], decays[TOKENS], betas[TOKENS], products[TOKENS];
    __local float2 parts[2 * WG];
    const uint groups = (DV + ROWS - 1) / ROWS, lid = get_local_id(0), lane = lid % LANES, line = lid / LANES;
    const uint head = get_group_id(0) / groups, row0 = get_group_id(0) % groups * ROWS, row = row0 + line;
    const Span span = CAT(Span, spans)[get_group_id(1)];
    __global float* record = (__global float*)(STATE_BUFFER(span.slot) + span.offset) + ((ulong)head * DV + row) * DK;
    const bool is_row = row < DV;
    float state[EACH];
#pragma unroll
    for (uint i = 0; i < EACH; i++) {
        const uint e = lane + LANES * i;
        state[i] = is_row && e < DK && !span.starts ? record[e] : 0.0f;
    }
    for (uint t0 = 0; t0 < span.n; t0 += TOKENS) {
        const uint n = min((uint)TOKENS, span.n - t0);
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = lid; i < n * DK; i += WG) {
            const ulong at = (((ulong)span.first + t0 + i / DK) * n_head_k + HEAD_K(head)) * DK + i % DK;
            keys[i] = CAT(float, k)[at];
            queries[i] = CAT(float, q)[at];
        }
        for (uint i = lid; i < n * ROWS; i += WG) {
            const ulong at = ((ulong)span.first + t0 + i / ROWS) * n_head_v + head;
            values[i] = CAT(float, v)[at * DV + min(row0 + i % ROWS, (uint)(DV - 1))];
        }
        for (uint i = lid; i < n; i += WG) {
            const ulong at = ((ulong)span.first + t0 + i) * n_head_v + head;
            decays[i] = exp(CAT(float, g)[at]);
            betas[i] = CAT(float, beta)[at];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        // The first token's sums wait for a barrier, and so do these.
        for (uint t = lid; t < n; t += WG) {
            float sum = 0.0f;
            for (uint e = 0; e < DK; e++) sum = fma(keys[t * DK + e], queries[t * DK + e], sum);
            products[t] = sum;
        }
        for (uint t = 0; t < n; t++) {
            float key[EACH];
            float sk = 0.0f, sq = 0.0f;
#pragma unroll
            for (uint i = 0; i < EACH; i++) {
                const uint e = lane + LANES * i;
                key[i] = e < DK ? keys[t * DK + e] : 0.0f;
                const float query = e < DK ? queries[t * DK + e] : 0.0f;
                sk = fma(state[i], key[i], sk);
                sq = fma(state[i], query, sq);
            }
            __local float2* own = parts + t % 2 * WG;
            own[lid] = (float2)(sk, sq);
            barrier(CLK_LOCAL_MEM_FENCE);
            float2 sums = 0.0f;
            for (uint i = 0; i < LANES; i++) sums += own[lid - lane + i];
            const float decay = decays[t], d = betas[t] * (values[t * ROWS + line] - decay * sums.x);
#pragma unroll
            for (uint i = 0; i < EACH; i++) state[i] = fma(d, key[i], decay * state[i]);
            if (lane == 0 && is_row) {
                const ulong at = ((ulong)span.first + t0 + t) * n_head_v + head;
                AT(float, y)[at * DV + row] = scale * fma(d, products[t], decay * sums.y);
            }
        }
    }
#pragma unroll
    for (uint i = 0; i < EACH; i++) {
        const uint e = lane + LANES * i;
        if (is_row && e < DK) record[e] = state[i];
    }
}
#endif
#endif
