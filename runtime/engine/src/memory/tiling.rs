//! Cuts tensors into tiles and packs tiles into chunks.
//!
//! A tensor is a stack of row groups (one row, or as many rows as a device's layout interleaves). A tile is a run of groups; it never
//! spans two chunks. Small tensors share chunks up to the preferred size; one larger than that but within `max_size` gets a
//! chunk of its own; only one larger than `max_size` is split. The same code serves buffers that are allocated and
//! ranges of a mapped file, where the place of every row is given and only the cuts are free.

use crate::Error;

/// What is to be packed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    /// For errors and pictures.
    pub name: String,
    /// Rows in all.
    pub n_rows: u64,
    /// Rows that stay together.
    pub rows_per_group: u64,
    /// Bytes of a group.
    pub group_bytes: u64,
    /// Alignment of a tile's first byte inside its chunk.
    pub alignment: u64,
    /// Rows of one expert, where the item is a stack of them; 0 where it is none. A cut that can be between two experts is.
    pub rows_per_expert: u64,
}

impl Item {
    fn n_groups(&self) -> u64 {
        self.n_rows.div_ceil(self.rows_per_group.max(1))
    }

    /// Groups after which the next one is aligned as the first is.
    fn groups_per_alignment(&self) -> u64 {
        let (mut a, mut b) = (self.alignment.max(1), self.group_bytes.max(1));
        while b != 0 {
            (a, b) = (b, a % b);
        }
        self.alignment.max(1) / a
    }

    /// Whether [`pack_file`] can cut the item where a file has it, at `begin`: whole, or after runs of groups that leave the next tile aligned,
    /// with whole units of `import_alignment` around each tile.
    pub fn is_cut_in_file(&self, begin: u64, import_alignment: u64, max_size: u64) -> bool {
        let unit = import_alignment.max(1);
        let room = max_size - max_size % unit;
        let fits = |from: u64, bytes: Option<u64>| {
            bytes.and_then(|bytes| from.checked_add(bytes)).is_some_and(|end| end <= room)
        };
        let run = self.groups_per_alignment().checked_mul(self.group_bytes);
        // A run may begin at the last byte of a unit.
        fits(begin % unit, self.bytes().ok()) || fits(unit - 1, run)
    }

    /// How many groups to take from `group` on where `room` would fit: up to the end of an expert where one fits, so that the ops that read one
    /// find it in one chunk. A multiple of `unit`, so that the next tile is aligned; 0 if not even one unit fits.
    fn cut(&self, group: u64, room: u64, unit: u64) -> u64 {
        let per_expert = self.rows_per_expert / self.rows_per_group.max(1);
        let cut = |n: u64| n - n % unit.max(1);
        let whole = match (group + room).checked_rem(per_expert) {
            // The end of the last expert that fits, counted from the cut before.
            Some(over) => room.saturating_sub(over),
            None => 0,
        };
        match cut(whole) {
            n if n == whole && n > 0 => n,
            _ => cut(room),
        }
    }

    /// Bytes of the whole item.
    pub fn bytes(&self) -> Result<u64, Error> {
        self.n_groups()
            .checked_mul(self.group_bytes)
            .ok_or_else(|| Error::Overflow { what: format!("the bytes of `{}`", self.name) })
    }
}

/// A piece of an item in a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TileSpec {
    /// Index of the item.
    pub item: usize,
    /// First row.
    pub first_row: u64,
    /// Rows.
    pub n_rows: u64,
    /// Index of the chunk.
    pub chunk: usize,
    /// First byte in the chunk.
    pub offset: u64,
    /// Bytes.
    pub size: u64,
}

/// Sizes of chunks and the tiles in them, in the order of the items.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Packing {
    /// Bytes of each chunk.
    pub chunks: Vec<u64>,
    /// First byte in the file of each chunk; only for packings of a file.
    pub file_begins: Vec<u64>,
    /// All tiles.
    pub tiles: Vec<TileSpec>,
}

/// Limits of the chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkLimits {
    /// No chunk is larger.
    pub max_size: u64,
    /// Small items share chunks up to this size; at most `max_size`.
    pub preferred: u64,
}

impl ChunkLimits {
    fn too_big(&self, item: &Item) -> Error {
        Error::RowTooBig {
            tensor: item.name.clone(),
            asked: item.group_bytes,
            limit: self.max_size,
        }
    }

    /// Groups of `item` that fit a chunk; at least one, or an error.
    fn groups_per_chunk(&self, item: &Item) -> Result<u64, Error> {
        match self.max_size.checked_div(item.group_bytes) {
            None => Ok(item.n_groups().max(1)),
            Some(0) => Err(self.too_big(item)),
            Some(n) => Ok(n),
        }
    }
}

/// Packs `items` into new chunks.
pub fn pack(items: &[Item], limits: ChunkLimits) -> Result<Packing, Error> {
    let mut out = Packing::default();
    for (index, item) in items.iter().enumerate() {
        let bytes = item.bytes()?;
        if bytes <= limits.max_size {
            let chunk = open_chunk(&mut out.chunks, item.alignment, bytes, limits.preferred);
            out.tiles.push(TileSpec {
                item: index,
                first_row: 0,
                n_rows: item.n_rows,
                chunk,
                offset: aligned(out.chunks[chunk], item.alignment),
                size: bytes,
            });
            out.chunks[chunk] = aligned(out.chunks[chunk], item.alignment) + bytes;
            continue;
        }
        let per_chunk = limits.groups_per_chunk(item)?;
        let mut group = 0;
        while group < item.n_groups() {
            let left = item.n_groups() - group;
            let n = if per_chunk >= left { left } else { item.cut(group, per_chunk, 1) };
            let first_row = group * item.rows_per_group;
            out.chunks.push(n * item.group_bytes);
            out.tiles.push(TileSpec {
                item: index,
                first_row,
                n_rows: (n * item.rows_per_group).min(item.n_rows - first_row),
                chunk: out.chunks.len() - 1,
                offset: 0,
                size: n * item.group_bytes,
            });
            group += n;
        }
    }
    Ok(out)
}

/// The last chunk if `bytes` still fit it, or a new one.
fn open_chunk(chunks: &mut Vec<u64>, alignment: u64, bytes: u64, preferred: u64) -> usize {
    let fits = chunks.last().is_some_and(|used| {
        used.checked_next_multiple_of(alignment.max(1))
            .and_then(|begin| begin.checked_add(bytes))
            .is_some_and(|end| end <= preferred)
    });
    if !fits {
        chunks.push(0);
    }
    chunks.len() - 1
}

fn aligned(offset: u64, alignment: u64) -> u64 {
    offset.checked_next_multiple_of(alignment.max(1)).unwrap_or(u64::MAX)
}

/// Bytes between two items of a file above which they do not share a chunk: what lies between belongs to another device, and
/// would be counted here as well.
const FILE_GAP_MAX: u64 = 64 << 10;

/// Cuts the mapped range of a file into chunks that the device reads in place. `begins` are the items' first bytes in the file, rising;
/// chunks begin at multiples of `import_alignment` and their sizes are multiples of it, so neighbours may overlap by less than that. Items
/// begin at multiples of their alignment ([`Item::alignment`]), and so do their tiles.
pub fn pack_file(
    items: &[Item],
    begins: &[u64],
    import_alignment: u64,
    limits: ChunkLimits,
) -> Result<Packing, Error> {
    let import_alignment = import_alignment.max(1);
    let down = |offset: u64| offset - offset % import_alignment;
    // Sizes are rounded up at the end, so the room is what is left when they are.
    let max_size = down(limits.max_size);
    let limits = ChunkLimits { max_size, preferred: limits.preferred.min(max_size) };
    let mut out = Packing::default();
    let mut begin_of_chunk = 0u64;
    for (index, (item, begin)) in items.iter().zip(begins).enumerate() {
        let overflow = || Error::Overflow { what: format!("the place of `{}`", item.name) };
        let mut group = 0;
        while group < item.n_groups() {
            let at = begin.checked_add(group * item.group_bytes).ok_or_else(overflow)?;
            let rest = (item.n_groups() - group).checked_mul(item.group_bytes);
            let rest = rest.ok_or_else(overflow)?;
            let whole_fits =
                |from: u64, limit: u64| at.checked_add(rest).is_some_and(|end| end - from <= limit);
            let current = out.chunks.last().copied().unwrap_or(0);
            let gap = at.saturating_sub(begin_of_chunk.saturating_add(current));
            if current == 0 || gap > FILE_GAP_MAX || !whole_fits(begin_of_chunk, limits.preferred) {
                begin_of_chunk = down(at);
                out.chunks.push(0);
                out.file_begins.push(begin_of_chunk);
            }
            let room = limits.max_size.saturating_sub(at - begin_of_chunk);
            let n = match room.checked_div(item.group_bytes) {
                None => item.n_groups() - group,
                Some(0) => return Err(limits.too_big(item)),
                Some(n) if n >= item.n_groups() - group => item.n_groups() - group,
                // A cut in the middle must leave the next tile aligned.
                Some(n) => match item.cut(group, n, item.groups_per_alignment()) {
                    0 => return Err(limits.too_big(item)),
                    n => n,
                },
            };
            let (first_row, size) = (group * item.rows_per_group, n * item.group_bytes);
            let chunk = out.chunks.len() - 1;
            out.tiles.push(TileSpec {
                item: index,
                first_row,
                n_rows: (n * item.rows_per_group).min(item.n_rows - first_row),
                chunk,
                offset: at - begin_of_chunk,
                size,
            });
            out.chunks[chunk] = at - begin_of_chunk + size;
            group += n;
        }
    }
    for size in &mut out.chunks {
        *size = size.next_multiple_of(import_alignment);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn item(n_rows: u64, rows_per_group: u64, group_bytes: u64, alignment: u64) -> Item {
        let rows_per_expert = 0;
        Item { name: "w".into(), n_rows, rows_per_group, group_bytes, alignment, rows_per_expert }
    }

    /// Every row once and in order, no chunk over the limit, no two tiles on the same bytes: else a weight is read wrong.
    fn check(items: &[Item], packing: &Packing, limits: ChunkLimits) {
        assert!(packing.chunks.iter().all(|size| *size <= limits.max_size), "{packing:?}");
        for (index, item) in items.iter().enumerate() {
            let mut next = 0;
            for tile in packing.tiles.iter().filter(|tile| tile.item == index) {
                assert_eq!(tile.first_row, next);
                let groups = tile.n_rows.div_ceil(item.rows_per_group);
                assert_eq!(tile.size, groups * item.group_bytes);
                assert!(tile.offset + tile.size <= packing.chunks[tile.chunk]);
                next += tile.n_rows;
            }
            assert_eq!(next, item.n_rows);
        }
        let mut spans: Vec<_> =
            packing.tiles.iter().map(|t| (t.chunk, t.offset, t.offset + t.size)).collect();
        spans.sort_unstable();
        for pair in spans.windows(2) {
            assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1, "{pair:?}");
        }
    }

    proptest! {
        #[test]
        fn packings_cover_every_row_once(
            shapes in prop::collection::vec((1u64..200, 1u64..9, 1u64..300, 0u32..7), 1..20),
            max in 300u64..5000,
            preferred in 1u64..5000,
            import_alignment in prop::sample::select(vec![1u64, 32, 64, 4096]),
        ) {
            let limits = ChunkLimits { max_size: max, preferred: preferred.min(max) };
            let items: Vec<_> =
                shapes.iter().map(|(r, g, b, a)| item(*r, *g, *b, 1 << a)).collect();
            let packing = pack(&items, limits).unwrap();
            check(&items, &packing, limits);
            for tile in &packing.tiles {
                prop_assert!(tile.offset.is_multiple_of(items[tile.item].alignment));
            }
            // Room for one cut that keeps the alignment, beside what rounding begin and size takes.
            let cut = items.iter().map(|i| i.groups_per_alignment() * i.group_bytes).max();
            let max_size = (max + cut.unwrap_or(0)).next_multiple_of(import_alignment) + 2 * import_alignment;
            let wide = ChunkLimits { max_size, ..limits };
            let mut at = 7u64;
            let mut begins = Vec::new();
            for item in &items {
                at = at.next_multiple_of(item.alignment);
                begins.push(at);
                at += item.bytes().unwrap() + 5;
            }
            let packing = pack_file(&items, &begins, import_alignment, wide).unwrap();
            check(&items, &packing, wide);
            prop_assert!(packing.chunks.iter().all(|size| size.is_multiple_of(import_alignment)));
            for tile in &packing.tiles {
                let item = &items[tile.item];
                prop_assert!((packing.file_begins[tile.chunk] + tile.offset).is_multiple_of(item.alignment));
                let row_begin = begins[tile.item] + tile.first_row / item.rows_per_group * item.group_bytes;
                prop_assert_eq!(packing.file_begins[tile.chunk] + tile.offset, row_begin);
            }
        }
    }

    /// What would be refused as a mapped tensor must be known before, so that it is allocated instead; what is accepted must be cut.
    #[test]
    fn items_that_a_file_cannot_be_cut_at() {
        for begin in (0..9000).step_by(7) {
            for group_bytes in [100, 512, 4000, 4096] {
                for (max_size, unit) in [(4096, 4096), (4100, 64), (8192, 4096), (512, 1)] {
                    let item = item(40, 1, group_bytes, 1);
                    let limits = ChunkLimits { max_size, preferred: max_size };
                    if item.is_cut_in_file(begin, unit, max_size) {
                        let items = [item];
                        let packing = pack_file(&items, &[begin], unit, limits).unwrap();
                        check(&items, &packing, limits);
                    } else {
                        assert!(group_bytes + unit > max_size, "{begin} {group_bytes} {max_size}");
                    }
                }
            }
        }
    }

    /// An expert that lies in two chunks costs each of its products a second pass: it happens only where one chunk cannot hold it.
    #[test]
    fn stacks_are_cut_between_experts() {
        for (rows_per_expert, max_size, cuts) in [
            (8, 1000, [8, 16, 24].as_slice()),
            (8, 1700, &[16]),
            (8, 799, &[7, 8, 15, 16, 23, 24, 31]),
            (8, 3200, &[]),
            (0, 1000, &[10, 20, 30]),
        ] {
            let stack = Item { rows_per_expert, ..item(32, 1, 100, 1) };
            let limits = ChunkLimits { max_size, preferred: max_size };
            let items = [stack];
            let (packed, in_file) =
                (pack(&items, limits).unwrap(), pack_file(&items, &[300], 1, limits).unwrap());
            for packing in [packed, in_file] {
                check(&items, &packing, limits);
                let firsts: Vec<u64> = packing.tiles.iter().skip(1).map(|t| t.first_row).collect();
                assert_eq!(firsts, cuts, "{rows_per_expert} {max_size}");
            }
        }
    }

    /// A limit that is no whole number of import units is lower for a mapped range; an item that fits the stated limit alone begins a chunk.
    #[test]
    fn the_last_part_of_a_unit_is_no_room() {
        let limits = ChunkLimits { max_size: 8200, preferred: 8200 };
        let items = [item(1, 1, 7600, 1), item(8, 1, 73, 64)];
        let packing = pack_file(&items, &[0, 7616], 4096, limits).unwrap();
        check(&items, &packing, limits);
        assert_eq!(packing.chunks.len(), 2);
    }

    /// One row larger than a buffer cannot be cut: the load is refused by name and numbers, not at some later step.
    #[test]
    fn a_row_over_the_limit_is_refused() {
        let limits = ChunkLimits { max_size: 99, preferred: 99 };
        let error = pack(&[item(4, 1, 100, 1)], limits).unwrap_err();
        assert!(matches!(error, Error::RowTooBig { asked: 100, limit: 99, .. }), "{error}");
        let error = pack_file(&[item(4, 1, 100, 1)], &[0], 1, limits).unwrap_err();
        assert!(matches!(error, Error::RowTooBig { .. }), "{error}");
    }
}
