// Attention over the paged KV cache with running maxima and sums.
//
// A work-group has QT tokens of one sequence and HPG query heads that share a head of keys: NQ = QT * HPG query rows, TPR work-items each. It walks over the
// positions of its split, TILE keys at a time: keys are decoded to local memory, scores computed, maxima moved, values decoded to the same
// memory, and weighted sums added up in registers. Splits and passes (see kv.cl) leave maximum, sum and weighted sum of values in `state`; a later pass goes on from
// there, and `combine` puts splits together. A sink is one more score whose value is zero; it enters at the very end.

#define NQ (QT * HPG)
#define TPR (WG / NQ)
#define DK4 ((DK + 3) / 4)
#define DV4 ((DV + 3) / 4)
#define D4 (DK4 > DV4 ? DK4 : DV4)
// One float4 more, so that rows begin in different banks.
#define PITCH (D4 + 1)
#define NC ((DV4 + TPR - 1) / TPR)
#define NS ((TILE + TPR - 1) / TPR)

inline float4 load4(__global const uchar* row, const uint type, const uint dim, const uint c) {
    if (type == T_Q8_0) {
        __global const uchar* block = row + c / 8 * 34;
        return HALF1(block, 0) * convert_float4(vload4(c % 8, (__global const char*)block + 2));
    }
    if (type == T_Q4_0) {
        __global const uchar* block = row + c / 8 * 18;
        const uchar4 q = vload4(c % 4, block + 2);
        const uchar4 low = c % 8 < 4 ? q & (uchar4)(15) : q >> (uchar4)(4);
        return HALF1(block, 0) * (convert_float4(low) - 8.0f);
    }
    if (dim % 4 == 0) {
        if (type == T_F32) return ((__global const float4*)row)[c];
        if (type == T_F16) return HALF4(row + 8 * c);
        return as_float4(convert_uint4(((__global const ushort4*)row)[c]) << (uint4)(16));
    }
    float v[4];
    for (uint i = 0; i < 4; i++) {
        const uint at = 4 * c + i;
        if (at >= dim) v[i] = 0.0f;
        else if (type == T_F32) v[i] = ((__global const float*)row)[at];
        else if (type == T_F16) v[i] = HALF1(row, at);
        else v[i] = as_float((uint)((__global const ushort*)row)[at] << 16);
    }
    return (float4)(v[0], v[1], v[2], v[3]);
}

// A row of keys or values, wherever its buffer is; null for none.
typedef __global const uchar* Row;

typedef struct {
    uint first_token, n_tokens, first_pos, seq;
} Query;

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void attention(
    IN(q), OUT(y), OUT(state), IN(queries), IN(seqs), IN(blocks), IN(segments), IN(sinks),
    const uint n_segments, const uint pass, const uint is_last, const uint has_sinks,
    const uint n_tokens, const uint n_head, const uint n_head_kv, const uint block_len,
    const float scale, const float softcap, const uint window, const uint split_len,
    KV_BUFFERS
) {
    __local float4 qs[NQ * DK4];
    __local float4 rows[TILE * PITCH];
    __local float scores[NQ * TILE];
    __local float weights[NQ * TILE];
    __local float parts[WG];
    __local Row keys[TILE];
    __local Row vals[TILE];
    __local uint any;

    const uint lid = get_local_id(0), r = lid / TPR, lane = lid % TPR;
    const uint per_kv = n_head / n_head_kv, head_groups = (per_kv + HPG - 1) / HPG;
    const uint head_kv = get_group_id(0) / head_groups % n_head_kv;
    const uint head_in = get_group_id(0) % head_groups * HPG + r % HPG;
    const Query query = CAT(Query, queries)[get_group_id(0) / head_groups / n_head_kv];
    const uint2 seq = CAT(uint2, seqs)[query.seq];
    __global const uint* table = CAT(uint, blocks) + seq.x;
    __global const Segment* segments = CAT(Segment, segments);

    const uint head = head_kv * per_kv + min(head_in, per_kv - 1);
    const uint token = query.first_token + min(r / HPG, query.n_tokens - 1);
    const uint own_pos = query.first_pos + r / HPG;
    const bool is_real = r / HPG < query.n_tokens && head_in < per_kv;
    for (uint i = lid; i < NQ * DK4; i += WG) {
        const uint qr = i / DK4, c = i % DK4;
        const uint in_group = get_group_id(0) % head_groups * HPG + qr % HPG;
        const ulong at = (ulong)(query.first_token + min(qr / HPG, query.n_tokens - 1)) * n_head + head_kv * per_kv + min(in_group, per_kv - 1);
        qs[i] = load4((__global const uchar*)(CAT(float, q) + at * DK), T_F32, DK, c);
    }

    float4 acc[NC];
    float most = -INFINITY, sum = 0.0f;
    const uint split = get_group_id(1);
    __global float* state = AT(float, state) + (((ulong)split * n_tokens + token) * n_head + head) * (DV + 2);
    for (uint j = 0; j < NC; j++) {
        acc[j] = (float4)(0.0f);
        if (pass > 0) {
            const uint c = 4 * (lane + j * TPR);
            acc[j].x = c < DV ? state[2 + c] : 0.0f;
            acc[j].y = c + 1 < DV ? state[3 + c] : 0.0f;
            acc[j].z = c + 2 < DV ? state[4 + c] : 0.0f;
            acc[j].w = c + 3 < DV ? state[5 + c] : 0.0f;
        }
    }
    if (pass > 0) {
        most = state[0];
        sum = lane == 0 ? state[1] : 0.0f;
    }

    const uint last = query.first_pos + query.n_tokens;
    uint begin = window != 0 && query.first_pos + 1 > window ? query.first_pos + 1 - window : 0;
    begin = max(begin, seq.y);
    begin += split * split_len;
    const uint end = min(last, begin + split_len);
    for (uint first = begin; first < end; first += TILE) {
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid == 0) any = 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = lid; i < TILE; i += WG) {
            const uint pos = first + i;
            Row k = 0, v = 0;
            if (pos < end) {
                const uint block = table[(pos - seq.y) / block_len];
                const uint index = segment_of(segments, n_segments, block);
                if (index < n_segments && segments[index].pass == pass) {
                    const uint slots = segments[index].slots;
                    const ulong place = ((ulong)(block - segments[index].first_block) * n_head_kv + head_kv) * block_len + (pos - seq.y) % block_len;
                    k = KV_BUFFER(slots & 0xffffu) + segments[index].k_offset + place * ROW_BYTES(KT, DK);
                    v = KV_BUFFER(slots >> 16) + segments[index].v_offset + place * ROW_BYTES(VT, DV);
                    any = 1;
                }
            }
            keys[i] = k;
            vals[i] = v;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (!any) continue;
        for (uint i = lid; i < TILE * DK4; i += WG) {
            const Row row = keys[i / DK4];
            rows[i / DK4 * PITCH + i % DK4] = row ? load4(row, KT, DK, i % DK4) : (float4)(0.0f);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float own[NS];
        for (uint j = 0; j < NS; j++) {
            const uint key = lane + j * TPR;
            own[j] = -INFINITY;
            if (key >= TILE) continue;
            const uint pos = first + key;
            if (keys[key] && is_real && pos <= own_pos && (window == 0 || pos + window > own_pos)) {
                float4 products = (float4)(0.0f);
                for (uint c = 0; c < DK4; c++) products = fma(qs[r * DK4 + c], rows[key * PITCH + c], products);
                float score = ((products.x + products.y) + (products.z + products.w)) * scale;
                if (softcap != 0.0f) score = softcap * tanh(score / softcap);
                own[j] = score;
            }
            scores[r * TILE + key] = own[j];
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        float now = most;
        for (uint key = 0; key < TILE; key++) now = fmax(now, scores[r * TILE + key]);
        // Before the first key that a row sees, its maximum is minus infinity, which has no difference to itself.
        const float base = now == -INFINITY ? 0.0f : now;
        const float shrink = exp(most - base);
        most = now;
        sum *= shrink;
        for (uint j = 0; j < NS; j++) {
            const uint key = lane + j * TPR;
            if (key >= TILE) continue;
            const float weight = exp(own[j] - base);
            weights[r * TILE + key] = weight;
            sum += weight;
        }
        for (uint i = lid; i < TILE * DV4; i += WG) {
            const Row row = vals[i / DV4];
            rows[i / DV4 * PITCH + i % DV4] = row ? load4(row, VT, DV, i % DV4) : (float4)(0.0f);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint j = 0; j < NC; j++) {
            const uint c = lane + j * TPR;
            if (c >= DV4) continue;
            float4 total = acc[j] * shrink;
            for (uint key = 0; key < TILE; key++) total = fma((float4)(weights[r * TILE + key]), rows[key * PITCH + c], total);
            acc[j] = total;
        }
    }

    barrier(CLK_LOCAL_MEM_FENCE);
    parts[lid] = sum;
    barrier(CLK_LOCAL_MEM_FENCE);
    sum = 0.0f;
    for (uint i = 0; i < TPR; i++) sum += parts[r * TPR + i];
    if (!is_real) return;
    const bool is_end = is_last && get_num_groups(1) == 1;
    __global float* y = AT(float, y) + ((ulong)token * n_head + head) * DV;
    float factor = 1.0f;
    if (is_end) {
        float top = most, total = sum;
        if (has_sinks) {
            const float sink = CAT(float, sinks)[head];
            top = fmax(most, sink);
            total = sum * exp(most - top) + exp(sink - top);
        }
        factor = exp(most - top) / total;
    } else {
        y = state + 2;
        if (lane == 0) {
            state[0] = most;
            state[1] = sum;
        }
    }
    for (uint j = 0; j < NC; j++) {
        const uint c = 4 * (lane + j * TPR);
        const float4 v = acc[j] * factor;
        if (c < DV) y[c] = v.x;
        if (c + 1 < DV) y[c + 1] = v.y;
        if (c + 2 < DV) y[c + 2] = v.z;
        if (c + 3 < DV) y[c + 3] = v.w;
    }
}
