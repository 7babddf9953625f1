//! Records the steps of a program for one shape.

use crate::executable::Executable;
use crate::kinds::{Kind, type_number};
use crate::pipelines::Kernel;
use crate::plan::{self, Step, StoreRope};
use crate::push::Push;
use crate::record::{Groups, Recorder, Span, kv_span};
use crate::shaders::Shader;
use ash::vk;
use tegula_sdk::program::{Activation, Op, OpKind, RopeStyle, ValueId, ValueKind};
use tegula_sdk::{Error, Result};

/// Where everything lies in a run.
pub(crate) struct Places {
    /// By value id.
    pub(crate) values: Vec<u64>,
    /// The run's record.
    pub(crate) record: u64,
    pub(crate) record_buffer: vk::Buffer,
    /// Partial attentions.
    pub(crate) parts: Span,
    /// Activations in f16.
    pub(crate) half: Span,
    /// Slots sorted by expert.
    pub(crate) experts: Span,
}

/// One shape being recorded.
pub(crate) struct Context<'a> {
    pub(crate) exe: &'a Executable,
    pub(crate) places: Places,
    n_tokens: u32,
    n_outputs: u32,
    /// What the f16 region holds: a span, how often that was written, and elements of a row.
    pub(crate) halved: Option<(Span, usize, u32)>,
    /// What the region of slots holds: the ids, how often those were written, and slots of a group.
    pub(crate) sorted: Option<(Span, usize, u32)>,
}

/// Records all steps.
pub(crate) fn record(
    exe: &Executable,
    recorder: &mut Recorder<'_>,
    places: Places,
    n_tokens: u32,
    n_outputs: u32,
) -> Result<()> {
    let mut context = Context { exe, places, n_tokens, n_outputs, halved: None, sorted: None };
    for step in &exe.frame.steps {
        context.step(recorder, step)?;
    }
    Ok(())
}

/// The number of a function in the shaders.
pub(crate) fn activation_number(activation: Activation) -> u32 {
    match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::GeluErf => 2,
        Activation::Relu => 3,
        Activation::Sigmoid => 4,
        Activation::Tanh => 5,
        Activation::Softplus => 6,
    }
}

/// Ops of the elementwise kernel.
#[derive(Clone, Copy)]
pub(crate) enum Elementwise {
    Add = 0,
    Mul = 1,
    Scale = 2,
    Softcap = 3,
    Unary = 4,
    Glu = 5,
    GluClamped = 6,
}

impl Context<'_> {
    /// The device address of a value or vector.
    pub(crate) fn at(&self, id: ValueId) -> u64 {
        self.places.values.get(id.index()).copied().unwrap_or(0)
    }

    /// Rows of a value.
    pub(crate) fn rows(&self, id: ValueId) -> Result<u32> {
        plan::rows(&self.exe.program, id, self.n_tokens, self.n_outputs)
    }

    /// Elements of a row.
    pub(crate) fn row_len(&self, id: ValueId) -> Result<u32> {
        let n = self.exe.program.value(id)?.row_len();
        u32::try_from(n).map_err(|_| Error::unsupported(format!("rows of {n} elements")))
    }

    /// The bytes of the first `n` rows of a value.
    pub(crate) fn span(&self, id: ValueId, n: u32) -> Result<Span> {
        Ok((self.at(id), 4 * u64::from(n) * u64::from(self.row_len(id)?)))
    }

    /// The bytes of a value in this run.
    pub(crate) fn whole(&self, id: ValueId) -> Result<Span> {
        self.span(id, self.rows(id)?)
    }

    fn step(&mut self, recorder: &mut Recorder<'_>, step: &Step) -> Result<()> {
        match step {
            Step::Product(product) => self.product(recorder, product),
            Step::Gated { gate, up, activation, y } => {
                let number = activation_number(*activation);
                if self.pair(recorder, gate, up, number, *y)? {
                    return Ok(());
                }
                self.product(recorder, gate)?;
                self.product(recorder, up)?;
                let inputs = [gate.y, up.y];
                self.elementwise(recorder, Elementwise::Glu, number, [0.0; 2], &inputs, *y)
            }
            Step::Norm { op, residual, y, may_skip } => {
                // Of a single row, those who read it make it themselves.
                if *may_skip && self.rows(*y)? == 1 {
                    return Ok(());
                }
                self.norm(recorder, *op, *residual, *y)
            }
            Step::GatedExperts { gate, up, activation, y } => {
                self.gated_experts(recorder, (*gate, *up), *activation, *y)
            }
            Step::Combined { op, residual, y } => {
                let inputs = self.exe.program.ops[*op].inputs.as_slice();
                self.combine(recorder, inputs, *residual, *y)
            }
            Step::Store { kv_layer, k, v, rope } => {
                self.store(recorder, *kv_layer, *k, *v, rope.as_ref())
            }
            Step::Op(index) => {
                let Some(op) = self.exe.program.ops.get(*index) else { return Ok(()) };
                self.op(recorder, *index, op)
            }
        }
    }

    fn op(&mut self, recorder: &mut Recorder<'_>, index: usize, op: &Op) -> Result<()> {
        let (inputs, y) = (op.inputs.as_slice(), op.outputs.first().copied());
        let y = y.ok_or_else(|| Error::invalid("an op that makes nothing"))?;
        match op.kind {
            OpKind::Add => self.elementwise(recorder, Elementwise::Add, 0, [0.0; 2], inputs, y),
            OpKind::Mul => self.elementwise(recorder, Elementwise::Mul, 0, [0.0; 2], inputs, y),
            OpKind::Scale { factor } => {
                self.elementwise(recorder, Elementwise::Scale, 0, [factor, 0.0], inputs, y)
            }
            OpKind::Softcap { cap } => {
                self.elementwise(recorder, Elementwise::Softcap, 0, [cap, 0.0], inputs, y)
            }
            OpKind::Unary { activation } => {
                let number = activation_number(activation);
                self.elementwise(recorder, Elementwise::Unary, number, [0.0; 2], inputs, y)
            }
            OpKind::Glu { activation } => {
                let number = activation_number(activation);
                self.elementwise(recorder, Elementwise::Glu, number, [0.0; 2], inputs, y)
            }
            OpKind::GluClamped { alpha, limit } => {
                self.elementwise(recorder, Elementwise::GluClamped, 0, [alpha, limit], inputs, y)
            }
            OpKind::Embed => self.embed(recorder, inputs, y),
            OpKind::Rope { .. } => self.rope(recorder, op, y),
            OpKind::Attention { .. } => self.attention(recorder, index, op, y),
            OpKind::Slice { begin, len } => {
                let from = (inputs[0], begin);
                self.copy(recorder, from, (y, 0), len, None)
            }
            OpKind::Concat => {
                let (p, q) = (self.row_len(inputs[0])?, self.row_len(inputs[1])?);
                self.copy(recorder, (inputs[0], 0), (y, 0), p, None)?;
                self.copy(recorder, (inputs[1], 0), (y, p), q, None)
            }
            OpKind::GatherRows => {
                let n = self.row_len(y)?;
                self.copy(recorder, (inputs[0], 0), (y, 0), n, Some(inputs[1]))
            }
            OpKind::Argmax => self.argmax(recorder, inputs[0], y),
            OpKind::TopK { k } => self.top_k(recorder, inputs[0], op, k),
            OpKind::SliceGroups { group, begin, len } => {
                self.slice_groups(recorder, (inputs[0], y), group, (begin, len))
            }
            OpKind::MatmulExperts { .. } => self.experts(recorder, index, None, y),
            OpKind::RouterTopk { .. } => self.router(recorder, op),
            OpKind::CombineExperts => self.combine(recorder, inputs, None, y),
            OpKind::ConvState { state_layer } => self.conv_state(recorder, op, state_layer, y),
            OpKind::GatedDelta { .. } => self.gated_delta(recorder, op, y),
            // The rest are steps of their own.
            _ => Err(Error::unsupported(op.kind.name())),
        }
    }

    pub(crate) fn elementwise(
        &self,
        recorder: &mut Recorder<'_>,
        what: Elementwise,
        activation: u32,
        [factor, limit]: [f32; 2],
        inputs: &[ValueId],
        y: ValueId,
    ) -> Result<()> {
        let (a, b) = (inputs[0], inputs.get(1).copied());
        let n = u64::from(self.rows(y)?) * u64::from(self.row_len(y)?);
        // A row that serves every row, or one number that serves every element.
        let row = match b {
            Some(b) if self.exe.program.value(b)?.kind == ValueKind::Weight => self.row_len(b)?,
            _ => 0,
        };
        let is_row = row > 0;
        let constants = [(1, what as u32), (2, activation), (3, u32::from(is_row))];
        let push = Push::new()
            .u64(self.at(a))
            .u64(b.map_or(0, |b| self.at(b)))
            .u64(self.at(y))
            .u64(n)
            .u32(row)
            .f32(factor)
            .f32(limit);
        let mut reads = vec![self.whole(a)?];
        if let Some(b) = b.filter(|_| !is_row) {
            reads.push(self.whole(b)?);
        }
        let kernel = Kernel::new(Shader::Elementwise, &constants);
        recorder.run(&kernel, &push, Groups::strided(n, 256), &reads, &[self.whole(y)?])
    }

    fn norm(
        &self,
        recorder: &mut Recorder<'_>,
        index: usize,
        residual: Option<ValueId>,
        y: ValueId,
    ) -> Result<()> {
        let op = &self.exe.program.ops[index];
        let (kind, eps, n) = match op.kind {
            OpKind::RmsNorm { eps, n } => (0, eps, n),
            OpKind::LayerNorm { eps, n } => (1, eps, n),
            OpKind::L2Norm { eps, n } => (2, eps, n),
            _ => return Err(Error::invalid("a norm that is none")),
        };
        let x = op.inputs[0];
        let vector = |i: usize| op.inputs.get(i).map_or(0, |id| self.at(*id));
        let n_groups = u64::from(self.rows(x)?) * u64::from(self.row_len(x)? / n.max(1));
        let groups =
            u32::try_from(n_groups).map_err(|_| Error::unsupported("a norm this large"))?;
        let push = Push::new()
            .u64(self.at(x))
            .u64(vector(1))
            .u64(vector(2))
            .u64(self.at(y))
            .u64(residual.map_or(0, |id| self.at(id)))
            .u32(n)
            .u32(groups)
            .f32(eps);
        let threads = match n {
            0..=256 => 32,
            257..=1024 => 128,
            _ => 512,
        }
        .max(recorder.gpu.physical.subgroup);
        let kernel = Kernel::new(Shader::Norm, &[(1, kind), (20, threads)]);
        let mut reads = vec![self.whole(x)?];
        if let Some(id) = residual {
            reads.push(self.whole(id)?);
        }
        recorder.run(&kernel, &push, Groups::flat(n_groups, 1)?, &reads, &[self.whole(y)?])
    }

    fn embed(&self, recorder: &mut Recorder<'_>, inputs: &[ValueId], y: ValueId) -> Result<()> {
        let (ids, table) = (inputs[0], self.exe.matrix(inputs[1])?);
        let n = self.rows(y)?;
        let mut constants = vec![(0, table.format as u32)];
        constants.extend((10u32..).zip(table.table));
        let kernel = Kernel::new(Shader::Embed, &constants);
        let items = u64::from(n) * u64::from(table.n_in.div_ceil(8));
        recorder.order(&[self.whole(ids)?], &[self.whole(y)?]);
        for tile in &table.tiles {
            let push = Push::new()
                .u64(self.at(ids))
                .u64(tile.address)
                .u64(self.at(y))
                .u32(tile.first)
                .u32(tile.n)
                .u32(table.n_rows)
                .u32(table.n_in)
                .u32(table.row_bytes)
                .u32(n);
            recorder.run(&kernel, &push, Groups::strided(items, 64), &[], &[])?;
        }
        Ok(())
    }

    /// The address of the table of a rope op, elements that turn, style and magnitude.
    fn rope_of(&self, op: &Op) -> Result<(u64, u32, u32, f32)> {
        let OpKind::Rope { style, n_rot, attn_factor, .. } = op.kind else {
            return Err(Error::invalid("a rope that is none"));
        };
        let frame = &self.exe.frame;
        let table = frame.ropes.find(&op.kind, &op.inputs);
        let table = table.ok_or_else(|| Error::invalid("a rope without a table"))?;
        let address = self.places.record + frame.layout.constants + table.offset;
        Ok((address, n_rot, u32::from(style == RopeStyle::Neox), attn_factor))
    }

    fn rope(&self, recorder: &mut Recorder<'_>, op: &Op, y: ValueId) -> Result<()> {
        let OpKind::Rope { head_dim, .. } = op.kind else { return Ok(()) };
        let (table, n_rot, is_neox, magnitude) = self.rope_of(op)?;
        let (x, positions) = (op.inputs[0], op.inputs[1]);
        let (n, heads) = (self.rows(x)?, self.row_len(x)? / head_dim.max(1));
        let push = Push::new()
            .u64(self.at(x))
            .u64(self.at(y))
            .u64(self.at(positions))
            .u64(table)
            .u32(head_dim)
            .u32(n_rot)
            .u32(heads)
            .u32(n)
            .f32(magnitude);
        let items = u64::from(head_dim - n_rot / 2) * u64::from(heads) * u64::from(n);
        let kernel = Kernel::new(Shader::Rope, &[(1, is_neox)]);
        let reads = [self.whole(x)?, self.whole(positions)?];
        recorder.run(&kernel, &push, Groups::strided(items, 64), &reads, &[self.whole(y)?])
    }

    fn store(
        &self,
        recorder: &mut Recorder<'_>,
        kv_layer: u32,
        k: ValueId,
        v: ValueId,
        rope: Option<&StoreRope>,
    ) -> Result<()> {
        let exe = self.exe;
        let layer = exe.program.kv_layers.get(kv_layer as usize);
        let layer = layer.ok_or_else(|| Error::invalid("a KV layer that is not there"))?;
        let turned = match rope {
            Some(rope) => {
                let op = exe.program.ops.get(rope.op);
                Some(self.rope_of(op.ok_or_else(|| Error::invalid("no rope"))?)?)
            }
            None => None,
        };
        let (table, n_rot, is_neox, magnitude) = turned.unwrap_or((0, 0, 0, 1.0));
        let constants = [
            (1, type_number(layer.dtype_k)),
            (2, type_number(layer.dtype_v)),
            (3, u32::from(rope.is_some())),
            (4, is_neox),
        ];
        let positions = rope.map_or(0, |rope| self.at(rope.positions));
        let push = Push::new()
            .u64(self.at(k))
            .u64(self.at(v))
            .u64(self.places.record)
            .u64(positions)
            .u64(table)
            .u32(exe.frame.layout.tokens)
            .u32(layer.group)
            .u32(layer.index)
            .u32(layer.n_head_kv)
            .u32(layer.head_dim_k)
            .u32(layer.head_dim_v)
            .u32(self.n_tokens)
            .u32(n_rot)
            .f32(magnitude);
        let mut reads = vec![self.whole(k)?, self.whole(v)?];
        if let Some(rope) = rope {
            reads.push(self.whole(rope.positions)?);
        }
        let pieces = (layer.head_dim_k.div_ceil(4) + layer.head_dim_v.div_ceil(4)).max(1);
        let items = u64::from(pieces) * u64::from(layer.n_head_kv) * u64::from(self.n_tokens);
        let kernel = Kernel::new(Shader::KvStore, &constants);
        recorder.run(&kernel, &push, Groups::strided(items, 64), &reads, &[kv_span(kv_layer)])
    }

    fn attention(
        &self,
        recorder: &mut Recorder<'_>,
        index: usize,
        op: &Op,
        y: ValueId,
    ) -> Result<()> {
        let OpKind::Attention { kv_layer, n_head, scale, softcap, window } = op.kind else {
            return Ok(());
        };
        let exe = self.exe;
        let number = exe.frame.kind_of.get(index).copied().flatten();
        let number = number.ok_or_else(|| Error::invalid("attention of no kind"))?;
        let layer = exe.program.kv_layers.get(kv_layer as usize);
        let (Some(kind), Some(layer)) = (exe.frame.kinds.get(number), layer) else {
            return Err(Error::invalid("attention over a KV layer that is not there"));
        };
        if self.n_tokens == 0 {
            return Ok(());
        }
        let q = op.inputs[0];
        let sinks = op.inputs.get(1).map_or(0, |id| self.at(*id));
        let record = exe.frame.layout.kind(number);
        let parts = self.places.parts;
        let push = Push::new()
            .u64(self.at(q))
            .u64(self.at(y))
            .u64(parts.0)
            .u64(self.places.record)
            .u64(sinks)
            .u32(record)
            .u32(layer.group)
            .u32(layer.index)
            .u32(n_head)
            .u32(layer.n_head_kv)
            .u32(window)
            .f32(scale)
            .f32(softcap);
        let kernel = attention_kernel(recorder.gpu.physical.subgroup_min, kind, self.n_tokens);
        let at = |words: u32| Groups::At(self.places.record_buffer, 4 * u64::from(record + words));
        let reads = [self.whole(q)?, kv_span(kv_layer)];
        let to = self.whole(y)?;
        recorder.run(&kernel, &push, at(0), &reads, &[to, parts])?;
        let can_split =
            u64::from(self.n_tokens) * 2 <= exe.frame.parts.get(number).copied().unwrap_or(0);
        if !can_split {
            return Ok(());
        }
        let push = Push::new()
            .u64(self.at(y))
            .u64(parts.0)
            .u64(self.places.record)
            .u64(sinks)
            .u32(record)
            .u32(n_head)
            .u32(layer.head_dim_v);
        let kernel = Kernel::new(Shader::AttentionCombine, &[]);
        recorder.run(&kernel, &push, at(4), &[parts], &[to])
    }
}

/// The attention kernel of a kind for a run of so many tokens.
fn attention_kernel(subgroup: u32, kind: &Kind, n_tokens: u32) -> Kernel {
    let layer = &kind.layer;
    Kernel::new(
        Shader::Attention,
        &[
            (1, type_number(layer.dtype_k)),
            (2, type_number(layer.dtype_v)),
            (3, layer.head_dim_k),
            (4, layer.head_dim_v),
            (5, kind.heads),
            (6, kind.tile_tokens(n_tokens)),
            (7, kind.keys),
            (8, subgroup.min(kind.keys)),
        ],
    )
}
