//! Addresses of KvBlocks: from the run's block tables to the pointers that the attention kernel reads.

use crate::kernels::KvSlot;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::{Error, KvGroup, Result, Seq};

/// Where one block lies: its segment, and its place in it.
#[derive(Debug, Clone, Copy)]
struct BlockPlace {
    segment: usize,
    index: u64,
}

/// The blocks of one sequence in one group, by position; blocks that a window has left behind are `None`.
#[derive(Debug, Default)]
pub(crate) struct SeqBlocks {
    places: Vec<Option<BlockPlace>>,
}

impl SeqBlocks {
    /// Resolves a sequence's block table.
    pub(crate) fn fill(
        &mut self,
        group: &KvGroup<'_, HostBuffer>,
        seq: &Seq<'_>,
        group_index: u32,
    ) -> Result<()> {
        let (blocks, first_pos) = seq.blocks(group_index)?;
        self.places.clear();
        let skipped = first_pos / group.block_len;
        let end = u64::from(seq.first_pos) + u64::from(seq.n_tokens);
        let covered = (u64::from(skipped) + blocks.len() as u64) * u64::from(group.block_len);
        if covered < end {
            return Err(Error::invalid(format!(
                "blocks for {covered} positions, {end} are needed"
            )));
        }
        self.places.resize(skipped as usize, None);
        for block in blocks {
            let after = group.segments.partition_point(|s| s.first_block <= *block);
            let segment = after.checked_sub(1).and_then(|i| group.segments.get(i));
            let index = segment.map(|s| block - s.first_block);
            match (segment, index) {
                (Some(segment), Some(index)) if index < segment.n_blocks => {
                    self.places
                        .push(Some(BlockPlace { segment: after - 1, index: u64::from(index) }));
                }
                _ => return Err(Error::invalid(format!("KvBlock {block} is in no segment"))),
            }
        }
        Ok(())
    }

    /// Appends the address of each block's keys (`side` 0) or values (1) of a layer.
    pub(crate) fn addresses(
        &self,
        group: &KvGroup<'_, HostBuffer>,
        layer: u32,
        side: usize,
        block_bytes: u64,
        out: &mut Vec<*const u8>,
    ) -> Result<()> {
        let mut tile: Option<(usize, *const u8)> = None;
        for place in &self.places {
            let Some(place) = place else {
                out.push(std::ptr::null());
                continue;
            };
            let base = match tile {
                Some((segment, base)) if segment == place.segment => base,
                _ => {
                    let range = group.tile(place.segment, layer, side)?;
                    let n_blocks = group.segments.get(place.segment).map_or(0, |s| s.n_blocks);
                    let needed = u64::from(n_blocks).checked_mul(block_bytes);
                    if needed.is_none_or(|needed| needed > range.size) {
                        return Err(Error::invalid(format!("a KV tile of {} bytes", range.size)));
                    }
                    let base = range.buffer.ptr_mut(range.offset, range.size)?.cast_const();
                    tile = Some((place.segment, base));
                    base
                }
            };
            // Inside the tile: the block's index is below the segment's number of blocks.
            let offset = usize::try_from(place.index * block_bytes).unwrap_or(usize::MAX);
            out.push(base.wrapping_add(offset));
        }
        Ok(())
    }
}

/// Where each token of a sequence is stored, given the addresses of its blocks.
pub(crate) fn slots(
    blocks: &[*const u8],
    first_pos: u32,
    n_tokens: u32,
    block_len: u32,
    out: &mut Vec<KvSlot>,
) -> Result<()> {
    for pos in first_pos..first_pos.saturating_add(n_tokens) {
        let block = blocks.get((pos / block_len) as usize).copied().unwrap_or(std::ptr::null());
        if block.is_null() {
            return Err(Error::invalid(format!("position {pos} has no KvBlock")));
        }
        out.push(KvSlot { block: block.cast_mut(), offset: (pos % block_len) as usize });
    }
    Ok(())
}
