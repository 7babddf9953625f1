// Mixtures of experts beside their products: the router, the order of slots, and the sum. EXPERTS_MAX is the most experts of a layer.

// What a logit is worth before it is divided by the sum of all.
inline float worth(const uint gating, const float x, const float most) {
    if (gating == 0) return exp(x - most);
    if (gating == 1) {
        // Close to 1 a difference keeps scores apart that a quotient makes equal.
        const float e = exp(-fabs(x)), rest = e / (1.0f + e);
        return x < 0.0f ? rest : 1.0f - rest;
    }
    return x;
}

// The experts of a row and their weights, a work-group a row: the greatest score that is left is looked for k times.
// gating 0: softmax, 1: sigmoid, 2: softmax over the chosen.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void router_topk(
    IN(logits), IN(bias), OUT(ids), OUT(weights),
    const uint n, const uint k, const uint gating, const uint normalise, const uint has_bias, const float scale
) {
    __local float p[EXPERTS_MAX];
    __local uint keys[EXPERTS_MAX];
    __local float sums[WG];
    __local uint best[WG], place[WG];
    const uint lid = get_local_id(0);
    const ulong row = get_group_id(0);
    __global const float* x = CAT(float, logits) + row * n;
    __global const float* bias = CAT(float, bias);
    __global int* ids = AT(int, ids) + row * k;
    __global float* weights = AT(float, weights) + row * k;
    float most = -INFINITY;
    for (uint i = lid; i < n; i += WG) most = fmax(most, x[i]);
    sums[lid] = most;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = 0; i < WG; i++) most = fmax(most, sums[i]);
    barrier(CLK_LOCAL_MEM_FENCE);
    float sum = 0.0f;
    for (uint i = lid; i < n; i += WG) {
        p[i] = worth(gating, x[i], most);
        sum += p[i];
    }
    sum = group_sum(sum, sums);
    for (uint i = lid; i < n; i += WG) {
        if (gating == 0) p[i] /= sum;
        keys[i] = key_of(has_bias ? p[i] + bias[i] : p[i]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint j = 0; j < k; j++) {
        uint key = 0, at = 0xffffffffu;
        for (uint i = lid; i < n; i += WG) {
            // A chosen one has no key left; of others the first of the greatest.
            if (keys[i] > key) {
                key = keys[i];
                at = i;
            }
        }
        best[lid] = key;
        place[lid] = at;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (uint half_n = WG / 2; half_n > 0; half_n /= 2) {
            if (lid < half_n) {
                const uint other = best[lid + half_n], there = place[lid + half_n];
                if (other > best[lid] || (other == best[lid] && there < place[lid])) {
                    best[lid] = other;
                    place[lid] = there;
                }
            }
            barrier(CLK_LOCAL_MEM_FENCE);
        }
        if (lid == 0) {
            const uint chosen = min(place[0], n - 1);
            ids[j] = (int)chosen;
            // Chosen once.
            keys[chosen] = 0;
        }
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    // The rest is a few numbers.
    if (lid != 0) return;
    float top = -INFINITY, total = 0.0f;
    for (uint j = 0; j < k; j++) top = fmax(top, p[ids[j]]);
    for (uint j = 0; j < k; j++) total += gating == 2 ? exp(p[ids[j]] - top) : p[ids[j]];
    const float part = gating == 2 ? total : normalise ? fmax(total, 1e-20f) : 1.0f;
    for (uint j = 0; j < k; j++) {
        const float weight = gating == 2 ? exp(p[ids[j]] - top) : p[ids[j]];
        weights[j] = weight / part * scale;
    }
}

// Slots sorted by expert, and groups of up to `size` slots of one expert: (expert, first, number, 0), zeros where there are fewer than could be.
// One work-group; in what order an expert's slots stand is left to chance, since each has its own results.
__kernel __attribute__((reqd_work_group_size(WG, 1, 1)))
void sort_slots(IN(ids), OUT(groups), const ulong slots_at, const uint n_rows, const uint k, const uint n_expert, const uint size) {
    __local uint counts[EXPERTS_MAX], places[EXPERTS_MAX], firsts[EXPERTS_MAX];
    __local uint used[1];
    const uint lid = get_local_id(0), n = n_rows * k, n_groups = (n + size - 1) / size + n_expert;
    __global const int* ids = CAT(int, ids);
    __global uint4* groups = AT(uint4, groups);
    __global uint* slots = (__global uint*)(groups_buf + groups_off + slots_at);
    for (uint i = lid; i < n_expert; i += WG) counts[i] = 0;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = lid; i < n; i += WG) atomic_inc(&counts[min((uint)ids[i], n_expert - 1)]);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (lid == 0) {
        uint place = 0, first = 0;
        for (uint i = 0; i < n_expert; i++) {
            places[i] = place;
            firsts[i] = first;
            place += counts[i];
            first += (counts[i] + size - 1) / size;
        }
        used[0] = first;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = lid; i < n_expert; i += WG) {
        uint to = firsts[i];
        for (uint at = 0; at < counts[i]; at += size) groups[to++] = (uint4)(i, places[i] + at, min(size, counts[i] - at), 0);
    }
    for (uint i = used[0] + lid; i < n_groups; i += WG) groups[i] = (uint4)(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint i = lid; i < n; i += WG) slots[atomic_inc(&places[min((uint)ids[i], n_expert - 1)])] = i;
}

// The weighted sum of what a row's k experts made.
__kernel void combine_experts(IN(x), IN(weights), OUT(y), const ulong n, const uint m, const uint k) {
    const ulong i = get_global_id(0);
    if (i >= n) return;
    const ulong row = i / m;
    __global const float* x = CAT(float, x) + row * k * m + i % m;
    __global const float* weights = CAT(float, weights) + row * k;
    float sum = 0.0f;
    for (uint j = 0; j < k; j++) sum = fma(weights[j], x[(ulong)j * m], sum);
    AT(float, y)[i] = sum;
}
