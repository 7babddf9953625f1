// Ranking. Numbers are compared as keys: unsigned integers in the order of the floats, zeros of both signs alike, a NaN as minus infinity.

inline uint key_of(float x) {
    if (isnan(x)) x = -INFINITY;
    const uint bits = as_uint(x == 0.0f ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The first of the greatest elements of each row; a work-group a row.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void argmax(IN(x), OUT(y), const uint row) {
    __local uint keys[WG], places[WG];
    const uint lid = get_local_id(0);
    __global const float* x = CAT(float, x) + (ulong)get_group_id(0) * row;
    uint best = 0, place = 0xffffffffu;
    for (uint i = lid; i < row; i += WG) {
        const uint key = key_of(x[i]);
        if (key > best || place == 0xffffffffu) {
            best = key;
            place = i;
        }
    }
    keys[lid] = best;
    places[lid] = place;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint n = WG / 2; n > 0; n /= 2) {
        if (lid < n) {
            const uint key = keys[lid + n], other = places[lid + n];
            if (key > keys[lid] || (key == keys[lid] && other < places[lid])) {
                keys[lid] = key;
                places[lid] = other;
            }
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    if (lid == 0) AT(int, y)[get_group_id(0)] = (int)places[0];
}

// The k greatest of each row: the key of the last one is found byte by byte, from the top, by counting; then what is above it is collected, and as
// many of its equals as fit, the first ones; then each of the k counts who comes before it. `temp` holds k pairs of key and place a row.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void top_k(IN(x), OUT(ids), OUT(values), OUT(temp), const uint row, const uint k) {
    __local uint counts[256];
    __local uint shared[3];
    __local uint lanes[WG];
    const uint lid = get_local_id(0);
    const ulong index = get_group_id(0);
    __global const float* x = CAT(float, x) + index * row;
    __global uint2* temp = AT(uint2, temp) + index * k;
    uint prefix = 0, wanted = k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (uint i = lid; i < 256; i += WG) counts[i] = 0;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint i = lid; i < row; i += WG) {
            const uint key = key_of(x[i]);
            if (shift == 24 || key >> (shift + 8) == prefix) atomic_inc(&counts[key >> shift & 255u]);
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        if (lid == 0) {
            uint left = wanted, digit = 255;
            while (digit > 0 && counts[digit] < left) left -= counts[digit--];
            shared[0] = digit;
            shared[1] = left;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
        prefix = prefix << 8 | shared[0];
        wanted = shared[1];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    // `prefix` is the key of the last one; `wanted` of its equals are taken. Each work-item has a run of columns, so that equals count in order.
    const uint run = (row + WG - 1) / WG, begin = min(lid * run, row), end = min(begin + run, row);
    uint equals = 0;
    for (uint i = begin; i < end; i++) equals += key_of(x[i]) == prefix;
    lanes[lid] = equals;
    if (lid == 0) shared[2] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0) {
        uint sum = 0;
        for (uint i = 0; i < WG; i++) {
            const uint n = lanes[i];
            lanes[i] = sum;
            sum += n;
        }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    uint before = lanes[lid];
    for (uint i = begin; i < end; i++) {
        const uint key = key_of(x[i]);
        const bool is_equal = key == prefix;
        if (key > prefix || (is_equal && before < wanted)) {
            const uint at = atomic_inc(&shared[2]);
            if (at < k) temp[at] = (uint2)(key, i);
        }
        before += is_equal;
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    for (uint i = lid; i < k; i += WG) {
        const uint2 own = temp[i];
        uint rank = 0;
        for (uint j = 0; j < k; j++) {
            const uint2 other = temp[j];
            rank += other.x > own.x || (other.x == own.x && other.y < own.y);
        }
        AT(int, ids)[index * k + rank] = (int)own.y;
        AT(float, values)[index * k + rank] = x[own.y];
    }
}
