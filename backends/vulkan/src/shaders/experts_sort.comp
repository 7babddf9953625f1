#version 460
// Slots sorted by the expert that they go to, and groups of up to `size` slots of one expert, for products that decode a weight once for
// several slots. One workgroup; in what order an expert's slots stand is left to chance, since each has its own results.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"

layout(local_size_x = 256) in;

layout(push_constant) uniform Push {
    uint64_t ids;
    uint64_t groups;
    uint64_t slots;
    uint n;
    uint n_expert;
    uint size;
    uint n_groups;
} p;

const uint EXPERTS_MAX = 2048;
const uint EACH = EXPERTS_MAX / 256;
// Slots of each expert; later the next place among all.
shared uint place[EXPERTS_MAX];
shared uvec2 sums[256];

uint expert_of(uint slot) { return min(uint(LDI(p.ids + 4 * uint64_t(slot))), p.n_expert - 1); }

void main() {
    uint tid = gl_LocalInvocationID.x;
    for (uint i = 0; i < EACH; i++) place[tid + 256 * i] = 0;
    barrier();
    for (uint slot = tid; slot < p.n; slot += 256) atomicAdd(place[expert_of(slot)], 1);
    barrier();
    // Each invocation has a few neighbouring experts; x are slots, y groups.
    uvec2 mine = uvec2(0);
    for (uint i = 0; i < EACH; i++) {
        uint n = place[EACH * tid + i];
        mine += uvec2(n, (n + p.size - 1) / p.size);
    }
    sums[tid] = mine;
    barrier();
    for (uint gap = 1; gap < 256; gap *= 2) {
        uvec2 before = tid >= gap ? sums[tid - gap] : uvec2(0);
        barrier();
        sums[tid] += before;
        barrier();
    }
    uvec2 next = sums[tid] - mine;
    uint n_used = sums[255].y;
    for (uint i = 0; i < EACH; i++) {
        uint expert = EACH * tid + i;
        uint n = place[expert];
        place[expert] = next.x;
        for (uint at = 0; at < n; at += p.size) {
            LDU4(p.groups + 16 * uint64_t(next.y)) = uvec4(expert, next.x + at, min(p.size, n - at), 0);
            next.y++;
        }
        next.x += n;
    }
    for (uint group = n_used + tid; group < p.n_groups; group += 256) LDU4(p.groups + 16 * uint64_t(group)) = uvec4(0);
    barrier();
    for (uint slot = tid; slot < p.n; slot += 256) {
        uint at = atomicAdd(place[expert_of(slot)], 1);
        LDU(p.slots + 4 * uint64_t(at)) = slot;
    }
}
