// Products with the rows of chosen experts: what of a stack of weights a workgroup multiplies, and for which slots. A slot is one expert of
// one row of activations. To be included after the push constants, which end as below; `steps/experts.rs` writes them.
//
//     uint64_t ids;        the experts of all slots
//     uint64_t groups;     with BY_GROUP: up to COLS slots of one expert each, as (expert, first in `slots`, number, 0)
//     uint64_t slots;      with BY_GROUP: slots, sorted by expert
//     uint first;          row of the stack that the tile begins with
//     uint n_tile;         rows of the tile
//     uint n_expert;
//     uint sharing;        slots that read one row of x
//
// `n_rows` are those of an expert. The weight, the second weight and the bias begin with the tile; x and y with the first slot.

layout(constant_id = 30) const uint EXPERTS = 0;
// One slot a workgroup, as they come: each reads the rows of its expert.
const uint BY_SLOT = 1;
// Slots of one expert together, so that a decoded weight serves them all.
const uint BY_GROUP = 2;

struct Share {
    // Rows from the tile's first to the expert's; it wraps where the tile begins later.
    uint64_t skip;
    // The rows of the expert that the tile holds.
    uint begin;
    uint end;
    // Columns: how many, and the first.
    uint n_cols;
    uint col0;
};

// The share of a workgroup in a product of at most `cols` columns at `group` in the direction of columns.
Share share(uint group, uint cols) {
    Share s;
    s.skip = 0;
    s.begin = 0;
    s.end = p.n_rows;
    s.n_cols = p.n_cols;
    s.col0 = group * cols;
    if (EXPERTS == 0) return s;
    uint expert;
    if (EXPERTS == BY_SLOT) {
        expert = uint(LDI(p.ids + 4 * uint64_t(group)));
        s.col0 = group;
        s.n_cols = group + 1;
    } else {
        uvec4 some = LDU4(p.groups + 16 * uint64_t(group));
        expert = some.x;
        s.col0 = some.y;
        s.n_cols = some.y + some.z;
        if (some.z == 0) {
            s.end = 0;
            return s;
        }
    }
    // Nothing outside the weight is read, whatever the ids are.
    expert = min(expert, p.n_expert - 1);
    uint64_t row = uint64_t(expert) * p.n_rows;
    uint64_t stop = uint64_t(p.first) + p.n_tile;
    s.skip = row - p.first;
    s.begin = uint(min(row < p.first ? p.first - row : 0, uint64_t(p.n_rows)));
    s.end = uint(row < stop ? min(stop - row, uint64_t(p.n_rows)) : 0);
    // Of an expert that lies in other tiles there are no rows.
    if (s.begin >= s.end) s.end = 0;
    return s;
}

// The row of y of a column, and that of x.
uint slot_of(uint col) {
    if (EXPERTS == BY_GROUP) return LDU(p.slots + 4 * uint64_t(col));
    return col;
}

uint row_of(uint slot) { return EXPERTS == 0 ? slot : slot / p.sharing; }
