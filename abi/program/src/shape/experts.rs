//! The rules of ops over experts.

use super::{Rule, activation, vector, weight};
use crate::{Dim, OpKind, Value, ValueKind};
use tegula_quant::DType;

/// The ids of k experts for each row.
fn ids(value: &Value, rows: Dim) -> Result<u64, String> {
    match value.dims.as_slice() {
        [n, Dim::Fixed(k)]
            if *n == rows && value.dtype == DType::I32 && value.kind != ValueKind::Weight =>
        {
            Ok(*k)
        }
        _ => Err(format!("`{}` is no i32 matrix of as many rows", value.name)),
    }
}

/// `[n, n_in]` or `[n, k * n_in]` times a stack of `[n_expert * n_rows, n_in]`.
pub(super) fn matmul(inputs: &[&Value], n_expert: u32) -> Rule {
    let row = activation(inputs[0])?;
    let (rows, n_in) = weight(inputs[1])?;
    let k = ids(inputs[2], inputs[0].rows())?;
    let n_rows = rows.checked_div(n_expert.into()).filter(|n| n * u64::from(n_expert) == rows);
    let Some(n_rows) = n_rows else {
        return Err(format!("`{}` of {rows} rows for {n_expert} experts", inputs[1].name));
    };
    if row != n_in && Some(row) != k.checked_mul(n_in) {
        let name = &inputs[1].name;
        return Err(format!("rows of {row} times `{name}`, which takes {n_in}, by {k} experts"));
    }
    if let Some(bias) = inputs.get(3) {
        let dims = [Dim::Fixed(n_expert.into()), Dim::Fixed(n_rows)];
        if bias.kind != ValueKind::Weight || bias.dtype != DType::F32 || bias.dims != dims {
            return Err(format!("`{}` is no weight of {dims:?} f32", bias.name));
        }
    }
    let out = k.checked_mul(n_rows).ok_or("a row of more than 2^64 elements")?;
    Ok(vec![(DType::F32, vec![inputs[0].rows(), Dim::Fixed(out)])])
}

pub(super) fn router(inputs: &[&Value], k: u32) -> Rule {
    let n_expert = activation(inputs[0])?;
    if k == 0 || u64::from(k) > n_expert {
        return Err(format!("{k} of {n_expert} experts"));
    }
    if let Some(bias) = inputs.get(1) {
        vector(bias, n_expert)?;
    }
    let dims = vec![inputs[0].rows(), Dim::Fixed(k.into())];
    Ok(vec![(DType::I32, dims.clone()), (DType::F32, dims)])
}

pub(super) fn router_grouped(inputs: &[&Value], kind: &OpKind) -> Rule {
    let OpKind::RouterTopkGrouped { k, n_group, n_group_used, n_score, .. } = *kind else {
        return Err("not a router of groups".into());
    };
    let n_expert = activation(inputs[0])?;
    let [n_group, n_used, n_score] = [n_group, n_group_used, n_score].map(u64::from);
    let Some(group) = n_expert.checked_div(n_group).filter(|n| n * n_group == n_expert) else {
        return Err(format!("{n_expert} experts in {n_group} groups"));
    };
    if n_used == 0 || n_used > n_group {
        return Err(format!("{n_used} of {n_group} groups"));
    }
    if n_score == 0 || n_score > group {
        return Err(format!("{n_score} scores of groups of {group}"));
    }
    // Less than the number of experts, which is a row's length.
    if u64::from(k) > n_used * group {
        return Err(format!("{k} of the {} experts of {n_used} groups", n_used * group));
    }
    router(inputs, k)
}

pub(super) fn combine(inputs: &[&Value]) -> Rule {
    let (row, k) = (activation(inputs[0])?, activation(inputs[1])?);
    match row.checked_div(k).filter(|m| m * k == row) {
        Some(m) if inputs[0].rows() == inputs[1].rows() => {
            Ok(vec![(DType::F32, vec![inputs[0].rows(), Dim::Fixed(m)])])
        }
        _ => Err(format!("rows of {row} and {k} weights")),
    }
}
