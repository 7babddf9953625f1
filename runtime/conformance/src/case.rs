//! What a case is: a program, its weights, its KV pool, and the runs to be made in order.

use crate::bounds::{self, Bound};
use crate::rounding::Rounded;
use crate::session::Rig;
use tegula_plugin::CompileOptions;
use tegula_program::{Dim, Program, Value, ValueKind};

/// One program with what it needs, and what it may be wrong by.
#[derive(Debug, Clone)]
pub struct Case {
    /// `<op>/<what>`, unique; the seed of its data, and what the lists of expectations name.
    pub name: String,
    /// Verified.
    pub program: Program,
    /// A weight for each weight value, in GGUF rows.
    pub weights: Vec<WeightData>,
    /// Rows of a weight's tiles, each in a buffer of its own; 0 for one tile.
    pub tile_rows: u64,
    /// Weights are imported from host memory, where the device can.
    pub import: bool,
    /// A pool for each KV group.
    pub kv: Vec<KvPool>,
    /// Greatest position + 1.
    pub n_ctx_max: u32,
    /// The runs.
    pub steps: Vec<Step>,
    /// How far results may be from the oracle's, on a processor.
    pub bound: &'static Bound,
}

/// A weight's bytes.
#[derive(Debug, Clone)]
pub struct WeightData {
    /// The value's name.
    pub name: String,
    /// Its rows.
    pub bytes: Vec<u8>,
}

/// The KV blocks of a group.
#[derive(Debug, Clone)]
pub struct KvPool {
    /// Tokens of a block.
    pub block_len: u32,
    /// Blocks of each segment.
    pub segments: Vec<u32>,
}

/// One run.
#[derive(Debug, Clone, Default)]
pub struct Step {
    /// Tokens.
    pub n_tokens: u32,
    /// Rows whose results are wanted.
    pub n_outputs: u32,
    /// Bytes of the inputs.
    pub inputs: Vec<Vec<u8>>,
    /// Sequences.
    pub seqs: Vec<SeqStep>,
    /// Of a product whose activations may be rounded: what errors are measured by, instead of the results.
    pub rounded: Option<Rounded>,
}

/// One sequence of a run.
#[derive(Debug, Clone)]
pub struct SeqStep {
    /// Its tokens.
    pub n_tokens: u32,
    /// Position of the first.
    pub first_pos: u32,
    /// Its slot of recurrent state.
    pub slot: u32,
    /// For each KV group its blocks, and the position that the first of them starts at.
    pub tables: Vec<(Vec<u32>, u32)>,
}

impl Case {
    /// A case without KV cache whose weights are in one tile each.
    pub(crate) fn new(name: &str, program: Program, bound: &'static Bound) -> Self {
        Self {
            name: name.into(),
            program,
            weights: Vec::new(),
            tile_rows: 0,
            import: false,
            kv: Vec::new(),
            n_ctx_max: 1,
            steps: Vec::new(),
            bound,
        }
    }

    /// How far results of a device may be from the oracle's.
    pub(crate) fn bound_on(&self, rig: &Rig) -> &'static Bound {
        bounds::on_device(self.bound, rig.device.info().kind, &self.program)
    }

    /// Slots of recurrent state that the steps name.
    pub(crate) fn n_slots(&self) -> u32 {
        let slots = self.steps.iter().flat_map(|step| &step.seqs).map(|seq| seq.slot + 1);
        if self.program.state_layers.is_empty() { 0 } else { slots.max().unwrap_or(1) }
    }

    /// The bounds that the steps reach.
    pub fn options(&self, scratch_type: u32, scratch_chunk_max: u64) -> CompileOptions {
        let most = |of: fn(&Step) -> u32| self.steps.iter().map(of).max().unwrap_or(1).max(1);
        CompileOptions {
            n_tokens_max: most(|step| step.n_tokens),
            n_outputs_max: most(|step| step.n_outputs),
            n_seqs_max: most(|step| u32::try_from(step.seqs.len()).unwrap_or(u32::MAX)),
            n_ctx_max: self.n_ctx_max.max(1),
            scratch_type,
            scratch_chunk_max,
        }
    }
}

impl Step {
    /// Bytes of a value that is given or made in this run.
    pub(crate) fn bytes(&self, value: &Value) -> usize {
        let rows = match value.rows() {
            Dim::Fixed(n) => n,
            Dim::NTokens => self.n_tokens.into(),
            Dim::NOutputs => self.n_outputs.into(),
        };
        usize::try_from(rows * value.row_len() * 4).unwrap_or(usize::MAX)
    }
}

/// Rows and elements of a row of a weight.
pub(crate) fn weight_shape(value: &Value) -> (u64, u64) {
    debug_assert!(value.kind == ValueKind::Weight);
    match value.rows() {
        Dim::Fixed(n) => (n, value.row_len()),
        _ => (0, value.row_len()),
    }
}
