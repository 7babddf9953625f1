//! What rounding activations to 16 bits may cost a product, as a part of what: the measure of [`crate::bounds::MATMUL_BLOCKS`].
//!
//! Results are sums that may cancel: the one result of a matrix of one row may be a thousandth of its terms, and the same error then is a
//! thousand times as great beside it. What rounding costs does not cancel with the terms, so errors are measured by what it depends on.

use crate::Result;
use tegula_quant::{DType, dequantize};

/// Activations that are rounded alike.
const RUN: usize = 32;

/// The results of one run, as rounding sees them.
#[derive(Debug, Clone, Copy)]
pub struct Rounded {
    /// Sum over all results, and over their runs of 32 terms, of the square of the run's greatest activation times the sum of squares of its
    /// weights.
    pub terms: f64,
    /// Tokens: their activations, and so their errors, have nothing to do with each other.
    pub n_tokens: u32,
}

impl Rounded {
    /// How far above its expectation the error of a correct kernel may be: `1 + 8.5 / sqrt(n) + 36 / n` for n tokens.
    ///
    /// Each token adds the square of a sum of many small errors, hence of a normal variable, or several such squares, which spread less. The
    /// mean of n squares exceeds `1 + 2 sqrt(x / n) + 2 x / n` with a probability below `exp(-x)` (Laurent and Massart, "Adaptive
    /// estimation of a quadratic functional", lemma 1); x is 18 here, so that one of 60 million correct kernels fails.
    pub(crate) fn excess(&self) -> f64 {
        let n = f64::from(self.n_tokens.max(1));
        1.0 + 8.5 / n.sqrt() + 36.0 / n
    }
}

/// Sums of squares of weights over runs of 32 columns, each of the rows of one expert, or of a whole matrix.
pub(crate) struct Weights {
    n_in: usize,
    /// `[experts][runs]`.
    squares: Vec<f64>,
}

impl Weights {
    pub(crate) fn new(dtype: DType, bytes: &[u8], n_in: u64, n_expert: u32) -> Result<Self> {
        let n_in = usize::try_from(n_in).unwrap_or(usize::MAX);
        let row_bytes = n_in / dtype.block_len() * dtype.block_bytes();
        let (runs, n_rows) = (n_in.div_ceil(RUN), bytes.len() / row_bytes);
        let n_expert = n_expert.max(1) as usize;
        let (mut row, mut squares) = (vec![0.0; n_in], vec![0.0; n_expert * runs]);
        for (i, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
            dequantize(dtype, bytes, &mut row)?;
            let squares = &mut squares[i / (n_rows / n_expert) * runs..][..runs];
            for (sum, weights) in squares.iter_mut().zip(row.chunks(RUN)) {
                *sum += weights.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>();
            }
        }
        Ok(Self { n_in, squares })
    }

    /// The terms of the products of `row` with the rows of an expert.
    pub(crate) fn terms(&self, row: &[f32], expert: usize) -> f64 {
        let runs = self.n_in.div_ceil(RUN);
        let greatest = |x: &[f32]| x.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        let greatest = row.chunks(RUN).map(|x| f64::from(greatest(x)).powi(2));
        greatest.zip(&self.squares[expert * runs..]).map(|(x, w)| x * w).sum()
    }

    /// The terms of a plain product.
    pub(crate) fn product(&self, x: &[f32], n_tokens: u32) -> Rounded {
        let terms = x.chunks_exact(self.n_in).map(|row| self.terms(row, 0)).sum();
        Rounded { terms, n_tokens }
    }

    /// The terms of a product with the experts `ids`, of which `sharing` read one row of `x`.
    pub(crate) fn experts(&self, x: &[f32], ids: &[i32], sharing: u32, n_tokens: u32) -> Rounded {
        let slots = ids.iter().enumerate().map(|(slot, id)| {
            let row = &x[slot / sharing.max(1) as usize * self.n_in..][..self.n_in];
            self.terms(row, id.unsigned_abs() as usize)
        });
        Rounded { terms: slots.sum(), n_tokens }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;
    use crate::bounds::MATMUL_BLOCKS;
    use crate::compare::check_rounded;
    use crate::data::{Rng, f32_bytes};

    /// Activations in steps of `2^-bits` of the power of two below the greatest of each run.
    fn round(x: &[f32], bits: i32) -> Vec<f32> {
        let mut out = x.to_vec();
        for run in out.chunks_mut(RUN) {
            let greatest = run.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            let step = (f64::from(greatest).log2().floor() - f64::from(bits)).exp2();
            for x in run {
                *x = ((f64::from(*x) / step).round() * step) as f32;
            }
        }
        out
    }

    fn product(x: &[f32], w: &[f32], n_in: usize) -> Vec<f32> {
        let dot = |x: &[f32], w: &[f32]| -> f64 {
            x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
        };
        let rows = x.chunks_exact(n_in).flat_map(|x| w.chunks_exact(n_in).map(move |w| (x, w)));
        rows.map(|(x, w)| dot(x, w) as f32).collect()
    }

    /// A bound that fails a correct kernel makes people raise it; one that passes a fault makes the suite worthless.
    #[test]
    fn rounding_passes_and_faults_do_not() {
        for (n_rows, n_tokens) in [(1, 1), (1, 17), (3, 1), (29, 3), (67, 64)] {
            for seed in 0..40 {
                let mut rng = Rng::of(&format!("{n_rows} {n_tokens} {seed}"));
                let n_in = 288usize;
                let bytes = rng.weights(DType::Q8_0, n_rows * n_in as u64).unwrap();
                let mut w = vec![0.0; bytes.len() / 34 * 32];
                dequantize(DType::Q8_0, &bytes, &mut w).unwrap();
                let x = rng.vec(u64::from(n_tokens) * n_in as u64, 3.0);
                let weights = Weights::new(DType::Q8_0, &bytes, n_in as u64, 1).unwrap();
                let rounded = weights.product(&x, n_tokens);
                let want = f32_bytes(&product(&x, &w, n_in));
                let passes = |got: &[f32]| {
                    let got = f32_bytes(got);
                    check_rounded(DType::F32, &got, &want, MATMUL_BLOCKS, &rounded).is_ok()
                };
                let at = format!("{n_rows} rows, {n_tokens} tokens, seed {seed}");
                assert!(passes(&product(&x, &w, n_in)), "exact, {at}");
                assert!(passes(&product(&round(&x, 14), &w, n_in)), "rounded, {at}");
                // One result may be right by chance; so few bits are not, in any number of them.
                assert!(n_rows == 1 || !passes(&product(&round(&x, 7), &w, n_in)), "8 bits, {at}");
                let mut scale = w.clone();
                for row in scale.chunks_exact_mut(n_in) {
                    row[32..64].iter_mut().for_each(|w| *w *= 1.01);
                }
                assert!(n_tokens == 1 || !passes(&product(&x, &scale, n_in)), "a scale, {at}");
                let mut dropped = product(&x, &w, n_in);
                *dropped.last_mut().unwrap() = 0.0;
                assert!(n_rows == 1 || !passes(&dropped), "a result, {at}");
                let mut shifted = w.clone();
                shifted.rotate_left(32);
                assert!(!passes(&product(&x, &shifted, n_in)), "the next block, {at}");
            }
        }
    }
}
