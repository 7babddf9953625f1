// Rows of a table by id, one work-item for each group of 32 elements. A tile writes the rows it has, and the first tile writes zeros for
// ids that no tile has: the device cannot refuse, and must not read elsewhere.
__kernel void embed(
    IN(ids), IN(w), OUT(y),
    const ulong n, const uint n_in, const uint G, const uint stride, const uint first_row, const uint n_rows, const uint n_vocab
) {
    const ulong i = get_global_id(0);
    if (i >= n) return;
    const uint g = i % G;
    const int id = CAT(int, ids)[i / G];
    __global float* y = AT(float, y) + i / G * n_in + 32 * g;
    const uint count = min(32u, n_in - 32 * g);
    if (id < 0 || (uint)id >= n_vocab) {
        for (uint k = 0; first_row == 0 && k < count; k++) y[k] = 0.0f;
        return;
    }
    if ((uint)id < first_row || (uint)id - first_row >= n_rows) return;
    float16 a, b;
    float4 s;
    raw32(CAT(uchar, w) + (ulong)((uint)id - first_row) * stride, G, g, &a, &b, &s);
    float values[32];
    vstore16(a * s.x + s.y, 0, values);
    vstore16(b * s.z + s.w, 1, values);
    for (uint k = 0; k < count; k++) y[k] = values[k];
}
