//! One run as its executable sees it: checked views of the host's arrays, made without allocating.

use crate::{Error, Range, Result};
use std::marker::PhantomData;
use tegula_abi as abi;

/// One run. Methods give views that live as long as the call.
pub struct Run<'a, B> {
    args: abi::RunArgs,
    _buffers: PhantomData<&'a B>,
}

/// Where an input or output lies.
pub enum Operand<'a, B> {
    /// In the host's memory: address and bytes.
    Host(*mut u8, u64),
    /// In a buffer of the device.
    Buffer(Range<'a, B>),
}

/// The tokens of one sequence in this run.
#[derive(Debug, Clone, Copy)]
pub struct Seq<'a> {
    /// Row of its first token.
    pub first_token: u32,
    /// Number of its tokens.
    pub n_tokens: u32,
    /// Position of its first token. State of a sequence that begins at 0 begins with zeros.
    pub first_pos: u32,
    /// Its records in the run's [`StatePool`].
    pub state_slot: u32,
    tables: &'a [abi::BlockTable],
}

impl<'a> Seq<'a> {
    /// Its block ids in a KV group, and the position that the first of them starts at.
    pub fn blocks(&self, group: u32) -> Result<(&'a [u32], u32)> {
        let table = self.tables.get(group as usize);
        let table = table.ok_or_else(|| Error::invalid(format!("no block table {group}")))?;
        if table.n_blocks == 0 {
            return Ok((&[], table.first_pos));
        }
        if table.blocks.is_null() {
            return Err(Error::invalid("a null block table"));
        }
        // SAFETY: not null; the host keeps `n_blocks` ids alive during the call.
        let blocks = unsafe { std::slice::from_raw_parts(table.blocks, table.n_blocks as usize) };
        Ok((blocks, table.first_pos))
    }
}

/// The KV cache of one group.
pub struct KvGroup<'a, B> {
    /// Equal values mean equal segments and tiles.
    pub generation: u64,
    /// Tokens of a block.
    pub block_len: u32,
    /// Layers of the group.
    pub n_layers: u32,
    /// Runs of blocks, in order of id.
    pub segments: &'a [abi::KvSegment],
    tiles: &'a [abi::BufferRange],
    _buffers: PhantomData<&'a B>,
}

impl<'a, B> KvGroup<'a, B> {
    /// The keys (`side` 0) or values (`side` 1) of a layer in a segment.
    pub fn tile(&self, segment: usize, layer: u32, side: usize) -> Result<Range<'a, B>> {
        let index = (segment * self.n_layers as usize + layer as usize) * 2 + side;
        let range = self.tiles.get(index).ok_or_else(|| Error::invalid("a KV tile too few"))?;
        // SAFETY: the host keeps the buffers alive during the run.
        unsafe { Range::new(range) }
    }
}

/// The recurrent state of all sequences.
pub struct StatePool<'a, B> {
    /// Equal values mean equal tiles.
    pub generation: u64,
    /// Slots that exist.
    pub n_slots: u32,
    /// State layers of the program.
    pub n_layers: u32,
    tiles: &'a [abi::BufferRange],
    _buffers: PhantomData<&'a B>,
}

impl<'a, B> StatePool<'a, B> {
    /// The record of a layer in a slot.
    pub fn record(&self, slot: u32, layer: u32) -> Result<Range<'a, B>> {
        let index = slot as usize * self.n_layers as usize + layer as usize;
        let range = self.tiles.get(index).filter(|_| slot < self.n_slots && layer < self.n_layers);
        let range = range.ok_or_else(|| {
            let (slots, layers) = (self.n_slots, self.n_layers);
            Error::invalid(format!(
                "record {layer} of slot {slot}; the state has {slots} slots of {layers}"
            ))
        })?;
        // SAFETY: the host keeps the buffers alive during the run.
        unsafe { Range::new(range) }
    }
}

impl<'a, B> Run<'a, B> {
    /// # Safety
    /// `args` and everything it points to is alive for `'a`.
    pub(crate) unsafe fn new(args: *const abi::RunArgs) -> Result<Self> {
        // SAFETY: alive by the caller's word.
        let args = unsafe { abi::read_sized(args) };
        let args = args.ok_or_else(|| Error::invalid("no run arguments"))?;
        Ok(Self { args, _buffers: PhantomData })
    }

    /// Tokens of the run.
    pub fn n_tokens(&self) -> u32 {
        self.args.n_tokens
    }

    /// Rows whose results are wanted.
    pub fn n_outputs(&self) -> u32 {
        self.args.n_outputs
    }

    /// The operand of the program's `i`th input.
    pub fn input(&self, i: usize) -> Result<Operand<'a, B>> {
        Self::operand(&self.args.inputs, i, "input")
    }

    /// The operand of the program's `i`th output.
    pub fn output(&self, i: usize) -> Result<Operand<'a, B>> {
        Self::operand(&self.args.outputs, i, "output")
    }

    fn operand(slice: &abi::Slice<abi::Binding>, i: usize, what: &str) -> Result<Operand<'a, B>> {
        // SAFETY: alive for 'a by the contract of `new`.
        let binding = unsafe { slice.get(i) };
        let binding = binding.ok_or_else(|| Error::invalid(format!("{what} {i} is not bound")))?;
        if binding.range.buffer.is_null() {
            if binding.host.is_null() {
                return Err(Error::invalid(format!("{what} {i} is bound to nothing")));
            }
            return Ok(Operand::Host(binding.host, binding.host_size));
        }
        // SAFETY: as above.
        Ok(Operand::Buffer(unsafe { Range::new(&binding.range) }?))
    }

    /// Number of scratch pieces given.
    pub fn n_scratch(&self) -> usize {
        self.args.scratch.len
    }

    /// The `i`th piece of scratch.
    pub fn scratch(&self, i: usize) -> Result<Range<'a, B>> {
        // SAFETY: alive for 'a by the contract of `new`.
        let pieces = unsafe { self.args.scratch.frozen() };
        let piece = pieces.and_then(|pieces| pieces.get(i));
        let piece = piece.ok_or_else(|| Error::invalid(format!("scratch piece {i} is missing")))?;
        // SAFETY: as above.
        unsafe { Range::new(piece) }
    }

    /// Number of sequences.
    pub fn n_seqs(&self) -> usize {
        self.args.seqs.len
    }

    /// The `i`th sequence.
    pub fn seq(&self, i: usize) -> Result<Seq<'a>> {
        // SAFETY: alive for 'a by the contract of `new`.
        let span = unsafe { self.args.seqs.get(i) };
        let span = span.ok_or_else(|| Error::invalid(format!("sequence {i} is missing")))?;
        let n_groups = self.args.kv.len;
        let tables: &'a [abi::BlockTable] = if n_groups == 0 || span.tables.is_null() {
            &[]
        } else {
            // SAFETY: the host keeps one table for each KV group alive during the call.
            unsafe { std::slice::from_raw_parts(span.tables, n_groups) }
        };
        Ok(Seq {
            first_token: span.first_token,
            n_tokens: span.n_tokens,
            first_pos: span.first_pos,
            state_slot: span.state_slot,
            tables,
        })
    }

    /// Number of KV groups.
    pub fn n_kv_groups(&self) -> usize {
        self.args.kv.len
    }

    /// The `i`th KV group.
    pub fn kv_group(&self, i: u32) -> Result<KvGroup<'a, B>> {
        // SAFETY: alive for 'a by the contract of `new`.
        let (group, segments, tiles) = unsafe {
            let group = self.args.kv.get(i as usize);
            let group = group.ok_or_else(|| Error::invalid(format!("KV group {i} is missing")))?;
            (group, group.segments.frozen(), group.tiles.frozen())
        };
        let (Some(segments), Some(tiles)) = (segments, tiles) else {
            return Err(Error::invalid(format!("KV group {i} has no tables")));
        };
        if group.block_len == 0 || segments.len() * group.n_layers as usize * 2 != tiles.len() {
            return Err(Error::invalid(format!("KV group {i} has tables that do not fit")));
        }
        Ok(KvGroup {
            generation: group.generation,
            block_len: group.block_len,
            n_layers: group.n_layers,
            segments,
            tiles,
            _buffers: PhantomData,
        })
    }
    /// The recurrent state; an error for a run without.
    pub fn state(&self) -> Result<StatePool<'a, B>> {
        // SAFETY: alive for 'a by the contract of `new`.
        let (pool, tiles) = unsafe {
            let pool = abi::read_sized(self.args.state);
            let pool = pool.ok_or_else(|| Error::invalid("the run has no recurrent state"))?;
            (pool, pool.tiles.frozen())
        };
        let n_tiles = u64::from(pool.n_slots) * u64::from(pool.n_layers);
        let tiles = tiles.filter(|tiles| tiles.len() as u64 == n_tiles);
        let tiles = tiles.ok_or_else(|| Error::invalid("a recurrent state of another size"))?;
        Ok(StatePool {
            generation: pool.generation,
            n_slots: pool.n_slots,
            n_layers: pool.n_layers,
            tiles,
            _buffers: PhantomData,
        })
    }
}
