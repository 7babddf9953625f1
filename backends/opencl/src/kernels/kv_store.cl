// Stores rows in the types of the KV cache, by the rules of GGUF's reference encoders. One work-item for each 32 elements of a row.

inline void store32(__global uchar* row, const uint type, const uint unit, const float* v, const uint count) {
    if (type == T_F32) {
        for (uint i = 0; i < count; i++) ((__global float*)row)[32 * unit + i] = v[i];
    } else if (type == T_F16) {
        for (uint i = 0; i < count; i++) vstore_half_rte(v[i], 32 * unit + i, (__global half*)row);
    } else if (type == T_BF16) {
        for (uint i = 0; i < count; i++) {
            const uint bits = as_uint(v[i]);
            const uint rounded = bits + 0x7fffu + (bits >> 16 & 1u);
            ((__global ushort*)row)[32 * unit + i] = (ushort)(isnan(v[i]) ? bits >> 16 | 0x40u : rounded >> 16);
        }
    } else if (type == T_Q8_0) {
        __global uchar* block = row + 34 * unit;
        float most = 0.0f;
        for (uint i = 0; i < 32; i++) most = fmax(most, fabs(v[i]));
        const float d = most / 127.0f, inverse = d == 0.0f ? 0.0f : 1.0f / d;
        vstore_half_rte(d, 0, (__global half*)block);
        for (uint i = 0; i < 32; i++) ((__global char*)block)[2 + i] = (char)clamp(round(v[i] * inverse), -127.0f, 127.0f);
    } else {
        __global uchar* block = row + 18 * unit;
        float most = 0.0f, extreme = 0.0f;
        for (uint i = 0; i < 32; i++) {
            if (fabs(v[i]) > most) {
                most = fabs(v[i]);
                extreme = v[i];
            }
        }
        const float d = extreme / -8.0f, inverse = d == 0.0f ? 0.0f : 1.0f / d;
        vstore_half_rte(d, 0, (__global half*)block);
        for (uint i = 0; i < 16; i++) {
            const uint low = (uint)clamp(v[i] * inverse + 8.5f, 0.0f, 15.0f);
            const uint high = (uint)clamp(v[i + 16] * inverse + 8.5f, 0.0f, 15.0f);
            block[2 + i] = (uchar)(low | high << 4);
        }
    }
}

// `slots` has for each token its block and its place in it. The second dimension is the side: keys, values.
__kernel void kv_store(
    IN(k), IN(v), IN(slots), IN(segments),
    const uint n_segments, const uint pass, const uint n_tokens, const uint n_head_kv, const uint block_len, const uint units_max,
    KV_BUFFERS
) {
    const uint side = get_global_id(1), unit = get_global_id(0) % units_max;
    const uint head = get_global_id(0) / units_max % n_head_kv, token = get_global_id(0) / units_max / n_head_kv;
    const uint dim = side ? DV : DK, type = side ? VT : KT;
    if (token >= n_tokens || 32 * unit >= dim) return;
    const uint2 slot = CAT(uint2, slots)[token];
    __global const Segment* segments = CAT(Segment, segments);
    const uint index = segment_of(segments, n_segments, slot.x);
    if (index >= n_segments || segments[index].pass != pass) return;
    const uint which = side ? segments[index].slots >> 16 : segments[index].slots & 0xffffu;
    const ulong offset = side ? segments[index].v_offset : segments[index].k_offset;
    const ulong row_bytes = ROW_BYTES(type, dim);
    const ulong place = (ulong)(slot.x - segments[index].first_block) * n_head_kv + head;
    __global uchar* row = KV_BUFFER(which) + offset + (place * block_len + slot.y) * row_bytes;
    __global const float* x = (side ? CAT(float, v) : CAT(float, k)) + ((ulong)token * n_head_kv + head) * dim + 32 * unit;
    const uint count = min(32u, dim - 32 * unit);
    float values[32];
    for (uint i = 0; i < 32; i++) values[i] = i < count ? x[i] : 0.0f;
    store32(row, type, unit, values, count);
}
