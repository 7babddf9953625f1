//! Mixtures of experts: which experts a row goes to, the products with their rows, and the sum of what they make.

use super::matmul::dot;
use super::rows::top_k;
use crate::values::zeros;
use crate::weight::Matrix;
use tegula_sdk::program::{Router, RouterGating, RouterGroups};
use tegula_sdk::{Error, Result};

/// `x W_e^T + bias_e` for the experts `ids` of each row, `k` side by side. `x` has one row of `n_in` for all of a row's experts, or one for
/// each. A row of W is decoded once and used for every row of x that goes to its expert.
pub(crate) fn matmul(
    x: &[f32],
    weight: &Matrix,
    ids: &[i32],
    bias: Option<&Matrix>,
    (n_expert, k): (u32, usize),
) -> Result<Vec<f32>> {
    let n_in = usize::try_from(weight.n_in).unwrap_or(usize::MAX);
    let n_rows = weight.n_rows / u64::from(n_expert.max(1));
    // Slots that read one row of x: all of a row's experts, or each by itself.
    let sharing = ids.len() * n_in / x.len().max(1);
    let mut out: Vec<f32> = zeros((ids.len() as u64).saturating_mul(n_rows))?;
    let n_out = usize::try_from(n_rows).unwrap_or(usize::MAX);
    let known = |id: &i32| u32::try_from(*id).is_ok_and(|id| id < n_expert);
    if let Some(id) = ids.iter().find(|id| !known(id)) {
        return Err(Error::invalid(format!("expert {id} of {n_expert}")));
    }
    // Nothing to multiply: no row of this run is wanted.
    if ids.is_empty() {
        return Ok(out);
    }
    if sharing != 1 && sharing != k {
        return Err(Error::invalid(format!("{} elements for {} slots", x.len(), ids.len())));
    }
    let (mut rows, mut biases) = (weight.rows()?, bias.map(Matrix::rows).transpose()?);
    for expert in 0..n_expert {
        let mine = |id: &i32| u32::try_from(*id) == Ok(expert);
        if !ids.iter().any(mine) {
            continue;
        }
        let bias = match &mut biases {
            Some(biases) => biases.get(expert.into())?,
            None => &[],
        };
        for row in 0..n_out {
            let w = rows.get(u64::from(expert) * n_rows + row as u64)?;
            let bias = bias.get(row).copied().unwrap_or(0.0);
            for (slot, _) in ids.iter().enumerate().filter(|(_, id)| mine(id)) {
                let x = &x[slot / sharing * n_in..][..n_in];
                out[slot * n_out + row] = (dot(x, w) + f64::from(bias)) as f32;
            }
        }
    }
    Ok(out)
}

/// Ids and weights of the experts of each row of `logits`.
pub(crate) fn router(
    logits: &[f32],
    bias: Option<&[f32]>,
    n_expert: usize,
    router: &Router,
    groups: RouterGroups,
) -> Result<(Vec<i32>, Vec<f32>)> {
    let k = router.k as usize;
    let n = (logits.len() / n_expert * k) as u64;
    let (mut ids, mut weights): (Vec<i32>, Vec<f32>) = (zeros(n)?, zeros(n)?);
    let (mut p, mut scores): (Vec<f64>, Vec<f32>) =
        (zeros(n_expert as u64)?, zeros(n_expert as u64)?);
    let mut chosen: Vec<f64> = zeros(k as u64)?;
    let out = ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
    for (row, (ids, weights)) in logits.chunks_exact(n_expert).zip(out) {
        for (p, logit) in p.iter_mut().zip(row) {
            *p = f64::from(*logit);
        }
        match router.gating {
            RouterGating::Softmax => softmax(&mut p),
            RouterGating::Sigmoid => p.iter_mut().for_each(|p| *p = 1.0 / (1.0 + (-*p).exp())),
            RouterGating::SoftmaxSelected => {}
        }
        for (i, (score, p)) in scores.iter_mut().zip(&p).enumerate() {
            *score = (p + bias.map_or(0.0, |bias| f64::from(bias[i]))) as f32;
        }
        // Of the experts that are searched, in order, so that the first of equals is the first of all.
        let searched = searched(&scores, groups)?;
        let mut theirs: Vec<f32> = zeros(searched.len() as u64)?;
        for (score, expert) in theirs.iter_mut().zip(&searched) {
            *score = scores[*expert];
        }
        let best = top_k(&theirs, theirs.len(), k)?.0;
        for (id, nth) in ids.iter_mut().zip(best) {
            let expert = searched[nth.unsigned_abs() as usize];
            *id = i32::try_from(expert)
                .map_err(|_| Error::invalid(format!("expert {expert} does not fit an id")))?;
        }
        for (chosen, id) in chosen.iter_mut().zip(&*ids) {
            *chosen = p[id.unsigned_abs() as usize];
        }
        if router.gating == RouterGating::SoftmaxSelected {
            softmax(&mut chosen);
        }
        let sum = if router.normalise { chosen.iter().sum::<f64>().max(1e-20) } else { 1.0 };
        for (weight, chosen) in weights.iter_mut().zip(&chosen) {
            *weight = (chosen / sum * f64::from(router.scale)) as f32;
        }
    }
    Ok((ids, weights))
}

/// The experts of the best groups by the sum of a group's best scores, in order.
fn searched(scores: &[f32], groups: RouterGroups) -> Result<Vec<usize>> {
    let [n_group, n_used, n_score] =
        [groups.n_group, groups.n_group_used, groups.n_score].map(|n| n as usize);
    let len = scores.len() / n_group;
    let mut of_groups: Vec<f32> = zeros(n_group as u64)?;
    for (sum, group) in of_groups.iter_mut().zip(scores.chunks_exact(len)) {
        let best = top_k(group, len, n_score)?.1;
        let number = |x: &f32| if x.is_nan() { f64::NEG_INFINITY } else { f64::from(*x) };
        *sum = best.iter().map(number).sum::<f64>() as f32;
    }
    let mut used = top_k(&of_groups, n_group, n_used)?.0;
    used.sort_unstable();
    let experts = |group: i32| {
        let first = group.unsigned_abs() as usize * len;
        first..first + len
    };
    Ok(used.into_iter().flat_map(experts).collect())
}

fn softmax(x: &mut [f64]) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

/// The sum of each row's `k` parts of `m` columns, weighted.
pub(crate) fn combine(x: &[f32], weights: &[f32], k: usize, m: usize) -> Result<Vec<f32>> {
    let mut out: Vec<f32> = zeros((x.len() / k) as u64)?;
    let rows = x.chunks_exact(k * m).zip(weights.chunks_exact(k));
    for ((x, weights), out) in rows.zip(out.chunks_exact_mut(m)) {
        for (i, out) in out.iter_mut().enumerate() {
            let parts = weights.iter().zip(x.iter().skip(i).step_by(m));
            *out = parts.map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>() as f32;
        }
    }
    Ok(out)
}
