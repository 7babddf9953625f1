//! Makes the plan: which device runs what, where each byte lies, how long the context is.
//!
//! Devices are filled in the order they were selected, and each device's kinds of memory in theirs (`slots`). A draft is made with all layers in the
//! first (or as `--split` says) and a modest context; where a heap or a pool of memory is over its budget, a layer moves on and the draft is made
//! again. Then the context grows to what is left, and everything that depends on it is asked for again (`finish`). The result is one [`Plan`].

mod assign;
mod budget;
mod finish;
mod free;
mod pins;
mod remedies;
mod report;
mod slots;
mod stage;
mod supports;

pub use assign::{PlaceRule, Split};
pub(crate) use remedies::Attempt;
pub(crate) use stage::{Bounds, max_size, weight_desc};

use crate::measure::faster_type;
use crate::memory::kv::{KvShape, block_len, bytes_per_token};
use crate::memory::plan::{MemoryTypes, Plan, StagePlan};
use crate::memory::state::StateShape;
use crate::memory::units::format_size;
use crate::partition::{Stage, partition};
use crate::runtime::{DeviceEntry, Runtime};
use crate::{Error, Result};
use budget::{Budget, Taker};
use free::FreeMemory;
use slots::{Slot, slots};
use stage::{Places, plan_memory, plan_weights};
use supports::supports;
use tegula_gguf::Gguf;
use tegula_plugin::{Device, DeviceError, ScratchDesc};
use tegula_program::ffi::FfiProgram;
use tegula_program::{DType, Dim, Program};

/// Context of the first draft where none is asked for: enough to be useful, so that layers are not moved for a context nobody asked for.
const N_CTX_DRAFT: u32 = 4096;

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
    /// Experts of the first so many layers are kept on the host's processor, unless a rule of `place` says otherwise.
    pub cpu_experts: u32,
    /// Sequences that may hold a part of the context at a time. They share it: their number changes nothing about its bytes.
    pub n_parallel: u32,
    /// Whether to go on where the plan is known not to fit, or nobody knows.
    pub force: bool,
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
            cpu_experts: 0,
            n_parallel: 1,
            force: false,
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
    pub(crate) n_threads: u32,
}

/// A plan before the context is chosen.
struct Draft {
    stages: Vec<(Stage, FfiProgram)>,
    plans: Vec<StagePlan>,
    /// For each stage.
    slots: Vec<usize>,
    block_len: u32,
    bounds: Bounds,
    ubatch_reason: Option<String>,
}

impl Planner<'_> {
    /// The plan, or why there is none.
    pub(crate) fn plan(mut self) -> Result<Planned> {
        let n_selected = self.devices.len();
        let pinned = self.pin_ops()?;
        self.leave_slow_memory();
        let free = FreeMemory::read(self.runtime, &self.devices);
        let supports: Result<Vec<Vec<bool>>, DeviceError> =
            self.devices.iter().map(|d| supports(&d.device, self.program)).collect();
        let supports = supports?;
        let names: Vec<String> = self.devices.iter().map(|d| d.entry.id()).collect();
        let n_filled = if self.options.split == Split::None { 1 } else { n_selected };
        let slots = slots(&self.devices, n_filled, self.row_bytes());
        let shares = self.free_for_split(&free, n_filled);
        let n_layers = assign::n_layers(self.program);
        let counts = assign::first_counts(&self.options.split, n_layers, &shares)?;
        let mut counts = assign::counts_of_slots(&counts, &slots);
        let trained = self.arch.info().n_ctx_train.max(1);
        let n_ctx = self.options.n_ctx.unwrap_or(trained.min(N_CTX_DRAFT));
        let draft = loop {
            let of_ops =
                assign::slots_of_ops(self.program, &counts, &slots, &supports, &pinned, &names)?;
            let draft = self.draft(&slots, &of_ops, n_ctx)?;
            let budget = self.budget(&draft, draft.bounds, &free)?;
            let mut over = budget.over(n_ctx);
            if !over.any(|slots| assign::shift(&mut counts, slots)) {
                break draft;
            }
        };
        let planned = self.finish(draft, &free, trained)?;
        self.devices = Vec::new();
        Ok(planned)
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

    /// Bytes of the longest row, which a buffer must hold.
    fn row_bytes(&self) -> u64 {
        let row = |value: &tegula_program::Value| value.dtype.row_bytes(value.row_len()).ok();
        self.program.weights().filter_map(|(_, value)| row(value)).max().unwrap_or(0)
    }

    /// Free memory of the devices to fill, for proportions; the host's processor takes no share beside an accelerator.
    fn free_for_split(&self, free: &FreeMemory, n_filled: usize) -> Vec<u64> {
        let is_cpu = |d: &OpenDevice| d.entry.info.kind == tegula_plugin::DeviceKind::CPU;
        let only_cpu = self.devices.iter().all(is_cpu);
        let of_device = |(index, open): (usize, &OpenDevice)| {
            let heap = Places::advised(&open.entry).ok()?.weights.buffer_type.heap;
            free.heap(index, heap)?.bytes.filter(|_| only_cpu || !is_cpu(open))
        };
        let devices = self.devices.iter().enumerate().take(n_filled);
        devices.map(|device| of_device(device).unwrap_or(0)).collect()
    }

    /// Everything but the context. `of_ops` has a slot for each op.
    fn draft(&self, slots: &[Slot], of_ops: &[usize], n_ctx: u32) -> Result<Draft> {
        let missing = || Error::Overflow { what: "a slot of the plan".into() };
        let (mut stages, mut in_slots, mut memory) = (Vec::new(), Vec::new(), Vec::new());
        for mut stage in partition(self.program, of_ops)? {
            let slot = slots.get(stage.device).ok_or_else(missing)?;
            in_slots.push(stage.device);
            memory.push(slot.types);
            stage.device = slot.device;
            let ffi = FfiProgram::new(&stage.program);
            stages.push((stage, ffi));
        }
        let mut block = u32::MAX;
        for ((stage, _), memory) in stages.iter().zip(&memory) {
            let places = self.places(stage.device, *memory)?;
            block = block.min(block_len(&stage.program.kv_layers, places.kv.limits.max_size)?);
        }
        let mut plans = Vec::with_capacity(stages.len());
        for ((stage, _), memory) in stages.iter().zip(memory) {
            let places = self.places(stage.device, memory)?;
            let open = self.open(stage.device)?;
            let gguf = self.gguf;
            let mmap = self.options.mmap;
            plans.push(StagePlan {
                device: stage.device,
                memory,
                weights: plan_weights(stage, gguf, &open.device, &places.weights, mmap)?,
                kv: kv_shape(stage, n_ctx, block, &places),
                state: self.state_shape(stage, &places),
                scratch: Vec::new(),
                compile_device_bytes: 0,
                compile_host_bytes: 0,
            });
        }
        let wanted = self.bounds(n_ctx);
        let (bounds, ubatch_reason) = self.fit_ubatch(&stages, &mut plans, wanted)?;
        Ok(Draft { stages, plans, slots: in_slots, block_len: block, bounds, ubatch_reason })
    }

    /// What is wished for at a context of `n_ctx`. Every sequence may want a row of logits of one run.
    fn bounds(&self, n_ctx: u32) -> Bounds {
        let n_seqs = self.options.n_parallel.max(1);
        Bounds {
            n_ubatch: self.options.n_ubatch.min(n_ctx).max(1),
            n_outputs: self.options.n_outputs.max(n_seqs),
            n_seqs,
            n_ctx,
        }
    }

    fn state_shape(&self, stage: &Stage, places: &Places<'_>) -> StateShape {
        let alignment = places.kv.buffer_type.alignment.max(1);
        let n_slots = self.options.n_parallel.max(1);
        StateShape::new(&stage.program.state_layers, n_slots, places.kv.limits, alignment)
    }

    fn open(&self, device: usize) -> Result<&OpenDevice> {
        self.devices
            .get(device)
            .ok_or_else(|| Error::Overflow { what: format!("device {device} of the plan") })
    }

    fn places(&self, device: usize, memory: MemoryTypes) -> Result<Places<'_>> {
        Places::new(&self.open(device)?.entry, memory)
    }

    fn places_of(&self, plan: &StagePlan) -> Result<Places<'_>> {
        self.places(plan.device, plan.memory)
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
                let places = self.places_of(plan)?;
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
                        bounds.n_ubatch = smaller_ubatch(n);
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

    /// What a draft takes, of everything there is.
    fn budget(&self, draft: &Draft, bounds: Bounds, free: &FreeMemory) -> Result<Budget> {
        let Draft { stages, plans, slots, .. } = draft;
        let mut budget = Budget::new(&self.devices, free);
        for (device, pieces) in shared_scratch(plans, self.devices.len()).iter().enumerate() {
            let stage = plans.iter().zip(slots).find(|(plan, _)| plan.device == device);
            let Some((plan, slot)) = stage else { continue };
            let place = &self.places_of(plan)?.scratch;
            let bytes = pieces.iter().map(|piece| place.taken(piece.size));
            let by = Taker { device, slot: *slot, place };
            budget.take(by, bytes.fold(0, u64::saturating_add));
        }
        for (((stage, ffi), plan), slot) in stages.iter().zip(plans).zip(slots) {
            let places = self.places_of(plan)?;
            let device = &self.open(stage.device)?.device;
            let (fixed, of_token) = share_of_context(ffi, device, &places, plan, bounds)?;
            let by = |place| Taker { device: plan.device, slot: *slot, place };
            let weights = places.weights.taken_by(&plan.weights);
            budget.take(by(&places.weights), weights.saturating_add(fixed.device_bytes));
            budget.take_host(plan.device, *slot, fixed.host_bytes);
            budget.take_per_token(by(&places.weights), of_token.device_bytes);
            budget.take_host_per_token(plan.device, *slot, of_token.host_bytes);
            budget.take_host(plan.device, *slot, self.crossing_bytes(stage, bounds)?);
            let per_token = bytes_per_token(&plan.kv.layers);
            budget.take_per_token(by(&places.kv), per_token);
            // Padding and rounding do not grow evenly with the context; at this one they are known.
            let tokens = per_token.saturating_mul(bounds.n_ctx.into());
            let taken = plan.kv.bytes_taken(places.kv.buffer_type.granularity)?;
            budget.take(by(&places.kv), taken.saturating_sub(tokens));
            budget.take(by(&places.kv), plan.state.planned_bytes()?);
        }
        if let Some((plan, slot)) = plans.iter().zip(slots).next_back() {
            budget.take_host(plan.device, *slot, self.logits_bytes(bounds)?);
        }
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
        let bytes = stages.iter().map(|(stage, _)| self.crossing_bytes(stage, bounds));
        bytes.sum()
    }

    /// Host memory for what `stage` makes and a later one reads.
    fn crossing_bytes(&self, stage: &Stage, bounds: Bounds) -> Result<u64> {
        let crossing = stage.outputs.iter().filter(|id| !self.program.outputs.contains(id));
        crossing.map(|id| value_bytes(self.program, *id, bounds)).sum()
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

/// The next number of tokens to try: lower by an eighth of a power of two, so that at most as much is left unused.
fn smaller_ubatch(n: u32) -> u32 {
    let below = n.max(2) - 1;
    let step = (1u32 << below.ilog2() >> 2).max(1);
    below / step * step
}

#[cfg(test)]
mod tests {
    use super::smaller_ubatch;

    // Otherwise a limit that is missed by little costs half of a prompt's speed, or planning never ends.
    #[test]
    fn a_ubatch_gets_smaller_by_at_most_a_quarter_and_ends_at_one() {
        for start in [2, 3, 7, 100, 512, 4096, u32::MAX] {
            let mut n = start;
            let mut tries = 0;
            while n > 1 {
                let next = smaller_ubatch(n);
                assert!(next < n && (n < 5 || next >= n / 4 * 3), "{n} -> {next}");
                n = next;
                tries += 1;
            }
            assert_eq!(n, 1, "from {start}");
            assert!(tries <= 4 * 32, "{tries} tries from {start}");
        }
    }
}
