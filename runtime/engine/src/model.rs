//! A loaded model: its plan executed on a device, shared by all its sequences.

use crate::alloc::Allowance;
use crate::engine::{Engine, OnRow, Ubatch, Wiring};
use crate::file::ModelFile;
use crate::kv_pool::{KvPool, StageKv};
use crate::memory::plan::Plan;
use crate::planner::{
    Attempt, Bounds, OpenDevice, PlanOptions, Planned, Planner, max_size, value_bytes,
};
use crate::runtime::Runtime;
use crate::sequence::Sequence;
use crate::shape::{Quant, Shape};
use crate::state_pool::{SlotPool, StageState};
use crate::weights::{self, Loader, Progress};
use crate::{Error, Result};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use tegula_arch::{ModelInfo, ProgramOptions, Results};
use tegula_gguf::Gguf;
use tegula_plugin::{Buffer, BufferUsage, ScratchDesc};
use tegula_program::Program;
use tegula_tokenizer::Tokenizer;

/// How to load a model.
#[derive(Debug, Clone, Default)]
pub struct ModelOptions {
    /// A device selector; `None` takes `TEGULA_DEVICE`, or `auto`.
    pub device: Option<String>,
    /// Host threads; 0 leaves the number to the backend.
    pub n_threads: u32,
    /// Context, KV types, ubatch.
    pub plan: PlanOptions,
}

/// A loaded model. Clones share it; any thread. Sequences take turns on the device.
#[derive(Debug, Clone)]
pub struct Model {
    shared: Arc<Shared>,
}

/// Fields are dropped in order: what runs before what it was made from.
#[derive(Debug)]
struct Shared {
    engine: Mutex<Engine>,
    kv: Mutex<KvPool>,
    slots: Mutex<SlotPool>,
    file: ModelFile,
    plan: Plan,
}

fn alloc_scratch(open: &OpenDevice, pieces: &[ScratchDesc]) -> Result<Vec<Buffer>> {
    let buffer_type = open.entry.info.type_for_scratch;
    let planned = pieces.iter().map(|piece| piece.size).fold(0, u64::saturating_add);
    let mut allowance = Allowance::new(open, buffer_type, BufferUsage::SCRATCH, planned);
    pieces.iter().map(|piece| allowance.alloc(piece.size)).collect()
}

/// The model's program, and the plan for it on the devices that the options select.
fn plan_model(
    runtime: &Runtime,
    gguf: &Gguf,
    arch: &tegula_arch::Model,
    options: &ModelOptions,
) -> Result<(Program, Planned)> {
    let program = arch.program(&ProgramOptions {
        dtype_k: options.plan.dtype_k,
        dtype_v: options.plan.dtype_v,
        results: Results::Logits,
        n_ctx: options.plan.n_ctx,
    })?;
    let mut devices = Vec::new();
    for entry in runtime.select(options.device.as_deref())? {
        let device = runtime.open_device(&entry, options.n_threads)?;
        devices.push(OpenDevice { entry, device });
    }
    let (selector, n_threads) = (options.device.as_deref(), options.n_threads);
    let attempt = Attempt { runtime, gguf, arch, devices: devices.clone(), selector, n_threads };
    let options = &options.plan;
    let planner = Planner { runtime, gguf, arch, program: &program, devices, options, n_threads };
    let planned = planner.plan().map_err(|error| attempt.explain(error, options))?;
    Ok((program, planned))
}

impl Model {
    /// What loading would put where. Nothing of the model's size is allocated or read.
    pub fn plan_only(
        runtime: &Runtime,
        path: impl AsRef<Path>,
        options: &ModelOptions,
    ) -> Result<Plan> {
        let file = ModelFile::open(path)?;
        Ok(plan_model(runtime, file.gguf(), file.arch(), options)?.1.plan)
    }

    /// What loading a model of this shape would put where. The runtime's caps stand in for a device that is not here: they count even where
    /// they are greater than what the selected device states.
    ///
    /// # Errors
    /// A shape that its architecture cannot have, and whatever planning a file refuses.
    pub fn plan_shape(
        runtime: &Runtime,
        shape: &Shape,
        quant: Quant,
        options: &ModelOptions,
    ) -> Result<Plan> {
        let gguf = shape.gguf(quant)?;
        let arch = tegula_arch::load(&gguf)?;
        Ok(plan_model(&runtime.standing_in(), &gguf, &arch, options)?.1.plan)
    }

    /// Opens, plans and loads. Where a device fails below the limit it states although memory is free, the limit is halved, remembered by the
    /// runtime, and loading begins again with a new plan; that is said once, at `warn`.
    ///
    /// # Errors
    /// Anything in [`Error`](crate::Error); what was allocated before is freed.
    pub fn open(
        runtime: &Runtime,
        path: impl AsRef<Path>,
        options: &ModelOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let path = path.as_ref();
        loop {
            match Self::load(runtime, ModelFile::open(path)?, options, progress) {
                Err(Error::Alloc {
                    device,
                    buffer_type,
                    asked,
                    learned: Some(limit),
                    source,
                    ..
                }) => {
                    log::warn!(
                        "{device}: {asked} bytes failed below the limit it states ({source}); chunks of at most {limit} bytes are tried"
                    );
                    runtime.learn(&device, buffer_type, limit);
                }
                other => return other,
            }
        }
    }

    fn load(
        runtime: &Runtime,
        file: ModelFile,
        options: &ModelOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let (program, planned) = plan_model(runtime, file.gguf(), file.arch(), options)?;
        let Planned { plan, devices, stages } = planned;
        log::info!("{} on {}", file.path().display(), plan.device_names());
        plan.report.notes.iter().for_each(|note| log::warn!("{note}"));
        let bounds = Bounds {
            n_ubatch: plan.n_ubatch,
            n_outputs: plan.n_outputs,
            n_seqs: plan.n_parallel,
            n_ctx: plan.context.n_ctx,
        };
        let mut queues = Vec::with_capacity(devices.len());
        let mut scratch = Vec::with_capacity(devices.len());
        for (open, pieces) in devices.iter().zip(&plan.scratch) {
            queues.push(open.device.queue()?);
            scratch.push(alloc_scratch(open, pieces)?);
        }
        let maps = weights::map_shards(&file)?;
        let mut loader = Loader::new(&file, &maps, &plan, progress);
        let mut wiring = Wiring::new(&program)?;
        let (mut runs, mut kv) = (Vec::with_capacity(stages.len()), Vec::new());
        let mut state = Vec::new();
        for ((stage, ffi), part) in stages.iter().zip(&plan.stages) {
            let (Some(open), Some(queue)) = (devices.get(part.device), queues.get_mut(part.device))
            else {
                return Err(Error::Overflow { what: "the devices of the plan".into() });
            };
            let bindings = loader.stage(&stage.program, part, open, queue)?;
            let scratch_type = open.entry.info.type_for_scratch;
            let chunk_max = max_size(&open.entry, open.entry.buffer_type(scratch_type)?);
            let options = bounds.options(scratch_type, chunk_max);
            let executable = open.device.compile(ffi, &options, &bindings)?;
            let outputs =
                stage.outputs.iter().map(|id| Ok((*id, value_bytes(&program, *id, bounds)?)));
            let outputs: Vec<_> = outputs.collect::<Result<_>>()?;
            runs.push(wiring.stage(executable, part.device, &stage.inputs, &outputs)?);
            kv.push(StageKv::new(runtime, open, part.kv.clone(), part.memory.kv)?);
            state.push(StageState::new(runtime, open, part.state.clone(), part.memory.kv)?);
        }
        let n_vocab = file.arch().info().n_vocab;
        let engine = Engine::new(&wiring, runs, queues, scratch, plan.n_outputs, n_vocab);
        let kv = KvPool::new(plan.block_len, plan.n_blocks, plan.n_parallel, kv);
        let n_slots = plan.stages.iter().map(|part| part.state.n_slots).max().unwrap_or(0);
        let slots = Mutex::new(SlotPool::new(n_slots, state));
        let shared = Shared { engine: Mutex::new(engine), kv: Mutex::new(kv), slots, file, plan };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The file it was loaded from.
    pub fn file(&self) -> &ModelFile {
        &self.shared.file
    }

    /// What it is.
    pub fn info(&self) -> &ModelInfo {
        self.shared.file.arch().info()
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        self.shared.file.tokenizer()
    }

    /// The plan it was loaded by.
    pub fn plan(&self) -> &Plan {
        &self.shared.plan
    }

    /// Whether a device that it lies on was lost, or its backend panicked: all its sequences fail from then on, and only loading it again,
    /// with a new [`Runtime`] or on another device, helps. Never waits: a run that is going on is not lost yet.
    pub fn is_lost(&self) -> bool {
        match self.shared.engine.try_lock() {
            Ok(engine) => engine.is_lost(),
            Err(TryLockError::Poisoned(engine)) => engine.into_inner().is_lost(),
            Err(TryLockError::WouldBlock) => false,
        }
    }

    /// An empty sequence. It takes blocks of the KV cache as it grows; as many as [`PlanOptions::n_parallel`] may hold some at a time.
    pub fn sequence(&self) -> Sequence {
        Sequence::new(self.clone())
    }

    fn kv(&self) -> MutexGuard<'_, KvPool> {
        // A panic while the pool is locked can only come from a failed allocation of a few bytes; its lists stay usable.
        self.shared.kv.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slots(&self) -> MutexGuard<'_, SlotPool> {
        // As for the blocks.
        self.shared.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether sequences have recurrent state, which cannot go back to an earlier position.
    pub fn has_state(&self) -> bool {
        self.slots().is_used()
    }

    /// A slot of recurrent state; `None` for a model without.
    pub(crate) fn take_slot(&self) -> Result<Option<u32>> {
        self.slots().take()
    }

    pub(crate) fn free_slot(&self, slot: u32) {
        self.slots().release(slot);
    }

    /// Takes blocks; the first ones make a sequence one of those that are in use, until it has given back the last one.
    pub(crate) fn reserve_blocks(&self, blocks: &mut Vec<u32>, n_tokens: u32) -> Result<()> {
        self.kv().reserve(blocks, n_tokens)
    }

    /// Gives blocks back; `is_last` if the sequence holds none after that.
    pub(crate) fn free_blocks(&self, blocks: &[u32], is_last: bool) {
        self.kv().release(blocks, is_last);
    }

    /// Whether both are the same loaded model.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Runs one ubatch and calls `on_logits(part, position, row)` for its rows of logits.
    pub(crate) fn run(&self, ubatch: &Ubatch<'_>, on_logits: OnRow<'_>) -> Result<()> {
        // A panic of a caller's `on_logits` leaves nothing half done here.
        let mut engine = self.shared.engine.lock().unwrap_or_else(PoisonError::into_inner);
        engine.run(ubatch, &self.kv(), &self.slots())?;
        let rows = ubatch.parts.iter().enumerate().flat_map(|(index, part)| {
            let position = |row: usize| part.first_pos + u32::try_from(row).unwrap_or(u32::MAX);
            part.rows.clone().map(move |row| (index, position(row)))
        });
        for ((part, position), logits) in rows.zip(engine.logits()) {
            on_logits(part, position, logits)?;
        }
        Ok(())
    }
}
