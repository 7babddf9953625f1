//! A compiled case on a device: its tiles, scratch and KV pool between sentinel bytes, and runs of it.

use crate::case::{Case, Step, weight_shape};
use crate::{Result, wrong};
use std::sync::Arc;
use tegula_plugin::{
    Backend, BlockTable, Buffer, BufferDesc, BufferUsage, Device, DeviceOptions, Executable,
    InputData, KvGroup, OutputData, Queue, RunArgs, SeqSpan, StatePool, Tile, WeightBinding,
    WeightDesc, weight_use,
};
use tegula_program::ffi::FfiProgram;
use tegula_program::{OpKind, Program, Value, ValueId};

/// What all memory holds before it is written, and what surrounds it. As f32 it is a small negative number, as f16 and as
/// a block's scale too, so that a read of it shows and does not drown in a NaN.
pub(crate) const SENTINEL: u8 = 0xA5;
/// Bytes watched on either side.
const MARGIN: u64 = 64;

/// Where operands of a run lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In host memory.
    Host,
    /// In buffers of the device.
    Device,
}

/// An open device with a queue.
#[derive(Debug)]
pub struct Rig {
    /// The device.
    pub device: Device,
    /// A queue of it.
    pub queue: Queue,
}

impl Rig {
    /// Opens a device.
    ///
    /// # Errors
    /// What the backend says.
    pub fn open(backend: &Backend, index: u32) -> Result<Self> {
        let device = Device::open(backend, index, DeviceOptions::default())?;
        let queue = device.queue()?;
        Ok(Self { device, queue })
    }

    /// The alignment of a buffer type.
    fn alignment(&self, buffer_type: u32) -> u64 {
        let kind = self.device.info().buffer_types.get(buffer_type as usize);
        kind.map_or(1, |kind| kind.alignment)
    }
}

/// Bytes of a device between sentinels.
pub(crate) struct Guarded {
    pub(crate) buffer: Arc<Buffer>,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

impl Guarded {
    /// Allocates; all bytes are sentinels. The first byte is aligned as asked, and no better.
    pub(crate) fn alloc(
        rig: &mut Rig,
        (buffer_type, usage): (u32, BufferUsage),
        size: u64,
        alignment: u64,
    ) -> Result<Self> {
        let alignment = alignment.max(rig.alignment(buffer_type)).max(1);
        let offset = alignment * (MARGIN.div_ceil(alignment) | 1);
        let desc = BufferDesc { size: offset + size + MARGIN, buffer_type, usage };
        let buffer = Arc::new(rig.device.alloc(&desc)?);
        let fill = vec![SENTINEL; usize::try_from(desc.size).unwrap_or(usize::MAX)];
        rig.queue.write(&buffer, 0, &fill)?;
        Ok(Self { buffer, offset, size })
    }

    fn range(&self) -> std::ops::Range<u64> {
        self.offset..self.offset + self.size
    }

    pub(crate) fn read(&self, queue: &mut Queue) -> Result<Vec<u8>> {
        let mut out = vec![0; usize::try_from(self.size).unwrap_or(usize::MAX)];
        queue.read(&self.buffer, self.offset, &mut out)?;
        Ok(out)
    }

    /// That nothing was written around it.
    pub(crate) fn check(&self, queue: &mut Queue, what: &str) -> Result<()> {
        let before = self.offset - MARGIN.min(self.offset);
        for (at, len) in [(before, self.offset - before), (self.range().end, MARGIN)] {
            let mut around = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
            queue.read(&self.buffer, at, &mut around)?;
            is_sentinel(&around, what)?;
        }
        Ok(())
    }
}

fn is_sentinel(bytes: &[u8], what: &str) -> Result<()> {
    if bytes.iter().all(|byte| *byte == SENTINEL) {
        return Ok(());
    }
    wrong(format!("bytes beside {what} were written"))
}

/// Host memory between sentinels, aligned to a cache line.
pub(crate) struct HostBytes {
    bytes: Vec<u8>,
    begin: usize,
    len: usize,
}

impl HostBytes {
    pub(crate) fn new(len: usize) -> Self {
        let margin = MARGIN as usize;
        let bytes = vec![SENTINEL; len + 3 * margin];
        let begin = margin + bytes.as_ptr().align_offset(margin).min(margin);
        Self { bytes, begin, len }
    }

    /// Nothing at all for an operand of no bytes, as an empty vector gives.
    pub(crate) fn get_mut(&mut self) -> &mut [u8] {
        match self.len {
            0 => &mut [],
            len => &mut self.bytes[self.begin..self.begin + len],
        }
    }

    pub(crate) fn get(&self) -> &[u8] {
        match self.len {
            0 => &[],
            len => &self.bytes[self.begin..self.begin + len],
        }
    }

    pub(crate) fn check(&self, what: &str) -> Result<()> {
        is_sentinel(&self.bytes[..self.begin], what)?;
        is_sentinel(&self.bytes[self.begin + self.len..], what)
    }
}

/// A weight's tile and what was in it once it was uploaded.
struct Uploaded {
    tile: Guarded,
    bytes: Vec<u8>,
}

/// A compiled case.
pub struct Session<'a> {
    rig: &'a mut Rig,
    program: &'a Program,
    executable: Executable,
    scratch: Vec<Guarded>,
    weights: Vec<Uploaded>,
    kv: Vec<KvGroup>,
    /// By group, then as the boundary orders them: segment, layer, side.
    kv_tiles: Vec<Vec<Guarded>>,
    state: Option<StatePool>,
    /// As the boundary orders them: slot, layer.
    records: Vec<Guarded>,
}

impl<'a> Session<'a> {
    /// The ops of the case that the device says it cannot run, each name once.
    ///
    /// # Errors
    /// What the backend says.
    pub fn refused_ops(rig: &Rig, case: &Case) -> Result<Vec<&'static str>> {
        let supported = rig.device.supports(&FfiProgram::new(&case.program))?;
        let ops = case.program.ops.iter().zip(supported);
        let mut names: Vec<_> = ops.filter(|(_, yes)| !yes).map(|(op, _)| op.kind.name()).collect();
        names.sort_unstable();
        names.dedup();
        Ok(names)
    }

    /// Compiles; `scratch_chunk_max` is the greatest piece of scratch.
    ///
    /// # Errors
    /// What the backend says.
    pub fn new(rig: &'a mut Rig, case: &'a Case, scratch_chunk_max: u64) -> Result<Self> {
        let info = rig.device.info();
        let (scratch_type, kv_type) = (info.type_for_scratch, info.type_for_kv);
        let (mut weights, mut bindings) = (Vec::new(), Vec::new());
        for (id, value) in case.program.weights() {
            let tiles = upload(rig, case, id, value, &mut weights)?;
            bindings.push(WeightBinding { value: id.0, tiles });
        }
        let program = FfiProgram::new(&case.program);
        let options = case.options(scratch_type, scratch_chunk_max);
        let executable = rig.device.compile(&program, &options, &bindings)?;
        let mut scratch = Vec::new();
        for piece in &executable.memory().scratch {
            let kind = (scratch_type, BufferUsage::SCRATCH);
            scratch.push(Guarded::alloc(rig, kind, piece.size, piece.alignment)?);
        }
        let (mut kv, mut kv_tiles) = (Vec::new(), Vec::new());
        for (index, pool) in (0..).zip(&case.kv) {
            let layers: Vec<_> =
                case.program.kv_layers.iter().filter(|layer| layer.group == index).collect();
            let n_layers = u32::try_from(layers.len()).unwrap_or(u32::MAX);
            let mut group = KvGroup::new(&rig.device, pool.block_len, n_layers);
            let mut tiles = Vec::new();
            for n_blocks in &pool.segments {
                let first = tiles.len();
                for layer in &layers {
                    let (k, v) = layer.block_bytes(pool.block_len).unwrap_or((0, 0));
                    for bytes in [k, v] {
                        let kind = (kv_type, BufferUsage::KV);
                        tiles.push(Guarded::alloc(rig, kind, bytes * u64::from(*n_blocks), 1)?);
                    }
                }
                let ranges: Vec<_> = tiles[first..]
                    .iter()
                    .map(|tile| (Arc::clone(&tile.buffer), tile.range()))
                    .collect();
                group.push_segment(*n_blocks, &ranges)?;
            }
            kv.push(group);
            kv_tiles.push(tiles);
        }
        let (state, records) = make_state(rig, case, kv_type)?;
        let program = &case.program;
        Ok(Self { rig, program, executable, scratch, weights, kv, kv_tiles, state, records })
    }

    /// Runs once; gives the outputs' bytes.
    ///
    /// # Errors
    /// What the backend says, and writes beside the outputs or to the inputs.
    pub fn run(&mut self, step: &Step, place: Place) -> Result<Vec<Vec<u8>>> {
        match place {
            Place::Host => self.run_on_host(step),
            Place::Device => self.run_on_device(step),
        }
    }

    fn run_on_host(&mut self, step: &Step) -> Result<Vec<Vec<u8>>> {
        let inputs = step.inputs.iter().map(|bytes| {
            let mut input = HostBytes::new(bytes.len());
            input.get_mut().copy_from_slice(bytes);
            input
        });
        let inputs: Vec<_> = inputs.collect();
        let mut outputs: Vec<_> = self.output_bytes(step).into_iter().map(HostBytes::new).collect();
        let bound: Vec<_> = inputs.iter().map(|input| InputData::Host(input.get())).collect();
        let out: Vec<_> =
            outputs.iter_mut().map(|output| OutputData::Host(output.get_mut())).collect();
        self.submit(step, &bound, out)?;
        for (input, bytes) in inputs.iter().zip(&step.inputs) {
            input.check("an input in host memory")?;
            if input.get() != bytes {
                return wrong("an input in host memory was written");
            }
        }
        for output in &outputs {
            output.check("an output in host memory")?;
        }
        Ok(outputs.iter().map(|output| output.get().to_vec()).collect())
    }

    fn run_on_device(&mut self, step: &Step) -> Result<Vec<Vec<u8>>> {
        let kind = (self.rig.device.info().type_for_staging, BufferUsage::ANY);
        let mut inputs = Vec::new();
        for bytes in &step.inputs {
            let input = Guarded::alloc(self.rig, kind, bytes.len() as u64, 4)?;
            self.rig.queue.write(&input.buffer, input.offset, bytes)?;
            inputs.push(input);
        }
        let mut outputs = Vec::new();
        for len in self.output_bytes(step) {
            outputs.push(Guarded::alloc(self.rig, kind, len as u64, 4)?);
        }
        let mut bound = Vec::new();
        for input in &inputs {
            bound.push(InputData::Buffer(input.buffer.span(input.offset, input.size)?));
        }
        let mut out = Vec::new();
        for output in &outputs {
            out.push(OutputData::Buffer(output.buffer.span(output.offset, output.size)?));
        }
        self.submit(step, &bound, out)?;
        let queue = &mut self.rig.queue;
        for (input, bytes) in inputs.iter().zip(&step.inputs) {
            input.check(queue, "an input in a buffer")?;
            if input.read(queue)? != *bytes {
                return wrong("an input in a buffer was written");
            }
        }
        let mut results = Vec::new();
        for output in &outputs {
            output.check(queue, "an output in a buffer")?;
            results.push(output.read(queue)?);
        }
        Ok(results)
    }

    fn output_bytes(&self, step: &Step) -> Vec<usize> {
        let values = self.program.outputs.iter().filter_map(|id| self.program.value(*id).ok());
        values.map(|value| step.bytes(value)).collect()
    }

    /// Runs with these operands.
    ///
    /// # Errors
    /// What the backend or the core says.
    pub fn submit(
        &mut self,
        step: &Step,
        inputs: &[InputData<'_>],
        outputs: Vec<OutputData<'_>>,
    ) -> Result<()> {
        // Shortens what the outputs borrow to what else the run borrows.
        let mut outputs: Vec<OutputData<'_>> = outputs;
        let mut scratch = Vec::new();
        for piece in &self.scratch {
            scratch.push(piece.buffer.span(piece.offset, piece.size)?);
        }
        let tables: Vec<Vec<_>> = step
            .seqs
            .iter()
            .map(|seq| {
                let tables = seq.tables.iter();
                tables
                    .map(|(blocks, first_pos)| BlockTable { blocks, first_pos: *first_pos })
                    .collect()
            })
            .collect();
        let mut first_token = 0;
        let seqs = step.seqs.iter().zip(&tables).map(|(seq, tables)| {
            let span = SeqSpan {
                first_token,
                n_tokens: seq.n_tokens,
                first_pos: seq.first_pos,
                tables,
                state_slot: seq.slot,
            };
            first_token += seq.n_tokens;
            span
        });
        let mut args = RunArgs {
            n_tokens: step.n_tokens,
            n_outputs: step.n_outputs,
            inputs,
            outputs: &mut outputs,
            scratch: &scratch,
            seqs: &seqs.collect::<Vec<_>>(),
            kv: &self.kv.iter().collect::<Vec<_>>(),
            state: self.state.as_ref(),
        };
        Ok(self.rig.queue.run(&self.executable, &mut args)?)
    }

    /// The bytes of all KV tiles, by group.
    ///
    /// # Errors
    /// What the backend says.
    pub fn kv_bytes(&mut self) -> Result<Vec<Vec<Vec<u8>>>> {
        let queue = &mut self.rig.queue;
        let groups = self.kv_tiles.iter();
        groups.map(|tiles| tiles.iter().map(|tile| tile.read(queue)).collect()).collect()
    }

    /// The bytes of all records of recurrent state.
    ///
    /// # Errors
    /// What the backend says.
    pub fn state_bytes(&mut self) -> Result<Vec<Vec<u8>>> {
        let queue = &mut self.rig.queue;
        self.records.iter().map(|record| record.read(queue)).collect()
    }

    /// Writes all records.
    ///
    /// # Errors
    /// What the backend says.
    pub fn set_state_bytes(&mut self, bytes: &[Vec<u8>]) -> Result<()> {
        for (record, bytes) in self.records.iter().zip(bytes) {
            self.rig.queue.write(&record.buffer, record.offset, bytes)?;
        }
        Ok(())
    }

    /// That nothing was written where nothing should be.
    ///
    /// # Errors
    /// What was.
    pub fn check_surroundings(&mut self) -> Result<()> {
        let queue = &mut self.rig.queue;
        for weight in &self.weights {
            weight.tile.check(queue, "a weight tile")?;
            if weight.tile.read(queue)? != weight.bytes {
                return wrong("a weight was written by a run");
            }
        }
        for piece in &self.scratch {
            piece.check(queue, "a piece of scratch")?;
        }
        for tile in self.kv_tiles.iter().flatten() {
            tile.check(queue, "a KV tile")?;
        }
        for record in &self.records {
            record.check(queue, "a record of recurrent state")?;
        }
        Ok(())
    }
}

/// The slots that a case names, each record in a buffer of its own.
fn make_state(
    rig: &mut Rig,
    case: &Case,
    buffer_type: u32,
) -> Result<(Option<StatePool>, Vec<Guarded>)> {
    let layers = &case.program.state_layers;
    if layers.is_empty() {
        return Ok((None, Vec::new()));
    }
    let mut pool = StatePool::new(&rig.device, u32::try_from(layers.len()).unwrap_or(u32::MAX));
    let mut records = Vec::new();
    for _ in 0..case.n_slots() {
        let first = records.len();
        for layer in layers {
            let kind = (buffer_type, BufferUsage::KV);
            records.push(Guarded::alloc(rig, kind, layer.bytes(), 4)?);
        }
        let ranges = records[first..].iter();
        let ranges: Vec<_> = ranges.map(|r| (Arc::clone(&r.buffer), r.range())).collect();
        pool.push_slot(&ranges)?;
    }
    Ok((Some(pool), records))
}

/// The uses of a weight, and the rows of an expert in it, as the core would state them.
fn uses(program: &Program, id: ValueId, value: &Value) -> (u32, u64) {
    if value.dims.len() == 1 {
        return (weight_use::VECTOR, 0);
    }
    let readers = program.ops.iter().filter(|op| op.inputs.contains(&id));
    readers.fold((0, 0), |(uses, rows), op| match op.kind {
        OpKind::Embed => (uses | weight_use::EMBED, rows),
        OpKind::Matmul => (uses | weight_use::MATMUL, rows),
        OpKind::MatmulExperts { n_expert } if op.inputs.get(1) == Some(&id) => {
            (uses | weight_use::EXPERTS, weight_shape(value).0 / u64::from(n_expert.max(1)))
        }
        _ => (uses | weight_use::VECTOR, rows),
    })
}

/// Makes the tiles of a weight, each in a buffer of its own.
fn upload(
    rig: &mut Rig,
    case: &Case,
    id: ValueId,
    value: &Value,
    uploaded: &mut Vec<Uploaded>,
) -> Result<Vec<Tile>> {
    let Some(data) = case.weights.iter().find(|data| data.name == value.name) else {
        return wrong(format!("the case itself is wrong: it has no weight `{}`", value.name));
    };
    let (n_rows, n_in) = weight_shape(value);
    let (uses, rows_per_expert) = uses(&case.program, id, value);
    let desc = WeightDesc { dtype: value.dtype, uses, n_in, n_rows, rows_per_expert };
    let layout = rig.device.weight_layout(&desc)?;
    let buffer_type = rig.device.info().type_for_weights;
    let row_bytes = value.dtype.row_bytes(n_in)?;
    let group = u64::from(layout.rows_per_group);
    let step = if case.tile_rows == 0 { n_rows } else { case.tile_rows };
    let step = step.div_ceil(group) * group;
    let kind = rig.device.info().buffer_types.get(buffer_type as usize);
    let import = case.import && layout.is_native() && kind.is_some_and(|kind| kind.import);
    let import_alignment = kind.map_or(1, |kind| kind.import_alignment);
    let alignment = layout.alignment.max(import_alignment);
    let mut tiles = Vec::new();
    let mut first_row = 0;
    while first_row < n_rows {
        let rows = step.min(n_rows - first_row);
        let at = |row: u64| usize::try_from(row * row_bytes).unwrap_or(usize::MAX);
        let Some(src) = data.bytes.get(at(first_row)..at(first_row + rows)) else {
            return wrong(format!("the case itself is wrong: `{}` is too short", value.name));
        };
        let native = layout.is_native().then_some(src.len() as u64);
        let size = native.or_else(|| layout.bytes(rows)).unwrap_or(u64::MAX);
        let tile = |buffer, offset| Tile {
            first_row,
            n_rows: rows,
            buffer,
            offset,
            size,
            layout: layout.layout,
        };
        if import && size.is_multiple_of(import_alignment) {
            tiles.push(tile(import_rows(rig, buffer_type, src, alignment)?, 0));
        } else {
            let kind = (buffer_type, BufferUsage::WEIGHTS);
            let memory = Guarded::alloc(rig, kind, size, layout.alignment)?;
            let tile = tile(Arc::clone(&memory.buffer), memory.offset);
            rig.queue.upload(&desc, &tile, src)?;
            let bytes = memory.read(&mut rig.queue)?;
            memory.check(&mut rig.queue, "an uploaded weight tile")?;
            uploaded.push(Uploaded { tile: memory, bytes });
            tiles.push(tile);
        }
        first_row += rows;
    }
    Ok(tiles)
}

/// Imports a copy of `src` that is aligned as asked, and no better.
fn import_rows(rig: &Rig, buffer_type: u32, src: &[u8], alignment: u64) -> Result<Arc<Buffer>> {
    let alignment = usize::try_from(alignment).unwrap_or(usize::MAX);
    let mut bytes = vec![SENTINEL; src.len() + 3 * alignment];
    let begin = bytes.as_ptr().align_offset(2 * alignment).min(2 * alignment) + alignment;
    bytes[begin..begin + src.len()].copy_from_slice(src);
    let desc = BufferDesc { size: 0, buffer_type, usage: BufferUsage::WEIGHTS };
    let range = begin..begin + src.len();
    Ok(Arc::new(rig.device.import(&desc, Arc::new(bytes), range)?))
}
