//! What reads weight matrices: embed and matmul. A matrix is its rows, wherever their tiles lie.

use crate::values::zeros;
use crate::weight::Matrix;
use tegula_sdk::{Error, Result};

/// Row `ids[i]` of the table for every i: `[n, n_in]`.
pub(crate) fn embed(ids: &[i32], table: &Matrix) -> Result<Vec<f32>> {
    let mut out: Vec<f32> = zeros((ids.len() as u64).saturating_mul(table.n_in))?;
    let mut rows = table.rows()?;
    let n_in = usize::try_from(table.n_in).unwrap_or(usize::MAX);
    for (token, (id, out)) in ids.iter().zip(out.chunks_exact_mut(n_in)).enumerate() {
        let row = u64::try_from(*id).ok().filter(|row| *row < table.n_rows);
        let row = row.ok_or_else(|| {
            let n_vocab = table.n_rows;
            Error::invalid(format!("token {token} has id {id}; the table has {n_vocab} rows"))
        })?;
        out.copy_from_slice(rows.get(row)?);
    }
    Ok(out)
}

/// `x W^T + bias` for x `[n, n_in]` and W `[n_rows, n_in]`. Each row of W is decoded once.
pub(crate) fn matmul(x: &[f32], weight: &Matrix, bias: Option<&[f32]>) -> Result<Vec<f32>> {
    let n_in = usize::try_from(weight.n_in).unwrap_or(usize::MAX);
    let n_rows = usize::try_from(weight.n_rows).unwrap_or(usize::MAX);
    let n = x.len() / n_in;
    let mut out: Vec<f32> = zeros((n as u64).saturating_mul(weight.n_rows))?;
    let mut rows = weight.rows()?;
    for row in 0..n_rows {
        let w = rows.get(row as u64)?;
        let bias = bias.and_then(|bias| bias.get(row)).copied().unwrap_or(0.0);
        let column = out.iter_mut().skip(row).step_by(n_rows);
        for (x, out) in x.chunks_exact(n_in).zip(column) {
            *out = (dot(x, w) + f64::from(bias)) as f32;
        }
    }
    Ok(out)
}

/// The sum of products in f64, in eight partial sums: a single one would wait for each addition.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f64 {
    let (a, a_rest) = a.as_chunks::<8>();
    let (b, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0f64; 8];
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            sums[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b));
    sums.iter().sum::<f64>() + rest.sum::<f64>()
}
