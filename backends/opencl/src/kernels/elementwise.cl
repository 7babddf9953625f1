// Elementwise ops, one work-item an element, and copies of rows and columns.

__kernel void add(IN(a), IN(b), OUT(y), const ulong n, const ulong period) {
    const ulong i = get_global_id(0);
    if (i < n) AT(float, y)[i] = CAT(float, a)[i] + CAT(float, b)[period ? i % period : i];
}

__kernel void mul(IN(a), IN(b), OUT(y), const ulong n, const ulong period) {
    const ulong i = get_global_id(0);
    if (i < n) AT(float, y)[i] = CAT(float, a)[i] * CAT(float, b)[period ? i % period : i];
}

__kernel void glu(IN(gate), IN(up), OUT(y), const ulong n, const uint which) {
    const ulong i = get_global_id(0);
    if (i < n) AT(float, y)[i] = activate(which, CAT(float, gate)[i]) * CAT(float, up)[i];
}

// Both sides within a limit; the gate with a sigmoid of its own steepness.
__kernel void glu_clamped(IN(gate), IN(up), OUT(y), const ulong n, const float alpha, const float limit) {
    const ulong i = get_global_id(0);
    if (i >= n) return;
    const float gate = fmin(CAT(float, gate)[i], limit);
    AT(float, y)[i] = gate / (1.0f + exp(-alpha * gate)) * (clamp(CAT(float, up)[i], -limit, limit) + 1.0f);
}

__kernel void unary(IN(x), OUT(y), const ulong n, const uint which) {
    const ulong i = get_global_id(0);
    if (i < n) AT(float, y)[i] = activate(which, CAT(float, x)[i]);
}

__kernel void scale(IN(x), OUT(y), const ulong n, const float factor) {
    const ulong i = get_global_id(0);
    if (i < n) AT(float, y)[i] = CAT(float, x)[i] * factor;
}

__kernel void softcap(IN(x), OUT(y), const ulong n, const float cap) {
    const ulong i = get_global_id(0);
    if (i < n) AT(float, y)[i] = cap * tanh(CAT(float, x)[i] / cap);
}

// `len` columns from `begin` of rows, or groups, of `row`.
__kernel void slice(IN(x), OUT(y), const ulong n, const uint row, const uint begin, const uint len) {
    const ulong i = get_global_id(0);
    if (i < n) AT(float, y)[i] = CAT(float, x)[i / len * row + begin + i % len];
}

__kernel void concat(IN(a), IN(b), OUT(y), const ulong n, const uint p, const uint q) {
    const ulong i = get_global_id(0);
    if (i >= n) return;
    const ulong row = i / (p + q);
    const uint column = i % (p + q);
    AT(float, y)[i] = column < p ? CAT(float, a)[row * p + column] : CAT(float, b)[row * q + column - p];
}

// Rows of x by number. A number out of range gives zeros: the device cannot refuse, and must not read elsewhere.
__kernel void gather_rows(IN(x), IN(rows), OUT(y), const ulong n, const uint row, const uint n_rows) {
    const ulong i = get_global_id(0);
    if (i >= n) return;
    const int from = CAT(int, rows)[i / row];
    const bool inside = from >= 0 && (uint)from < n_rows;
    AT(float, y)[i] = inside ? CAT(float, x)[(ulong)from * row + i % row] : 0.0f;
}
