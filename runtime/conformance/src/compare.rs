//! Results against the oracle's.

use crate::bounds::{Bound, stored_step};
use crate::data::{f32s, i32s};
use crate::rounding::Rounded;
use crate::session::SENTINEL;
use crate::{Result, wrong};
use tegula_program::{DType, KvLayer};
use tegula_quant::dequantize;

/// The error of `got`, if it is within the bound. Integers must be the same.
pub(crate) fn check(dtype: DType, got: &[u8], want: &[u8], bound: &Bound) -> Result<f64> {
    check_by(dtype, got, want, bound, None)
}

/// As [`check`], of a product whose activations may be rounded: the error is measured by the terms of its sums.
pub(crate) fn check_rounded(
    dtype: DType,
    got: &[u8],
    want: &[u8],
    bound: &Bound,
    rounded: &Rounded,
) -> Result<f64> {
    check_by(dtype, got, want, bound, Some(rounded))
}

fn check_by(
    dtype: DType,
    got: &[u8],
    want: &[u8],
    bound: &Bound,
    rounded: Option<&Rounded>,
) -> Result<f64> {
    if got.len() != want.len() {
        return wrong(format!("{} bytes, the oracle makes {}", got.len(), want.len()));
    }
    if dtype != DType::F32 {
        let (got, want) = (i32s(got), i32s(want));
        let first = got.iter().zip(&want).position(|(got, want)| got != want);
        return first.map_or(Ok(0.0), |i| {
            wrong(format!("element {i} is {}, the oracle says {}", got[i], want[i]))
        });
    }
    let (got, want) = (f32s(got), f32s(want));
    let (mut error, mut size, mut worst) = (0.0, 0.0, (0.0, 0));
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        // The same infinity has no difference; a number and none, or two infinities, have one that is not finite.
        let difference = if got == want { 0.0 } else { (f64::from(*got) - f64::from(*want)).abs() };
        let are_both_nan = got.is_nan() && want.is_nan();
        if !difference.is_finite() && !are_both_nan {
            return wrong(format!("element {i} is {got}, the oracle says {want}"));
        }
        if difference > worst.0 {
            worst = (difference, i);
        }
        error += if difference.is_nan() { 0.0 } else { difference * difference };
        size += if want.is_finite() { f64::from(*want).powi(2) } else { 0.0 };
    }
    let (size, allowed) = match rounded {
        Some(rounded) => (rounded.terms, bound.nmse * rounded.excess()),
        None => (size, bound.nmse),
    };
    let nmse = if error == 0.0 { 0.0 } else { error / size.max(f64::MIN_POSITIVE) };
    if nmse <= allowed {
        return Ok(nmse);
    }
    let i = worst.1;
    wrong(format!(
        "error {nmse:.1e} of {allowed:.1e} allowed to {} ({}); element {i} of {} is {}, the oracle says {}",
        bound.what,
        bound.reason,
        got.len(),
        got[i],
        want[i]
    ))
}

/// Compares the bytes of one KV tile, row by row: rows that nobody stored keep the sentinel, stored ones are near.
pub(crate) fn check_kv(layer: &KvLayer, side: usize, got: &[u8], want: &[u8]) -> Result<()> {
    let (dtype, head_dim) = match side {
        0 => (layer.dtype_k, layer.head_dim_k),
        _ => (layer.dtype_v, layer.head_dim_v),
    };
    let row_bytes = usize::try_from(dtype.row_bytes(head_dim.into())?).unwrap_or(usize::MAX);
    let mut rows = (vec![0.0; head_dim as usize], vec![0.0; head_dim as usize]);
    if got.len() != want.len() {
        return wrong(format!("a KV tile of {} bytes, {} by the oracle", got.len(), want.len()));
    }
    let both = got.chunks_exact(row_bytes).zip(want.chunks_exact(row_bytes));
    for (i, (got, want)) in both.enumerate() {
        if got == want {
            continue;
        }
        if want.iter().all(|byte| *byte == SENTINEL) {
            return wrong(format!("row {i} of a KV tile was written, no token is stored there"));
        }
        dequantize(dtype, got, &mut rows.0)?;
        dequantize(dtype, want, &mut rows.1)?;
        let step = stored_step(dtype);
        let most = rows.1.iter().fold(0.0f32, |most, v| most.max(v.abs())) * step;
        let far = rows.0.iter().zip(&rows.1).position(|(got, want)| {
            let difference = (got - want).abs();
            difference.is_nan() || difference > most
        });
        if let Some(at) = far {
            return wrong(format!(
                "row {i} of a KV tile of {dtype}: element {at} is {}, the oracle stores {}",
                rows.0[at], rows.1[at]
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounds::{COPY, MATMUL};
    use crate::data::{f32_bytes, i32_bytes};

    /// A comparison that lets things pass makes every test of the suite worthless.
    #[test]
    fn what_is_wrong_is_seen() {
        const NAN: f32 = f32::NAN;
        const INF: f32 = f32::INFINITY;
        let check_floats = |got: &[f32], want: &[f32], expected: bool| {
            let result = check(DType::F32, &f32_bytes(got), &f32_bytes(want), MATMUL);
            assert_eq!(result.is_ok(), expected, "{got:?} {want:?}: {result:?}");
        };
        check_floats(&[1.0, 2.0], &[1.0, 2.0], true);
        check_floats(&[1.0, 2.000_001], &[1.0, 2.0], true);
        check_floats(&[1.0, 2.001], &[1.0, 2.0], false);
        check_floats(&[NAN, 2.0], &[1.0, 2.0], false);
        check_floats(&[1.0, 2.0], &[NAN, 2.0], false);
        check_floats(&[INF, 2.0], &[1.0, 2.0], false);
        check_floats(&[INF, 2.0], &[INF, 2.0], true);
        check_floats(&[INF, 2.0], &[-INF, 2.0], false);
        check_floats(&[NAN, 2.0], &[NAN, 2.0], true);
        check_floats(&[1e-20], &[0.0], false);
        check_floats(&[1.0], &[1.0, 2.0], false);
        let exact = check(DType::F32, &f32_bytes(&[1.000_000_1]), &f32_bytes(&[1.0]), COPY);
        assert!(exact.is_err());
        let ids = check(DType::I32, &i32_bytes(&[1, 2]), &i32_bytes(&[1, 3]), COPY);
        assert!(ids.unwrap_err().to_string().contains("element 1 is 2, the oracle says 3"));
    }
}
