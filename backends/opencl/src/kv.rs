//! The KV cache at run time: tables for the kernels, and the passes that reach all of a layer's buffers.
//!
//! Two kinds of tables. A layer's segments (where keys and values of each lie, by buffer and byte) change with the cache's generation and stay on the device.
//! Block ids, places of new tokens and the queries of a run go up with every run, in one transfer.

use crate::buffer::{ClBuffer, device_place};
use crate::launch::{Memory, u32_of};
use crate::state::StateCall;
use ocl_core::ffi::cl_mem;
use tegula_sdk::program::KvLayer;
use tegula_sdk::{Error, KvGroup, Result, Run};

/// Buffers that a kernel takes; `kernels/kv.cl` lists as many.
pub(crate) const BUFFERS: usize = 8;
/// Bytes of a segment in the table.
pub(crate) const SEGMENT_BYTES: usize = 32;

/// The buffers of one call; unused places repeat the first.
pub(crate) type Pass = [cl_mem; BUFFERS];

/// A layer's segments as kernels see them.
#[derive(Debug, Default)]
pub(crate) struct LayerTable {
    pub(crate) generation: Option<u64>,
    pub(crate) n_segments: u32,
    pub(crate) passes: Vec<Pass>,
    /// The pass of each segment.
    pass_of: Vec<u32>,
    /// The first block after each segment.
    ends: Vec<u32>,
    /// What goes to the device.
    pub(crate) bytes: Vec<u8>,
}

#[expect(
    unsafe_code,
    reason = "handles of buffers are used by several threads, one after the other"
)]
// SAFETY: handles that any thread may use, in runs that the core orders.
unsafe impl Send for LayerTable {}

impl LayerTable {
    /// Translates the segments of a layer, and checks that each tile holds its blocks.
    pub(crate) fn fill(&mut self, layer: &KvLayer, group: &KvGroup<'_, ClBuffer>) -> Result<()> {
        let fault = |why: &str| Error::invalid(format!("KV layer {}: {why}", layer.index));
        if layer.index >= group.n_layers {
            return Err(fault("is not in its group"));
        }
        let blocks = layer.block_bytes(group.block_len);
        let (k_bytes, v_bytes) = blocks.ok_or_else(|| fault("a KvBlock over 2^64 bytes"))?;
        self.generation = None;
        self.passes.clear();
        self.pass_of.clear();
        self.ends.clear();
        self.bytes.clear();
        let mut buffers: Vec<cl_mem> = Vec::with_capacity(BUFFERS);
        let mut next = 0u32;
        for (index, segment) in group.segments.iter().enumerate() {
            if segment.first_block != next {
                return Err(fault("segments with a gap"));
            }
            next = next.saturating_add(segment.n_blocks);
            let mut places = [(std::ptr::null_mut(), 0); 2];
            for ((place, side), bytes) in places.iter_mut().zip(0..).zip([k_bytes, v_bytes]) {
                let tile = group.tile(index, layer.index, side)?;
                let needed = u64::from(segment.n_blocks).checked_mul(bytes);
                if needed.is_none_or(|needed| needed > tile.size) {
                    return Err(fault("a tile that is too small"));
                }
                *place = device_place(&tile, "a KV tile")?;
                if !place.1.is_multiple_of(4) {
                    return Err(fault("a tile that is not aligned"));
                }
            }
            let new = |buffers: &[cl_mem]| {
                let mut list = buffers.to_vec();
                for (mem, _) in places {
                    if !list.contains(&mem) {
                        list.push(mem);
                    }
                }
                list
            };
            let mut with = new(&buffers);
            if with.len() > BUFFERS {
                self.close_pass(&buffers);
                with = new(&[]);
            }
            buffers = with;
            let slot = |mem| buffers.iter().position(|b| *b == mem).unwrap_or(0) as u32;
            let pass = u32_of(self.passes.len() as u64)?;
            let [(k_mem, k_offset), (v_mem, v_offset)] = places;
            let slots = slot(k_mem) | slot(v_mem) << 16;
            for word in [segment.first_block, segment.n_blocks, pass, slots] {
                self.bytes.extend(word.to_le_bytes());
            }
            self.bytes.extend(k_offset.to_le_bytes());
            self.bytes.extend(v_offset.to_le_bytes());
            self.pass_of.push(pass);
            self.ends.push(next);
        }
        self.close_pass(&buffers);
        self.n_segments = u32_of(group.segments.len() as u64)?;
        self.generation = Some(group.generation);
        Ok(())
    }

    fn close_pass(&mut self, buffers: &[cl_mem]) {
        if let Some(first) = buffers.first() {
            self.passes.push(std::array::from_fn(|i| buffers.get(i).copied().unwrap_or(*first)));
        }
    }

    /// The passes that have any of these blocks, in order.
    pub(crate) fn passes_of(&self, blocks: &mut dyn Iterator<Item = u32>) -> Vec<u32> {
        let mut found: Vec<u32> = blocks
            .filter_map(|block| {
                let index = self.ends.partition_point(|end| *end <= block);
                self.pass_of.get(index).copied()
            })
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// Tables of one run, as bytes and as places in them.
#[derive(Debug, Default)]
pub(crate) struct RunTables {
    /// What goes to the device; inputs may follow.
    pub(crate) bytes: Vec<u8>,
    /// By entry of the list of query heights: first byte, and number of queries.
    pub(crate) queries: Vec<(u64, u64)>,
    /// By group.
    pub(crate) groups: Vec<GroupTables>,
    /// By state layer: the calls that reach the records of all sequences.
    pub(crate) states: Vec<Vec<StateCall>>,
    /// The greatest number of tokens of a sequence.
    pub(crate) longest: u32,
    /// The greatest number of positions that a query sees, without windows.
    pub(crate) depth: u32,
}

/// One group's tables.
#[derive(Debug, Default, Clone)]
pub(crate) struct GroupTables {
    /// First bytes: of the list of sequences, of block ids, of the places of new tokens.
    pub(crate) seqs: u64,
    pub(crate) blocks: u64,
    pub(crate) slots: u64,
    pub(crate) block_len: u32,
    /// Blocks that new tokens go to.
    pub(crate) new_blocks: Vec<u32>,
}

/// Every table begins at a multiple of this.
const TABLE_ALIGNMENT: usize = 64;

impl RunTables {
    fn align(&mut self) -> u64 {
        let len = self.bytes.len().next_multiple_of(TABLE_ALIGNMENT);
        self.bytes.resize(len, 0);
        len as u64
    }

    fn put(&mut self, words: &[u32]) {
        for word in words {
            self.bytes.extend(word.to_le_bytes());
        }
    }

    /// Appends bytes, and says where.
    pub(crate) fn append(&mut self, bytes: &[u8]) -> u64 {
        let at = self.align();
        self.bytes.extend_from_slice(bytes);
        at
    }

    /// Lists the run's sequences. `heights` are the numbers of tokens that attention kernels take at once.
    pub(crate) fn fill(&mut self, run: &Run<'_, ClBuffer>, heights: &[u32]) -> Result<()> {
        self.bytes.clear();
        self.queries.clear();
        self.groups.clear();
        self.states.clear();
        (self.longest, self.depth) = (0, 0);
        let mut next = 0u32;
        for i in 0..run.n_seqs() {
            let seq = run.seq(i)?;
            let end = seq.first_token.checked_add(seq.n_tokens);
            if seq.first_token != next || end.is_none_or(|end| end > run.n_tokens()) {
                return Err(Error::invalid("sequences that do not cover the run in order"));
            }
            next = seq.first_token + seq.n_tokens;
            let depth = seq.first_pos.checked_add(seq.n_tokens);
            let depth = depth.filter(|depth| *depth < u32::MAX / 2);
            self.depth =
                self.depth.max(depth.ok_or_else(|| Error::invalid("a position over 2^31"))?);
            self.longest = self.longest.max(seq.n_tokens);
        }
        for height in heights {
            let at = self.align();
            let mut count = 0;
            for i in 0..run.n_seqs() {
                let seq = run.seq(i)?;
                for first in (0..seq.n_tokens).step_by(*height as usize) {
                    let n = (*height).min(seq.n_tokens - first);
                    self.put(&[seq.first_token + first, n, seq.first_pos + first, i as u32]);
                    count += 1;
                }
            }
            self.queries.push((at, count));
        }
        for g in 0..u32_of(run.n_kv_groups() as u64)? {
            let group = run.kv_group(g)?;
            let tables = self.fill_group(run, g, &group)?;
            self.groups.push(tables);
        }
        Ok(())
    }

    fn fill_group(
        &mut self,
        run: &Run<'_, ClBuffer>,
        g: u32,
        group: &KvGroup<'_, ClBuffer>,
    ) -> Result<GroupTables> {
        let mut out = GroupTables { block_len: group.block_len, ..GroupTables::default() };
        let n_blocks =
            group.segments.last().map_or(0, |s| s.first_block.saturating_add(s.n_blocks));
        out.seqs = self.align();
        let mut first = 0u32;
        for i in 0..run.n_seqs() {
            let (blocks, first_pos) = run.seq(i)?.blocks(g)?;
            self.put(&[first, first_pos]);
            first = first.saturating_add(u32_of(blocks.len() as u64)?);
        }
        out.blocks = self.align();
        for i in 0..run.n_seqs() {
            let seq = run.seq(i)?;
            let (blocks, first_pos) = seq.blocks(g)?;
            let covered = u64::from(first_pos) + blocks.len() as u64 * u64::from(group.block_len);
            let end = u64::from(seq.first_pos) + u64::from(seq.n_tokens);
            if covered < end || seq.first_pos < first_pos {
                return Err(Error::invalid(format!(
                    "blocks for positions {first_pos}..{covered}, up to {end} are needed"
                )));
            }
            if let Some(block) = blocks.iter().find(|block| **block >= n_blocks) {
                return Err(Error::invalid(format!("KvBlock {block} is in no segment")));
            }
            self.put(blocks);
        }
        out.slots = self.align();
        for i in 0..run.n_seqs() {
            let seq = run.seq(i)?;
            let (blocks, first_pos) = seq.blocks(g)?;
            for pos in seq.first_pos..seq.first_pos + seq.n_tokens {
                let place = pos - first_pos;
                let block = blocks.get((place / group.block_len) as usize).copied().unwrap_or(0);
                self.put(&[block, place % group.block_len]);
                if out.new_blocks.last() != Some(&block) {
                    out.new_blocks.push(block);
                }
            }
        }
        Ok(out)
    }
}

/// What a memory argument of the tables is.
pub(crate) fn at(Memory(mem, offset): Memory, byte: u64) -> Memory {
    Memory(mem, offset + byte)
}
