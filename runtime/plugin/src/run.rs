//! What a run is given, in safe terms, and its translation for the boundary.
//!
//! A queue keeps the translated arrays, so a run allocates nothing once they have grown. Everything that the device would
//! trust is checked here: sizes of inputs and outputs, scratch, that sequences cover the ubatch, that block tables reach the last
//! position and name blocks that exist. KV tables are checked once for each of their generations.

use crate::buffer::{Buffer, BufferSpan};
use crate::device::{Device, DeviceInner};
use crate::error::DeviceError;
use crate::executable::{Executable, IoShape, KvShape};
use crate::state::StatePool;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tegula_abi::{self as abi, BufferRange, Slice};

const WHAT: &str = "queue_run";

/// The bytes of one input.
#[derive(Debug, Clone, Copy)]
pub enum InputData<'a> {
    /// In host memory.
    Host(&'a [u8]),
    /// On the device.
    Buffer(BufferSpan<'a>),
}

/// Where one output goes.
#[derive(Debug)]
pub enum OutputData<'a> {
    /// To host memory.
    Host(&'a mut [u8]),
    /// To the device.
    Buffer(BufferSpan<'a>),
}

/// The KvBlocks of one sequence in one group, in order of position.
#[derive(Debug, Clone, Copy)]
pub struct BlockTable<'a> {
    /// Ids of the blocks.
    pub blocks: &'a [u32],
    /// Position held by the first place of the first block; a multiple of the block length.
    pub first_pos: u32,
}

/// The tokens of one sequence in a run, at consecutive positions.
#[derive(Debug, Clone, Copy)]
pub struct SeqSpan<'a> {
    /// Row of its first token in the ubatch.
    pub first_token: u32,
    /// Number of its tokens; at least 1.
    pub n_tokens: u32,
    /// Position of its first token.
    pub first_pos: u32,
    /// One block table for each KV group of the program.
    pub tables: &'a [BlockTable<'a>],
    /// Its slot in [`RunArgs::state`]; no other sequence of the run has it. Anything for a program without state.
    pub state_slot: u32,
}

/// One run.
#[derive(Debug)]
pub struct RunArgs<'a> {
    /// Tokens of the run; at least 1.
    pub n_tokens: u32,
    /// Output rows of the run.
    pub n_outputs: u32,
    /// The program's inputs, in its order. More bytes than a value has in this run are allowed, and ignored.
    pub inputs: &'a [InputData<'a>],
    /// The program's outputs, in its order; as for inputs.
    pub outputs: &'a mut [OutputData<'a>],
    /// The pieces of [`crate::ExecutableMemory::scratch`], in its order.
    pub scratch: &'a [BufferSpan<'a>],
    /// The sequences; their rows cover the ubatch in order. None for a program without a KV cache and state.
    pub seqs: &'a [SeqSpan<'a>],
    /// The KV groups of the program.
    pub kv: &'a [&'a KvGroup],
    /// The recurrent state, for a program that has any.
    pub state: Option<&'a StatePool>,
}

/// The KV cache of one group of layers: segments of blocks, each with tiles for every layer's keys and values. Grown and
/// shrunk between runs; keeps its buffers alive.
#[derive(Debug)]
pub struct KvGroup {
    device: Arc<DeviceInner>,
    block_len: u32,
    n_layers: u32,
    n_blocks: u32,
    generation: u64,
    segments: Vec<abi::KvSegment>,
    tiles: Vec<BufferRange>,
    buffers: Vec<Arc<Buffer>>,
}

// SAFETY: the raw buffers in `tiles` are kept by `buffers` and may be used from any thread.
unsafe impl Send for KvGroup {}
// SAFETY: as above.
unsafe impl Sync for KvGroup {}

/// Unique in the process, so that a backend may keep translated tables by generation alone, over all groups.
pub(crate) fn next_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl KvGroup {
    /// A group without blocks. `block_len` tokens in a block, `n_layers` layers.
    pub fn new(device: &Device, block_len: u32, n_layers: u32) -> Self {
        Self {
            device: Arc::clone(&device.inner),
            block_len,
            n_layers,
            n_blocks: 0,
            generation: next_generation(),
            segments: Vec::new(),
            tiles: Vec::new(),
            buffers: Vec::new(),
        }
    }

    /// Adds a segment of `n_blocks` blocks: for each layer the bytes of its keys, then of its values. Returns the id of its first block.
    ///
    /// # Errors
    /// InvalidArgument for another number of tiles, a tile outside its buffer or on another device.
    pub fn push_segment(
        &mut self,
        n_blocks: u32,
        tiles: &[(Arc<Buffer>, std::ops::Range<u64>)],
    ) -> Result<u32, DeviceError> {
        let caller = &self.device.caller;
        if n_blocks == 0 || tiles.len() as u64 != u64::from(self.n_layers) * 2 {
            let message = format!(
                "{} tiles of {n_blocks} KvBlocks for {} layers",
                tiles.len(),
                self.n_layers
            );
            return Err(caller.invalid("kv_segment", message));
        }
        let first_block = self.n_blocks;
        let total = first_block.checked_add(n_blocks);
        let total = total.ok_or_else(|| caller.invalid("kv_segment", "too many KvBlocks"))?;
        let mut raw = Vec::with_capacity(tiles.len());
        for (buffer, range) in tiles {
            if !Arc::ptr_eq(&buffer.device, &self.device) || range.end < range.start {
                let message = format!("a tile {range:?} on {}", buffer.device.caller.label);
                return Err(caller.invalid("kv_segment", message));
            }
            raw.push(buffer.raw_range(range.start, range.end - range.start, "kv_segment")?);
        }
        self.tiles.extend(raw);
        self.buffers.extend(tiles.iter().map(|(buffer, _)| Arc::clone(buffer)));
        self.segments.push(abi::KvSegment { first_block, n_blocks });
        self.n_blocks = total;
        self.generation = next_generation();
        Ok(first_block)
    }

    /// Takes the last segment away, and with it the hold on its buffers.
    pub fn pop_segment(&mut self) -> bool {
        let Some(segment) = self.segments.pop() else { return false };
        let left = self.segments.len() * self.n_layers as usize * 2;
        self.tiles.truncate(left);
        self.buffers.truncate(left);
        self.n_blocks = segment.first_block;
        self.generation = next_generation();
        true
    }

    /// Number of its blocks; their ids are `0..n_blocks`.
    pub fn n_blocks(&self) -> u32 {
        self.n_blocks
    }

    /// Tokens of a block.
    pub fn block_len(&self) -> u32 {
        self.block_len
    }

    fn raw(&self) -> abi::KvGroup {
        abi::KvGroup {
            struct_size: size_of::<abi::KvGroup>(),
            generation: self.generation,
            block_len: self.block_len,
            n_layers: self.n_layers,
            segments: Slice::of(&self.segments),
            tiles: Slice::of(&self.tiles),
        }
    }

    /// That its tiles have the bytes that the program's layers take.
    fn check(&self, shape: &KvShape) -> Result<(), String> {
        if self.block_len == 0 || self.n_layers as usize != shape.layers.len() {
            return Err(format!(
                "a KV group of {} layers and {} tokens in a KvBlock, the program has {} layers",
                self.n_layers,
                self.block_len,
                shape.layers.len()
            ));
        }
        let sides = shape.layers.iter().flat_map(|(k, v)| [*k, *v]);
        let per_segment = self.tiles.chunks_exact((self.n_layers as usize * 2).max(1));
        for (segment, tiles) in self.segments.iter().zip(per_segment) {
            let tokens = u64::from(segment.n_blocks) * u64::from(self.block_len);
            for (tile, bytes) in tiles.iter().zip(sides.clone()) {
                if bytes.checked_mul(tokens) != Some(tile.size) {
                    return Err(format!(
                        "a KV tile of {} bytes for {tokens} tokens of {bytes}",
                        tile.size
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The translated arrays of a run, kept for the next.
#[derive(Debug, Default)]
pub(crate) struct RunArrays {
    inputs: Vec<abi::Binding>,
    outputs: Vec<abi::Binding>,
    scratch: Vec<BufferRange>,
    tables: Vec<abi::BlockTable>,
    seqs: Vec<abi::SeqSpan>,
    kv: Vec<abi::KvGroup>,
}

// SAFETY: between runs the pointers in the arrays are never followed; during one, what they point to is borrowed by the caller.
unsafe impl Send for RunArrays {}

impl RunArrays {
    /// Checks and translates. The result borrows `self` and `args` although its type does not say so: it is for one call.
    pub(crate) fn fill(
        &mut self,
        executable: &Executable,
        kv_checked: &mut [u64],
        args: &mut RunArgs<'_>,
    ) -> Result<abi::RunArgs, DeviceError> {
        check_bounds(executable, args)
            .and_then(|()| self.fill_bindings(executable, args))
            .and_then(|()| self.fill_scratch(executable, args))
            .and_then(|()| self.fill_kv(executable, kv_checked, args))
            .and_then(|()| check_state(executable, kv_checked, args))
            .and_then(|()| self.fill_seqs(executable, args))
            .map_err(|message| executable.device.caller.invalid(WHAT, message))?;
        Ok(abi::RunArgs {
            struct_size: size_of::<abi::RunArgs>(),
            n_tokens: args.n_tokens,
            n_outputs: args.n_outputs,
            inputs: Slice::of(&self.inputs),
            outputs: Slice::of(&self.outputs),
            scratch: Slice::of(&self.scratch),
            seqs: Slice::of(&self.seqs),
            kv: Slice::of(&self.kv),
            state: args.state.map_or(std::ptr::null(), StatePool::raw),
        })
    }

    fn fill_bindings(
        &mut self,
        executable: &Executable,
        args: &mut RunArgs<'_>,
    ) -> Result<(), String> {
        let (signature, device) = (&executable.signature, &executable.device);
        if args.inputs.len() != signature.inputs.len()
            || args.outputs.len() != signature.outputs.len()
        {
            return Err(format!(
                "{} inputs and {} outputs, the program has {} and {}",
                args.inputs.len(),
                args.outputs.len(),
                signature.inputs.len(),
                signature.outputs.len()
            ));
        }
        let bytes = |shape: &IoShape| {
            let bytes = shape.bytes(args.n_tokens, args.n_outputs);
            bytes.ok_or_else(|| format!("value {} overflows", shape.value))
        };
        self.inputs.clear();
        for (input, shape) in args.inputs.iter().zip(&signature.inputs) {
            let host = match input {
                // Inputs are only read, by the boundary's contract.
                InputData::Host(host) => Place::Host(host.as_ptr().cast_mut(), host.len() as u64),
                InputData::Buffer(span) => Place::Device(span),
            };
            self.inputs.push(binding(shape.value, bytes(shape)?, host, device)?);
        }
        self.outputs.clear();
        for (output, shape) in args.outputs.iter_mut().zip(&signature.outputs) {
            let host = match output {
                OutputData::Host(host) => Place::Host(host.as_mut_ptr(), host.len() as u64),
                OutputData::Buffer(span) if span.buffer.is_read_only() => {
                    return Err(format!("value {} goes to an imported buffer", shape.value));
                }
                OutputData::Buffer(span) => Place::Device(span),
            };
            self.outputs.push(binding(shape.value, bytes(shape)?, host, device)?);
        }
        Ok(())
    }

    fn fill_scratch(&mut self, executable: &Executable, args: &RunArgs<'_>) -> Result<(), String> {
        let wanted = &executable.memory().scratch;
        if args.scratch.len() != wanted.len() {
            return Err(format!(
                "{} pieces of scratch, {} are needed",
                args.scratch.len(),
                wanted.len()
            ));
        }
        self.scratch.clear();
        for (span, piece) in args.scratch.iter().zip(wanted) {
            if span.size < piece.size
                || !span.offset.is_multiple_of(piece.alignment)
                || span.buffer.is_read_only()
                || !Arc::ptr_eq(&span.buffer.device, &executable.device)
            {
                return Err(format!("scratch {span:?} for {piece:?}"));
            }
            self.scratch.push(span.raw());
        }
        Ok(())
    }

    fn fill_kv(
        &mut self,
        executable: &Executable,
        checked: &mut [u64],
        args: &RunArgs<'_>,
    ) -> Result<(), String> {
        let shapes = &executable.signature.kv;
        if args.kv.len() != shapes.len() {
            return Err(format!("{} KV groups, the program has {}", args.kv.len(), shapes.len()));
        }
        self.kv.clear();
        for ((group, shape), checked) in args.kv.iter().zip(shapes).zip(checked) {
            if *checked != group.generation {
                if !Arc::ptr_eq(&group.device, &executable.device) {
                    return Err(format!("a KV group on {}", group.device.caller.label));
                }
                group.check(shape)?;
                *checked = group.generation;
            }
            self.kv.push(group.raw());
        }
        Ok(())
    }

    fn fill_seqs(&mut self, executable: &Executable, args: &RunArgs<'_>) -> Result<(), String> {
        self.tables.clear();
        self.seqs.clear();
        // Reserved before, so that the addresses of tables hold while the rest is pushed.
        self.tables.reserve(args.seqs.len() * args.kv.len());
        let mut next = 0u32;
        for seq in args.seqs {
            let rows_end = seq.first_token.checked_add(seq.n_tokens);
            let end = seq.first_pos.checked_add(seq.n_tokens);
            let (Some(rows_end), Some(end)) = (rows_end, end) else {
                return Err("a sequence's rows or positions overflow".into());
            };
            if seq.first_token != next || seq.n_tokens == 0 || end > executable.options.n_ctx_max {
                return Err(format!(
                    "a sequence with rows {next}.. at {} and positions up to {end} of {}",
                    seq.first_token, executable.options.n_ctx_max
                ));
            }
            next = rows_end;
            let first = self.tables.len();
            self.push_tables(seq, end, args)?;
            self.seqs.push(abi::SeqSpan {
                struct_size: size_of::<abi::SeqSpan>(),
                first_token: seq.first_token,
                n_tokens: seq.n_tokens,
                first_pos: seq.first_pos,
                reserved: 0,
                tables: self.tables.get(first..).map_or(std::ptr::null(), <[_]>::as_ptr),
                state_slot: seq.state_slot,
                reserved_end: 0,
            });
        }
        let needs_seqs = !args.kv.is_empty() || args.state.is_some() || !args.seqs.is_empty();
        if needs_seqs && next != args.n_tokens {
            return Err(format!("sequences of {next} tokens in a run of {}", args.n_tokens));
        }
        Ok(())
    }

    fn push_tables(
        &mut self,
        seq: &SeqSpan<'_>,
        end: u32,
        args: &RunArgs<'_>,
    ) -> Result<(), String> {
        if seq.tables.len() != args.kv.len() {
            return Err(format!(
                "{} block tables for {} KV groups",
                seq.tables.len(),
                args.kv.len()
            ));
        }
        for (table, group) in seq.tables.iter().zip(args.kv) {
            let reach =
                u64::from(table.first_pos) + table.blocks.len() as u64 * u64::from(group.block_len);
            if table.first_pos > seq.first_pos
                || table.first_pos % group.block_len.max(1) != 0
                || reach < u64::from(end)
            {
                return Err(format!(
                    "a block table of positions {}..{reach} for positions {}..{end}",
                    table.first_pos, seq.first_pos
                ));
            }
            if let Some(id) = table.blocks.iter().find(|id| **id >= group.n_blocks) {
                return Err(format!("KvBlock {id} of {}", group.n_blocks));
            }
            let n_blocks = u32::try_from(table.blocks.len()).map_err(|e| e.to_string())?;
            let blocks = table.blocks.as_ptr();
            self.tables.push(abi::BlockTable { blocks, n_blocks, first_pos: table.first_pos });
        }
        Ok(())
    }
}

/// That the state is the program's, and that every sequence has a slot of its own. `checked` ends with the state's generation.
fn check_state(
    executable: &Executable,
    checked: &mut [u64],
    args: &RunArgs<'_>,
) -> Result<(), String> {
    let layers = &executable.signature.state;
    let pool = match (args.state, layers.is_empty()) {
        (None, true) => return Ok(()),
        (Some(pool), false) => pool,
        (Some(_), true) => return Err("a recurrent state for a program without".into()),
        (None, false) => {
            return Err(format!(
                "no recurrent state; the program has {} layers of it",
                layers.len()
            ));
        }
    };
    if let Some(checked) = checked.last_mut().filter(|checked| **checked != pool.generation) {
        pool.check(&executable.device, layers)?;
        *checked = pool.generation;
    }
    for (i, seq) in args.seqs.iter().enumerate() {
        let slot = seq.state_slot;
        let taken = args.seqs.iter().take(i).any(|other| other.state_slot == slot);
        if taken || slot >= pool.n_slots() {
            let n = pool.n_slots();
            return Err(format!("sequence {i} has slot {slot} of {n}, or another has it too"));
        }
    }
    Ok(())
}

fn check_bounds(executable: &Executable, args: &RunArgs<'_>) -> Result<(), String> {
    let most = &executable.options;
    let n_seqs = args.seqs.len() as u64;
    if args.n_tokens == 0
        || args.n_tokens > most.n_tokens_max
        || args.n_outputs > most.n_outputs_max
        || n_seqs > u64::from(most.n_seqs_max)
    {
        return Err(format!(
            "{} tokens, {} outputs and {n_seqs} sequences; it was compiled for {}, {} and {}",
            args.n_tokens, args.n_outputs, most.n_tokens_max, most.n_outputs_max, most.n_seqs_max
        ));
    }
    Ok(())
}

/// Where the bytes of a binding are.
#[derive(Clone, Copy)]
enum Place<'a> {
    Host(*mut u8, u64),
    Device(&'a BufferSpan<'a>),
}

/// The binding of a value of `bytes` bytes.
fn binding(
    value: u32,
    bytes: u64,
    place: Place<'_>,
    device: &Arc<DeviceInner>,
) -> Result<abi::Binding, String> {
    let (range, host, size) = match place {
        Place::Host(host, size) => (BufferRange::NONE, host, size),
        Place::Device(span) if !Arc::ptr_eq(&span.buffer.device, device) => {
            return Err(format!("value {value} on {}", span.buffer.device.caller.label));
        }
        Place::Device(span) => {
            let range = BufferRange { size: bytes, ..span.raw() };
            (range, std::ptr::null_mut(), span.size)
        }
    };
    if size < bytes {
        return Err(format!("value {value} has {bytes} bytes in this run, {size} are given"));
    }
    let host_size = if host.is_null() { 0 } else { bytes };
    Ok(abi::Binding { struct_size: size_of::<abi::Binding>(), value, range, host, host_size })
}
