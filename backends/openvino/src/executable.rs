//! A compiled program: models, and what is done between them.

#![expect(unsafe_code, reason = "a run names host memory")]

use crate::attention::work_bytes;
use crate::between::{Around, State, is_between};
use crate::buffer::Buffer;
use crate::engine::Engine;
use crate::kv::GroupPlaces;
use crate::model::{ModelRun, ROWS_MAX};
use crate::partition::{self, ModelStep, Step};
use crate::rope::table_bytes;
use crate::slots::Slots;
use crate::tiles::Tiles;
use crate::weights::Form;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Dim, OpKind, Program, ValueId, ValueKind};
use tegula_sdk::scratch::ScratchPlan;
use tegula_sdk::{Error, Memory, Result, Run, WeightBinding};

/// A step that can be run.
enum Ready {
    Between(Vec<usize>),
    Model(Box<ModelRun>),
}

/// A program that can be run.
pub struct Executable {
    program: Program,
    options: CompileOptions,
    engine: Arc<Engine>,
    plan: ScratchPlan,
    steps: Vec<Ready>,
    state: State,
    slots: Slots,
}

impl Executable {
    pub(crate) fn new(
        program: Program,
        options: &CompileOptions,
        bindings: Vec<WeightBinding<Buffer>>,
        engine: Arc<Engine>,
    ) -> Result<Self> {
        let mut weights = bound(&program, bindings)?;
        let steps = partition::cut(&program, is_between)?;
        let plan = partition::scratch(&program, &steps, options)?;
        let steps = compile_all(&engine, &program, steps, &weights)?;
        let mut state = State::default();
        state.work.resize_with(engine.pool.n_threads(), Mutex::default);
        for op in &program.ops {
            for (i, id) in op.inputs.iter().enumerate() {
                let vector = match op.kind {
                    OpKind::Rope { .. } => i == 2,
                    OpKind::Attention { .. } => i == 1,
                    _ => false,
                };
                if vector && let Some(tiles) = weights.get(id) {
                    state.vectors.insert(*id, tiles.vector()?);
                }
            }
        }
        for op in program.ops.iter().filter(|op| op.kind == OpKind::Embed) {
            if let Some((id, table)) = op.inputs.get(1).and_then(|id| weights.remove_entry(id)) {
                state.tables.insert(id, table);
            }
        }
        let slots = Slots::default();
        Ok(Self { program, options: *options, engine, plan, steps, state, slots })
    }

    /// Runs once.
    ///
    /// # Safety
    /// Host memory named in the run is valid.
    pub(crate) unsafe fn run(&mut self, run: &Run<'_, Buffer>) -> Result<()> {
        if run.n_tokens() > self.options.n_tokens_max
            || run.n_outputs() > self.options.n_outputs_max
        {
            return Err(Error::invalid(format!(
                "{} tokens and {} outputs, compiled for {} and {}",
                run.n_tokens(),
                run.n_outputs(),
                self.options.n_tokens_max,
                self.options.n_outputs_max
            )));
        }
        // SAFETY: passed on.
        unsafe { self.slots.begin(&self.program, &self.plan, run) }?;
        let groups = 0..self.program.n_kv_groups();
        let groups: Result<Vec<_>> = groups.map(|i| GroupPlaces::new(run, i)).collect();
        let groups = groups?;
        let around = Around {
            program: &self.program,
            run,
            slots: &self.slots,
            groups: &groups,
            pool: &self.engine.pool,
            kernels: self.engine.kernels,
        };
        for step in &mut self.steps {
            match step {
                Ready::Model(model) => {
                    model.run(&self.program, &self.slots, run.n_tokens().into())?;
                }
                Ready::Between(ops) => {
                    for index in ops {
                        let Some(op) = self.program.ops.get(*index) else { continue };
                        self.state.run(&around, op).map_err(|error| {
                            let (name, of) = (op.kind.name(), &self.program.name);
                            let message =
                                format!("op {index} ({name}) of `{of}`: {}", error.message);
                            Error { message, ..error }
                        })?;
                    }
                }
            }
        }
        // SAFETY: passed on.
        unsafe { self.slots.finish() };
        Ok(())
    }
}

/// Tiles of all weights, each checked.
fn bound(
    program: &Program,
    bindings: Vec<WeightBinding<Buffer>>,
) -> Result<HashMap<ValueId, Tiles>> {
    let mut out = HashMap::with_capacity(bindings.len());
    for binding in bindings {
        let (id, value) = (binding.value, program.value(binding.value)?);
        if value.kind != ValueKind::Weight || out.contains_key(&id) {
            return Err(Error::invalid(format!(
                "`{}` is no weight, or is bound twice",
                value.name
            )));
        }
        out.insert(id, Tiles::new(value, binding)?);
    }
    match program.weights().find(|(id, _)| !out.contains_key(id)) {
        Some((_, value)) => Err(Error::invalid(format!("weight `{}` is not bound", value.name))),
        None => Ok(out),
    }
}

/// Compiles all models, several at once: most of it is work of one thread.
fn compile_all(
    engine: &Engine,
    program: &Program,
    steps: Vec<Step>,
    weights: &HashMap<ValueId, Tiles>,
) -> Result<Vec<Ready>> {
    let mut out: Vec<Option<Ready>> = Vec::with_capacity(steps.len());
    let mut models: Vec<(usize, ModelStep)> = Vec::new();
    for step in steps {
        match step {
            Step::Between(ops) => out.push(Some(Ready::Between(ops))),
            Step::Model(step) => {
                models.push((out.len(), step));
                out.push(None);
            }
        }
    }
    let next = AtomicUsize::new(0);
    let (done, failed) = (Mutex::new(Vec::new()), Mutex::new(None));
    let work = || {
        loop {
            let taken = models.get(next.fetch_add(1, Ordering::Relaxed));
            let Some((index, step)) = taken else { return };
            match ModelRun::new(engine, program, step, weights) {
                Ok(model) => {
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((*index, model));
                }
                Err(error) => {
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    next.store(usize::MAX / 2, Ordering::Relaxed);
                }
            }
        }
    };
    let n_threads = engine.pool.n_threads().min(models.len());
    std::thread::scope(|scope| {
        for _ in 1..n_threads {
            scope.spawn(work);
        }
        work();
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    for (index, model) in done.into_inner().unwrap_or_else(PoisonError::into_inner) {
        if let Some(slot) = out.get_mut(index) {
            *slot = Some(Ready::Model(Box::new(model)));
        }
    }
    out.into_iter()
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| Error::invalid("a model was not compiled"))
}

/// What compiling and running a program take. OpenVINO keeps a model's constants as they were given, packs matrices once more
/// for its kernels at the first run, and holds values inside a model for as many rows as it is given at once.
pub(crate) fn memory(
    program: &Program,
    options: &CompileOptions,
    n_threads: usize,
) -> Result<Memory> {
    let steps = partition::cut(program, is_between)?;
    let plan = partition::scratch(program, &steps, options)?;
    let mut device_bytes = 0u64;
    let (mut n_wide, mut wide) = (0u64, 0u64);
    for step in &steps {
        let Step::Model(step) = step else { continue };
        let mut seen = Vec::new();
        for op in step.ops.iter().filter_map(|i| program.ops.get(*i)) {
            for id in op.inputs.iter().chain(&op.outputs) {
                let value = program.value(*id)?;
                if value.kind == ValueKind::Weight && !seen.contains(id) {
                    seen.push(*id);
                    let Dim::Fixed(n_rows) = value.rows() else { continue };
                    let form = Form::of(value.dtype, n_rows);
                    let bytes: u64 = form
                        .parts(n_rows, value.row_len())
                        .and_then(|parts| parts.into_iter().try_fold(0u64, u64::checked_add))
                        .ok_or_else(|| {
                            Error::invalid(format!("`{}` is larger than 2^64 bytes", value.name))
                        })?;
                    let copies = if value.dims.len() == 2 { 2 } else { 1 };
                    device_bytes = device_bytes.saturating_add(bytes.saturating_mul(copies));
                    if form == Form::F32 {
                        n_wide += 1;
                        wide = wide.saturating_add(bytes);
                    }
                }
            }
            for id in &op.outputs {
                let value = program.value(*id)?;
                let rows = match value.rows() {
                    Dim::Fixed(n) => n,
                    Dim::NTokens => u64::from(options.n_tokens_max).min(ROWS_MAX),
                    Dim::NOutputs => options.n_outputs_max.into(),
                };
                device_bytes = device_bytes
                    .saturating_add(rows.saturating_mul(value.row_len()).saturating_mul(4));
            }
        }
    }
    if n_wide > 0 {
        log::info!(
            "{n_wide} weights of `{}` have types without a compressed form here and become f32: {wide} bytes",
            program.name
        );
    }
    let mut host_bytes = 0u64;
    for op in &program.ops {
        let bytes = match op.kind {
            OpKind::Rope { n_rot, .. } => table_bytes(n_rot, options.n_tokens_max),
            OpKind::Attention { kv_layer, n_head, .. } => {
                let layer = program.kv_layers.get(kv_layer as usize);
                layer.map_or(0, |layer| work_bytes(layer, n_head).saturating_mul(n_threads as u64))
            }
            OpKind::TopK { .. } => op
                .inputs
                .first()
                .map_or(Ok(0), |id| Ok::<_, Error>(program.value(*id)?.row_len() * 4))?,
            _ => 0,
        };
        host_bytes = host_bytes.max(bytes);
    }
    Ok(Memory { scratch: plan.chunks, device_bytes, host_bytes })
}
