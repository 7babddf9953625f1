//! The run's record: a small buffer with all that changes from run to run, so that recorded commands are replayed as they are.
//!
//! It has a fixed part (sizes, tokens, constants, what the host gives as inputs) and a part that grows (addresses of KV tiles, tiles of
//! attention, block tables); `shaders/kv.glsl` describes it. Where the device's memory can be written by the host it lies there; on cards without
//! such a window the commands begin with a copy.

#![expect(unsafe_code, reason = "writes mapped memory")]

use crate::gpu::Gpu;
use crate::kinds::Kind;
use crate::memory::Buffer;
use crate::state::{self, Grid};
use std::sync::Arc;
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::{Error, KvGroup, Result, Run};

/// Words of a KV group's record, and of a kind's.
const GROUP_WORDS: u32 = 4;
const KIND_WORDS: u32 = 12;
/// Words of a state layer's record.
const STATE_WORDS: u32 = 4;
/// Inputs begin at multiples of this: vectors of floats are read from them.
const INPUT_ALIGNMENT: u64 = 256;
/// Device memory written by the host directly, at most: the window may be small.
const WINDOW_MAX: u64 = 64 << 20;

/// Where things lie in the fixed part.
#[derive(Debug, Clone, Default)]
pub(crate) struct Layout {
    /// Offset of the kinds, in words.
    kinds: u32,
    /// Offset of the state layers, in words.
    pub(crate) states: u32,
    /// Offset of the tokens, in words.
    pub(crate) tokens: u32,
    /// Offset of the constants, in bytes.
    pub(crate) constants: u64,
    /// Offset of each input, in bytes.
    pub(crate) inputs: Vec<u64>,
    /// Bytes of the fixed part.
    pub(crate) fixed: u64,
}

impl Layout {
    /// `inputs` are the greatest bytes of each.
    pub(crate) fn new(
        (n_groups, n_kinds, n_states): (u32, usize, usize),
        constants: u64,
        inputs: &[u64],
        options: &CompileOptions,
    ) -> Result<Self> {
        let too_much = || Error::unsupported("inputs of more than 2^63 bytes");
        let n_kinds = u32::try_from(n_kinds).map_err(|_| too_much())?;
        let kinds = n_groups.saturating_mul(GROUP_WORDS);
        let n_states = u32::try_from(n_states).map_err(|_| too_much())?;
        let states = kinds.saturating_add(n_kinds.saturating_mul(KIND_WORDS));
        let tokens = states.saturating_add(n_states.saturating_mul(STATE_WORDS));
        let tokens = tokens.next_multiple_of(4);
        let mut end = 4 * u64::from(tokens) + 8 * u64::from(options.n_tokens_max);
        end = end.next_multiple_of(INPUT_ALIGNMENT);
        let mut layout =
            Self { kinds, states, tokens, constants: end, inputs: Vec::new(), fixed: 0 };
        end += constants.next_multiple_of(INPUT_ALIGNMENT);
        for bytes in inputs {
            layout.inputs.push(end);
            end = end.checked_add(*bytes).filter(|end| *end < 1 << 62).ok_or_else(too_much)?;
            end = end.next_multiple_of(INPUT_ALIGNMENT);
        }
        layout.fixed = end;
        Ok(layout)
    }

    /// Offset of a kind's record, in words.
    pub(crate) fn kind(&self, kind: usize) -> u32 {
        self.kinds + KIND_WORDS * u32::try_from(kind).unwrap_or(0)
    }

    /// Bytes to begin with: the fixed part, and tables of blocks of 16 tokens.
    pub(crate) fn first_bytes(&self, n_groups: u32, options: &CompileOptions) -> u64 {
        let blocks = u64::from(options.n_ctx_max / 16 + 1) * u64::from(options.n_seqs_max);
        let n_states = u64::from(self.tokens.saturating_sub(self.states) / STATE_WORDS);
        let states = (16 + 8 * n_states) * u64::from(options.n_seqs_max);
        let tables =
            states + 8 * blocks * u64::from(n_groups) + 64 * u64::from(options.n_tokens_max) + 4096;
        self.fixed + tables
    }
}

/// The buffer, and what of it is kept between runs.
pub(crate) struct Params {
    host: Buffer,
    device: Option<Buffer>,
    /// By group: the generation, and the addresses of its tiles.
    bases: Vec<(Option<u64>, Vec<u64>)>,
    /// The part that grows, as it is written.
    tables: Vec<u32>,
    head: Vec<u32>,
}

impl Params {
    pub(crate) fn new(gpu: &Arc<Gpu>, bytes: u64, n_groups: u32) -> Result<Self> {
        let (host, device) = Self::allocate(gpu, bytes)?;
        Ok(Self {
            host,
            device,
            bases: vec![(None, Vec::new()); n_groups as usize],
            tables: Vec::new(),
            head: Vec::new(),
        })
    }

    fn allocate(gpu: &Arc<Gpu>, bytes: u64) -> Result<(Buffer, Option<Buffer>)> {
        let bytes = bytes.next_multiple_of(4096);
        if let Some(window) = gpu.physical.window.filter(|_| bytes <= WINDOW_MAX) {
            match Buffer::new(gpu, bytes, window) {
                Ok(buffer) => return Ok((buffer, None)),
                Err(error) => log::debug!("no device memory that the host writes: {error}"),
            }
        }
        let host = Buffer::new(gpu, bytes, gpu.physical.host)?;
        let device = Buffer::new(gpu, bytes, gpu.physical.local)?;
        Ok((host, Some(device)))
    }

    /// What the shaders read.
    pub(crate) fn buffer(&self) -> &Buffer {
        self.device.as_ref().unwrap_or(&self.host)
    }

    /// What the commands have to copy first, if anything: the host's side, and bytes in steps that seldom change.
    pub(crate) fn copy(&self, layout: &Layout) -> Option<(&Buffer, u64)> {
        let used = layout.fixed + 4 * self.tables.len() as u64;
        let step = used.next_power_of_two().min(self.host.raw.size);
        self.device.as_ref().map(|_| (&self.host, step))
    }

    /// Writes bytes of the fixed part.
    ///
    /// # Safety
    /// `src` holds `size` bytes; no run is in flight.
    pub(crate) unsafe fn put(&self, at: u64, src: *const u8, size: u64) -> Result<()> {
        // SAFETY: passed on.
        unsafe { self.host.raw.write(at, src, size) }
    }

    /// Writes words of the fixed part; no run is in flight.
    pub(crate) fn put_words(&self, at: u64, words: &[u32]) -> Result<()> {
        // SAFETY: the slice holds its bytes, and no run is in flight (the caller waited).
        unsafe { self.put(at, words.as_ptr().cast(), 4 * words.len() as u64) }
    }

    /// Writes what a run says about sequences and the KV cache. No run is in flight.
    #[expect(clippy::too_many_arguments, reason = "parts of the executable, which also owns this")]
    pub(crate) fn fill(
        &mut self,
        gpu: &Arc<Gpu>,
        layout: &Layout,
        program: &tegula_sdk::program::Program,
        kinds: &[Kind],
        parts: &[u64],
        states: &[Grid],
        run: &Run<'_, Buffer>,
        tokens: &mut Vec<u32>,
    ) -> Result<()> {
        let first = u32::try_from(layout.fixed / 4)
            .map_err(|_| Error::unsupported("a run's record this long"))?;
        self.head.clear();
        self.head.resize(layout.tokens as usize, 0);
        self.tables.clear();
        let offset = |tables: &Vec<u32>| {
            first.saturating_add(u32::try_from(tables.len()).unwrap_or(u32::MAX))
        };
        for g in 0..u32::try_from(self.bases.len()).unwrap_or(0) {
            let group = run.kv_group(g)?;
            self.refresh(program, g, &group)?;
            let at = offset(&self.tables);
            let bases = self.bases.get(g as usize).map_or(&[][..], |(_, bases)| bases);
            self.tables.extend(bases.iter().flat_map(|a| [*a as u32, (*a >> 32) as u32]));
            let record = [group.block_len, 0, at, group.n_layers];
            let to = (GROUP_WORDS * g) as usize;
            if let Some(to) = self.head.get_mut(to..to + 4) {
                to.copy_from_slice(&record);
            }
        }
        self.fill_tables(run, first)?;
        let n_kinds = kinds.iter().zip(parts).enumerate();
        for (i, (kind, parts)) in n_kinds {
            let at = offset(&self.tables);
            let (n_tiles, n_keys) = tiles(run, kind, &mut self.tables)?;
            let (n_splits, len) = kind.splits(gpu, n_tiles, run.n_tokens(), n_keys, *parts);
            let combine = if n_splits > 1 { [run.n_tokens(), kind.n_head, 1] } else { [0; 3] };
            let record = [
                n_tiles,
                kind.columns(),
                n_splits,
                at,
                combine[0],
                combine[1],
                combine[2],
                n_splits,
                len,
            ];
            let to = layout.kind(i) as usize;
            if let Some(to) = self.head.get_mut(to..to + record.len()) {
                to.copy_from_slice(&record);
            }
        }
        if !states.is_empty() {
            let at = offset(&self.tables);
            let n_seqs = state::spans(program, run, &mut self.tables)?;
            for (to, grid) in
                self.head[layout.states as usize..].as_chunks_mut::<4>().0.iter_mut().zip(states)
            {
                let [x, y, z] = grid.groups(run, n_seqs)?;
                *to = [x, y, z, at];
            }
        }
        token_places(run, tokens)?;
        self.write(gpu, layout, tokens)
    }

    /// The addresses of a group's tiles, if they are others than before.
    fn refresh(
        &mut self,
        program: &tegula_sdk::program::Program,
        g: u32,
        group: &KvGroup<'_, Buffer>,
    ) -> Result<()> {
        let Some((generation, bases)) = self.bases.get_mut(g as usize) else { return Ok(()) };
        if *generation == Some(group.generation) {
            return Ok(());
        }
        *generation = None;
        bases.clear();
        let layers: Vec<_> = program.kv_layers.iter().filter(|layer| layer.group == g).collect();
        if layers.len() != group.n_layers as usize {
            return Err(Error::invalid(format!("KV group {g} has {} layers", group.n_layers)));
        }
        for (s, segment) in group.segments.iter().enumerate() {
            for (i, layer) in (0u32..).zip(&layers) {
                let (k, v) = layer.block_bytes(group.block_len).unwrap_or((u64::MAX, u64::MAX));
                for (side, bytes) in [k, v].into_iter().enumerate() {
                    let tile = group.tile(s, i, side)?;
                    let needed = bytes.checked_mul(segment.n_blocks.into());
                    if needed.is_none_or(|needed| needed > tile.size) {
                        return Err(Error::invalid(format!("a KV tile of {} bytes", tile.size)));
                    }
                    bases.push(tile.buffer.address(tile.offset, tile.size)?);
                }
            }
        }
        *generation = Some(group.generation);
        Ok(())
    }

    /// Block tables of all sequences in all groups.
    fn fill_tables(&mut self, run: &Run<'_, Buffer>, first: u32) -> Result<()> {
        for g in 0..u32::try_from(self.bases.len()).unwrap_or(0) {
            let group = run.kv_group(g)?;
            let seqs_at = self.tables.len();
            self.tables.resize(seqs_at + 2 * run.n_seqs(), 0);
            if let Some(word) = self.head.get_mut((GROUP_WORDS * g + 1) as usize) {
                *word = first.saturating_add(u32::try_from(seqs_at).unwrap_or(u32::MAX));
            }
            for i in 0..run.n_seqs() {
                let seq = run.seq(i)?;
                let (blocks, first_pos) = seq.blocks(g)?;
                let end = u64::from(seq.first_pos) + u64::from(seq.n_tokens);
                let covered =
                    u64::from(first_pos) + blocks.len() as u64 * u64::from(group.block_len);
                if covered < end || (first_pos > seq.first_pos && seq.n_tokens > 0) {
                    return Err(Error::invalid(format!(
                        "blocks for {covered} positions, {end} are needed"
                    )));
                }
                let at = first.saturating_add(u32::try_from(self.tables.len()).unwrap_or(u32::MAX));
                if let Some(to) = self.tables.get_mut(seqs_at + 2 * i..seqs_at + 2 * i + 2) {
                    to.copy_from_slice(&[at, first_pos]);
                }
                for block in blocks {
                    let after = group.segments.partition_point(|s| s.first_block <= *block);
                    let segment = after.checked_sub(1).and_then(|s| group.segments.get(s));
                    let index = segment.map(|s| (s, block - s.first_block));
                    match index {
                        Some((s, index)) if index < s.n_blocks => {
                            self.tables.extend([u32::try_from(after - 1).unwrap_or(0), index]);
                        }
                        _ => {
                            return Err(Error::invalid(format!(
                                "KvBlock {block} is in no segment"
                            )));
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, gpu: &Arc<Gpu>, layout: &Layout, tokens: &[u32]) -> Result<()> {
        let needed = layout.fixed + 4 * self.tables.len() as u64;
        if needed > self.host.raw.size {
            let (host, device) = Self::allocate(gpu, needed.saturating_mul(2))?;
            // Constants were written once.
            let (from, size) = self.host.raw.host_range(0, layout.fixed)?;
            // SAFETY: both sides hold the fixed part; no run is in flight.
            unsafe { host.raw.write(0, from, size as u64) }?;
            (self.host, self.device) = (host, device);
        }
        self.put_words(0, &self.head)?;
        self.put_words(4 * u64::from(layout.tokens), tokens)?;
        self.put_words(layout.fixed, &self.tables)
    }
}

/// For each row of the ubatch its sequence and position.
fn token_places(run: &Run<'_, Buffer>, out: &mut Vec<u32>) -> Result<()> {
    out.clear();
    if run.n_kv_groups() == 0 {
        return Ok(());
    }
    for i in 0..run.n_seqs() {
        let seq = run.seq(i)?;
        if seq.first_token as usize * 2 != out.len() {
            return Err(Error::invalid(format!("sequence {i} begins at row {}", seq.first_token)));
        }
        if u64::from(seq.first_token) + u64::from(seq.n_tokens) > u64::from(run.n_tokens()) {
            return Err(Error::invalid("a sequence past the run"));
        }
        let places = (0..seq.n_tokens).map(|t| seq.first_pos.saturating_add(t));
        out.extend(places.flat_map(|pos| [u32::try_from(i).unwrap_or(0), pos]));
    }
    if out.len() != 2 * run.n_tokens() as usize {
        return Err(Error::invalid(format!(
            "sequences of {} tokens in a run of {}",
            out.len() / 2,
            run.n_tokens()
        )));
    }
    Ok(())
}

/// The tiles of a kind: sequence, first row, rows, first position. Gives their number and the most keys that one sees.
fn tiles(run: &Run<'_, Buffer>, kind: &Kind, out: &mut Vec<u32>) -> Result<(u32, u32)> {
    let step = kind.tile_tokens(run.n_tokens()).max(1);
    let (mut n_tiles, mut n_keys) = (0, 0);
    for i in 0..run.n_seqs() {
        let seq = run.seq(i)?;
        let mut t = 0;
        while t < seq.n_tokens {
            let n = step.min(seq.n_tokens - t);
            let pos = seq.first_pos.saturating_add(t);
            out.extend([u32::try_from(i).unwrap_or(0), seq.first_token.saturating_add(t), n, pos]);
            let begin = if kind.window > 0 { (pos + 1).saturating_sub(kind.window) } else { 0 };
            n_keys = n_keys.max(pos.saturating_add(n) - begin);
            n_tiles += 1;
            t += n;
        }
    }
    Ok((n_tiles, n_keys))
}
