#version 460
// The k greatest of a row, one workgroup a row. Elements become distinct 64-bit keys; the k-th greatest key is found digit by digit, and
// what is not below it is sorted: in shared memory up to 1024, else each by counting how many are greater.
#extension GL_GOOGLE_include_directive : require
#include "common.glsl"
#include "rank.glsl"

layout(local_size_x = 256) in;

layout(push_constant) uniform Push {
    uint64_t x;
    uint64_t ids;
    uint64_t values;
    uint n;
    uint n_rows;
    uint k;
} p;

const uint SORTED = 1024;
shared uint histogram[256];
shared uint64_t sorted[SORTED];
shared uint n_sorted;
shared uint64_t prefix;
shared uint left;

uint64_t key_at(uint row, uint i) {
    float x = LDF(p.x + 4 * (uint64_t(row) * p.n + i));
    return (uint64_t(order(x)) << 32) | (0xffffffffu - i);
}

void put(uint row, uint rank, uint64_t key) {
    uint i = 0xffffffffu - uint(key & 0xffffffffu);
    uint64_t at = 4 * (uint64_t(row) * p.k + rank);
    LDI(p.ids + at) = int(i);
    LDU(p.values + at) = LDU(p.x + 4 * (uint64_t(row) * p.n + i));
}

void select(uint row, uint tid) {
    if (tid == 0) {
        prefix = 0;
        left = p.k;
        n_sorted = 0;
    }
    for (int shift = 56; shift >= 0; shift -= 8) {
        histogram[tid] = 0;
        barrier();
        uint64_t above = prefix;
        for (uint i = tid; i < p.n; i += 256) {
            uint64_t key = key_at(row, i);
            bool is_same = shift == 56 || (key >> (shift + 8)) == (above >> (shift + 8));
            if (is_same) atomicAdd(histogram[uint(key >> shift) & 255], 1);
        }
        barrier();
        if (tid == 0) {
            uint wanted = left;
            uint digit = 255;
            while (digit > 0 && histogram[digit] < wanted) wanted -= histogram[digit--];
            left = wanted;
            prefix = above | (uint64_t(digit) << shift);
        }
        barrier();
    }
}

void sort(uint row, uint tid) {
    uint size = 1;
    while (size < p.k) size *= 2;
    for (uint i = p.k + tid; i < size; i += 256) sorted[i] = 0;
    barrier();
    for (uint span = 2; span <= size; span *= 2) {
        for (uint gap = span / 2; gap > 0; gap /= 2) {
            for (uint i = tid; i < size; i += 256) {
                uint j = i ^ gap;
                if (j > i) {
                    uint64_t a = sorted[i];
                    uint64_t b = sorted[j];
                    bool is_falling = (i & span) == 0;
                    if (is_falling ? a < b : a > b) {
                        sorted[i] = b;
                        sorted[j] = a;
                    }
                }
            }
            barrier();
        }
    }
    for (uint i = tid; i < p.k; i += 256) put(row, i, sorted[i]);
}

void main() {
    uint tid = gl_LocalInvocationID.x;
    for (uint row = gl_WorkGroupID.x; row < p.n_rows; row += gl_NumWorkGroups.x) {
        barrier();
        select(row, tid);
        uint64_t least = prefix;
        if (p.k > SORTED) {
            for (uint i = tid; i < p.n; i += 256) {
                uint64_t key = key_at(row, i);
                if (key < least) continue;
                uint rank = 0;
                for (uint j = 0; j < p.n; j++) rank += key_at(row, j) > key ? 1 : 0;
                put(row, rank, key);
            }
            continue;
        }
        for (uint i = tid; i < p.n; i += 256) {
            uint64_t key = key_at(row, i);
            if (key >= least) {
                uint at = atomicAdd(n_sorted, 1);
                if (at < SORTED) sorted[at] = key;
            }
        }
        barrier();
        sort(row, tid);
    }
}
