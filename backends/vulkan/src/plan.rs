//! A program as steps: what is one dispatch, or a few, on the device; and scratch for them.
//!
//! Ops are joined where that saves a pass over memory or a barrier between dispatches, which on a fast card cost more than the work of a
//! small op:
//! * a product and the residual sum after it;
//! * the products of gate and up, and their gated unit;
//! * a norm and the products that read it: each workgroup normalises on the way when there is one row;
//! * rope of the keys and their store;
//! * a norm and the sum after it;
//! * the experts' products of gate and up, and their gated unit; the sum of what experts made and the sum after it.
//!
//! Scratch is planned for the steps, not for the ops: a step reads all it reads until it ends.

use tegula_sdk::abi::CompileOptions;
use tegula_sdk::program::{Activation, Dim, Op, OpKind, Program, ValueId, ValueKind};
use tegula_sdk::scratch::{self, ScratchPlan};
use tegula_sdk::{Error, Result};

/// A norm that a product may do itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prologue {
    pub(crate) x: ValueId,
    pub(crate) weight: ValueId,
    pub(crate) eps: f32,
}

/// `y = x W^T + bias + residual`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Product {
    pub(crate) x: ValueId,
    pub(crate) weight: ValueId,
    pub(crate) bias: Option<ValueId>,
    pub(crate) residual: Option<ValueId>,
    pub(crate) y: ValueId,
    pub(crate) norm: Option<Prologue>,
}

/// Rope of the keys of a store.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StoreRope {
    /// The op, for its parameters.
    pub(crate) op: usize,
    pub(crate) positions: ValueId,
}

/// What is recorded together.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// An op as it is.
    Op(usize),
    Product(Product),
    Gated {
        gate: Product,
        up: Product,
        activation: Activation,
        y: ValueId,
    },
    /// `may_skip`: all readers can normalise themselves.
    Norm {
        op: usize,
        residual: Option<ValueId>,
        y: ValueId,
        may_skip: bool,
    },
    /// As `Gated`, of the experts' products that are ops `gate` and `up`.
    GatedExperts {
        gate: usize,
        up: usize,
        activation: Activation,
        y: ValueId,
    },
    /// The weighted sum of what experts made, which is an op, and a residual.
    Combined {
        op: usize,
        residual: Option<ValueId>,
        y: ValueId,
    },
    Store {
        kv_layer: u32,
        k: ValueId,
        v: ValueId,
        rope: Option<StoreRope>,
    },
}

impl Step {
    fn reads(&self, program: &Program) -> Vec<ValueId> {
        let product = |p: &Product| {
            let mut ids = vec![p.x];
            ids.extend(p.residual);
            ids.extend(p.norm.map(|norm| norm.x));
            ids
        };
        match self {
            Self::Op(op) => program.ops[*op].inputs.clone(),
            Self::Product(p) => product(p),
            Self::Gated { gate, up, .. } => [product(gate), product(up)].concat(),
            Self::GatedExperts { gate, up, .. } => {
                [program.ops[*gate].inputs.as_slice(), &program.ops[*up].inputs].concat()
            }
            Self::Combined { op, residual, .. } => {
                let mut ids = program.ops[*op].inputs.clone();
                ids.extend(*residual);
                ids
            }
            Self::Norm { op, residual, .. } => {
                let mut ids = vec![program.ops[*op].inputs[0]];
                ids.extend(*residual);
                ids
            }
            Self::Store { k, v, rope, .. } => {
                let mut ids = vec![*k, *v];
                ids.extend(rope.map(|rope| rope.positions));
                ids
            }
        }
    }

    fn makes(&self, program: &Program) -> Vec<ValueId> {
        match self {
            Self::Op(op) => program.ops[*op].outputs.clone(),
            Self::Product(p) => vec![p.y],
            Self::Gated { gate, up, y, .. } => vec![gate.y, up.y, *y],
            Self::GatedExperts { gate, up, y, .. } => {
                let made = |op: &usize| program.ops[*op].outputs.as_slice();
                [made(gate), made(up), &[*y]].concat()
            }
            Self::Norm { y, .. } | Self::Combined { y, .. } => vec![*y],
            Self::Store { .. } => Vec::new(),
        }
    }
}

/// The steps of a program.
pub(crate) fn steps(program: &Program) -> Result<Vec<Step>> {
    Joiner::new(program).run()
}

/// Places of all values that steps make, and of extra regions.
pub(crate) fn plan(
    program: &Program,
    steps: &[Step],
    options: &CompileOptions,
    extra: &[u64],
) -> Result<ScratchPlan> {
    let ops = steps.iter().map(|step| Op {
        kind: OpKind::Add,
        layer: None,
        inputs: step.reads(program),
        outputs: step.makes(program),
    });
    // Only inputs, outputs and order count for places; the kind is a name in errors.
    let shadow = Program {
        name: program.name.clone(),
        values: program.values.clone(),
        ops: ops.collect(),
        inputs: program.inputs.clone(),
        outputs: program.outputs.clone(),
        kv_layers: Vec::new(),
        state_layers: Vec::new(),
    };
    scratch::plan(&shadow, options, extra)
}

/// Rows of a value in a run.
pub(crate) fn rows(program: &Program, id: ValueId, n_tokens: u32, n_outputs: u32) -> Result<u32> {
    let rows = match program.value(id)?.rows() {
        Dim::Fixed(n) => u32::try_from(n).map_err(|_| Error::unsupported("more than 2^32 rows"))?,
        Dim::NTokens => n_tokens,
        Dim::NOutputs => n_outputs,
    };
    Ok(rows)
}

struct Joiner<'a> {
    program: &'a Program,
    /// By value: the ops that read it.
    readers: Vec<Vec<usize>>,
    /// By value: the op that makes it.
    maker: Vec<Option<usize>>,
    /// By op: it is part of a step of another.
    is_joined: Vec<bool>,
}

impl<'a> Joiner<'a> {
    fn new(program: &'a Program) -> Self {
        let mut readers = vec![Vec::new(); program.values.len()];
        let mut maker = vec![None; program.values.len()];
        for (i, op) in program.ops.iter().enumerate() {
            for id in &op.inputs {
                readers[id.index()].push(i);
            }
            for id in &op.outputs {
                maker[id.index()] = Some(i);
            }
        }
        Self { program, readers, maker, is_joined: vec![false; program.ops.len()] }
    }

    fn run(mut self) -> Result<Vec<Step>> {
        let mut steps = Vec::with_capacity(self.program.ops.len());
        for i in 0..self.program.ops.len() {
            if !self.is_joined[i] {
                steps.extend(self.step(i)?);
            }
        }
        Ok(steps)
    }

    /// The one op that reads a value which is no output.
    fn only_reader(&self, id: ValueId) -> Option<usize> {
        match self.readers[id.index()].as_slice() {
            [one] if !self.program.outputs.contains(&id) => Some(*one),
            _ => None,
        }
    }

    /// Whether a value is there before op `i`.
    fn is_before(&self, id: ValueId, i: usize) -> bool {
        self.maker[id.index()].is_none_or(|maker| maker < i)
    }

    /// A sum with something that is there already: the other operand, and the sum.
    fn sum_after(&mut self, y: ValueId, i: usize) -> Option<(ValueId, ValueId)> {
        let at = self.only_reader(y)?;
        let op = &self.program.ops[at];
        if op.kind != OpKind::Add {
            return None;
        }
        let other = if op.inputs[0] == y { op.inputs[1] } else { op.inputs[0] };
        let is_matrix = self.program.values[other.index()].kind != ValueKind::Weight;
        if other == y || !is_matrix || !self.is_before(other, i) {
            return None;
        }
        self.is_joined[at] = true;
        Some((other, op.outputs[0]))
    }

    fn step(&mut self, i: usize) -> Result<Option<Step>> {
        let op = &self.program.ops[i];
        Ok(Some(match op.kind {
            OpKind::Matmul => return Ok(self.product(i)),
            OpKind::MatmulExperts { .. } => return Ok(self.experts(i)),
            OpKind::CombineExperts => {
                let (residual, y) = match self.sum_after(op.outputs[0], i) {
                    Some((residual, y)) => (Some(residual), y),
                    None => (None, op.outputs[0]),
                };
                Step::Combined { op: i, residual, y }
            }
            OpKind::RmsNorm { .. } | OpKind::LayerNorm { .. } | OpKind::L2Norm { .. } => {
                let may_skip = self.is_prologue(i);
                let sum = if may_skip { None } else { self.sum_after(op.outputs[0], i) };
                let (residual, y) = match sum {
                    Some((residual, y)) => (Some(residual), y),
                    None => (None, op.outputs[0]),
                };
                Step::Norm { op: i, residual, y, may_skip }
            }
            OpKind::Rope { .. } if self.stored_by(i).is_some() => return Ok(None),
            OpKind::KvStore { kv_layer } => {
                let maker = self.maker[op.inputs[0].index()];
                let rope = maker.filter(|rope| self.stored_by(*rope) == Some(i));
                let k = rope.map_or(op.inputs[0], |rope| self.program.ops[rope].inputs[0]);
                let rope =
                    rope.map(|op| StoreRope { op, positions: self.program.ops[op].inputs[1] });
                Step::Store { kv_layer, k, v: op.inputs[1], rope }
            }
            _ => Step::Op(i),
        }))
    }

    /// The store that turns its keys itself, instead of rope op `i`.
    fn stored_by(&self, i: usize) -> Option<usize> {
        let op = &self.program.ops[i];
        let OpKind::Rope { head_dim, .. } = op.kind else { return None };
        let store = self.only_reader(op.outputs[0])?;
        let OpKind::KvStore { kv_layer } = self.program.ops[store].kind else { return None };
        let layer = self.program.kv_layers.get(kv_layer as usize)?;
        let is_key = self.program.ops[store].inputs[0] == op.outputs[0];
        (is_key && layer.head_dim_k == head_dim).then_some(store)
    }

    /// Whether op `i` is a norm of whole rows with a weight that only products read.
    fn is_prologue(&self, i: usize) -> bool {
        let op = &self.program.ops[i];
        let OpKind::RmsNorm { n, .. } = op.kind else { return false };
        let (y, n_in) = (op.outputs[0], self.program.values[op.inputs[0].index()].row_len());
        let readers = &self.readers[y.index()];
        op.inputs.len() == 2
            && u64::from(n) == n_in
            && n_in.is_multiple_of(32)
            && !self.program.outputs.contains(&y)
            && !readers.is_empty()
            && readers.iter().all(|at| {
                let reader = &self.program.ops[*at];
                reader.kind == OpKind::Matmul
                    && reader.inputs[0] == y
                    && !self.program.outputs.contains(&op.inputs[0])
            })
    }

    fn plain_product(&self, i: usize) -> Product {
        let op = &self.program.ops[i];
        let maker = self.maker[op.inputs[0].index()].filter(|maker| self.is_prologue(*maker));
        let norm = maker.and_then(|maker| {
            let norm = &self.program.ops[maker];
            let OpKind::RmsNorm { eps, .. } = norm.kind else { return None };
            Some(Prologue { x: norm.inputs[0], weight: norm.inputs[1], eps })
        });
        Product {
            x: op.inputs[0],
            weight: op.inputs[1],
            bias: op.inputs.get(2).copied(),
            residual: None,
            y: op.outputs[0],
            norm,
        }
    }

    /// Op `i`, a product with experts: by itself, or with the other side of its gated unit, where the later of the two stands.
    fn experts(&mut self, i: usize) -> Option<Step> {
        let Some((glu, gate, up)) = self.gated(i) else { return Some(Step::Op(i)) };
        if i != gate.max(up) {
            return None;
        }
        self.is_joined[glu] = true;
        let op = &self.program.ops[glu];
        let OpKind::Glu { activation } = op.kind else { return None };
        Some(Step::GatedExperts { gate, up, activation, y: op.outputs[0] })
    }

    fn product(&mut self, i: usize) -> Option<Step> {
        if let Some((glu, gate, up)) = self.gated(i) {
            // Emitted where the later of the two stands.
            if i != gate.max(up) {
                return None;
            }
            self.is_joined[glu] = true;
            let op = &self.program.ops[glu];
            let OpKind::Glu { activation } = op.kind else { return None };
            let (gate, up) = (self.plain_product(gate), self.plain_product(up));
            return Some(Step::Gated { gate, up, activation, y: op.outputs[0] });
        }
        let mut product = self.plain_product(i);
        if let Some((residual, y)) = self.sum_after(product.y, i) {
            product.residual = Some(residual);
            product.y = y;
        }
        Some(Step::Product(product))
    }

    /// The gated unit that op `i` belongs to: the unit, and the products of gate and up.
    fn gated(&self, i: usize) -> Option<(usize, usize, usize)> {
        let glu = self.only_reader(self.program.ops[i].outputs[0])?;
        let op = &self.program.ops[glu];
        let OpKind::Glu { .. } = op.kind else { return None };
        let (gate, up) = (self.maker[op.inputs[0].index()]?, self.maker[op.inputs[1].index()]?);
        let weight = |at: usize| {
            let product = &self.program.ops[at];
            // Without a bias.
            let n_inputs = match product.kind {
                OpKind::Matmul => 2,
                OpKind::MatmulExperts { .. } => 3,
                _ => return None,
            };
            let fits = product.inputs.len() == n_inputs
                && self.only_reader(product.outputs[0]) == Some(glu);
            let value = &self.program.values[product.inputs.get(1)?.index()];
            let (x, ids) = (product.inputs[0], product.inputs.get(2));
            fits.then_some((product.kind, x, ids, value.dtype, &value.dims))
        };
        (gate != up && weight(gate)? == weight(up)?).then_some((glu, gate, up))
    }
}
