//! The rules of ops that keep state.

use super::{Rule, activation, like, vector, weight};
use crate::{Dim, OpKind, StateLayer, Value};
use tegula_quant::DType;

/// A record's elements must be those of the op.
fn record(state: &StateLayer, shape: [u64; 3]) -> Result<(), String> {
    let n = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim));
    if n == Some(state.n_elements) {
        return Ok(());
    }
    Err(format!("a state of {} elements, not {shape:?}", state.n_elements))
}

/// State follows the tokens of sequences, so every token of the run is there.
fn all_tokens(value: &Value, row: u64) -> Result<(), String> {
    if activation(value)? == row && value.rows() == Dim::NTokens {
        return Ok(());
    }
    Err(format!("`{}` is not [n_tokens, {row}]", value.name))
}

pub(super) fn conv(inputs: &[&Value], state: &StateLayer) -> Rule {
    let (row, (channels, kernel)) = (activation(inputs[0])?, weight(inputs[1])?);
    all_tokens(inputs[0], row)?;
    if channels != row || kernel < 2 || !inputs[1].dtype.is_float() {
        let name = &inputs[1].name;
        return Err(format!("rows of {row} and `{name}` of {channels} kernels of {kernel}"));
    }
    if let Some(bias) = inputs.get(2) {
        vector(bias, row)?;
    }
    record(state, [1, kernel - 1, row])?;
    Ok(like(inputs[0]))
}

pub(super) fn gated_delta(kind: &OpKind, inputs: &[&Value], state: &StateLayer) -> Rule {
    let OpKind::GatedDelta { n_head_k, n_head_v, head_dim_k, head_dim_v, .. } = *kind else {
        return Err("not a gated delta rule".into());
    };
    if n_head_k == 0 || n_head_v == 0 || !n_head_v.is_multiple_of(n_head_k) {
        return Err(format!("{n_head_v} heads of values over {n_head_k} of keys"));
    }
    let [heads_k, heads_v, dim_k, dim_v] =
        [n_head_k, n_head_v, head_dim_k, head_dim_v].map(u64::from);
    let rows = [heads_k * dim_k, heads_k * dim_k, heads_v * dim_v, heads_v, heads_v];
    for (value, row) in inputs.iter().zip(rows) {
        all_tokens(value, row)?;
    }
    record(state, [heads_v, dim_v, dim_k])?;
    Ok(vec![(DType::F32, vec![Dim::NTokens, Dim::Fixed(heads_v * dim_v)])])
}
