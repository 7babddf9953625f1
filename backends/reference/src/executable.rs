//! A compiled program: here the program itself, with its weights and its places in scratch.

use crate::ops;
use crate::values::{Bound, Values};
use crate::weight::Matrix;
use tegula_sdk::abi::CompileOptions;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::program::{Op, OpKind, Program, ValueKind};
use tegula_sdk::scratch::{self, ScratchPlan};
use tegula_sdk::{Error, Result, Run, WeightBinding};

/// A program that can be run.
pub struct Executable {
    pub(crate) program: Program,
    pub(crate) options: CompileOptions,
    pub(crate) scratch: ScratchPlan,
    /// By value id; `None` for what is no weight.
    pub(crate) weights: Vec<Option<Matrix>>,
}

impl Executable {
    /// Checks that every weight is bound once, by tiles that cover it.
    pub(crate) fn new(
        program: Program,
        options: &CompileOptions,
        bindings: Vec<WeightBinding<HostBuffer>>,
    ) -> Result<Self> {
        let mut weights: Vec<Option<Matrix>> = program.values.iter().map(|_| None).collect();
        for binding in bindings {
            let value = program.value(binding.value)?;
            let slot = weights.get_mut(binding.value.index());
            match slot {
                Some(slot @ None) if value.kind == ValueKind::Weight => {
                    *slot = Some(Matrix::new(value, binding)?);
                }
                _ => {
                    let what = format!("`{}` is no weight, or is bound twice", value.name);
                    return Err(Error::invalid(what));
                }
            }
        }
        if let Some((_, value)) = program.weights().find(|(id, _)| weights[id.index()].is_none()) {
            return Err(Error::invalid(format!("weight `{}` is not bound", value.name)));
        }
        let scratch = scratch::plan(&program, options, &[])?;
        Ok(Self { program, options: *options, scratch, weights })
    }

    /// Runs the ops in order.
    pub(crate) fn run<'a>(&'a self, run: &'a Run<'a, HostBuffer>, bound: Bound<'a>) -> Result<()> {
        let values = Values::new(self, run, bound)?;
        for (index, op) in self.program.ops.iter().enumerate() {
            ops::run(&values, op).map_err(|error| {
                let (name, of) = (op.kind.name(), &self.program.name);
                let message = format!("op {index} ({name}) of `{of}`: {}", error.message);
                Error { message, ..error }
            })?;
        }
        Ok(())
    }
}

/// Bytes of the host's memory that the greatest op of a program takes while it works: copies of what it reads and
/// makes, one row of its matrix, and for attention the keys and values of one head.
pub(crate) fn working_bytes(program: &Program, options: &CompileOptions) -> Result<u64> {
    let mut bytes = program.ops.iter().map(|op| op_bytes(program, op, options));
    bytes.try_fold(0, |max, bytes| Ok(max.max(bytes?)))
}

fn op_bytes(program: &Program, op: &Op, options: &CompileOptions) -> Result<u64> {
    let mut total = 0u64;
    for id in op.inputs.iter().chain(&op.outputs) {
        let value = program.value(*id)?;
        let bytes = match (value.kind, value.dims.len()) {
            // One row as it is stored, and decoded to f32.
            (ValueKind::Weight, 2..) => {
                let n_in = value.row_len();
                value.dtype.row_bytes(n_in)?.saturating_add(n_in.saturating_mul(4))
            }
            _ => scratch::value_bytes(program, id.index(), options)?,
        };
        total = total.saturating_add(bytes);
    }
    let extra = match op.kind {
        OpKind::Attention { kv_layer, .. } => {
            let layer = program.kv_layers.get(kv_layer as usize);
            let layer = layer.ok_or_else(|| Error::invalid(format!("no KV layer {kv_layer}")))?;
            let (k, v) = (u64::from(layer.head_dim_k), u64::from(layer.head_dim_v));
            // A key and a value in f32, a score in f64; the sum of values in f64.
            u64::from(options.n_ctx_max).saturating_mul((k + v) * 4 + 8).saturating_add(v * 8)
        }
        // The window of a sequence, and a record as f32 and as bytes; rows of S stay where they are.
        OpKind::ConvState { state_layer } | OpKind::GatedDelta { state_layer, .. } => {
            let record = program.state_layers.get(state_layer as usize);
            let record = record.map_or(0, |layer| layer.bytes()).saturating_mul(3);
            record.saturating_add(scratch::value_bytes(program, op.inputs[0].index(), options)?)
        }
        // Scores, probabilities and the order of a row's experts, and the same of those that are searched.
        OpKind::RouterTopk { .. } | OpKind::RouterTopkGrouped { .. } => {
            program.value(op.inputs[0])?.row_len().saturating_mul(48)
        }
        // The order of a row's columns.
        OpKind::TopK { .. } => program.value(op.inputs[0])?.row_len().saturating_mul(4),
        _ => 0,
    };
    Ok(total.saturating_add(extra))
}
