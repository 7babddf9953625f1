//! The KV cache on the host: where blocks lie, and storing rows in them.

#![expect(unsafe_code, reason = "blocks are addressed in the core's tiles")]

use crate::buffer::Buffer;
use tegula_sdk::program::KvLayer;
use tegula_sdk::quant::{DType, QuantizeFn, quantize_row_fn};
use tegula_sdk::{Error, KvGroup, Result, Run, Seq};

/// Where one block lies: its segment, and its place in it.
#[derive(Debug, Clone, Copy)]
struct Place {
    segment: usize,
    index: u64,
}

/// One sequence of a run, with its blocks of one group by position; blocks that a window has left are `None`.
#[derive(Debug)]
pub(crate) struct SeqPlaces {
    pub(crate) first_token: usize,
    pub(crate) n_tokens: usize,
    pub(crate) first_pos: usize,
    places: Vec<Option<Place>>,
}

impl SeqPlaces {
    fn new<B>(group: &KvGroup<'_, B>, seq: &Seq<'_>, index: u32) -> Result<Self> {
        let (blocks, first_pos) = seq.blocks(index)?;
        let skipped = (first_pos / group.block_len) as usize;
        let end = u64::from(seq.first_pos) + u64::from(seq.n_tokens);
        let covered = (skipped as u64 + blocks.len() as u64) * u64::from(group.block_len);
        if covered < end {
            return Err(Error::invalid(format!("KvBlocks for {covered} positions of {end}")));
        }
        let mut places = vec![None; skipped];
        for block in blocks {
            let after = group.segments.partition_point(|s| s.first_block <= *block);
            let segment = after.checked_sub(1).and_then(|i| Some((i, group.segments.get(i)?)));
            let place = segment
                .filter(|(_, s)| *block - s.first_block < s.n_blocks)
                .map(|(i, s)| Place { segment: i, index: u64::from(*block - s.first_block) });
            if place.is_none() {
                return Err(Error::invalid(format!("KvBlock {block} is in no segment")));
            }
            places.push(place);
        }
        Ok(Self {
            first_token: seq.first_token as usize,
            n_tokens: seq.n_tokens as usize,
            first_pos: seq.first_pos as usize,
            places,
        })
    }
}

/// All sequences of a run in one KV group.
pub(crate) struct GroupPlaces {
    pub(crate) block_len: usize,
    pub(crate) seqs: Vec<SeqPlaces>,
}

impl GroupPlaces {
    /// Resolves the block tables of a run.
    pub(crate) fn new(run: &Run<'_, Buffer>, index: u32) -> Result<Self> {
        let group = run.kv_group(index)?;
        let seqs: Result<Vec<_>> =
            (0..run.n_seqs()).map(|i| SeqPlaces::new(&group, &run.seq(i)?, index)).collect();
        let seqs = seqs?;
        let rows = u64::from(run.n_tokens());
        if seqs.iter().any(|seq| seq.first_token as u64 + seq.n_tokens as u64 > rows) {
            return Err(Error::invalid("a sequence has rows beyond the run's"));
        }
        Ok(Self { block_len: group.block_len as usize, seqs })
    }
}

/// One side, keys or values, of a layer: how its rows are stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Side {
    pub(crate) dtype: DType,
    pub(crate) dim: usize,
    pub(crate) row_bytes: usize,
    pub(crate) n_head: usize,
}

impl Side {
    /// `side` 0 is keys.
    pub(crate) fn new(layer: &KvLayer, side: usize) -> Result<Self> {
        let (dtype, dim) = match side {
            0 => (layer.dtype_k, layer.head_dim_k),
            _ => (layer.dtype_v, layer.head_dim_v),
        };
        let row_bytes = dtype.row_bytes(u64::from(dim))?;
        let row_bytes =
            usize::try_from(row_bytes).map_err(|_| Error::invalid("a row of all memory"))?;
        Ok(Self { dtype, dim: dim as usize, row_bytes, n_head: layer.n_head_kv as usize })
    }

    fn block_bytes(&self, block_len: usize) -> Result<u64> {
        let bytes = self.row_bytes.checked_mul(self.n_head).and_then(|n| n.checked_mul(block_len));
        bytes.map(|n| n as u64).ok_or_else(|| Error::invalid("a KvBlock of more than 2^64 bytes"))
    }
}

/// Addresses of the blocks of one sequence, one side of one layer. They are valid for the run that they were made for.
pub(crate) struct Addresses(Vec<*mut u8>);

// SAFETY: addresses of the core's memory, which the core lets nobody else touch during the run.
unsafe impl Sync for Addresses {}
// SAFETY: as above.
unsafe impl Send for Addresses {}

impl Addresses {
    pub(crate) fn new(
        run: &Run<'_, Buffer>,
        layer: &KvLayer,
        side: (usize, &Side),
        block_len: usize,
        seq: &SeqPlaces,
    ) -> Result<Self> {
        let group = run.kv_group(layer.group)?;
        let bytes = side.1.block_bytes(block_len)?;
        let mut out = Vec::with_capacity(seq.places.len());
        let mut tile: Option<(usize, *mut u8)> = None;
        for place in &seq.places {
            let Some(place) = place else {
                out.push(std::ptr::null_mut());
                continue;
            };
            let base = match tile {
                Some((segment, base)) if segment == place.segment => base,
                _ => {
                    let range = group.tile(place.segment, layer.index, side.0)?;
                    let n_blocks = group.segments.get(place.segment).map_or(0, |s| s.n_blocks);
                    let needed = u64::from(n_blocks).checked_mul(bytes);
                    if needed.is_none_or(|needed| needed > range.size) {
                        return Err(Error::invalid(format!("a KV tile of {} bytes", range.size)));
                    }
                    let base = range.buffer.ptr_mut(range.offset, range.size)?;
                    tile = Some((place.segment, base));
                    base
                }
            };
            // Inside the tile: the block's index is below the segment's number of blocks, whose bytes the tile has.
            out.push(base.wrapping_add(usize::try_from(place.index * bytes).unwrap_or(usize::MAX)));
        }
        Ok(Self(out))
    }

    /// Row bytes of `n` positions of a head in block `block`, from its first position on; `None` for a block that is not there.
    pub(crate) fn rows(
        &self,
        block: usize,
        side: &Side,
        head: usize,
        block_len: usize,
        n: usize,
    ) -> Option<&[u8]> {
        let base = *self.0.get(block)?;
        if base.is_null() || n > block_len || head >= side.n_head {
            return None;
        }
        // SAFETY: the block has `n_head * block_len` rows of `row_bytes` at `base`; head and rows are among them. Nobody writes while attention reads.
        Some(unsafe {
            let begin = base.add(head * block_len * side.row_bytes);
            std::slice::from_raw_parts(begin, n * side.row_bytes)
        })
    }

    /// Stores one row.
    ///
    /// # Safety
    /// No other reference to the row is alive.
    unsafe fn store(
        &self,
        pos: usize,
        side: &Side,
        head: usize,
        block_len: usize,
        row: &[f32],
        encode: QuantizeFn,
    ) -> Result<()> {
        let base = self.0.get(pos / block_len).copied().unwrap_or(std::ptr::null_mut());
        if base.is_null() {
            return Err(Error::invalid(format!("position {pos} has no KvBlock")));
        }
        let at = (head * block_len + pos % block_len) * side.row_bytes;
        // SAFETY: the block has `n_head * block_len` rows of `row_bytes` at `base`; nobody else uses this one.
        let dst = unsafe { std::slice::from_raw_parts_mut(base.add(at), side.row_bytes) };
        encode(row, dst);
        Ok(())
    }
}

/// Stores rows `[n_tokens, n_head * dim]` of keys (`side` 0) or values at their positions.
pub(crate) fn store(
    run: &Run<'_, Buffer>,
    places: &GroupPlaces,
    layer: &KvLayer,
    side: usize,
    rows: &[f32],
) -> Result<()> {
    let shape = Side::new(layer, side)?;
    let encode = quantize_row_fn(shape.dtype);
    let encode = encode
        .ok_or_else(|| Error::unsupported(format!("a KV cache of {}", shape.dtype.name())))?;
    let width = shape.dim * shape.n_head;
    for seq in &places.seqs {
        let addresses = Addresses::new(run, layer, (side, &shape), places.block_len, seq)?;
        for t in 0..seq.n_tokens {
            let row = rows.get((seq.first_token + t) * width..(seq.first_token + t + 1) * width);
            let row = row
                .ok_or_else(|| Error::invalid("keys or values for fewer rows than the run has"))?;
            for (head, row) in row.chunks_exact(shape.dim).enumerate() {
                // SAFETY: one row at a time, and nothing else runs.
                unsafe {
                    addresses.store(seq.first_pos + t, &shape, head, places.block_len, row, encode)
                }?;
            }
        }
    }
    Ok(())
}
