// Attention for processors: a work-item for each query row, which walks over its keys in wide vectors. No local memory, no barriers; what query heads
// share comes from the cache. Arguments, splits and passes are those of attention.cl.

#define DK16 ((DK + 15) / 16)
#define DV16 ((DV + 15) / 16)

typedef __global const uchar* Row;

inline float16 load16(Row row, const uint type, const uint dim, const uint c) {
    if (type == T_Q8_0) {
        Row block = row + c / 2 * 34;
        return HALF1(block, 0) * convert_float16(vload16(c % 2, (__global const char*)block + 2));
    }
    if (type == T_Q4_0) {
        Row block = row + c / 2 * 18;
        const uchar16 q = vload16(0, block + 2);
        return HALF1(block, 0) * (convert_float16(c % 2 ? q >> (uchar16)(4) : q & (uchar16)(15)) - 8.0f);
    }
    if (dim % 16 == 0) {
        if (type == T_F32) return vload16(c, (__global const float*)row);
        if (type == T_F16) return vload_half16(c, (__global const half*)row);
        return as_float16(convert_uint16(vload16(c, (__global const ushort*)row)) << (uint16)(16));
    }
    float v[16];
    for (uint i = 0; i < 16; i++) {
        const uint at = 16 * c + i;
        if (at >= dim) v[i] = 0.0f;
        else if (type == T_F32) v[i] = ((__global const float*)row)[at];
        else if (type == T_F16) v[i] = HALF1(row, at);
        else v[i] = as_float((uint)((__global const ushort*)row)[at] << 16);
    }
    return vload16(0, v);
}

inline float sum16(const float16 v) {
    const float8 a = v.lo + v.hi;
    const float4 b = a.lo + a.hi;
    return (b.x + b.y) + (b.z + b.w);
}

typedef struct {
    uint first_token, n_tokens, first_pos, seq;
} Query;

__kernel __attribute__((reqd_work_group_size(1, 1, 1)))
void attention(
    IN(q), OUT(y), OUT(state), IN(queries), IN(seqs), IN(blocks), IN(segments), IN(sinks),
    const uint n_segments, const uint pass, const uint is_last, const uint has_sinks,
    const uint n_tokens, const uint n_head, const uint n_head_kv, const uint block_len,
    const float scale, const float softcap, const uint window, const uint split_len,
    KV_BUFFERS
) {
    const uint head = get_group_id(0) % n_head, head_kv = head / (n_head / n_head_kv);
    const Query query = CAT(Query, queries)[get_group_id(0) / n_head];
    const uint2 seq = CAT(uint2, seqs)[query.seq];
    __global const uint* table = CAT(uint, blocks) + seq.x;
    __global const Segment* segments = CAT(Segment, segments);
    const ulong row = (ulong)query.first_token * n_head + head;
    __global float* state = AT(float, state) + ((ulong)get_group_id(1) * n_tokens * n_head + row) * (DV + 2);

    float16 own[DK16], acc[DV16];
    for (uint c = 0; c < DK16; c++) own[c] = load16((Row)(CAT(float, q) + row * DK), T_F32, DK, c);
    for (uint c = 0; c < DV16; c++) acc[c] = pass > 0 ? load16((Row)(state + 2), T_F32, DV, c) : (float16)(0.0f);
    float most = pass > 0 ? state[0] : -INFINITY, sum = pass > 0 ? state[1] : 0.0f;

    uint begin = window != 0 && query.first_pos + 1 > window ? query.first_pos + 1 - window : 0;
    begin = max(begin, seq.y) + get_group_id(1) * split_len;
    const uint end = min(query.first_pos + 1, begin + split_len);
    // Block by block: the places of a block are found once.
    for (uint pos = begin; pos < end;) {
        const uint block = table[(pos - seq.y) / block_len], first = (pos - seq.y) % block_len;
        const uint count = min(block_len - first, end - pos);
        pos += count;
        const uint index = segment_of(segments, n_segments, block);
        if (index >= n_segments || segments[index].pass != pass) continue;
        const uint slots = segments[index].slots;
        const ulong place = ((ulong)(block - segments[index].first_block) * n_head_kv + head_kv) * block_len + first;
        Row k = KV_BUFFER(slots & 0xffffu) + segments[index].k_offset + place * ROW_BYTES(KT, DK);
        Row v = KV_BUFFER(slots >> 16) + segments[index].v_offset + place * ROW_BYTES(VT, DV);
        for (uint i = 0; i < count; i++) {
            float16 products = (float16)(0.0f);
            for (uint c = 0; c < DK16; c++) products = fma(own[c], load16(k, KT, DK, c), products);
            float score = sum16(products) * scale;
            if (softcap != 0.0f) score = softcap * tanh(score / softcap);
            if (score > most) {
                const float shrink = exp(most - score);
                most = score;
                sum *= shrink;
                for (uint c = 0; c < DV16; c++) acc[c] *= shrink;
            }
            const float weight = exp(score - most);
            sum += weight;
            for (uint c = 0; c < DV16; c++) acc[c] = fma((float16)(weight), load16(v, VT, DV, c), acc[c]);
            k += ROW_BYTES(KT, DK);
            v += ROW_BYTES(VT, DV);
        }
    }

    __global float* y = AT(float, y) + row * DV;
    float factor = 1.0f;
    if (is_last && get_num_groups(1) == 1) {
        float top = most, total = sum;
        if (has_sinks) {
            const float sink = CAT(float, sinks)[head];
            top = fmax(most, sink);
            total = sum * exp(most - top) + exp(sink - top);
        }
        factor = exp(most - top) / total;
    } else {
        y = state + 2;
        state[0] = most;
        state[1] = sum;
    }
    for (uint c = 0; c < DV16; c++) {
        float values[16];
        vstore16(acc[c] * factor, 0, values);
        for (uint i = 0; i < 16 && 16 * c + i < DV; i++) y[16 * c + i] = values[i];
    }
}
