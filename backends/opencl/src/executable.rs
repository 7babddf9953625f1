//! A compiled program: kernels with their arguments, and a run of them.
//!
//! Weights, constants and shapes are set once. A run brings the tables of the cache and small inputs up in one transfer, then enqueues; nothing waits
//! for the device, and nothing is allocated once lists have grown to the size of the first run.

use crate::attention::{KvOp, KvRun, Shape, layer_of};
use crate::bound::{Bound, is_vector};
use crate::buffer::{ClBuffer, Place, device_place, place};
use crate::build::{Builder, FEW_ROWS, rows_of_group};
use crate::cl::Mem;
use crate::context::Shared;
use crate::facts::Facts;
use crate::groups::{Form, Group};
use crate::kv::{LayerTable, RunTables, SEGMENT_BYTES};
use crate::launch::{Arg, Frame, Launch, Memory, Setting};
use crate::plan::{Plan, bytes_of, plan};
use crate::queue::Transfers;
use crate::state::{self, StateOp};
use crate::turns::turns;
use ocl_core::ffi;
use std::sync::Arc;
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Dim, OpKind, Program, ValueId};
use tegula_sdk::{Error, Operand, Result, Run, WeightBinding};

/// Inputs up to this size travel with the tables.
const SMALL_INPUT: u64 = 16 << 10;
/// Segments of a layer that the device's table has room for at first.
const SEGMENTS_AT_FIRST: usize = 16;
/// Tokens of a block at least, for the size of tables at first; shorter blocks make them grow.
const BLOCK_LEN_LIKELY: u64 = 8;

/// What runs at one place of the program.
#[derive(Debug)]
enum Step {
    Launches {
        dim: Dim,
        /// With few rows, where that differs.
        few: Option<Vec<Launch>>,
        many: Vec<Launch>,
    },
    Kv(Box<KvOp>),
    State(Box<StateOp>),
}

/// A buffer of the executable's own, outside of scratch.
#[derive(Debug)]
struct Own {
    mem: Mem,
    size: u64,
}

impl Own {
    fn new(shared: &Shared, size: u64) -> Result<Self> {
        let size = size.max(64).next_multiple_of(64);
        Ok(Self { mem: shared.context.buffer(ffi::CL_MEM_READ_WRITE, size)?, size })
    }

    /// Makes room; what was there is lost.
    fn grow(&mut self, shared: &Shared, size: u64) -> Result<()> {
        if size > self.size {
            *self = Self::new(shared, size.saturating_mul(2))?;
        }
        Ok(())
    }

    fn at(&self) -> Memory {
        Memory(self.mem.raw(), 0)
    }
}

/// A program that can be run.
#[derive(Debug)]
pub struct Executable {
    shared: Arc<Shared>,
    program: Program,
    options: CompileOptions,
    plan: Plan,
    steps: Vec<Step>,
    /// Turns of rope; read by kernels.
    _constants: Own,
    run_tables: Own,
    layer_tables: Own,
    layers: Vec<(LayerTable, u64)>,
    heights: Vec<u32>,
    lists: Lists,
    /// The queue of the last run, and its end.
    pub(crate) last: Option<(u64, Arc<crate::cl::Event>)>,
}

/// Lists that are filled anew in each run and keep their capacity.
#[derive(Debug, Default)]
struct Lists {
    frame: Frame,
    tables: RunTables,
    settings: Vec<Setting>,
    segments: Vec<u8>,
}

#[expect(
    unsafe_code,
    reason = "handles of buffers are used by several threads, one after the other"
)]
// SAFETY: handles that any thread may use, in runs that the core orders.
unsafe impl Send for Lists {}

/// Tokens that attention kernels of a program take at once, each number once.
fn heights(facts: &Facts, program: &Program) -> Vec<u32> {
    let mut out = Vec::new();
    for op in &program.ops {
        let (OpKind::Attention { n_head, .. }, Some((_, layer))) = (op.kind, layer_of(program, op))
        else {
            continue;
        };
        for many in [false, true] {
            let shape = Shape::new(facts, &layer, n_head, many);
            out.extend(shape.map(|shape| shape.height).filter(|height| !out.contains(height)));
        }
    }
    out
}

fn constants_bytes(program: &Program) -> u64 {
    let pairs = program.ops.iter().map(|op| match op.kind {
        OpKind::Rope { n_rot, .. } => u64::from(n_rot / 2) * 8 + 64,
        _ => 0,
    });
    pairs.sum()
}

fn run_table_bytes(program: &Program, options: &CompileOptions) -> u64 {
    let blocks = u64::from(options.n_ctx_max).div_ceil(BLOCK_LEN_LIKELY) + 2;
    let seqs = u64::from(options.n_seqs_max);
    let tokens = u64::from(options.n_tokens_max);
    let group = 4 * blocks * seqs + 8 * seqs + 8 * tokens + 256;
    let states = program.state_layers.len() as u64 * (state::SPAN_BYTES * seqs + 64);
    states
        + u64::from(program.n_kv_groups()) * group
        + 32 * (tokens + seqs)
        + (SMALL_INPUT + 64) * program.inputs.len() as u64
}

/// Bytes of the device that an executable takes outside of scratch.
pub(crate) fn device_bytes(program: &Program, options: &CompileOptions) -> u64 {
    let layers = (program.kv_layers.len() * SEGMENTS_AT_FIRST * SEGMENT_BYTES) as u64;
    constants_bytes(program) + run_table_bytes(program, options) + layers + 3 * 64
}

impl Executable {
    pub(crate) fn new(
        shared: Arc<Shared>,
        program: Program,
        options: &CompileOptions,
        bindings: &[WeightBinding<ClBuffer>],
    ) -> Result<Self> {
        let mut weights: Vec<Option<Bound>> = program.values.iter().map(|_| None).collect();
        for binding in bindings {
            let value = program.value(binding.value)?;
            if let Some(slot) = weights.get_mut(binding.value.index()) {
                let is_vector = is_vector(&program, binding.value);
                *slot = Some(Bound::new(value, is_vector, binding)?);
            }
        }
        if let Some((_, value)) = program.weights().find(|(id, _)| weights[id.index()].is_none()) {
            return Err(Error::invalid(format!("weight `{}` is not bound", value.name)));
        }
        let plan = plan(&shared.facts, &program, options)?;
        let (constants, turns) = constants(&shared, &program, &weights)?;
        let heights = heights(&shared.facts, &program);
        let run_tables = Own::new(&shared, run_table_bytes(&program, options))?;
        let n_layers = program.kv_layers.len();
        let layer_tables =
            Own::new(&shared, (n_layers * SEGMENTS_AT_FIRST * SEGMENT_BYTES) as u64)?;
        let layers = (0..n_layers).map(|_| Default::default()).collect();
        let builder = Builder {
            shared: &shared,
            program: &program,
            weights: &weights,
            turns: &|op| turns.get(op).copied().flatten(),
            rank_region: plan.rank,
            lists: plan.lists,
            sorted: Default::default(),
        };
        let steps = steps(&builder, &plan)?;
        Ok(Self {
            program,
            options: *options,
            plan,
            steps,
            _constants: constants,
            run_tables,
            layer_tables,
            layers,
            heights,
            lists: Lists::default(),
            last: None,
            shared,
        })
    }

    /// Enqueues a run.
    ///
    /// # Safety
    /// Host memory named in the run is valid until the work is done.
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    pub(crate) unsafe fn run(
        &mut self,
        run: &Run<'_, ClBuffer>,
        transfers: &mut Transfers<'_>,
    ) -> Result<()> {
        for (what, n, most) in [
            ("tokens", u64::from(run.n_tokens()), self.options.n_tokens_max),
            ("outputs", u64::from(run.n_outputs()), self.options.n_outputs_max),
            ("sequences", run.n_seqs() as u64, self.options.n_seqs_max),
        ] {
            if n > u64::from(most) {
                return Err(Error::invalid(format!("{n} {what}, compiled for {most}")));
            }
        }
        let mut lists = std::mem::take(&mut self.lists);
        // SAFETY: passed on unchanged.
        let result = unsafe { self.run_with(run, transfers, &mut lists) };
        self.lists = lists;
        result
    }

    /// # Safety
    /// As for [`Executable::run`].
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    unsafe fn run_with(
        &mut self,
        run: &Run<'_, ClBuffer>,
        transfers: &mut Transfers<'_>,
        lists: &mut Lists,
    ) -> Result<()> {
        let Lists { frame, tables, settings, segments } = lists;
        tables.fill(run, &self.heights)?;
        state::list(&self.program, run, tables)?;
        self.fill_layers(run, transfers, segments)?;
        self.fill_frame(run, frame)?;
        // SAFETY: passed on unchanged.
        let small = unsafe { self.bind_inputs(run, transfers, frame, tables) }?;
        self.run_tables.grow(&self.shared, tables.bytes.len() as u64)?;
        let run_at = self.run_tables.at();
        for (id, byte) in small {
            frame.values[id.index()] = Some(Memory(run_at.0, byte));
        }
        transfers.upload(run_at, &tables.bytes)?;
        let kv = KvRun {
            tables,
            heights: &self.heights,
            run_at,
            layers: &self.layers,
            layers_at: self.layer_tables.at(),
            facts: &self.shared.facts,
        };
        for step in &mut self.steps {
            let sink = &mut transfers.sink();
            match step {
                Step::Launches { dim, few, many } => {
                    let list = match few {
                        Some(few) if frame.rows(*dim) <= FEW_ROWS => few,
                        _ => many,
                    };
                    for launch in list {
                        launch.run(sink, frame, settings)?;
                    }
                }
                Step::Kv(op) => op.run(sink, frame, &kv, settings)?,
                Step::State(op) => op.run(sink, frame, tables, run_at, settings)?,
            }
        }
        // SAFETY: passed on unchanged.
        unsafe { self.give_outputs(run, transfers, frame) }
    }

    /// Brings changed segments to the device.
    fn fill_layers(
        &mut self,
        run: &Run<'_, ClBuffer>,
        transfers: &mut Transfers<'_>,
        bytes: &mut Vec<u8>,
    ) -> Result<()> {
        let mut changed = false;
        for ((table, _), layer) in self.layers.iter_mut().zip(&self.program.kv_layers) {
            let group = run.kv_group(layer.group)?;
            if table.generation != Some(group.generation) {
                table.fill(layer, &group)?;
                changed = true;
            }
        }
        if !changed {
            return Ok(());
        }
        bytes.clear();
        for (table, at) in &mut self.layers {
            *at = bytes.len() as u64;
            bytes.extend_from_slice(&table.bytes);
        }
        self.layer_tables.grow(&self.shared, bytes.len() as u64)?;
        let uploaded = transfers.upload(self.layer_tables.at(), bytes);
        if uploaded.is_err() {
            self.layers.iter_mut().for_each(|(table, _)| table.generation = None);
        }
        uploaded
    }

    fn region(&self, run: &Run<'_, ClBuffer>, index: usize) -> Result<Memory> {
        let place = self.plan.scratch.extra.get(index).copied();
        let place = place.ok_or_else(|| Error::invalid("a region too few"))?;
        self.scratch(run, place)
    }

    fn scratch(
        &self,
        run: &Run<'_, ClBuffer>,
        place: tegula_sdk::scratch::Place,
    ) -> Result<Memory> {
        let piece = run.scratch(place.chunk)?;
        if place.offset.saturating_add(place.size) > piece.size {
            return Err(Error::invalid(format!("scratch piece {} is too small", place.chunk)));
        }
        let (mem, offset) = device_place(&piece, "scratch")?;
        Ok(Memory(mem, offset + place.offset))
    }

    /// Places of everything but what the host has.
    fn fill_frame(&self, run: &Run<'_, ClBuffer>, frame: &mut Frame) -> Result<()> {
        frame.n_tokens = run.n_tokens().into();
        frame.n_outputs = run.n_outputs().into();
        frame.values.clear();
        for place in &self.plan.scratch.values {
            frame.values.push(place.map(|place| self.scratch(run, place)).transpose()?);
        }
        frame.regions.clear();
        for index in 0..self.plan.scratch.extra.len() {
            frame.regions.push(self.region(run, index)?);
        }
        // An output's place is the region of the first that names it, unless a buffer is bound.
        let outputs = &self.program.outputs;
        for (i, id) in outputs.iter().enumerate() {
            let first = outputs.iter().position(|other| other == id).unwrap_or(i);
            let home = frame.regions.get(self.plan.outputs + first).copied();
            if frame.values[id.index()].is_none() {
                frame.values[id.index()] = home;
            }
            let needed = bytes_of(&self.program, *id, |dim| frame.rows(dim))?;
            let operand = run.output(i)?;
            check_size(&operand, needed)?;
            if let Operand::Buffer(range) = operand
                && let Place::Device(mem, offset) = place(&range)?
                && offset.is_multiple_of(16)
            {
                frame.values[id.index()] = Some(Memory(mem, offset));
            }
        }
        Ok(())
    }

    /// Inputs: in place, with the tables, or by transfers of their own. Gives those that are with the tables.
    ///
    /// # Safety
    /// As for [`Executable::run`].
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    unsafe fn bind_inputs(
        &self,
        run: &Run<'_, ClBuffer>,
        transfers: &mut Transfers<'_>,
        frame: &mut Frame,
        tables: &mut RunTables,
    ) -> Result<Vec<(ValueId, u64)>> {
        let mut small = Vec::new();
        for (i, id) in self.program.inputs.iter().enumerate() {
            let needed = bytes_of(&self.program, *id, |dim| frame.rows(dim))?;
            let operand = run.input(i)?;
            check_size(&operand, needed)?;
            let region = frame.regions.get(self.plan.inputs + i).copied();
            let region = region.ok_or_else(|| Error::invalid("a region too few"))?;
            let (ptr, pinned) = match operand {
                Operand::Host(ptr, _) => (ptr, false),
                Operand::Buffer(range) => match place(&range)? {
                    Place::Device(mem, offset) if offset.is_multiple_of(16) => {
                        frame.values[id.index()] = Some(Memory(mem, offset));
                        continue;
                    }
                    Place::Device(mem, offset) => {
                        frame.values[id.index()] = Some(region);
                        transfers.copy(Memory(mem, offset), region, needed)?;
                        continue;
                    }
                    Place::Pinned(ptr) => (ptr, true),
                },
            };
            frame.values[id.index()] = Some(region);
            if needed == 0 {
                continue;
            }
            let len = usize::try_from(needed).map_err(|_| Error::invalid("an input too large"))?;
            if needed <= SMALL_INPUT && !pinned {
                // SAFETY: `needed` bytes are readable by the caller's word; the size was checked.
                let bytes = unsafe { std::slice::from_raw_parts(ptr, len) };
                small.push((*id, tables.append(bytes)));
            } else {
                // SAFETY: the bytes are readable until the work is done, by the caller's word.
                unsafe { transfers.write(region, ptr, needed, pinned) }?;
            }
        }
        Ok(small)
    }

    /// Brings outputs to where the core wants them.
    ///
    /// # Safety
    /// As for [`Executable::run`].
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    unsafe fn give_outputs(
        &self,
        run: &Run<'_, ClBuffer>,
        transfers: &mut Transfers<'_>,
        frame: &Frame,
    ) -> Result<()> {
        for (i, id) in self.program.outputs.iter().enumerate() {
            let bytes = bytes_of(&self.program, *id, |dim| frame.rows(dim))?;
            if bytes == 0 {
                continue;
            }
            let from = frame.value(*id)?;
            let (ptr, pinned) = match run.output(i)? {
                Operand::Host(ptr, _) => (ptr, false),
                Operand::Buffer(range) => match place(&range)? {
                    Place::Device(mem, offset) if Memory(mem, offset) == from => continue,
                    Place::Device(mem, offset) => {
                        transfers.copy(from, Memory(mem, offset), bytes)?;
                        continue;
                    }
                    Place::Pinned(ptr) => (ptr, true),
                },
            };
            // SAFETY: the bytes are writable until the work is done, by the caller's word; the size was checked.
            unsafe { transfers.read(from, ptr, bytes, pinned) }?;
        }
        Ok(())
    }
}

fn check_size(operand: &Operand<'_, ClBuffer>, needed: u64) -> Result<()> {
    let size = match operand {
        Operand::Host(_, size) => *size,
        Operand::Buffer(range) => range.size,
    };
    if size < needed {
        return Err(Error::invalid(format!("an operand of {size} bytes, {needed} are needed")));
    }
    Ok(())
}

/// The turns of all rope ops in one buffer; by op.
fn constants(
    shared: &Shared,
    program: &Program,
    weights: &[Option<Bound>],
) -> Result<(Own, Vec<Option<Memory>>)> {
    let own = Own::new(shared, constants_bytes(program))?;
    let mut bytes: Vec<u8> = Vec::new();
    let mut places = vec![None; program.ops.len()];
    let mut known: Vec<(Vec<u64>, u64)> = Vec::new();
    for (op, place) in program.ops.iter().zip(&mut places) {
        if !matches!(op.kind, OpKind::Rope { .. }) {
            continue;
        }
        let factors = op.inputs.get(2).and_then(|id| weights.get(id.index())?.as_ref());
        let factors =
            factors.map(|bound| vector(shared, program, op.inputs[2], bound)).transpose()?;
        let list = turns(&op.kind, factors.as_deref());
        let at = match known.iter().find(|(other, _)| *other == list) {
            Some((_, at)) => *at,
            None => {
                bytes.resize(bytes.len().next_multiple_of(64), 0);
                let at = bytes.len() as u64;
                bytes.extend(list.iter().flat_map(|turn| turn.to_le_bytes()));
                known.push((list, at));
                at
            }
        };
        *place = Some(Memory(own.mem.raw(), at));
    }
    shared.upload(&own.mem, 0, &bytes)?;
    Ok((own, places))
}

/// Reads a weight vector back from the device.
fn vector(shared: &Shared, program: &Program, id: ValueId, bound: &Bound) -> Result<Vec<f32>> {
    let [tile] = bound.tiles.as_slice() else {
        return Err(Error::invalid("a vector in several tiles"));
    };
    let n = usize::try_from(program.value(id)?.row_len()).unwrap_or(0);
    let mut bytes = vec![0u8; n * 4];
    shared.download(tile.at.0, tile.at.1, &mut bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn steps(builder: &Builder<'_>, plan: &Plan) -> Result<Vec<Step>> {
    let program = builder.program;
    let is_whole = |id: ValueId| {
        let bound = builder.weights.get(id.index()).and_then(Option::as_ref);
        bound.is_some_and(|bound| bound.tiles.len() == 1)
    };
    let mut steps = Vec::with_capacity(plan.groups.len());
    for group in &plan.groups {
        let first = group.ops.first().and_then(|i| program.ops.get(*i));
        if let Some(op) = first.filter(|op| layer_of(program, op).is_some()) {
            let sinks = match op.kind {
                OpKind::Attention { .. } => op.inputs.get(1),
                _ => None,
            };
            let sinks = sinks.and_then(|id| builder.weights.get(id.index())?.as_ref());
            let sinks = sinks.and_then(|bound| bound.tiles.first()).map(|tile| Arg::Fixed(tile.at));
            let op = KvOp::new(builder.shared, program, op, sinks, plan.state)?;
            steps.push(Step::Kv(Box::new(op)));
            continue;
        }
        if let Some(op) = first.filter(|op| state::layer_of(op).is_some()) {
            steps.push(Step::State(Box::new(StateOp::new(builder, op)?)));
            continue;
        }
        let all_whole = match &group.form {
            Form::Plain | Form::Ropes => false,
            Form::Products { products, .. } => products.iter().all(|(product, _)| {
                let weight = program.ops.get(*product).and_then(|op| op.inputs.get(1));
                weight.is_some_and(|id| is_whole(*id))
            }),
        };
        let few = if all_whole { builder.few(group)? } else { None };
        let few = match few {
            Some(few) => Some(few),
            None => plain(builder, group, true)?,
        };
        steps.push(Step::Launches {
            dim: rows_of_group(program, group),
            few,
            many: plain(builder, group, false)?.unwrap_or_default(),
        });
    }
    Ok(steps)
}

/// The ops of a group one by one; `None` for few rows where that makes no difference.
fn plain(builder: &Builder<'_>, group: &Group, few: bool) -> Result<Option<Vec<Launch>>> {
    let is_product = |i: &usize| {
        let op = builder.program.ops.get(*i);
        op.is_some_and(|op| matches!(op.kind, OpKind::Matmul | OpKind::MatmulExperts { .. }))
    };
    if few && !group.ops.iter().any(is_product) {
        return Ok(None);
    }
    let mut launches = Vec::new();
    if group.form == Form::Ropes {
        builder.rope(&group.ops, &mut launches)?;
        return Ok(Some(launches));
    }
    for op in &group.ops {
        builder.plain(*op, few, &mut launches)?;
    }
    Ok(Some(launches))
}
