//! What one run of an executable is given: inputs, outputs, scratch, sequences, the paged KV cache and the recurrent state.
//!
//! Shapes depend on the number of tokens and on block tables, all of which are here, so an executable survives from token to token.

use crate::{BufferRange, Slice};
use abi_stable::StableAbi;

/// A value's bytes for one run: exactly one of `range.buffer` and `host` is set.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct Binding {
    /// Set by the host.
    pub struct_size: usize,
    /// The value's index in the program.
    pub value: u32,
    /// Where it lies on the device, or [`BufferRange::NONE`].
    pub range: BufferRange,
    /// Where it lies on the host, or null. Inputs are only read.
    pub host: *mut u8,
    /// Bytes at `host`.
    pub host_size: u64,
}

/// The KvBlocks of one sequence in one group, in order of position. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct BlockTable {
    /// Ids of the blocks.
    pub blocks: *const u32,
    /// Number of blocks.
    pub n_blocks: u32,
    /// Position held by the first place of the first block; a multiple of the block length. Above 0 once a window has moved on.
    pub first_pos: u32,
}

/// The tokens of one sequence in this run: rows `first_token ..` of the ubatch, at consecutive positions from `first_pos`.
/// Its block tables cover every position up to the last one of this run.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct SeqSpan {
    /// Set by the host.
    pub struct_size: usize,
    /// Row of its first token in the ubatch.
    pub first_token: u32,
    /// Number of its tokens.
    pub n_tokens: u32,
    /// Position of its first token.
    pub first_pos: u32,
    /// Unused; keeps `tables` aligned.
    pub reserved: u32,
    /// One block table for each KV group of the program.
    pub tables: *const BlockTable,
    /// Its place in [`StatePool`]; no two sequences of a run have the same. Default: 0, which is right for a program without state.
    pub state_slot: u32,
    /// Unused; keeps the size even.
    pub reserved_end: u32,
}

/// A run of blocks whose bytes were allocated together: blocks `first_block .. first_block + n_blocks`. Frozen.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct KvSegment {
    /// Id of its first block.
    pub first_block: u32,
    /// Number of its blocks.
    pub n_blocks: u32,
}

/// The KV cache of one group of layers that share block tables.
///
/// One block of one layer's keys is `[n_head_kv][block_len][head_dim_k]` elements of the layer's `dtype_k`, contiguous; of its values
/// likewise with `head_dim_v`. Blocks of a segment follow each other without gap, so block `b` of layer `i` has its keys at
/// `tiles[(s * n_layers + i) * 2].offset + (b - segments[s].first_block) * bytes of one block`, its values in the tile after that.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct KvGroup {
    /// Set by the host.
    pub struct_size: usize,
    /// Changes whenever segments or tiles change; equal values mean equal tables, so that translated tables can be kept.
    pub generation: u64,
    /// Tokens of a block.
    pub block_len: u32,
    /// Layers of the group.
    pub n_layers: u32,
    /// Its segments, in order of block id, without gap.
    pub segments: Slice<KvSegment>,
    /// `segments.len * n_layers * 2` tiles: for each segment, for each layer, keys then values.
    pub tiles: Slice<BufferRange>,
}

/// The recurrent state of all sequences: one record for each state layer in each slot, `n_elements` f32 as the layer's op says.
///
/// A sequence whose `first_pos` is 0 begins with zeros whatever its records hold; one whose `first_pos` is more continues from what the run that ended
/// at that position left. Runs that name a slot change its records; a run that fails leaves them undefined.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct StatePool {
    /// Set by the host.
    pub struct_size: usize,
    /// Changes whenever tiles change; equal values mean equal tiles, so that translated tables can be kept.
    pub generation: u64,
    /// Slots that exist: ids `0 .. n_slots`.
    pub n_slots: u32,
    /// State layers of the program.
    pub n_layers: u32,
    /// `n_slots * n_layers` tiles, each a whole record: for each slot, for each layer.
    pub tiles: Slice<BufferRange>,
}

/// One run.
#[repr(C)]
#[derive(Debug, Clone, Copy, StableAbi)]
pub struct RunArgs {
    /// Set by the host.
    pub struct_size: usize,
    /// The program's symbolic dimension n_tokens.
    pub n_tokens: u32,
    /// The program's symbolic dimension n_outputs.
    pub n_outputs: u32,
    /// A binding for every input of the program, in the order of its inputs.
    pub inputs: Slice<Binding>,
    /// A binding for every output of the program, in the order of its outputs.
    pub outputs: Slice<Binding>,
    /// The pieces that program_memory asked for, in its order.
    pub scratch: Slice<BufferRange>,
    /// The sequences; their rows cover the ubatch in order.
    pub seqs: Slice<SeqSpan>,
    /// The KV groups of the program.
    pub kv: Slice<KvGroup>,
    /// The recurrent state; null where the program has none. Default: null.
    pub state: *const StatePool,
}
