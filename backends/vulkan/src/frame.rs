//! What a program takes, known before its weights are: steps, kinds of attention, and the places of everything that a run needs.

use crate::gpu::Gpu;
use crate::kinds::{self, Kind};
use crate::params::Layout;
use crate::plan::{self, Step};
use crate::rope;
use crate::state::{self, Grid};
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Program, ValueId};
use tegula_sdk::scratch::{self, ScratchPlan};
use tegula_sdk::{Memory, Result};

/// Token-splits of attention that scratch has room for, where the limit allows.
const PARTS: u64 = 256;

/// All that a program takes and that does not need its weights.
pub(crate) struct Frame {
    pub(crate) steps: Vec<Step>,
    pub(crate) kinds: Vec<Kind>,
    /// By op: the kind of an attention.
    pub(crate) kind_of: Vec<Option<usize>>,
    /// Token-splits that scratch has room for, by kind.
    pub(crate) parts: Vec<u64>,
    pub(crate) ropes: rope::Tables,
    pub(crate) layout: Layout,
    pub(crate) scratch: ScratchPlan,
    /// Offset of each output in the results, and the bytes of all.
    pub(crate) outputs: Vec<u64>,
    pub(crate) results_bytes: u64,
    /// Index among scratch's extra regions of the partial attentions and of activations in f16.
    pub(crate) parts_region: Option<usize>,
    pub(crate) half_region: Option<usize>,
    /// And of slots sorted by expert.
    pub(crate) experts_region: Option<usize>,
    /// By state layer: the workgroups of its op.
    pub(crate) states: Vec<Grid>,
}

impl Frame {
    pub(crate) fn new(gpu: &Gpu, program: &Program, options: &CompileOptions) -> Result<Self> {
        let steps = plan::steps(program)?;
        let (kinds, kind_of) = kinds::kinds(program)?;
        let ropes = rope::Tables::new(program);
        let mut extra = Vec::new();
        let parts: Vec<u64> = kinds
            .iter()
            .map(|kind| PARTS.min(options.scratch_chunk_max / kind.part_bytes().max(1)))
            .collect();
        let most = kinds.iter().zip(&parts).map(|(kind, n)| kind.part_bytes() * n).max();
        let parts_region = most.map(|bytes| {
            extra.push(bytes);
            extra.len() - 1
        });
        let half = crate::product::half_bytes(gpu, program, options)?;
        let half_region = (half > 0).then(|| {
            extra.push(half);
            extra.len() - 1
        });
        let experts = crate::experts::region_bytes(program, options)?;
        let experts_region = (experts > 0).then(|| {
            extra.push(experts);
            extra.len() - 1
        });
        let states = state::grids(gpu, program)?;
        let scratch = plan::plan(program, &steps, options, &extra)?;
        let bytes = |id: &ValueId| scratch::value_bytes(program, id.index(), options);
        let inputs: Vec<u64> = program.inputs.iter().map(bytes).collect::<Result<_>>()?;
        let n_groups = program.n_kv_groups();
        let layout =
            Layout::new((n_groups, kinds.len(), states.len()), ropes.bytes(), &inputs, options)?;
        let mut outputs = Vec::new();
        let mut end = 0u64;
        for (i, id) in program.outputs.iter().enumerate() {
            // A value that is named twice lies once.
            let first = program.outputs.iter().position(|other| other == id).unwrap_or(i);
            if let Some(at) = outputs.get(first).copied() {
                outputs.push(at);
                continue;
            }
            outputs.push(end);
            end = end.saturating_add(bytes(id)?).next_multiple_of(256);
        }
        let results_bytes = end.max(256);
        Ok(Self {
            steps,
            kinds,
            kind_of,
            parts,
            ropes,
            layout,
            scratch,
            outputs,
            results_bytes,
            parts_region,
            half_region,
            experts_region,
            states,
        })
    }

    /// What the program takes.
    pub(crate) fn memory(&self, gpu: &Gpu, program: &Program, options: &CompileOptions) -> Memory {
        let record = self.layout.first_bytes(program.n_kv_groups(), options).next_multiple_of(4096);
        let is_unified = gpu.physical.is_unified();
        // Results come back through pinned memory, which on unified memory is where they lie.
        let host = if is_unified { 0 } else { self.results_bytes };
        Memory {
            scratch: self.scratch.chunks.clone(),
            device_bytes: self.results_bytes.saturating_add(record),
            host_bytes: host,
        }
    }
}
