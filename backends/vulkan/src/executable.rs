//! A compiled program: its steps, its weights, the record of a run, and the commands recorded for the shapes that ran.
//!
//! Commands are recorded when a shape (numbers of tokens and outputs, and what is bound where) is first seen and replayed after that. A
//! run waits for the one before it, since both use one record; while a token is computed the host has nothing else to do.

#![expect(unsafe_code, reason = "Vulkan is a C interface")]

use crate::commands::Commands;
use crate::frame::Frame;
use crate::gpu::{Gpu, Timeline};
use crate::kinds::Kind;
use crate::memory::Buffer;
use crate::params::Params;
use crate::plan;
use crate::profile::{self, Profile};
use crate::queue::{Delivery, Queue};
use crate::record::Recorder;
use crate::weight::{Matrix, is_vector};
use ash::vk;
use std::collections::HashMap;
use std::sync::Arc;
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{OpKind, Program, ValueId, ValueKind};
use tegula_sdk::scratch;
use tegula_sdk::{Error, Operand, Range, Result, Run, WeightBinding};

/// Shapes whose commands are kept.
const SHAPES_MAX: usize = 24;
/// What commands were recorded for.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shape {
    n_tokens: u32,
    n_outputs: u32,
    /// Addresses of scratch, buffers and offsets of operands, the record, and what is copied.
    places: Vec<u64>,
}

struct Recorded {
    shape: Shape,
    commands: vk::CommandBuffer,
    last_used: u64,
    profile: Option<Profile>,
}

/// A program that can be run.
pub struct Executable {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) program: Program,
    options: CompileOptions,
    pub(crate) frame: Frame,
    /// By value id.
    pub(crate) weights: Vec<Option<Matrix>>,
    params: Params,
    has_constants: bool,
    results: Buffer,
    readback: Option<Buffer>,
    commands: Commands,
    recorded: Vec<Recorded>,
    /// The last run.
    last: Option<(Arc<Timeline>, u64)>,
    n_runs: u64,
    tokens: Vec<u32>,
    times: HashMap<String, (f64, u64)>,
    is_profiled: bool,
    running: Option<usize>,
}

impl Executable {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        program: Program,
        options: &CompileOptions,
        bindings: Vec<WeightBinding<Buffer>>,
    ) -> Result<Self> {
        let frame = Frame::new(gpu, &program, options)?;
        let mut weights: Vec<Option<Matrix>> = program.values.iter().map(|_| None).collect();
        for binding in bindings {
            let value = program.value(binding.value)?;
            let slot = weights.get_mut(binding.value.index());
            match slot {
                Some(slot @ None) if value.kind == ValueKind::Weight => {
                    let is_vector = is_vector(&program, binding.value);
                    *slot = Some(Matrix::new(value, is_vector, &binding)?);
                }
                _ => {
                    let why = format!("`{}` is no weight, or is bound twice", value.name);
                    return Err(Error::invalid(why));
                }
            }
        }
        if let Some((_, value)) = program.weights().find(|(id, _)| weights[id.index()].is_none()) {
            return Err(Error::invalid(format!("weight `{}` is not bound", value.name)));
        }
        let n_groups = program.n_kv_groups();
        let params = Params::new(gpu, frame.layout.first_bytes(n_groups, options), n_groups)?;
        let physical = &gpu.physical;
        let results = Buffer::new(gpu, frame.results_bytes, physical.local)?;
        let readback = match results.raw.mapped {
            Some(_) => None,
            None => Some(Buffer::new(gpu, frame.results_bytes, physical.host)?),
        };
        let executable = Self {
            gpu: Arc::clone(gpu),
            options: *options,
            frame,
            weights,
            params,
            has_constants: false,
            results,
            readback,
            commands: Commands::new(gpu)?,
            recorded: Vec::new(),
            last: None,
            n_runs: 0,
            tokens: Vec::new(),
            times: HashMap::new(),
            is_profiled: profile::is_wanted(),
            running: None,
            program,
        };
        if executable.program.ops.len() > crate::warm::OPS_MIN {
            let kernels = crate::warm::kernels(&executable, options);
            gpu.pipelines.warm(&gpu.device, &kernels)?;
        }
        Ok(executable)
    }

    /// Runs once on `queue`.
    ///
    /// # Safety
    /// Host memory named in the run is valid until the fence that is given.
    pub(crate) unsafe fn run(&mut self, queue: &mut Queue, run: &Run<'_, Buffer>) -> Result<u64> {
        self.check_counts(run)?;
        self.settle(queue)?;
        if !self.has_constants {
            self.fill_constants(queue)?;
        }
        let mut tokens = std::mem::take(&mut self.tokens);
        let filled = self.params.fill(
            &self.gpu,
            &self.frame.layout,
            &self.program,
            &self.frame.kinds,
            &self.frame.parts,
            &self.frame.states,
            run,
            &mut tokens,
        );
        self.tokens = tokens;
        filled?;
        self.put_inputs(run)?;
        let shape = self.shape(run)?;
        let at = self.recorded(shape, run)?;
        let Some(commands) = self.recorded.get(at).map(|recorded| recorded.commands) else {
            return Err(Error::invalid("no commands"));
        };
        let value = queue.value + 1;
        self.gpu.submit(commands, &queue.timeline, value)?;
        queue.value = value;
        self.last = Some((Arc::clone(&queue.timeline), value));
        self.running = Some(at);
        self.deliveries(queue, run, value)?;
        Ok(value)
    }

    fn check_counts(&self, run: &Run<'_, Buffer>) -> Result<()> {
        for (what, n, most) in [
            ("tokens", u64::from(run.n_tokens()), self.options.n_tokens_max),
            ("outputs", u64::from(run.n_outputs()), self.options.n_outputs_max),
            ("sequences", run.n_seqs() as u64, self.options.n_seqs_max),
        ] {
            if n > u64::from(most) {
                return Err(Error::invalid(format!("{n} {what}, compiled for {most}")));
            }
        }
        if run.n_kv_groups() != self.program.n_kv_groups() as usize {
            return Err(Error::invalid(format!("{} KV groups", run.n_kv_groups())));
        }
        Ok(())
    }

    /// Waits for the run before, whose record is about to be overwritten.
    fn settle(&mut self, queue: &mut Queue) -> Result<()> {
        let Some((timeline, value)) = self.last.take() else { return Ok(()) };
        timeline.wait(value, u64::MAX)?;
        if Arc::ptr_eq(&timeline, &queue.timeline) {
            queue.deliver_until(value);
        }
        self.collect();
        Ok(())
    }

    fn collect(&mut self) {
        let running = self.running.take().and_then(|at| self.recorded.get(at));
        if let Some(profile) = running.and_then(|recorded| recorded.profile.as_ref()) {
            profile.collect(&self.gpu, &mut self.times);
            self.n_runs += 1;
        }
    }

    /// Tables of rope, which need the factors from the device.
    fn fill_constants(&mut self, queue: &mut Queue) -> Result<()> {
        let mut words = Vec::new();
        for table in &self.frame.ropes.tables {
            let factors = match table.factors {
                Some(id) => Some(self.read_vector(queue, id)?),
                None => None,
            };
            words.extend(table.words(factors.as_deref()));
        }
        self.params.put_words(self.frame.layout.constants, &words)?;
        self.has_constants = true;
        Ok(())
    }

    fn read_vector(&self, queue: &mut Queue, id: ValueId) -> Result<Vec<f32>> {
        use tegula_sdk::Queue as _;
        let matrix = self.matrix(id)?;
        let Some((buffer, offset)) = &matrix.vector else {
            return Err(Error::invalid("factors that are no vector"));
        };
        let mut bytes = vec![0u8; 4 * matrix.n_in as usize];
        let range = Range { buffer: &**buffer, offset: *offset, size: bytes.len() as u64 };
        // SAFETY: the bytes live until the wait below.
        let fence = unsafe { queue.read(range, bytes.as_mut_ptr()) }?;
        queue.wait(fence, None)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    fn put_inputs(&self, run: &Run<'_, Buffer>) -> Result<()> {
        for (i, (id, at)) in self.program.inputs.iter().zip(&self.frame.layout.inputs).enumerate() {
            let needed = self.bytes(*id, run.n_tokens(), run.n_outputs())?;
            match run.input(i) {
                _ if needed == 0 => {}
                Ok(Operand::Host(ptr, size)) if size >= needed => {
                    // SAFETY: the run's memory holds `size` bytes; no run is in flight.
                    unsafe { self.params.put(*at, ptr, needed) }?;
                }
                Ok(Operand::Buffer(range)) if range.size >= needed => {
                    range.buffer.raw.check(range.offset, needed)?;
                }
                Ok(_) => return Err(Error::invalid(format!("input {i} is bound too short"))),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Bytes of a value in a run.
    pub(crate) fn bytes(&self, id: ValueId, n_tokens: u32, n_outputs: u32) -> Result<u64> {
        let rows = plan::rows(&self.program, id, n_tokens, n_outputs)?;
        let row = self.program.value(id)?.row_len().saturating_mul(4);
        u64::from(rows).checked_mul(row).ok_or_else(|| Error::invalid("a value over 2^64 bytes"))
    }

    pub(crate) fn matrix(&self, id: ValueId) -> Result<&Matrix> {
        let matrix = self.weights.get(id.index()).and_then(Option::as_ref);
        matrix.ok_or_else(|| Error::invalid(format!("value {} is no weight", id.0)))
    }

    fn shape(&self, run: &Run<'_, Buffer>) -> Result<Shape> {
        let mut places = vec![self.params.buffer().id];
        places.push(self.params.copy(&self.frame.layout).map_or(0, |(_, bytes)| bytes));
        for i in 0..self.frame.scratch.chunks.len() {
            let piece = run.scratch(i)?;
            places.push(piece.buffer.address(piece.offset, piece.size)?);
        }
        let inputs = (0..self.program.inputs.len()).map(|i| run.input(i));
        let outputs = (0..self.program.outputs.len()).map(|i| run.output(i));
        for (id, operand) in
            self.program.inputs.iter().chain(&self.program.outputs).zip(inputs.chain(outputs))
        {
            let needed = self.bytes(*id, run.n_tokens(), run.n_outputs())?;
            let (size, place) = match operand? {
                Operand::Host(_, size) => (size, [0, 0]),
                Operand::Buffer(range) => {
                    range.buffer.raw.check(range.offset, range.size)?;
                    (range.size, [range.buffer.id, range.offset])
                }
            };
            if size < needed {
                return Err(Error::invalid(format!("value {} is bound too short", id.0)));
            }
            places.extend(place);
        }
        Ok(Shape { n_tokens: run.n_tokens(), n_outputs: run.n_outputs(), places })
    }

    /// The commands of a shape: replayed, or recorded now.
    fn recorded(&mut self, shape: Shape, run: &Run<'_, Buffer>) -> Result<usize> {
        let now = self.recorded.iter().map(|recorded| recorded.last_used).max().unwrap_or(0) + 1;
        if let Some(at) = self.recorded.iter().position(|recorded| recorded.shape == shape) {
            if let Some(recorded) = self.recorded.get_mut(at) {
                recorded.last_used = now;
            }
            return Ok(at);
        }
        if self.recorded.len() < SHAPES_MAX {
            let commands = self.commands.allocate()?;
            let profile = if self.is_profiled { Some(Profile::new(&self.gpu)?) } else { None };
            self.recorded.push(Recorded { shape: shape.clone(), commands, last_used: 0, profile });
        }
        // A shape without a last use holds no commands yet, and comes first.
        let oldest =
            self.recorded.iter().enumerate().min_by_key(|(_, recorded)| recorded.last_used);
        let at = oldest.map_or(0, |(at, _)| at);
        let Some(recorded) = self.recorded.get_mut(at) else {
            return Err(Error::invalid("no room for commands"));
        };
        let (commands, mut profile) = (recorded.commands, recorded.profile.take());
        recorded.last_used = 0;
        recorded.shape = Shape { n_tokens: 0, n_outputs: 0, places: Vec::new() };
        let result = self.record(commands, run, profile.as_mut());
        let Some(recorded) = self.recorded.get_mut(at) else { return Ok(at) };
        recorded.profile = profile;
        result?;
        recorded.shape = shape;
        recorded.last_used = now;
        Ok(at)
    }

    fn record(
        &self,
        commands: vk::CommandBuffer,
        run: &Run<'_, Buffer>,
        mut profile: Option<&mut Profile>,
    ) -> Result<()> {
        self.commands.record(commands, |_, commands| {
            if let Some(profile) = &mut profile {
                profile.begin(&self.gpu, commands);
            }
            let mut recorder = Recorder::new(&self.gpu, commands, profile);
            let places = self.places(run)?;
            self.record_inputs(&mut recorder, run)?;
            crate::steps::record(self, &mut recorder, places, run.n_tokens(), run.n_outputs())?;
            self.record_outputs(&mut recorder, run)?;
            log::debug!(
                "`{}`: {} tokens, {} outputs: {} dispatches, {} barriers",
                self.program.name,
                run.n_tokens(),
                run.n_outputs(),
                recorder.n_dispatches,
                recorder.n_barriers
            );
            Ok(())
        })
    }

    /// Addresses of all values, by id.
    fn places(&self, run: &Run<'_, Buffer>) -> Result<crate::steps::Places> {
        let frame = &self.frame;
        let mut chunks = Vec::new();
        for (i, chunk) in frame.scratch.chunks.iter().enumerate() {
            let piece = run.scratch(i)?;
            if piece.size < chunk.size {
                return Err(Error::invalid(format!("scratch piece {i} is too short")));
            }
            chunks.push(piece.buffer.address(piece.offset, piece.size)?);
        }
        let chunk =
            |place: &scratch::Place| chunks.get(place.chunk).map_or(0, |base| base + place.offset);
        let mut values = vec![0u64; self.program.values.len()];
        for (slot, place) in values.iter_mut().zip(&frame.scratch.values) {
            *slot = place.as_ref().map_or(0, chunk);
        }
        let record = self.params.buffer().raw.address;
        for (id, at) in self.program.inputs.iter().zip(&frame.layout.inputs) {
            values[id.index()] = record + at;
        }
        for (id, at) in self.program.outputs.iter().zip(&frame.outputs) {
            values[id.index()] = self.results.raw.address + at;
        }
        for (slot, matrix) in values.iter_mut().zip(&self.weights) {
            if let Some(matrix) = matrix {
                *slot = matrix.address();
            }
        }
        let extra = |region: Option<usize>| region.and_then(|i| frame.scratch.extra.get(i));
        Ok(crate::steps::Places {
            values,
            record,
            record_buffer: self.params.buffer().raw.handle,
            parts: extra(frame.parts_region).map_or((0, 0), |place| (chunk(place), place.size)),
            half: extra(frame.half_region).map_or((0, 0), |place| (chunk(place), place.size)),
            experts: extra(frame.experts_region).map_or((0, 0), |place| (chunk(place), place.size)),
        })
    }

    fn record_inputs(&self, recorder: &mut Recorder<'_>, run: &Run<'_, Buffer>) -> Result<()> {
        let record = &self.params.buffer().raw;
        if let Some((host, bytes)) = self.params.copy(&self.frame.layout) {
            let from = (host.raw.handle, 0, host.raw.address);
            recorder.copy(from, (record.handle, 0, record.address), bytes);
        }
        for (i, (id, at)) in self.program.inputs.iter().zip(&self.frame.layout.inputs).enumerate() {
            let Operand::Buffer(range) = run.input(i)? else { continue };
            let bytes = self.bytes(*id, run.n_tokens(), run.n_outputs())?;
            let address = range.buffer.address(range.offset, bytes)?;
            let from = (range.buffer.raw.handle, range.offset, address);
            recorder.copy(from, (record.handle, *at, record.address + at), bytes);
        }
        Ok(())
    }

    fn record_outputs(&self, recorder: &mut Recorder<'_>, run: &Run<'_, Buffer>) -> Result<()> {
        for (i, (id, at)) in self.program.outputs.iter().zip(&self.frame.outputs).enumerate() {
            let bytes = self.bytes(*id, run.n_tokens(), run.n_outputs())?;
            let from = (self.results.raw.handle, *at, self.results.raw.address + at);
            match (run.output(i)?, &self.readback) {
                (Operand::Host(_, size), _) if size < bytes => {
                    return Err(Error::invalid(format!("output {i} is bound too short")));
                }
                (Operand::Host(..), None) => {}
                (Operand::Host(..), Some(readback)) => {
                    let to = (readback.raw.handle, *at, readback.raw.address + at);
                    recorder.copy(from, to, bytes);
                }
                (Operand::Buffer(range), _) => {
                    if range.size < bytes {
                        return Err(Error::invalid(format!("output {i} is bound too short")));
                    }
                    let address = range.buffer.address(range.offset, bytes)?;
                    recorder.copy(from, (range.buffer.raw.handle, range.offset, address), bytes);
                }
            }
        }
        Ok(())
    }

    /// What goes to the host's memory once the fence is reached.
    fn deliveries(&self, queue: &mut Queue, run: &Run<'_, Buffer>, fence: u64) -> Result<()> {
        for (i, (id, at)) in self.program.outputs.iter().zip(&self.frame.outputs).enumerate() {
            let Operand::Host(to, size) = run.output(i)? else { continue };
            let bytes = self.bytes(*id, run.n_tokens(), run.n_outputs())?;
            if size < bytes {
                return Err(Error::invalid(format!("output {i} is bound too short")));
            }
            let from = self.readback.as_ref().unwrap_or(&self.results);
            let (from, size) = from.raw.host_range(*at, bytes)?;
            queue.deliveries.push(Delivery { fence, from, to, size });
        }
        Ok(())
    }

    /// Whether an op can be run at all.
    pub(crate) fn supports(gpu: &Gpu, program: &Program, op: &tegula_sdk::program::Op) -> bool {
        let layer = |i: u32| program.kv_layers.get(i as usize);
        match op.kind {
            OpKind::Attention { kv_layer, n_head, window, .. } => {
                layer(kv_layer).is_some_and(|layer| Kind::new(layer, n_head, window).is_some())
            }
            OpKind::MatmulExperts { n_expert } => n_expert <= crate::experts::EXPERTS_MAX,
            OpKind::ConvState { .. } | OpKind::GatedDelta { .. } => {
                crate::state::grid(gpu, program, op).is_some()
            }
            OpKind::Embed
            | OpKind::RmsNorm { .. }
            | OpKind::LayerNorm { .. }
            | OpKind::Matmul
            | OpKind::Rope { .. }
            | OpKind::KvStore { .. }
            | OpKind::Glu { .. }
            | OpKind::Unary { .. }
            | OpKind::Add
            | OpKind::Mul
            | OpKind::Scale { .. }
            | OpKind::Softcap { .. }
            | OpKind::Slice { .. }
            | OpKind::Concat
            | OpKind::GatherRows
            | OpKind::Argmax
            | OpKind::TopK { .. }
            | OpKind::RouterTopk { .. }
            | OpKind::CombineExperts
            | OpKind::L2Norm { .. }
            | OpKind::SliceGroups { .. }
            | OpKind::GluClamped { .. } => true,
            // Not written yet: the core runs them on another device.
            OpKind::ConcatGroups { .. } | OpKind::RouterTopkGrouped { .. } => false,
        }
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if let Some((timeline, value)) = self.last.take() {
            // On a lost device nothing runs any more.
            if timeline.wait(value, u64::MAX).is_ok() {
                self.collect();
            }
        }
        for recorded in self.recorded.drain(..) {
            if let Some(profile) = recorded.profile {
                profile.free(&self.gpu);
            }
        }
        if self.is_profiled && self.n_runs > 0 {
            profile::report(&self.program.name, self.n_runs, &self.times);
        }
    }
}
