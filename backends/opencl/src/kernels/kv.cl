// The paged KV cache: where a position's row lies, and how rows are stored. KT and VT are GGUF's numbers of the types of keys and values.
//
// There are no addresses in OpenCL, so the buffers that hold a layer's tiles are arguments, as many as fit a call (a pass). A segment's entry in
// the table says which pass has it, and which of the pass's buffers holds its keys and its values, from which byte on.

#define T_F32 0
#define T_F16 1
#define T_Q4_0 2
#define T_Q8_0 8
#define T_BF16 30

#define KV_BUFFERS                                                                                       \
    __global uchar* kv0, __global uchar* kv1, __global uchar* kv2, __global uchar* kv3, __global uchar* kv4, \
        __global uchar* kv5, __global uchar* kv6, __global uchar* kv7
#define KV_BUFFER(i)                                                                                     \
    ((i) < 4 ? ((i) < 2 ? ((i) == 0 ? kv0 : kv1) : ((i) == 2 ? kv2 : kv3))                                \
             : ((i) < 6 ? ((i) == 4 ? kv4 : kv5) : ((i) == 6 ? kv6 : kv7)))

#define ROW_BYTES(type, dim)                                                                            \
    ((type) == T_F32 ? 4 * (dim) : (type) == T_Q8_0 ? (dim) / 32 * 34 : (type) == T_Q4_0 ? (dim) / 32 * 18 : 2 * (dim))

typedef struct {
    uint first_block, n_blocks, pass, slots;
    ulong k_offset, v_offset;
} Segment;

// The segment of a block, or `n` for one that is in none.
inline uint segment_of(__global const Segment* segments, const uint n, const uint block) {
    uint low = 0, high = n;
    while (low < high) {
        const uint middle = (low + high) / 2;
        if (segments[middle].first_block + segments[middle].n_blocks <= block) low = middle + 1;
        else high = middle;
    }
    return low;
}
