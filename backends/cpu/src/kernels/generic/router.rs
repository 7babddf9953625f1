//! The small ops around experts: which experts a token goes to, and the sum of what they make.
//!
//! The choice is made in f64 from the router's f32 logits, as its definition reads: rounding there could turn one expert for another, which
//! is no small error. A row has some hundred logits, so that costs microseconds.

use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels, expect_len, expect_scratch};

/// From a router's logits to the weights of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each.
    Sigmoid,
    /// Softmax over the selected experts alone.
    SoftmaxSelected,
}

/// How experts are chosen and weighed.
#[derive(Clone, Copy, Debug)]
pub struct Router<'a> {
    /// Experts that there are.
    pub n_expert: usize,
    /// Experts of a token, at most `n_expert`.
    pub k: usize,
    /// How logits become weights.
    pub gating: Gating,
    /// Weights are divided by their sum.
    pub normalise: bool,
    /// Multiplies the weights.
    pub scale: f32,
    /// `[n_expert]`, added for the choice alone.
    pub bias: Option<&'a [f32]>,
}

fn softmax(x: &mut [f64]) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

impl Router<'_> {
    /// f32 of scratch of one thread: probabilities in f64, scores, and those of the chosen.
    pub fn scratch_len(n_expert: usize) -> usize {
        n_expert.saturating_mul(6).saturating_add(2)
    }

    /// One row.
    fn row(
        &self,
        kernels: Kernels,
        logits: &[f32],
        ids: &mut [u32],
        weights: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<(), KernelError> {
        let skip = scratch.as_ptr().align_offset(align_of::<f64>()).min(1);
        let (p, scores) = scratch[skip..].split_at_mut(4 * self.n_expert);
        // SAFETY: aligned, twice as many f32 as f64 are asked for, and every pattern is valid.
        let p = unsafe {
            std::slice::from_raw_parts_mut(p.as_mut_ptr().cast::<f64>(), 2 * self.n_expert)
        };
        let (p, chosen) = p.split_at_mut(self.n_expert);
        let (scores, chosen) = (&mut scores[..self.n_expert], &mut chosen[..self.k]);
        p.iter_mut().zip(logits).for_each(|(p, logit)| *p = f64::from(*logit));
        match self.gating {
            Gating::Softmax => softmax(p),
            Gating::Sigmoid => p.iter_mut().for_each(|p| *p = 1.0 / (1.0 + (-*p).exp())),
            Gating::SoftmaxSelected => {}
        }
        for (i, (score, p)) in scores.iter_mut().zip(&*p).enumerate() {
            *score = (p + self.bias.map_or(0.0, |bias| f64::from(bias[i]))) as f32;
            // NaN is less than everything, and as much as the least number: the first of them before.
            if score.is_nan() {
                *score = f32::NEG_INFINITY;
            }
        }
        kernels.top_k(scores, weights, ids)?;
        for (chosen, id) in chosen.iter_mut().zip(&*ids) {
            *chosen = p[*id as usize];
        }
        if self.gating == Gating::SoftmaxSelected {
            softmax(chosen);
        }
        let sum = if self.normalise { chosen.iter().sum::<f64>().max(1e-20) } else { 1.0 };
        for (weight, chosen) in weights.iter_mut().zip(&*chosen) {
            *weight = (chosen / sum * f64::from(self.scale)) as f32;
        }
        Ok(())
    }
}

/// `y[i] = sum over j of weights[j] * x[j * m + i]`, for each row.
struct CombineKernel<'a> {
    m: usize,
    k: usize,
    x: &'a [f32],
    weights: &'a [f32],
    y: &'a mut [f32],
}

impl Kernel for CombineKernel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { m, k, .. } = self;
        let rows = self.x.chunks_exact(m * k).zip(self.weights.chunks_exact(k));
        let whole = m / S::LANES * S::LANES;
        for ((x, weights), y) in rows.zip(self.y.chunks_exact_mut(m)) {
            for i in (0..whole).step_by(S::LANES) {
                let mut sum = s.splat(0.0);
                for (j, weight) in weights.iter().enumerate() {
                    // SAFETY: `i + LANES <= m`, and x has `k` rows of `m`, y one.
                    let part = unsafe { s.load(x.as_ptr().add(j * m + i)) };
                    sum = s.fma(s.splat(*weight), part, sum);
                }
                // SAFETY: as above.
                unsafe { s.store(y.as_mut_ptr().add(i), sum) };
            }
            for i in whole..m {
                let mut sum = 0.0;
                for (j, weight) in weights.iter().enumerate() {
                    sum += weight * x[j * m + i];
                }
                y[i] = sum;
            }
        }
    }
}

impl Kernels {
    /// The experts of each row of `logits`, in falling order, and their weights. `scratch` holds at least [`Router::scratch_len`].
    ///
    /// # Errors
    /// [`KernelError`] when lengths or numbers do not fit each other.
    pub fn router_topk(
        self,
        router: &Router<'_>,
        logits: &[f32],
        ids: &mut [u32],
        weights: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<(), KernelError> {
        const KERNEL: &str = "router_topk";
        let Router { n_expert, k, .. } = *router;
        if k == 0 || k > n_expert {
            return Err(KernelError::Shape {
                kernel: KERNEL,
                what: "k",
                got: k,
                allowed: "it must be positive and at most the number of experts",
            });
        }
        let n = logits.len() / n_expert;
        expect_len(KERNEL, "logits", &[n, n_expert], logits.len())?;
        expect_len(KERNEL, "ids", &[n, k], ids.len())?;
        expect_len(KERNEL, "weights", &[n, k], weights.len())?;
        if let Some(bias) = router.bias {
            expect_len(KERNEL, "bias", &[n_expert], bias.len())?;
        }
        expect_scratch(KERNEL, Router::scratch_len(n_expert), scratch.len())?;
        let out = ids.chunks_exact_mut(k).zip(weights.chunks_exact_mut(k));
        for (logits, (ids, weights)) in logits.chunks_exact(n_expert).zip(out) {
            router.row(self, logits, ids, weights, scratch)?;
        }
        Ok(())
    }

    /// The sum of each row's `k` parts of `m` columns, weighted: `x` is `[n, k * m]`, `weights` `[n, k]`, `y` `[n, m]`.
    ///
    /// # Errors
    /// [`KernelError`] when the lengths do not fit.
    pub fn combine_experts(
        self,
        m: usize,
        x: &[f32],
        weights: &[f32],
        y: &mut [f32],
    ) -> Result<(), KernelError> {
        const KERNEL: &str = "combine_experts";
        let n = y.len() / m.max(1);
        let k = weights.len() / n.max(1);
        expect_len(KERNEL, "y", &[n, m], y.len())?;
        expect_len(KERNEL, "weights", &[n, k], weights.len())?;
        expect_len(KERNEL, "x", &[n, k, m], x.len())?;
        if n > 0 && m > 0 && k > 0 {
            self.dispatch(CombineKernel { m, k, x, weights, y });
        }
        Ok(())
    }
}
