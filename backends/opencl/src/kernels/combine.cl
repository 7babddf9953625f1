// Puts the splits of a row together; a work-item for each element.
__kernel void combine(
    IN(state), OUT(y), IN(sinks), const uint has_sinks, const uint n_splits, const uint n_tokens, const uint n_head
) {
    const ulong i = get_global_id(0);
    if (i >= (ulong)n_tokens * n_head * DV) return;
    const ulong row = i / DV, n_rows = (ulong)n_tokens * n_head;
    const uint c = i % DV;
    __global const float* state = CAT(float, state);
    float most = has_sinks ? CAT(float, sinks)[row % n_head] : -INFINITY;
    for (uint s = 0; s < n_splits; s++) most = fmax(most, state[(s * n_rows + row) * (DV + 2)]);
    float sum = has_sinks ? exp(CAT(float, sinks)[row % n_head] - most) : 0.0f, total = 0.0f;
    for (uint s = 0; s < n_splits; s++) {
        __global const float* part = state + (s * n_rows + row) * (DV + 2);
        const float weight = exp(part[0] - most);
        sum += part[1] * weight;
        total += part[2 + c] * weight;
    }
    AT(float, y)[i] = total / sum;
}
