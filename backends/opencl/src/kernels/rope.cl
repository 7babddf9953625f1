// Rotary position embedding.
//
// An angle in f32 is off by 4e-3 at position 100,000, and double precision is optional in OpenCL. So `turns` holds, for each pair, the part of a
// full turn that it makes in one position, as a fraction of 2^64: the product with a position wraps by itself, exactly.

inline float2 rotation(const ulong turn, const int position, const float magnitude) {
    const long fraction = (long)(turn * (ulong)(long)position);
    // In half turns, from -1 to 1.
    const float half_turns = (float)fraction * 1.0842021724855044e-19f;
    return (float2)(cospi(half_turns), sinpi(half_turns)) * magnitude;
}

// One work-item for each pair of a head; the elements that do not turn are copied by the last ones. Queries and keys turn alike, so they
// run together: `n` items of x, then `n2` of x2.
__kernel void rope(
    IN(x), IN(x2), IN(positions), IN(turns), OUT(y), OUT(y2),
    const ulong n, const ulong n2, const uint n_head_x, const uint n_head_x2,
    const uint head_dim, const uint n_rot, const uint neox, const float magnitude
) {
    const bool is_second = get_global_id(0) >= n;
    const ulong i = is_second ? get_global_id(0) - n : get_global_id(0);
    if (is_second && i >= n2) return;
    const uint n_head = is_second ? n_head_x2 : n_head_x;
    // Pairs of turning elements, then single elements.
    const uint n_pairs = n_rot / 2, items = head_dim - n_pairs;
    const ulong head = i / items;
    const uint item = i % items;
    __global const float* x = (is_second ? CAT(float, x2) : CAT(float, x)) + head * head_dim;
    __global float* y = (is_second ? AT(float, y2) : AT(float, y)) + head * head_dim;
    if (item >= n_pairs) {
        y[item + n_pairs] = x[item + n_pairs];
        return;
    }
    const int position = CAT(int, positions)[head / n_head];
    const float2 r = rotation(CAT(ulong, turns)[item], position, magnitude);
    const uint a = neox ? item : 2 * item, b = neox ? item + n_pairs : 2 * item + 1;
    const float u = x[a], v = x[b];
    y[a] = u * r.x - v * r.y;
    y[b] = u * r.y + v * r.x;
}
