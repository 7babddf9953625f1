//! What moves or ranks whole rows and columns.

use crate::values::zeros;
use tegula_sdk::{Error, Result};

/// Columns `begin .. begin + len`.
pub(crate) fn slice(x: &[f32], row_len: usize, begin: usize, len: usize) -> Result<Vec<f32>> {
    let mut out: Vec<f32> = zeros((x.len() / row_len * len) as u64)?;
    for (x, out) in x.chunks_exact(row_len).zip(out.chunks_exact_mut(len)) {
        out.copy_from_slice(&x[begin..begin + len]);
    }
    Ok(out)
}

/// Columns of `a`, then those of `b`.
pub(crate) fn concat(a: &[f32], p: usize, b: &[f32], q: usize) -> Result<Vec<f32>> {
    let mut out: Vec<f32> = zeros((a.len() + b.len()) as u64)?;
    let rows = a.chunks_exact(p).zip(b.chunks_exact(q));
    for ((a, b), out) in rows.zip(out.chunks_exact_mut(p + q)) {
        out[..p].copy_from_slice(a);
        out[p..].copy_from_slice(b);
    }
    Ok(out)
}

/// For every group of a row `p` columns of `a`, then `q` of `b`. Rows are of `row_a` and `row_b`; an `a` of one group serves them all.
pub(crate) fn concat_groups(
    (a, row_a, p): (&[f32], usize, usize),
    (b, row_b, q): (&[f32], usize, usize),
) -> Result<Vec<f32>> {
    let n_groups = (b.len() / q) as u64;
    let mut out: Vec<f32> = zeros(n_groups.saturating_mul((p + q) as u64))?;
    let rows = a.chunks_exact(row_a).zip(b.chunks_exact(row_b));
    for ((a, b), out) in rows.zip(out.chunks_exact_mut(row_b / q * (p + q))) {
        let groups = a.chunks_exact(p).cycle().zip(b.chunks_exact(q));
        for ((a, b), out) in groups.zip(out.chunks_exact_mut(p + q)) {
            out[..p].copy_from_slice(a);
            out[p..].copy_from_slice(b);
        }
    }
    Ok(out)
}

/// Row `rows[i]` of `x` for every i.
pub(crate) fn gather(x: &[f32], row_len: usize, rows: &[i32]) -> Result<Vec<f32>> {
    let mut out: Vec<f32> = zeros((rows.len() as u64).saturating_mul(row_len as u64))?;
    let n = x.len() / row_len;
    for (row, out) in rows.iter().zip(out.chunks_exact_mut(row_len)) {
        let index = usize::try_from(*row).ok().filter(|row| *row < n);
        let index = index.ok_or_else(|| Error::invalid(format!("row {row} of {n}")))?;
        out.copy_from_slice(&x[index * row_len..][..row_len]);
    }
    Ok(out)
}

/// Index of the greatest element of each row, the first of equals. A NaN is less than everything.
pub(crate) fn argmax(x: &[f32], row_len: usize) -> Result<Vec<i32>> {
    x.chunks_exact(row_len)
        .map(|row| {
            let mut best = (0, rank(row[0]));
            for (i, x) in row.iter().enumerate() {
                if rank(*x) > best.1 {
                    best = (i, rank(*x));
                }
            }
            index(best.0)
        })
        .collect()
}

/// Indices and values of the `k` greatest elements of each row, in falling order, the first of equals before.
pub(crate) fn top_k(x: &[f32], row_len: usize, k: usize) -> Result<(Vec<i32>, Vec<f32>)> {
    let n = (x.len() / row_len * k) as u64;
    let (mut ids, mut values) = (zeros(n)?, zeros(n)?);
    let mut order: Vec<u32> = zeros(row_len as u64)?;
    let out = ids.chunks_exact_mut(k).zip(values.chunks_exact_mut(k));
    for (row, (ids, values)) in x.chunks_exact(row_len).zip(out) {
        for (i, column) in order.iter_mut().enumerate() {
            *column = index(i)?.unsigned_abs();
        }
        // Unstable, so that nothing is allocated; the index breaks ties.
        order.sort_unstable_by(|a, b| {
            rank(row[*b as usize]).total_cmp(&rank(row[*a as usize])).then(a.cmp(b))
        });
        for ((id, value), column) in ids.iter_mut().zip(values).zip(&order) {
            (*id, *value) = (index(*column as usize)?, row[*column as usize]);
        }
    }
    Ok((ids, values))
}

/// The order of elements: that of numbers, zeros of both signs equal, a NaN least.
fn rank(x: f32) -> f32 {
    if x.is_nan() { f32::NEG_INFINITY } else { x + 0.0 }
}

fn index(i: usize) -> Result<i32> {
    i32::try_from(i).map_err(|_| Error::invalid(format!("column {i} does not fit an i32")))
}
