//! Shape and type rules: what each op accepts and makes. Used by the builder to type results and by the verifier to check them.

mod experts;
mod state;

use crate::{Dim, KvLayer, OpKind, StateLayer, Value, ValueKind};
use tegula_quant::DType;

type Shape = (DType, Vec<Dim>);
type Rule = Result<Vec<Shape>, String>;

/// What an op may name beside values.
#[derive(Clone, Copy)]
pub(crate) struct Layers<'a> {
    pub(crate) kv: &'a [KvLayer],
    pub(crate) state: &'a [StateLayer],
}

/// The types an op makes from `inputs`, or what does not fit, with both sides.
pub(crate) fn infer(kind: &OpKind, inputs: &[&Value], layers: Layers<'_>) -> Rule {
    let arity = |low: usize, high: usize| match inputs.len() {
        n if (low..=high).contains(&n) => Ok(()),
        n => Err(format!("takes {low} to {high} inputs, has {n}")),
    };
    match *kind {
        OpKind::Embed => arity(2, 2).and_then(|()| embed(inputs[0], inputs[1])),
        OpKind::RmsNorm { n, .. } => arity(1, 2).and_then(|()| norm(inputs, n)),
        OpKind::L2Norm { n, .. } => arity(1, 1).and_then(|()| norm(inputs, n)),
        OpKind::LayerNorm { n, .. } => arity(2, 3).and_then(|()| norm(inputs, n)),
        OpKind::Matmul => arity(2, 3).and_then(|()| matmul(inputs)),
        OpKind::Rope { head_dim, n_rot, .. } => {
            arity(2, 3).and_then(|()| rope(inputs, head_dim, n_rot))
        }
        OpKind::KvStore { kv_layer } => {
            arity(2, 2).and_then(|()| kv_store(inputs, kv_layer_of(layers.kv, kv_layer)?))
        }
        OpKind::Attention { kv_layer, n_head, .. } => {
            arity(1, 2).and_then(|()| attention(inputs, n_head, kv_layer_of(layers.kv, kv_layer)?))
        }
        OpKind::Glu { .. } | OpKind::GluClamped { .. } => arity(2, 2).and_then(|()| {
            activation(inputs[0])?;
            same(inputs[0], inputs[1])
        }),
        OpKind::Unary { .. } | OpKind::Scale { .. } | OpKind::Softcap { .. } => {
            arity(1, 1).and_then(|()| activation(inputs[0]).map(|_| like(inputs[0])))
        }
        OpKind::Add => arity(2, 2).and_then(|()| elementwise(inputs[0], inputs[1], false)),
        OpKind::Mul => arity(2, 2).and_then(|()| elementwise(inputs[0], inputs[1], true)),
        OpKind::Slice { begin, len } => arity(1, 1).and_then(|()| slice(inputs[0], begin, len)),
        OpKind::Concat => arity(2, 2).and_then(|()| concat(inputs[0], inputs[1])),
        OpKind::GatherRows => arity(2, 2).and_then(|()| gather(inputs[0], inputs[1])),
        OpKind::Argmax => arity(1, 1).and_then(|()| {
            activation(inputs[0])?;
            Ok(vec![(DType::I32, vec![inputs[0].rows()])])
        }),
        OpKind::TopK { k } => arity(1, 1).and_then(|()| top_k(inputs[0], k)),
        OpKind::MatmulExperts { n_expert } => {
            arity(3, 4).and_then(|()| experts::matmul(inputs, n_expert))
        }
        OpKind::RouterTopk { k, .. } => arity(1, 2).and_then(|()| experts::router(inputs, k)),
        OpKind::CombineExperts => arity(2, 2).and_then(|()| experts::combine(inputs)),
        OpKind::ConvState { state_layer } => arity(2, 3)
            .and_then(|()| state::conv(inputs, state_layer_of(layers.state, state_layer)?)),
        OpKind::GatedDelta { state_layer, .. } => arity(5, 5).and_then(|()| {
            state::gated_delta(kind, inputs, state_layer_of(layers.state, state_layer)?)
        }),
        OpKind::SliceGroups { group, begin, len } => {
            arity(1, 1).and_then(|()| slice_groups(inputs[0], group, begin, len))
        }
        OpKind::ConcatGroups { group_a, group_b } => {
            arity(2, 2).and_then(|()| concat_groups(inputs, [group_a, group_b]))
        }
        OpKind::RouterTopkGrouped { .. } => {
            arity(1, 2).and_then(|()| experts::router_grouped(inputs, kind))
        }
    }
}

fn kv_layer_of(kv: &[KvLayer], index: u32) -> Result<&KvLayer, String> {
    kv.get(index as usize).ok_or_else(|| format!("KV layer {index} of a program with {}", kv.len()))
}

fn state_layer_of(state: &[StateLayer], index: u32) -> Result<&StateLayer, String> {
    let none = || format!("state layer {index} of a program with {}", state.len());
    state.get(index as usize).ok_or_else(none)
}

fn like(value: &Value) -> Vec<Shape> {
    vec![(value.dtype, value.dims.clone())]
}

/// An f32 matrix made at run time; gives its row length.
fn activation(value: &Value) -> Result<u64, String> {
    match value.dims.as_slice() {
        [_, Dim::Fixed(n)] if value.dtype == DType::F32 && value.kind != ValueKind::Weight => {
            Ok(*n)
        }
        _ => Err(format!("`{}` is no f32 matrix of activations", value.name)),
    }
}

/// A vector of i32 made at run time; gives its length.
fn indices(value: &Value) -> Result<Dim, String> {
    match value.dims.as_slice() {
        [n] if value.dtype == DType::I32 && value.kind != ValueKind::Weight => Ok(*n),
        _ => Err(format!("`{}` is no i32 vector", value.name)),
    }
}

/// A weight vector of `n` f32.
fn vector(value: &Value, n: u64) -> Result<(), String> {
    let fits = value.kind == ValueKind::Weight
        && value.dtype == DType::F32
        && value.dims == [Dim::Fixed(n)];
    fits.then_some(()).ok_or_else(|| {
        format!(
            "`{}` is {:?} of {}, not a weight of {n} f32",
            value.name,
            value.dims,
            value.dtype.name()
        )
    })
}

fn weight(value: &Value) -> Result<(u64, u64), String> {
    match value.dims.as_slice() {
        [Dim::Fixed(rows), Dim::Fixed(n_in)] if value.kind == ValueKind::Weight => {
            value.dtype.row_bytes(*n_in).map_err(|error| format!("`{}`: {error}", value.name))?;
            Ok((*rows, *n_in))
        }
        _ => Err(format!("`{}` is no weight matrix", value.name)),
    }
}

fn same(a: &Value, b: &Value) -> Rule {
    if a.dims != b.dims || a.dtype != b.dtype {
        return Err(format!("`{}` {:?} and `{}` {:?} differ", a.name, a.dims, b.name, b.dims));
    }
    Ok(like(a))
}

fn embed(ids: &Value, table: &Value) -> Rule {
    let (_, n_in) = weight(table)?;
    Ok(vec![(DType::F32, vec![indices(ids)?, Dim::Fixed(n_in)])])
}

fn norm(inputs: &[&Value], n: u32) -> Rule {
    let row = activation(inputs[0])?;
    if n == 0 || row % u64::from(n) != 0 {
        return Err(format!("rows of {row} are no multiple of the {n} normalised together"));
    }
    for weight in &inputs[1..] {
        vector(weight, u64::from(n))?;
    }
    Ok(like(inputs[0]))
}

fn matmul(inputs: &[&Value]) -> Rule {
    let row = activation(inputs[0])?;
    let (rows, n_in) = weight(inputs[1])?;
    if row != n_in {
        return Err(format!("rows of {row} times `{}`, which takes {n_in}", inputs[1].name));
    }
    if let Some(bias) = inputs.get(2) {
        vector(bias, rows)?;
    }
    Ok(vec![(DType::F32, vec![inputs[0].rows(), Dim::Fixed(rows)])])
}

fn rope(inputs: &[&Value], head_dim: u32, n_rot: u32) -> Rule {
    let row = activation(inputs[0])?;
    if head_dim == 0 || row % u64::from(head_dim) != 0 {
        return Err(format!("rows of {row} are no multiple of heads of {head_dim}"));
    }
    if n_rot == 0 || !n_rot.is_multiple_of(2) || n_rot > head_dim {
        return Err(format!("{n_rot} turning elements in heads of {head_dim}"));
    }
    if indices(inputs[1])? != inputs[0].rows() {
        return Err("positions and rows differ in number".into());
    }
    if let Some(factors) = inputs.get(2) {
        vector(factors, u64::from(n_rot / 2))?;
    }
    Ok(like(inputs[0]))
}

fn kv_store(inputs: &[&Value], layer: &KvLayer) -> Rule {
    for (value, head_dim) in inputs.iter().zip([layer.head_dim_k, layer.head_dim_v]) {
        let expected = u64::from(layer.n_head_kv) * u64::from(head_dim);
        if activation(value)? != expected || value.rows() != Dim::NTokens {
            return Err(format!("`{}` is not [n_tokens, {expected}]", value.name));
        }
    }
    Ok(Vec::new())
}

fn attention(inputs: &[&Value], n_head: u32, layer: &KvLayer) -> Rule {
    let expected = u64::from(n_head) * u64::from(layer.head_dim_k);
    if activation(inputs[0])? != expected || inputs[0].rows() != Dim::NTokens {
        return Err(format!("the query is not [n_tokens, {expected}]"));
    }
    if !n_head.is_multiple_of(layer.n_head_kv) {
        return Err(format!("{n_head} query heads over {} of keys", layer.n_head_kv));
    }
    if let Some(sinks) = inputs.get(1) {
        vector(sinks, u64::from(n_head))?;
    }
    let out = u64::from(n_head) * u64::from(layer.head_dim_v);
    Ok(vec![(DType::F32, vec![Dim::NTokens, Dim::Fixed(out)])])
}

fn elementwise(a: &Value, b: &Value, number: bool) -> Rule {
    let row = activation(a)?;
    if b.dims.len() == 1 {
        vector(b, if number && b.dims == [Dim::Fixed(1)] { 1 } else { row })?;
        return Ok(like(a));
    }
    activation(b)?;
    same(a, b)
}

fn slice(x: &Value, begin: u32, len: u32) -> Rule {
    let row = activation(x)?;
    if len == 0 || u64::from(begin) + u64::from(len) > row {
        return Err(format!("columns {begin} + {len} of {row}"));
    }
    Ok(vec![(DType::F32, vec![x.rows(), Dim::Fixed(u64::from(len))])])
}

fn slice_groups(x: &Value, group: u32, begin: u32, len: u32) -> Rule {
    let row = activation(x)?;
    if group == 0 || row % u64::from(group) != 0 {
        return Err(format!("rows of {row} are no multiple of groups of {group}"));
    }
    if len == 0 || u64::from(begin) + u64::from(len) > u64::from(group) {
        return Err(format!("columns {begin} + {len} of groups of {group}"));
    }
    let row = row / u64::from(group) * u64::from(len);
    Ok(vec![(DType::F32, vec![x.rows(), Dim::Fixed(row)])])
}

fn concat(a: &Value, b: &Value) -> Rule {
    let row = activation(a)? + activation(b)?;
    if a.rows() != b.rows() {
        return Err(format!("`{}` and `{}` differ in rows", a.name, b.name));
    }
    Ok(vec![(DType::F32, vec![a.rows(), Dim::Fixed(row)])])
}

fn concat_groups(inputs: &[&Value], groups: [u32; 2]) -> Rule {
    let ([a, b], [group_a, group_b]) = ([inputs[0], inputs[1]], groups.map(u64::from));
    let count = |value: &Value, group: u64| {
        let row = activation(value)?;
        let whole = row.checked_div(group).filter(|n| *n > 0 && n * group == row);
        whole.ok_or_else(|| format!("rows of {row} are no multiple of groups of {group}"))
    };
    let (n_a, n_b) = (count(a, group_a)?, count(b, group_b)?);
    if n_a != n_b && n_a != 1 {
        return Err(format!("{n_a} and {n_b} groups"));
    }
    if a.rows() != b.rows() {
        return Err(format!("`{}` and `{}` differ in rows", a.name, b.name));
    }
    let row = n_b.checked_mul(group_a + group_b).ok_or("a row of more than 2^64 elements")?;
    Ok(vec![(DType::F32, vec![a.rows(), Dim::Fixed(row)])])
}

fn gather(x: &Value, rows: &Value) -> Rule {
    let row = activation(x)?;
    Ok(vec![(DType::F32, vec![indices(rows)?, Dim::Fixed(row)])])
}

fn top_k(x: &Value, k: u32) -> Rule {
    let row = activation(x)?;
    if k == 0 || u64::from(k) > row {
        return Err(format!("the {k} greatest of {row}"));
    }
    let dims = vec![x.rows(), Dim::Fixed(u64::from(k))];
    Ok(vec![(DType::I32, dims.clone()), (DType::F32, dims)])
}
