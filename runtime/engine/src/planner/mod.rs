//! Makes the plan: which device runs what, where each byte lies, how long the context is.
//!
//! Devices are filled in the order they were selected. A draft is made with all layers on the first (or as `--split` says) and a modest context; where a
//! pool of memory is over its budget, a layer moves to the next device and the draft is made again. Then the context grows to
//! what is left, and everything that depends on it is asked for again. The result is one [`Plan`].

mod assign;
mod budget;
mod remedies;
mod report;
mod stage;

pub use assign::{PlaceRule, Split};
pub(crate) use remedies::Attempt;
pub(crate) use stage::{Bounds, max_size, weight_desc};

use crate::measure::faster_type;
use crate::memory::context::{ContextInputs, choose};
use crate::memory::kv::{KvShape, block_len, bytes_per_token};
use crate::memory::plan::{Plan, StagePlan};
use crate::memory::units::format_size;
use crate::partition::{Stage, partition};
use crate::runtime::{DeviceEntry, Runtime};
use crate::{Error, Result};
use budget::Budget;
use stage::{Places, plan_memory, plan_weights};
use tegula_gguf::Gguf;
use tegula_plugin::{Device, DeviceError, ScratchDesc};
use tegula_program::ffi::FfiProgram;
use tegula_program::{DType, Dim, Program};

/// Context of the first draft where none is asked for: enough to be useful, so that layers are not moved for a context nobody asked for.
const N_CTX_DRAFT: u32 = 4096;

/// Rounds in which the context shrinks by what is missing and no more.
const ROUNDS_EXACT: u32 = 4;

/// Wishes for the plan.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    /// Context in tokens; `None` is the longest sensible one.
    pub n_ctx: Option<u32>,
    /// Type of stored keys.
    pub dtype_k: DType,
    /// Type of stored values.
    pub dtype_v: DType,
    /// Tokens of a run.
    pub n_ubatch: u32,
    /// Rows of logits of a run.
    pub n_outputs: u32,
    /// Whether weights may be used in place from the mapped file.
    pub mmap: bool,
    /// How layers are divided over several devices.
    pub split: Split,
    /// Weights that are kept on a device of their own; the first rule that matches counts.
    pub place: Vec<PlaceRule>,
}

impl Default for PlanOptions {
    fn default() -> Self {
        Self {
            n_ctx: None,
            dtype_k: DType::F16,
            dtype_v: DType::F16,
            n_ubatch: 512,
            n_outputs: 1,
            mmap: true,
            split: Split::Fill,
            place: Vec::new(),
        }
    }
}

/// A device that a plan may use.
#[derive(Debug, Clone)]
pub(crate) struct OpenDevice {
    pub(crate) entry: DeviceEntry,
    pub(crate) device: Device,
}

/// A plan with what is needed to execute it. Devices that run nothing are closed.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    pub(crate) devices: Vec<OpenDevice>,
    pub(crate) stages: Vec<(Stage, FfiProgram)>,
}

/// What a plan is made of.
pub(crate) struct Planner<'a> {
    pub(crate) runtime: &'a Runtime,
    pub(crate) gguf: &'a Gguf,
    pub(crate) arch: &'a tegula_arch::Model,
    pub(crate) program: &'a Program,
    pub(crate) devices: Vec<OpenDevice>,
    pub(crate) options: &'a PlanOptions,
}

/// A plan before the context is chosen.
struct Draft {
    stages: Vec<(Stage, FfiProgram)>,
    plans: Vec<StagePlan>,
    block_len: u32,
    bounds: Bounds,
    ubatch_reason: Option<String>,
    budget: Budget,
}

impl Planner<'_> {
    /// The plan, or why there is none.
    pub(crate) fn plan(mut self) -> Result<Planned> {
        let pinned = self.pin_ops()?;
        self.leave_slow_memory();
        let whole = FfiProgram::new(self.program);
        let supports: Result<Vec<Vec<bool>>, DeviceError> =
            self.devices.iter().map(|d| d.device.supports(&whole)).collect();
        let supports = supports?;
        let names: Vec<String> = self.devices.iter().map(|d| d.entry.id()).collect();
        let n_usable = if self.options.split == Split::None { 1 } else { self.devices.len() };
        let free: Vec<u64> = self.free_for_split().into_iter().take(n_usable).collect();
        let n_layers = assign::n_layers(self.program);
        let mut counts = assign::first_counts(&self.options.split, n_layers, &free)?;
        let trained = self.arch.info().n_ctx_train.max(1);
        let n_ctx = self.options.n_ctx.unwrap_or(trained.min(N_CTX_DRAFT));
        let draft = loop {
            let devices =
                assign::devices_of_ops(self.program, &counts, &supports, &pinned, &names)?;
            let draft = self.draft(&partition(self.program, &devices)?, n_ctx)?;
            match draft.budget.first_over(n_ctx) {
                Some(device) if assign::shift(&mut counts, device) => {}
                _ => break draft,
            }
        };
        let planned = self.finish(draft, trained)?;
        self.devices = Vec::new();
        Ok(planned)
    }

    /// The device that a rule gives each op.
    fn pin_ops(&mut self) -> Result<Vec<Option<usize>>> {
        let mut rules = Vec::new();
        for rule in &self.options.place {
            let entry = self.runtime.select(Some(&rule.device))?.into_iter().next();
            let entry = entry.ok_or_else(|| Error::NoDevice("the rule names no device".into()))?;
            let known = self.devices.iter().position(|d| d.entry.id() == entry.id());
            let index = match known {
                Some(index) => index,
                None => {
                    let device = self.runtime.open_device(&entry, 0)?;
                    self.devices.push(OpenDevice { entry, device });
                    self.devices.len() - 1
                }
            };
            rules.push((&rule.pattern, index));
        }
        let weights = |op: &tegula_program::Op| -> Option<usize> {
            let mut names = op.inputs.iter().filter_map(|id| {
                let value = self.program.values.get(id.index())?;
                (value.kind == tegula_program::ValueKind::Weight).then_some(value.name.as_str())
            });
            names.find_map(|name| {
                rules.iter().find(|(pattern, _)| pattern.is_match(name)).map(|(_, index)| *index)
            })
        };
        Ok(self.program.ops.iter().map(weights).collect())
    }

    /// Weights are not read from memory that was measured to be far slower than another of the same device that could hold them.
    fn leave_slow_memory(&mut self) {
        let bytes = self.weight_bytes();
        for open in &mut self.devices {
            let id = open.entry.id();
            let info = &mut open.entry.info;
            let advised = info.type_for_weights;
            let Some(slow) = faster_type(&info.buffer_types, &info.heaps, advised, bytes) else {
                continue;
            };
            let name = |index: u32| {
                info.buffer_types.get(index as usize).map_or("?", |kind| kind.name.as_str())
            };
            log::warn!(
                "{id}: weights go to buffer type {}, which was measured to be read at {}/s, not to {}, which the backend advises and which is read at {}/s",
                name(slow.faster),
                format_size(slow.faster_rate),
                name(advised),
                format_size(slow.rate),
            );
            info.type_for_weights = slow.faster;
        }
    }

    /// Bytes of all tensors that the program reads.
    fn weight_bytes(&self) -> u64 {
        let tensors = self.program.weights().filter_map(|(_, value)| self.gguf.tensor(&value.name));
        tensors.map(tegula_gguf::TensorInfo::n_bytes).fold(0, u64::saturating_add)
    }

    /// Free memory by device for proportions; the host's processor takes no share beside an accelerator.
    fn free_for_split(&self) -> Vec<u64> {
        let is_cpu = |d: &OpenDevice| d.entry.info.kind == tegula_plugin::DeviceKind::CPU;
        let only_cpu = self.devices.iter().all(is_cpu);
        let free = |d: &OpenDevice| {
            let place = Places::new(&d.entry).ok()?;
            place.weights.heap.free.get()
        };
        self.devices
            .iter()
            .map(|d| if is_cpu(d) && !only_cpu { 0 } else { free(d).unwrap_or(0) })
            .collect()
    }

    fn draft(&self, stages: &[Stage], n_ctx: u32) -> Result<Draft> {
        let stages: Vec<(Stage, FfiProgram)> =
            stages.iter().map(|stage| (stage.clone(), FfiProgram::new(&stage.program))).collect();
        let mut block = u32::MAX;
        for (stage, _) in &stages {
            let places = self.places(stage.device)?;
            block = block.min(block_len(&stage.program.kv_layers, places.kv.limits.max_size)?);
        }
        let mut plans = Vec::with_capacity(stages.len());
        for (stage, _) in &stages {
            let places = self.places(stage.device)?;
            let open = self.open(stage.device)?;
            let gguf = self.gguf;
            let mmap = self.options.mmap;
            plans.push(StagePlan {
                device: stage.device,
                weights: plan_weights(stage, gguf, &open.device, &places.weights, mmap)?,
                kv: kv_shape(stage, n_ctx, block, &places),
                scratch: Vec::new(),
                compile_device_bytes: 0,
                compile_host_bytes: 0,
            });
        }
        let wanted = Bounds {
            n_ubatch: self.options.n_ubatch.min(n_ctx).max(1),
            n_outputs: self.options.n_outputs,
            n_ctx,
        };
        let (bounds, ubatch_reason) = self.fit_ubatch(&stages, &mut plans, wanted)?;
        let budget = self.budget(&stages, &plans, bounds)?;
        Ok(Draft { stages, plans, block_len: block, bounds, ubatch_reason, budget })
    }

    fn open(&self, device: usize) -> Result<&OpenDevice> {
        self.devices
            .get(device)
            .ok_or_else(|| Error::Overflow { what: format!("device {device} of the plan") })
    }

    fn places(&self, device: usize) -> Result<Places<'_>> {
        Places::new(&self.open(device)?.entry)
    }

    /// Fills in what the stages' executables take, at the greatest ubatch whose scratch fits everywhere; and why it is lower than wanted.
    fn fit_ubatch(
        &self,
        stages: &[(Stage, FfiProgram)],
        plans: &mut [StagePlan],
        mut bounds: Bounds,
    ) -> Result<(Bounds, Option<String>)> {
        let mut reason = None;
        'smaller: loop {
            for ((stage, ffi), plan) in stages.iter().zip(plans.iter_mut()) {
                let places = self.places(stage.device)?;
                let open = self.open(stage.device)?;
                match plan_memory(ffi, &open.device, &places.scratch, bounds)? {
                    Ok(memory) => {
                        plan.scratch = memory.scratch;
                        plan.compile_device_bytes = memory.device_bytes;
                        plan.compile_host_bytes = memory.host_bytes;
                    }
                    Err(error) if bounds.n_ubatch > 1 => {
                        let n = bounds.n_ubatch;
                        reason = Some(format!("{n} tokens do not fit: {}", error.message));
                        bounds.n_ubatch /= 2;
                        continue 'smaller;
                    }
                    Err(error) => {
                        let device = open.entry.id();
                        return Err(Error::ScratchTooBig { device, cause: Box::new(error) });
                    }
                }
            }
            return Ok((bounds, reason));
        }
    }

    fn budget(
        &self,
        stages: &[(Stage, FfiProgram)],
        plans: &[StagePlan],
        bounds: Bounds,
    ) -> Result<Budget> {
        let mut budget = Budget::new(&self.devices)?;
        for (device, pieces) in shared_scratch(plans, self.devices.len()).iter().enumerate() {
            let bytes = pieces.iter().map(|piece| piece.size).sum();
            if bytes > 0 {
                budget.take(device, &self.places(device)?.scratch, bytes);
            }
        }
        for ((stage, ffi), plan) in stages.iter().zip(plans) {
            let places = self.places(plan.device)?;
            let device = &self.open(stage.device)?.device;
            let weights = plan.weights.bytes(true) + plan.weights.bytes(false);
            let (fixed, of_token) = share_of_context(ffi, device, &places, plan, bounds)?;
            budget.take(plan.device, &places.weights, weights + fixed.device_bytes);
            budget.take_host(fixed.host_bytes);
            budget.take_per_token(plan.device, &places.weights, of_token.device_bytes);
            budget.take_host_per_token(of_token.host_bytes);
            budget.take_per_token(plan.device, &places.kv, bytes_per_token(&plan.kv.layers));
        }
        budget.take_host(self.logits_bytes(bounds)?);
        budget.take_host(self.activation_bytes(stages, bounds)?);
        Ok(budget)
    }

    fn logits_bytes(&self, bounds: Bounds) -> Result<u64> {
        let rows = u64::from(bounds.n_outputs.clamp(1, bounds.n_ubatch.max(1)));
        rows.checked_mul(u64::from(self.arch.info().n_vocab))
            .and_then(|n| n.checked_mul(4))
            .ok_or_else(|| Error::Overflow { what: "the bytes of the logits".into() })
    }

    /// Host memory for everything that one stage makes and a later one reads.
    fn activation_bytes(&self, stages: &[(Stage, FfiProgram)], bounds: Bounds) -> Result<u64> {
        let mut total = 0u64;
        for (stage, _) in stages {
            for id in stage.outputs.iter().filter(|id| !self.program.outputs.contains(id)) {
                total = total.saturating_add(value_bytes(self.program, *id, bounds)?);
            }
        }
        Ok(total)
    }

    fn finish(&mut self, draft: Draft, trained: u32) -> Result<Planned> {
        let Draft { mut stages, mut plans, block_len, bounds, ubatch_reason, budget } = draft;
        let choose_by = |budget: &Budget| {
            let (asked, trained) = (self.options.n_ctx, u64::from(trained));
            choose(ContextInputs { asked, trained, fits: budget.tokens_that_fit()? })
        };
        let mut context = choose_by(&budget)?;
        self.close_unused(&mut stages, &mut plans);
        // Scratch and lists may depend on the context, and not evenly: what they take is asked for again at the context chosen,
        // and where that is over the budget, a shorter one is chosen.
        let mut rounds = 0;
        let (wanted, bounds, reason) = loop {
            rounds += 1;
            let n_ctx = context.n_ctx;
            for ((stage, _), plan) in stages.iter().zip(&mut plans) {
                plan.kv = kv_shape(stage, n_ctx, block_len, &self.places(stage.device)?);
            }
            let n_ubatch = self.options.n_ubatch.min(n_ctx).max(1);
            let wanted = Bounds { n_ubatch, n_ctx, ..bounds };
            let (bounds, reason) = self.fit_ubatch(&stages, &mut plans, wanted)?;
            let again = choose_by(&self.budget(&stages, &plans, bounds)?)?;
            if again.n_ctx >= n_ctx {
                break (wanted, bounds, reason);
            }
            context = again;
            // Two or three rounds settle it; a backend whose statements never do must not keep a user waiting.
            if rounds > ROUNDS_EXACT {
                context.n_ctx = (context.n_ctx - context.n_ctx / 4).max(1);
            }
        };
        let mut plan = Plan {
            devices: self.devices.iter().map(|d| d.entry.id()).collect(),
            scratch: shared_scratch(&plans, self.devices.len()),
            stages: plans,
            n_blocks: context.n_ctx.div_ceil(block_len.max(1)),
            context,
            block_len,
            n_ubatch: bounds.n_ubatch,
            ubatch_reason: reason.or(ubatch_reason.filter(|_| bounds.n_ubatch < wanted.n_ubatch)),
            n_outputs: bounds.n_outputs.clamp(1, bounds.n_ubatch.max(1)),
            logits_bytes: self.logits_bytes(bounds)?,
            activation_bytes: self.activation_bytes(&stages, bounds)?,
            report: report::empty(self),
        };
        report::fill(self, &stages, &mut plan)?;
        Ok(Planned { plan, devices: std::mem::take(&mut self.devices), stages })
    }

    /// Closes devices that run nothing, so that they neither keep threads nor stand in the plan.
    fn close_unused(&mut self, stages: &mut [(Stage, FfiProgram)], plans: &mut [StagePlan]) {
        let mut kept = 0usize;
        let mut numbers = Vec::with_capacity(self.devices.len());
        for index in 0..self.devices.len() {
            let used = plans.iter().any(|plan| plan.device == index);
            numbers.push(used.then_some(kept));
            kept += usize::from(used);
        }
        let number = |device: usize| numbers.get(device).copied().flatten().unwrap_or(device);
        for ((stage, _), plan) in stages.iter_mut().zip(plans) {
            stage.device = number(stage.device);
            plan.device = number(plan.device);
        }
        let mut index = 0;
        self.devices.retain(|_| {
            index += 1;
            numbers.get(index - 1).copied().flatten().is_some()
        });
    }
}

/// What an executable takes beside buffers: the part that does not depend on the context, and that of each of its tokens.
#[derive(Debug, Clone, Copy, Default)]
struct CompileBytes {
    device_bytes: u64,
    host_bytes: u64,
}

/// Tells the two parts apart by asking for half the context too; what a backend states grows evenly with it.
fn share_of_context(
    ffi: &FfiProgram,
    device: &Device,
    places: &Places<'_>,
    plan: &StagePlan,
    bounds: Bounds,
) -> Result<(CompileBytes, CompileBytes)> {
    let whole = CompileBytes {
        device_bytes: plan.compile_device_bytes,
        host_bytes: plan.compile_host_bytes,
    };
    let n_ctx = u64::from(bounds.n_ctx);
    let half_bounds = Bounds { n_ctx: bounds.n_ctx / 2, ..bounds };
    if half_bounds.n_ctx < bounds.n_ubatch {
        return Ok((whole, CompileBytes::default()));
    }
    let Ok(half) = plan_memory(ffi, device, &places.scratch, half_bounds)? else {
        return Ok((whole, CompileBytes::default()));
    };
    let of_token = |whole: u64, half: u64| {
        whole.saturating_sub(half).div_ceil(n_ctx - u64::from(half_bounds.n_ctx))
    };
    let of_token = CompileBytes {
        device_bytes: of_token(whole.device_bytes, half.device_bytes),
        host_bytes: of_token(whole.host_bytes, half.host_bytes),
    };
    let fixed = |whole: u64, of_token: u64| whole.saturating_sub(of_token.saturating_mul(n_ctx));
    let fixed = CompileBytes {
        device_bytes: fixed(whole.device_bytes, of_token.device_bytes),
        host_bytes: fixed(whole.host_bytes, of_token.host_bytes),
    };
    Ok((fixed, of_token))
}

fn kv_shape(stage: &Stage, n_ctx: u32, block_len: u32, places: &Places<'_>) -> KvShape {
    let alignment = places.kv.buffer_type.alignment.max(1);
    KvShape::new(&stage.program.kv_layers, n_ctx, block_len, places.kv.limits, alignment)
}

/// For each device the chunks that serve every one of its stages: piece by piece the greatest.
fn shared_scratch(plans: &[StagePlan], n_devices: usize) -> Vec<Vec<ScratchDesc>> {
    let mut out: Vec<Vec<ScratchDesc>> = vec![Vec::new(); n_devices];
    for plan in plans {
        let Some(shared) = out.get_mut(plan.device) else { continue };
        for (i, piece) in plan.scratch.iter().enumerate() {
            match shared.get_mut(i) {
                Some(known) => {
                    known.size = known.size.max(piece.size);
                    known.alignment = known.alignment.max(piece.alignment);
                }
                None => shared.push(*piece),
            }
        }
    }
    out
}

/// Bytes of a value made at run time, at the greatest number of rows.
pub(crate) fn value_bytes(
    program: &Program,
    id: tegula_program::ValueId,
    bounds: Bounds,
) -> Result<u64> {
    let value = program.value(id)?;
    let rows = match value.rows() {
        Dim::Fixed(n) => n,
        Dim::NTokens => u64::from(bounds.n_ubatch),
        Dim::NOutputs => u64::from(bounds.n_outputs.clamp(1, bounds.n_ubatch.max(1))),
    };
    rows.checked_mul(value.row_len())
        .and_then(|n| n.checked_mul(4))
        .ok_or_else(|| Error::Overflow { what: format!("the bytes of `{}`", value.name) })
}
