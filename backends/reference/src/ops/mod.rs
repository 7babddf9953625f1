//! The ops: each fetches what it reads, calls a plain function over slices, and stores what it makes.

mod attention;
mod elementwise;
mod experts;
mod kv;
mod matmul;
mod norm;
mod rope;
mod rows;
mod state;

use crate::values::Values;
use tegula_sdk::program::{Op, OpKind, Rope, Router, RouterGroups, ValueId};
use tegula_sdk::{Error, Result};

/// An op with the values of a run.
struct Args<'v, 'a> {
    values: &'v Values<'a>,
    op: &'v Op,
}

impl Args<'_, '_> {
    fn input(&self, i: usize) -> Result<ValueId> {
        let id = self.op.inputs.get(i).copied();
        id.ok_or_else(|| Error::invalid(format!("input {i} is missing")))
    }

    fn output(&self, i: usize) -> Result<ValueId> {
        let id = self.op.outputs.get(i).copied();
        id.ok_or_else(|| Error::invalid(format!("output {i} is missing")))
    }

    fn f32s(&self, i: usize) -> Result<Vec<f32>> {
        self.values.f32s(self.input(i)?)
    }

    /// An input that may be absent.
    fn opt_f32s(&self, i: usize) -> Result<Option<Vec<f32>>> {
        self.op.inputs.get(i).map(|id| self.values.f32s(*id)).transpose()
    }

    fn i32s(&self, i: usize) -> Result<Vec<i32>> {
        self.values.i32s(self.input(i)?)
    }

    fn row_len(&self, i: usize) -> Result<usize> {
        self.values.row_len(self.input(i)?)
    }

    fn put(&self, elements: &[f32]) -> Result<()> {
        self.values.put_f32s(self.output(0)?, elements)
    }

    /// Changes a copy of the first input and stores it.
    fn map(&self, change: impl FnOnce(&mut [f32])) -> Result<()> {
        let mut x = self.f32s(0)?;
        change(&mut x);
        self.put(&x)
    }
}

/// Runs one op.
pub(crate) fn run(values: &Values<'_>, op: &Op) -> Result<()> {
    let args = Args { values, op };
    match op.kind {
        OpKind::Embed => args.put(&matmul::embed(&args.i32s(0)?, values.matrix(args.input(1)?)?)?),
        OpKind::Matmul => {
            let (x, bias) = (args.f32s(0)?, args.opt_f32s(2)?);
            args.put(&matmul::matmul(&x, values.matrix(args.input(1)?)?, bias.as_deref())?)
        }
        OpKind::RmsNorm { eps, n } => {
            let weight = args.opt_f32s(1)?;
            args.map(|x| norm::rms_norm(x, weight.as_deref(), eps, n as usize))
        }
        OpKind::LayerNorm { eps, n } => {
            let (weight, bias) = (args.f32s(1)?, args.opt_f32s(2)?);
            args.map(|x| norm::layer_norm(x, &weight, bias.as_deref(), eps, n as usize))
        }
        OpKind::Rope { .. } => run_rope(&args),
        OpKind::KvStore { kv_layer } => kv::store(values, kv_layer, &args.f32s(0)?, &args.f32s(1)?),
        OpKind::Attention { kv_layer, n_head, scale, softcap, window } => {
            let params = attention::Params { n_head, scale, softcap, window };
            let (q, sinks) = (args.f32s(0)?, args.opt_f32s(1)?);
            args.put(&attention::attention(values, kv_layer, &q, sinks.as_deref(), &params)?)
        }
        OpKind::Glu { activation } => {
            let up = args.f32s(1)?;
            args.map(|gate| elementwise::glu(activation, gate, &up))
        }
        OpKind::Unary { activation } => args.map(|x| elementwise::unary(activation, x)),
        OpKind::Add => {
            let b = args.f32s(1)?;
            args.map(|a| elementwise::combine(a, &b, |a, b| a + b))
        }
        OpKind::Mul => {
            let b = args.f32s(1)?;
            args.map(|a| elementwise::combine(a, &b, |a, b| a * b))
        }
        OpKind::Scale { factor } => args.map(|x| elementwise::scale(x, factor)),
        OpKind::Softcap { cap } => args.map(|x| elementwise::softcap(x, cap)),
        OpKind::Slice { begin, len } => {
            args.put(&rows::slice(&args.f32s(0)?, args.row_len(0)?, begin as usize, len as usize)?)
        }
        OpKind::Concat => {
            let (p, q) = (args.row_len(0)?, args.row_len(1)?);
            args.put(&rows::concat(&args.f32s(0)?, p, &args.f32s(1)?, q)?)
        }
        OpKind::GatherRows => {
            args.put(&rows::gather(&args.f32s(0)?, args.row_len(0)?, &args.i32s(1)?)?)
        }
        OpKind::Argmax => {
            let best = rows::argmax(&args.f32s(0)?, args.row_len(0)?)?;
            values.put_i32s(args.output(0)?, &best)
        }
        OpKind::TopK { k } => {
            let (ids, best) = rows::top_k(&args.f32s(0)?, args.row_len(0)?, k as usize)?;
            values.put_i32s(args.output(0)?, &ids)?;
            values.put_f32s(args.output(1)?, &best)
        }
        OpKind::MatmulExperts { n_expert } => {
            let bias = op.inputs.get(3).map(|id| values.matrix(*id)).transpose()?;
            let (ids, k) = (args.i32s(2)?, args.row_len(2)?);
            let weight = values.matrix(args.input(1)?)?;
            args.put(&experts::matmul(&args.f32s(0)?, weight, &ids, bias, (n_expert, k))?)
        }
        OpKind::RouterTopk { k, gating, normalise, scale } => {
            let groups = RouterGroups { n_group: 1, n_group_used: 1, n_score: 1 };
            run_router(&args, &Router { k, gating, normalise, scale }, groups)
        }
        OpKind::RouterTopkGrouped {
            k,
            gating,
            normalise,
            scale,
            n_group,
            n_group_used,
            n_score,
        } => {
            let groups = RouterGroups { n_group, n_group_used, n_score };
            run_router(&args, &Router { k, gating, normalise, scale }, groups)
        }
        OpKind::CombineExperts => {
            let k = args.row_len(1)?;
            args.put(&experts::combine(&args.f32s(0)?, &args.f32s(1)?, k, args.row_len(0)? / k)?)
        }
        OpKind::L2Norm { eps, n } => args.map(|x| norm::l2_norm(x, eps, n as usize)),
        OpKind::ConvState { state_layer } => {
            let (x, weight) = (args.f32s(0)?, values.matrix(args.input(1)?)?);
            let bias = args.opt_f32s(2)?;
            args.put(&state::conv(values, state_layer, &x, weight, bias.as_deref())?)
        }
        OpKind::GatedDelta {
            state_layer,
            n_head_k,
            n_head_v,
            head_dim_k,
            head_dim_v,
            order,
            scale,
        } => {
            let heads =
                state::GatedDelta { n_head_k, n_head_v, head_dim_k, head_dim_v, order, scale };
            let [q, k, v] = [args.f32s(0)?, args.f32s(1)?, args.f32s(2)?];
            let inputs = [q, k, v, args.f32s(3)?, args.f32s(4)?];
            args.put(&state::gated_delta(values, state_layer, &inputs, &heads)?)
        }
        OpKind::SliceGroups { group, begin, len } => {
            let [group, begin, len] = [group, begin, len].map(|n| n as usize);
            args.put(&rows::slice(&args.f32s(0)?, group, begin, len)?)
        }
        OpKind::ConcatGroups { group_a, group_b } => {
            let (a, b) = (args.f32s(0)?, args.f32s(1)?);
            let (row_a, row_b) = (args.row_len(0)?, args.row_len(1)?);
            let [group_a, group_b] = [group_a, group_b].map(|n| n as usize);
            args.put(&rows::concat_groups((&a, row_a, group_a), (&b, row_b, group_b))?)
        }
        OpKind::GluClamped { alpha, limit } => {
            let up = args.f32s(1)?;
            args.map(|gate| elementwise::glu_clamped(alpha, limit, gate, &up))
        }
    }
}

/// A router whose experts are one group searches them all.
fn run_router(args: &Args<'_, '_>, router: &Router, groups: RouterGroups) -> Result<()> {
    let (logits, bias) = (args.f32s(0)?, args.opt_f32s(1)?);
    let n = args.row_len(0)?;
    let (ids, weights) = experts::router(&logits, bias.as_deref(), n, router, groups)?;
    args.values.put_i32s(args.output(0)?, &ids)?;
    args.values.put_f32s(args.output(1)?, &weights)
}

fn run_rope(args: &Args<'_, '_>) -> Result<()> {
    let OpKind::Rope {
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
    } = args.op.kind
    else {
        return Err(Error::invalid("not a rope"));
    };
    let params = Rope {
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
    let (positions, factors, row_len) = (args.i32s(1)?, args.opt_f32s(2)?, args.row_len(0)?);
    args.map(|x| rope::rope(x, row_len, &positions, factors.as_deref(), &params))
}
