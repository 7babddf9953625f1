// Products with the rows of chosen experts: what of a stack of weights is multiplied, and for which slots. A slot is one expert of one row of
// activations. Which experts those are is known to the device alone, so kernels read the router's ids.
//
// EXPERTS  0: none, columns are the rows of x
//          1: each slot by itself
//          2: groups of up to so many slots of one expert, as `sort_slots` lists them, so that a decoded weight serves them all
//
// A tile of the weight has rows `tile_first ..` of the stack, `n_tile` of them; `n_rows` are those of an expert, and so are those of y.

#if EXPERTS
#define EXPERTS_ARGS                                                                                    \
    , IN(ids), IN(groups), const ulong slots_at, const uint n_expert, const uint sharing, const uint tile_first, const uint n_tile
#else
#define EXPERTS_ARGS
#endif

typedef struct {
    // From row 0 of the expert to row `begin`, the first that the tile holds, and its end.
    uint begin, end;
    // Rows of the stack before the expert's first, less those before the tile: it wraps where the tile begins later.
    ulong skip;
    // The first column, and the end of columns.
    uint col0, n_cols;
} Share;

#if EXPERTS
inline Share share_of(
    __global const int* ids, __global const uint4* groups, const uint column, const uint n_rows, const uint n_expert, const uint tile_first,
    const uint n_tile
) {
    Share s;
#if EXPERTS == 1
    uint expert = (uint)ids[column];
    s.col0 = column;
    s.n_cols = column + 1;
#else
    const uint4 some = groups[column];
    uint expert = some.x;
    s.col0 = some.y;
    s.n_cols = some.y + some.z;
#endif
    // Nothing outside the weight is read, whatever the ids are.
    expert = min(expert, n_expert - 1);
    const ulong row = (ulong)expert * n_rows, end = (ulong)tile_first + n_tile;
    s.skip = row - tile_first;
    s.begin = (uint)min(row < tile_first ? tile_first - row : 0ul, (ulong)n_rows);
    s.end = (uint)(row < end ? min(end - row, (ulong)n_rows) : 0ul);
    // Of an expert that lies in other tiles, and of no expert, there are no rows.
    if (s.begin >= s.end || s.col0 == s.n_cols) s.end = 0;
    return s;
}
#define SHARE(column) share_of(CAT(int, ids), CAT(uint4, groups), column, n_rows, n_expert, tile_first, n_tile)
#if EXPERTS == 1
#define SLOT_OF(column) (column)
#else
#define SLOT_OF(column) (((__global const uint*)(groups_buf + groups_off + slots_at))[column])
#endif
#define ROW_OF(column) (SLOT_OF(column) / sharing)
#endif
