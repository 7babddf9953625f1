//! Builds programs so that a model's file reads like its paper.
//!
//! Methods return ids at once and never fail: the first fault is kept and given by [`ProgramBuilder::finish`], so that model code has no error handling between
//! its formulas. After a fault further calls do nothing useful and nothing harmful.

use crate::{
    Activation, Dim, HeadOrder, KvLayer, Op, OpKind, Program, ProgramError, RopeStyle,
    RouterGating, StateLayer, Value, ValueId, ValueKind,
};
use std::collections::HashMap;
use tegula_quant::DType;

/// Rope's parameters with the defaults of a model without scaling.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "parameters are documented once, at the structs of the boundary")]
pub struct Rope {
    pub style: RopeStyle,
    pub head_dim: u32,
    pub n_rot: u32,
    pub n_ctx_orig: u32,
    pub base: f32,
    pub freq_scale: f32,
    pub ext_factor: f32,
    pub attn_factor: f32,
    pub beta_fast: f32,
    pub beta_slow: f32,
}

impl Rope {
    /// Turns the first `n_rot` elements of heads of `head_dim` with frequency base `base`, unscaled.
    pub fn new(style: RopeStyle, head_dim: u32, n_rot: u32, base: f32) -> Self {
        Self {
            style,
            head_dim,
            n_rot,
            n_ctx_orig: 0,
            base,
            freq_scale: 1.0,
            ext_factor: 0.0,
            attn_factor: 1.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
        }
    }
}

/// A norm's parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// Added before the root.
    pub eps: f32,
    /// Elements normalised together.
    pub n: u32,
}

/// How a router chooses experts and weighs them.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "parameters are documented once, at the structs of the boundary")]
pub struct Router {
    pub k: u32,
    pub gating: RouterGating,
    pub normalise: bool,
    pub scale: f32,
}

/// The groups of a router that searches the best of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "parameters are documented once, at the structs of the boundary")]
pub struct RouterGroups {
    pub n_group: u32,
    pub n_group_used: u32,
    pub n_score: u32,
}

/// The heads of a gated delta rule.
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(missing_docs, reason = "parameters are documented once, at the structs of the boundary")]
pub struct GatedDelta {
    pub n_head_k: u32,
    pub n_head_v: u32,
    pub head_dim_k: u32,
    pub head_dim_v: u32,
    pub order: HeadOrder,
    pub scale: f32,
}

/// Writes a [`Program`] value by value.
#[derive(Debug, Default)]
pub struct ProgramBuilder {
    program: Program,
    /// Weights by name, so that models of thousands of layers build in time linear in their size.
    weights: HashMap<String, ValueId>,
    layer: Option<u32>,
    fault: Option<ProgramError>,
}

impl ProgramBuilder {
    /// An empty program called `name`.
    pub fn new(name: &str) -> Self {
        Self { program: Program { name: name.into(), ..Program::default() }, ..Self::default() }
    }

    /// Ops from here on belong to transformer layer `layer`.
    pub fn layer(&mut self, layer: Option<u32>) {
        self.layer = layer;
    }

    /// Declares an input.
    pub fn input(&mut self, name: &str, dtype: DType, dims: &[Dim]) -> ValueId {
        let id = self.push(ValueKind::Input, name, dtype, dims.to_vec());
        self.program.inputs.push(id);
        id
    }

    /// Declares a weight by its tensor's name. Asking again for the same name gives the same value (tied embeddings).
    pub fn weight(&mut self, name: &str, dtype: DType, dims: &[u64]) -> ValueId {
        if let Some(id) = self.weights.get(name) {
            return *id;
        }
        let dims = dims.iter().map(|n| Dim::Fixed(*n)).collect();
        let id = self.push(ValueKind::Weight, name, dtype, dims);
        self.weights.insert(name.to_owned(), id);
        id
    }

    /// Declares the KV cache of a layer; `kv.index` is set here.
    pub fn kv_layer(&mut self, mut kv: KvLayer) -> u32 {
        let before = self.program.kv_layers.iter().filter(|other| other.group == kv.group).count();
        kv.index = u32::try_from(before).unwrap_or(u32::MAX);
        self.program.kv_layers.push(kv);
        u32::try_from(self.program.kv_layers.len() - 1).unwrap_or(u32::MAX)
    }

    /// Declares the state of an op.
    fn state_layer(&mut self, n_elements: Option<u64>) -> u32 {
        // An overflow is refused by the op's own rule, which finds another number of elements.
        self.program.state_layers.push(StateLayer { n_elements: n_elements.unwrap_or(0) });
        u32::try_from(self.program.state_layers.len() - 1).unwrap_or(u32::MAX)
    }

    /// Declares an output and names it.
    pub fn output(&mut self, name: &str, value: ValueId) {
        if let Some(value) = self.program.values.get_mut(value.index()) {
            value.name = name.into();
        }
        self.program.outputs.push(value);
    }

    /// Rows `ids` of `table`: `[n, n_embd]`.
    pub fn embed(&mut self, ids: ValueId, table: ValueId) -> ValueId {
        self.op1(OpKind::Embed, &[ids, table])
    }

    /// `x / rms(x) * weight`.
    pub fn rms_norm(&mut self, x: ValueId, weight: Option<ValueId>, norm: Norm) -> ValueId {
        let kind = OpKind::RmsNorm { eps: norm.eps, n: norm.n };
        self.op1(kind, &with(&[x], weight))
    }

    /// `(x - mean) / sd * weight + bias`.
    pub fn layer_norm(
        &mut self,
        x: ValueId,
        weight: ValueId,
        bias: Option<ValueId>,
        norm: Norm,
    ) -> ValueId {
        let kind = OpKind::LayerNorm { eps: norm.eps, n: norm.n };
        self.op1(kind, &with(&[x, weight], bias))
    }

    /// `x W^T + bias`.
    pub fn matmul(&mut self, x: ValueId, weight: ValueId, bias: Option<ValueId>) -> ValueId {
        self.op1(OpKind::Matmul, &with(&[x, weight], bias))
    }

    /// Turns the heads of `x` by their positions.
    pub fn rope(
        &mut self,
        x: ValueId,
        positions: ValueId,
        factors: Option<ValueId>,
        rope: Rope,
    ) -> ValueId {
        let Rope {
            style,
            head_dim,
            n_rot,
            n_ctx_orig,
            base,
            freq_scale,
            ext_factor,
            attn_factor,
            beta_fast,
            beta_slow,
        } = rope;
        let kind = OpKind::Rope {
            style,
            head_dim,
            n_rot,
            n_ctx_orig,
            base,
            freq_scale,
            ext_factor,
            attn_factor,
            beta_fast,
            beta_slow,
        };
        self.op1(kind, &with(&[x, positions], factors))
    }

    /// Stores this run's keys and values.
    pub fn kv_store(&mut self, kv_layer: u32, k: ValueId, v: ValueId) {
        self.op(OpKind::KvStore { kv_layer }, &[k, v]);
    }

    /// Attends to everything stored; `window` 0 is no window, `softcap` 0 no cap. `sinks` is one score for each head.
    #[expect(clippy::too_many_arguments, reason = "the op's inputs and parameters, each once")]
    pub fn attention(
        &mut self,
        kv_layer: u32,
        q: ValueId,
        sinks: Option<ValueId>,
        n_head: u32,
        scale: f32,
        softcap: f32,
        window: u32,
    ) -> ValueId {
        let kind = OpKind::Attention { kv_layer, n_head, scale, softcap, window };
        self.op1(kind, &with(&[q], sinks))
    }

    /// `activation(gate) * up`.
    pub fn glu(&mut self, activation: Activation, gate: ValueId, up: ValueId) -> ValueId {
        self.op1(OpKind::Glu { activation }, &[gate, up])
    }

    /// `activation(x)`.
    pub fn unary(&mut self, activation: Activation, x: ValueId) -> ValueId {
        self.op1(OpKind::Unary { activation }, &[x])
    }

    /// `a + b`.
    pub fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op1(OpKind::Add, &[a, b])
    }

    /// `a * b`.
    pub fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op1(OpKind::Mul, &[a, b])
    }

    /// `x * factor`.
    pub fn scale(&mut self, x: ValueId, factor: f32) -> ValueId {
        self.op1(OpKind::Scale { factor }, &[x])
    }

    /// `cap * tanh(x / cap)`.
    pub fn softcap(&mut self, x: ValueId, cap: f32) -> ValueId {
        self.op1(OpKind::Softcap { cap }, &[x])
    }

    /// Columns `begin .. begin + len`.
    pub fn slice(&mut self, x: ValueId, begin: u32, len: u32) -> ValueId {
        self.op1(OpKind::Slice { begin, len }, &[x])
    }

    /// Columns of `a`, then of `b`.
    pub fn concat(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.op1(OpKind::Concat, &[a, b])
    }

    /// Rows of `x` by number.
    pub fn gather_rows(&mut self, x: ValueId, rows: ValueId) -> ValueId {
        self.op1(OpKind::GatherRows, &[x, rows])
    }

    /// Index of the greatest element of each row.
    pub fn argmax(&mut self, x: ValueId) -> ValueId {
        self.op1(OpKind::Argmax, &[x])
    }

    /// Ids and values of the `k` greatest elements of each row.
    pub fn top_k(&mut self, x: ValueId, k: u32) -> (ValueId, ValueId) {
        match self.op(OpKind::TopK { k }, &[x]).as_slice() {
            [ids, values] => (*ids, *values),
            _ => (x, x),
        }
    }

    /// `x W_e^T + bias_e` for each of the experts `ids` of a row, side by side. `x` is one row for all of them, or one for each.
    pub fn matmul_experts(
        &mut self,
        x: ValueId,
        weight: ValueId,
        ids: ValueId,
        bias: Option<ValueId>,
        n_expert: u32,
    ) -> ValueId {
        self.op1(OpKind::MatmulExperts { n_expert }, &with(&[x, weight, ids], bias))
    }

    /// Ids and weights of the experts of each row.
    pub fn router_topk(
        &mut self,
        logits: ValueId,
        selection_bias: Option<ValueId>,
        router: Router,
    ) -> (ValueId, ValueId) {
        let Router { k, gating, normalise, scale } = router;
        let kind = OpKind::RouterTopk { k, gating, normalise, scale };
        match self.op(kind, &with(&[logits], selection_bias)).as_slice() {
            [ids, weights] => (*ids, *weights),
            _ => (logits, logits),
        }
    }

    /// Ids and weights of the experts of each row, from those of the best groups.
    pub fn router_topk_grouped(
        &mut self,
        logits: ValueId,
        selection_bias: Option<ValueId>,
        router: Router,
        groups: RouterGroups,
    ) -> (ValueId, ValueId) {
        let Router { k, gating, normalise, scale } = router;
        let RouterGroups { n_group, n_group_used, n_score } = groups;
        let kind = OpKind::RouterTopkGrouped {
            k,
            gating,
            normalise,
            scale,
            n_group,
            n_group_used,
            n_score,
        };
        match self.op(kind, &with(&[logits], selection_bias)).as_slice() {
            [ids, weights] => (*ids, *weights),
            _ => (logits, logits),
        }
    }

    /// The weighted sum over the experts of each row.
    pub fn combine_experts(&mut self, x: ValueId, weights: ValueId) -> ValueId {
        self.op1(OpKind::CombineExperts, &[x, weights])
    }

    /// `x / sqrt(sum(x^2) + eps)`.
    pub fn l2_norm(&mut self, x: ValueId, norm: Norm) -> ValueId {
        self.op1(OpKind::L2Norm { eps: norm.eps, n: norm.n }, &[x])
    }

    /// Causal convolution over time of each column with its row of `weight`; keeps the rows before.
    pub fn conv_state(&mut self, x: ValueId, weight: ValueId, bias: Option<ValueId>) -> ValueId {
        let sizes = match self.program.value(weight).map(|value| value.dims.as_slice()) {
            Ok([Dim::Fixed(rows), Dim::Fixed(kernel)]) => Some((*rows, *kernel)),
            _ => None,
        };
        let n = sizes.and_then(|(rows, kernel)| kernel.checked_sub(1)?.checked_mul(rows));
        let state_layer = self.state_layer(n);
        self.op1(OpKind::ConvState { state_layer }, &with(&[x, weight], bias))
    }

    /// The gated delta rule over `q`, `k`, `v` with decay `exp(g)` and strength `beta`; keeps its state.
    pub fn gated_delta(&mut self, [q, k, v, g, beta]: [ValueId; 5], heads: GatedDelta) -> ValueId {
        let GatedDelta { n_head_k, n_head_v, head_dim_k, head_dim_v, order, scale } = heads;
        let n = u64::from(n_head_v) * u64::from(head_dim_v);
        let state_layer = self.state_layer(n.checked_mul(head_dim_k.into()));
        let kind = OpKind::GatedDelta {
            state_layer,
            n_head_k,
            n_head_v,
            head_dim_k,
            head_dim_v,
            order,
            scale,
        };
        self.op1(kind, &[q, k, v, g, beta])
    }

    /// Columns `begin .. begin + len` of every `group` columns.
    pub fn slice_groups(&mut self, x: ValueId, group: u32, begin: u32, len: u32) -> ValueId {
        self.op1(OpKind::SliceGroups { group, begin, len }, &[x])
    }

    /// For every group `group_a` columns of `a` and then `group_b` of `b`; where `a` has one group alone, every group gets it.
    pub fn concat_groups(&mut self, a: ValueId, group_a: u32, b: ValueId, group_b: u32) -> ValueId {
        self.op1(OpKind::ConcatGroups { group_a, group_b }, &[a, b])
    }

    /// `a sigmoid(alpha a) (b + 1)` with both sides bounded by `limit`, the gate only above.
    pub fn glu_clamped(&mut self, gate: ValueId, up: ValueId, alpha: f32, limit: f32) -> ValueId {
        self.op1(OpKind::GluClamped { alpha, limit }, &[gate, up])
    }

    /// The verified program, or the first fault.
    pub fn finish(self) -> Result<Program, ProgramError> {
        if let Some(fault) = self.fault {
            return Err(fault);
        }
        self.program.verify()?;
        Ok(self.program)
    }

    fn push(&mut self, kind: ValueKind, name: &str, dtype: DType, dims: Vec<Dim>) -> ValueId {
        // A program of 2^32 values cannot be written by hand; the cap only keeps the cast honest.
        let id = ValueId(u32::try_from(self.program.values.len()).unwrap_or(u32::MAX));
        self.program.values.push(Value { kind, dtype, dims, name: name.into() });
        id
    }

    fn op1(&mut self, kind: OpKind, inputs: &[ValueId]) -> ValueId {
        let fallback = inputs.first().copied().unwrap_or(ValueId(0));
        self.op(kind, inputs).first().copied().unwrap_or(fallback)
    }

    fn op(&mut self, kind: OpKind, inputs: &[ValueId]) -> Vec<ValueId> {
        if self.fault.is_some() {
            return Vec::new();
        }
        let values: Result<Vec<_>, _> = inputs.iter().map(|id| self.program.value(*id)).collect();
        let types = values.and_then(|values| {
            crate::shape::infer(&kind, &values, self.program.layers()).map_err(|why| {
                ProgramError::Op {
                    program: self.program.name.clone(),
                    op: self.program.ops.len(),
                    name: kind.name(),
                    why,
                }
            })
        });
        let types = match types {
            Ok(types) => types,
            Err(fault) => {
                self.fault = Some(fault);
                return Vec::new();
            }
        };
        let outputs: Vec<_> = types
            .into_iter()
            .map(|(dtype, dims)| self.push(ValueKind::Result, kind.name(), dtype, dims))
            .collect();
        let op = Op { kind, layer: self.layer, inputs: inputs.to_vec(), outputs: outputs.clone() };
        self.program.ops.push(op);
        outputs
    }
}

fn with(inputs: &[ValueId], optional: Option<ValueId>) -> Vec<ValueId> {
    inputs.iter().copied().chain(optional).collect()
}
