//! Cuts a program into steps: OpenVINO models, and what is done between them.
//!
//! OpenVINO's C interface has no state that lives between runs, so a model cannot hold the KV cache, and one that were handed the cache's tiles could not
//! write them where they lie. So a program is cut where keys and values are stored and read: what lies between is one model each, as large as can be,
//! and the cache stays in the core's tiles, written and read in place. Ops whose results the host needs anyway, or that read tables row by row, are done
//! between the models too; [`crate::device`] says which.
//!
//! Every op has a phase: even ones between models, odd ones in a model. An op's phase is the least that follows from its inputs' phases, so that there are as few
//! models as the data allow. Stores and reads of one KV layer keep their order.

use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Op, OpKind, Program, ValueId, ValueKind};
use tegula_sdk::scratch::{self, ScratchPlan};
use tegula_sdk::{Error, Result};

/// Part of a run.
#[derive(Debug)]
pub(crate) enum Step {
    /// Ops done one by one, as indices into the program.
    Between(Vec<usize>),
    /// One model.
    Model(ModelStep),
}

/// Ops of one model, and what crosses its border.
#[derive(Debug)]
pub(crate) struct ModelStep {
    /// Indices into the program, in order.
    pub(crate) ops: Vec<usize>,
    /// Values it is given; no weights.
    pub(crate) inputs: Vec<ValueId>,
    /// Values it gives.
    pub(crate) outputs: Vec<ValueId>,
}

/// Cuts a program. `is_between` tells the ops that no model does.
pub(crate) fn cut(program: &Program, is_between: fn(&OpKind) -> bool) -> Result<Vec<Step>> {
    let live = live(program);
    let phases = phases(program, &live, is_between)?;
    let last = phases.iter().flatten().copied().max().unwrap_or(0);
    let mut by_phase: Vec<Vec<usize>> = vec![Vec::new(); last + 1];
    for (op, phase) in phases.iter().enumerate() {
        if let Some(phase) = phase {
            by_phase[*phase].push(op);
        }
    }
    let mut made_in: Vec<Option<usize>> = vec![None; program.values.len()];
    for (op, phase) in program.ops.iter().zip(&phases) {
        for id in &op.outputs {
            made_in[id.index()] = *phase;
        }
    }
    // The last phase that reads a value; outputs are read after all.
    let mut read_until = vec![0usize; program.values.len()];
    for (op, phase) in program.ops.iter().zip(&phases) {
        for id in op.inputs.iter().filter(|_| phase.is_some()) {
            read_until[id.index()] = read_until[id.index()].max(phase.unwrap_or(0));
        }
    }
    for id in &program.outputs {
        read_until[id.index()] = usize::MAX;
    }
    let phases = by_phase.into_iter().enumerate().filter(|(_, ops)| !ops.is_empty());
    Ok(phases
        .map(|(phase, ops)| match phase % 2 {
            0 => Step::Between(ops),
            _ => Step::Model(model_step(program, phase, ops, &made_in, &read_until)),
        })
        .collect())
}

fn model_step(
    program: &Program,
    phase: usize,
    ops: Vec<usize>,
    made_in: &[Option<usize>],
    read_until: &[usize],
) -> ModelStep {
    let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
    for op in ops.iter().filter_map(|op| program.ops.get(*op)) {
        for id in &op.inputs {
            let is_weight = program.values[id.index()].kind == ValueKind::Weight;
            if !is_weight && made_in[id.index()] != Some(phase) && !inputs.contains(id) {
                inputs.push(*id);
            }
        }
        outputs.extend(op.outputs.iter().filter(|id| read_until[id.index()] > phase));
    }
    ModelStep { ops, inputs, outputs }
}

/// Whether anything that lasts depends on an op.
fn live(program: &Program) -> Vec<bool> {
    let mut wanted = vec![false; program.values.len()];
    for id in &program.outputs {
        wanted[id.index()] = true;
    }
    let mut live = vec![false; program.ops.len()];
    for (i, op) in program.ops.iter().enumerate().rev() {
        let stores = matches!(op.kind, OpKind::KvStore { .. });
        live[i] = stores || op.outputs.iter().any(|id| wanted[id.index()]);
        for id in op.inputs.iter().filter(|_| live[i]) {
            wanted[id.index()] = true;
        }
    }
    live
}

fn phases(
    program: &Program,
    live: &[bool],
    is_between: fn(&OpKind) -> bool,
) -> Result<Vec<Option<usize>>> {
    let mut of_value = vec![0usize; program.values.len()];
    let mut of_kv = vec![0usize; program.kv_layers.len()];
    let mut out = Vec::with_capacity(program.ops.len());
    for (op, live) in program.ops.iter().zip(live) {
        if !live {
            out.push(None);
            continue;
        }
        let mut phase = op.inputs.iter().map(|id| of_value[id.index()]).max().unwrap_or(0);
        let kv = match op.kind {
            OpKind::KvStore { kv_layer } | OpKind::Attention { kv_layer, .. } => Some(kv_layer),
            _ => None,
        };
        if let Some(kv) = kv {
            let kv = of_kv.get(kv as usize);
            phase = phase.max(*kv.ok_or_else(|| Error::invalid("a KV layer that is not there"))?);
        }
        if (phase % 2 == 0) != is_between(&op.kind) {
            phase += 1;
        }
        if let Some(slot) = kv.and_then(|kv| of_kv.get_mut(kv as usize)) {
            *slot = phase;
        }
        for id in &op.outputs {
            of_value[id.index()] = phase;
        }
        out.push(Some(phase));
    }
    Ok(out)
}

/// Places of all values that cross a border of steps, or are made between models. What a model holds inside is OpenVINO's.
pub(crate) fn scratch(
    program: &Program,
    steps: &[Step],
    options: &CompileOptions,
) -> Result<ScratchPlan> {
    // The planner reads lifetimes from ops: a model counts as one op here.
    let mut ops = Vec::new();
    for step in steps {
        match step {
            Step::Between(list) => {
                ops.extend(list.iter().filter_map(|i| program.ops.get(*i)).cloned());
            }
            Step::Model(step) => {
                let first = step.ops.first().and_then(|i| program.ops.get(*i));
                let first = first.ok_or_else(|| Error::invalid("a model without ops"))?;
                ops.push(Op {
                    kind: first.kind,
                    layer: first.layer,
                    inputs: step.inputs.clone(),
                    outputs: step.outputs.clone(),
                });
            }
        }
    }
    let crossing = Program {
        name: program.name.clone(),
        values: program.values.clone(),
        ops,
        inputs: program.inputs.clone(),
        outputs: program.outputs.clone(),
        kv_layers: program.kv_layers.clone(),
        state_layers: Vec::new(),
    };
    scratch::plan(&crossing, options, &[])
}

#[cfg(test)]
mod tests {
    use super::*;
    use tegula_sdk::program::{Activation, Dim, KvLayer, Norm, ProgramBuilder};
    use tegula_sdk::quant::DType;

    fn is_between(kind: &OpKind) -> bool {
        matches!(kind, OpKind::Embed | OpKind::KvStore { .. } | OpKind::Attention { .. })
    }

    /// One model more to a layer is one run more to a token.
    #[test]
    fn a_layer_is_one_model_and_dead_ops_are_none() {
        let mut b = ProgramBuilder::new("two layers");
        let ids = b.input("ids", DType::I32, &[Dim::NTokens]);
        let table = b.weight("table", DType::F32, &[10, 32]);
        let mut x = b.embed(ids, table);
        for layer in 0..2 {
            let kv = b.kv_layer(KvLayer {
                group: 0,
                index: 0,
                n_head_kv: 1,
                head_dim_k: 32,
                head_dim_v: 32,
                dtype_k: DType::F16,
                dtype_v: DType::F16,
            });
            let w = b.weight(&format!("w{layer}"), DType::F32, &[32, 32]);
            let h = b.rms_norm(x, None, Norm { eps: 1e-5, n: 32 });
            let q = b.matmul(h, w, None);
            b.kv_store(kv, q, h);
            let a = b.attention(kv, q, None, 1, 1.0, 0.0, 0);
            let _ = b.unary(Activation::Silu, a);
            x = b.add(x, a);
        }
        b.output("x", x);
        let program = b.finish().unwrap();
        let steps = cut(&program, is_between).unwrap();
        let models: Vec<_> = steps
            .iter()
            .filter_map(|step| match step {
                Step::Model(step) => Some((step.inputs.len(), step.outputs.len(), step.ops.len())),
                Step::Between(_) => None,
            })
            .collect();
        // Norm and product; sum, norm and product; sum. The dead ops are in none.
        assert_eq!(models, [(1, 2, 2), (2, 3, 3), (2, 1, 1)]);
    }
}
