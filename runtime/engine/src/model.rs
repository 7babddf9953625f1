//! A loaded model: its plan executed on a device, shared by all its sequences.

use crate::engine::{Engine, Ubatch};
use crate::file::ModelFile;
use crate::kv_pool::KvPool;
use crate::memory::plan::Plan;
use crate::planner::{PlanOptions, Planner, compile_options};
use crate::runtime::{DeviceEntry, Runtime};
use crate::sequence::Sequence;
use crate::weights::{self, Progress};
use crate::{Error, Result};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tegula_arch::{ModelInfo, ProgramOptions, Results};
use tegula_plugin::{BufferDesc, BufferUsage, Device};
use tegula_program::Program;
use tegula_program::ffi::FfiProgram;
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

#[derive(Debug)]
struct Shared {
    file: ModelFile,
    plan: Plan,
    device: Device,
    engine: Mutex<Engine>,
    kv: Mutex<KvPool>,
}

/// A model on a device, planned but not loaded.
struct Planned {
    file: ModelFile,
    entry: DeviceEntry,
    device: Device,
    program: Program,
    ffi: FfiProgram,
    plan: Plan,
}

fn plan_model(runtime: &Runtime, file: ModelFile, options: &ModelOptions) -> Result<Planned> {
    let devices = runtime.select(options.device.as_deref())?;
    let entry = devices.into_iter().next();
    let entry = entry.ok_or_else(|| Error::NoDevice("the selector names no device".into()))?;
    let device = runtime.open_device(&entry, options.n_threads)?;
    let program = file.arch().program(&ProgramOptions {
        dtype_k: options.plan.dtype_k,
        dtype_v: options.plan.dtype_v,
        results: Results::Logits,
    })?;
    let ffi = FfiProgram::new(&program);
    let plan = Planner {
        device: &device,
        entry: &entry,
        gguf: file.gguf(),
        model: file.arch(),
        program: &program,
        ffi: &ffi,
        options: options.plan,
    }
    .plan()?;
    Ok(Planned { file, entry, device, program, ffi, plan })
}

impl Model {
    /// What loading would put where. Nothing of the model's size is allocated or read.
    pub fn plan_only(
        runtime: &Runtime,
        path: impl AsRef<Path>,
        options: &ModelOptions,
    ) -> Result<Plan> {
        Ok(plan_model(runtime, ModelFile::open(path)?, options)?.plan)
    }

    /// Opens, plans and loads.
    ///
    /// # Errors
    /// Anything in [`Error`]; what was allocated before is freed.
    pub fn open(
        runtime: &Runtime,
        path: impl AsRef<Path>,
        options: &ModelOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let Planned { file, entry, device, program, ffi, plan } =
            plan_model(runtime, ModelFile::open(path)?, options)?;
        log::info!("{} on {} ({})", file.path().display(), entry.id(), entry.info.name);
        let mut queue = device.queue()?;
        let weights =
            weights::load(&file, &program, &plan.weights, &entry, &device, &mut queue, progress)?;
        let scratch_type = entry.info.type_for_scratch;
        let mut scratch = Vec::with_capacity(plan.scratch.len());
        for piece in &plan.scratch {
            let desc = BufferDesc {
                size: piece.size,
                buffer_type: scratch_type,
                usage: BufferUsage::SCRATCH,
            };
            scratch.push(device.alloc(&desc)?);
        }
        let chunk_max = entry.buffer_type(scratch_type)?.max_size.get().unwrap_or(u64::MAX);
        let options = compile_options(
            plan.n_ubatch,
            plan.n_outputs,
            plan.context.n_ctx,
            scratch_type,
            chunk_max,
        );
        let executable = device.compile(&ffi, &options, &weights)?;
        let n_vocab = file.arch().info().n_vocab;
        let engine = Engine::new(executable, queue, scratch, plan.n_outputs, n_vocab);
        let kv = KvPool::new(&device, plan.kv.clone(), entry.info.type_for_kv);
        let shared = Shared { file, plan, device, engine: Mutex::new(engine), kv: Mutex::new(kv) };
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

    /// An empty sequence. It takes blocks of the KV cache as it grows.
    pub fn sequence(&self) -> Sequence {
        Sequence::new(self.clone())
    }

    fn kv(&self) -> MutexGuard<'_, KvPool> {
        // A panic while the pool is locked can only come from a failed allocation of a few bytes; its lists stay usable.
        self.shared.kv.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn reserve_blocks(&self, blocks: &mut Vec<u32>, n_tokens: u32) -> Result<()> {
        self.kv().reserve(&self.shared.device, blocks, n_tokens)
    }

    pub(crate) fn free_blocks(&self, blocks: &[u32]) {
        self.kv().release(blocks);
    }

    /// Runs one ubatch of one sequence and hands out its rows of logits.
    pub(crate) fn run(
        &self,
        ubatch: &Ubatch<'_>,
        on_logits: &mut dyn FnMut(u32, &mut [f32]) -> Result<()>,
    ) -> Result<()> {
        // A panic of a caller's `on_logits` leaves nothing half done here.
        let mut engine = self.shared.engine.lock().unwrap_or_else(PoisonError::into_inner);
        engine.run(ubatch, &self.kv())?;
        for (row, logits) in ubatch.rows.clone().zip(engine.logits()) {
            on_logits(ubatch.first_pos + row, logits)?;
        }
        Ok(())
    }
}
