// Norms: a work-group for each group of `n` elements that are normalised together.

__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void rms_norm(IN(x), IN(w), OUT(y), const uint n, const float eps, const uint has_weight) {
    __local float shared[WG];
    const ulong begin = (ulong)get_group_id(0) * n;
    __global const float* x = CAT(float, x) + begin;
    __global const float* w = CAT(float, w);
    __global float* y = AT(float, y) + begin;
    float sum = 0.0f;
    for (uint i = get_local_id(0); i < n; i += WG) sum += x[i] * x[i];
    sum = group_sum(sum, shared);
    const float factor = 1.0f / sqrt(sum / (float)n + eps);
    for (uint i = get_local_id(0); i < n; i += WG) {
        const float value = x[i] * factor;
        y[i] = has_weight ? value * w[i] : value;
    }
}

// By length: the sum of squares, not their mean.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void l2_norm(IN(x), OUT(y), const uint n, const float eps) {
    __local float shared[WG];
    const ulong begin = (ulong)get_group_id(0) * n;
    __global const float* x = CAT(float, x) + begin;
    __global float* y = AT(float, y) + begin;
    float sum = 0.0f;
    for (uint i = get_local_id(0); i < n; i += WG) sum += x[i] * x[i];
    const float factor = 1.0f / sqrt(group_sum(sum, shared) + eps);
    for (uint i = get_local_id(0); i < n; i += WG) y[i] = x[i] * factor;
}

// The mean is subtracted before squares are summed, so that a great mean costs no digits of the variance.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void layer_norm(IN(x), IN(w), IN(b), OUT(y), const uint n, const float eps, const uint has_bias) {
    __local float shared[WG];
    const ulong begin = (ulong)get_group_id(0) * n;
    __global const float* x = CAT(float, x) + begin;
    __global const float* w = CAT(float, w);
    __global const float* b = CAT(float, b);
    __global float* y = AT(float, y) + begin;
    float sum = 0.0f;
    for (uint i = get_local_id(0); i < n; i += WG) sum += x[i];
    const float mean = group_sum(sum, shared) / (float)n;
    sum = 0.0f;
    for (uint i = get_local_id(0); i < n; i += WG) sum += (x[i] - mean) * (x[i] - mean);
    sum = group_sum(sum, shared);
    const float factor = 1.0f / sqrt(sum / (float)n + eps);
    for (uint i = get_local_id(0); i < n; i += WG) {
        const float value = (x[i] - mean) * factor * w[i];
        y[i] = has_bias ? value + b[i] : value;
    }
}
