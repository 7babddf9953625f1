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

/// Experts by groups of neighbours, of which the best are searched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouterGroups {
    /// Groups; divides the number of experts.
    pub n_group: usize,
    /// Groups that are searched.
    pub n_used: usize,
    /// A group's score is the sum of so many of its best.
    pub n_score: usize,
}

impl RouterGroups {
    /// All experts are searched.
    pub const ONE: Self = Self { n_group: 1, n_used: 1, n_score: 1 };

    /// Leaves the scores of the searched groups at the start of `scores`, in order. `sums` has an element for each group, `used` gets the
    /// numbers of the searched ones. Gives how many scores are left.
    fn search(&self, scores: &mut [f32], sums: &mut [f32], used: &mut [f32]) -> usize {
        let len = scores.len() / self.n_group;
        for (sum, group) in sums.iter_mut().zip(scores.chunks_exact(len)) {
            let best = |i: &usize| rank(group, *i) < self.n_score;
            let total: f64 = (0..len).filter(best).map(|i| f64::from(group[i])).sum();
            *sum = if total.is_nan() { f32::NEG_INFINITY } else { total as f32 };
        }
        let mut n = 0;
        for group in (0..self.n_group).filter(|group| rank(sums, *group) < self.n_used) {
            scores.copy_within(group * len..(group + 1) * len, n * len);
            // A number of a group is far below 2^24.
            used[n] = group as f32;
            n += 1;
        }
        n * len
    }
}

/// How many elements come before element i: the greater ones, and of equals the earlier ones.
fn rank(x: &[f32], i: usize) -> usize {
    let before = |(j, y): (usize, &f32)| *y > x[i] || (*y == x[i] && j < i);
    x.iter().enumerate().filter(|other| before(*other)).count()
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
    /// Which experts are searched.
    pub groups: RouterGroups,
}

fn softmax(x: &mut [f64]) {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

impl Router<'_> {
    /// f32 of scratch of one thread: probabilities in f64, scores, those of the chosen and those of groups.
    pub fn scratch_len(n_expert: usize) -> usize {
        n_expert.saturating_mul(8).saturating_add(2)
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
        let (scores, of_groups) = scores.split_at_mut(self.n_expert);
        let (sums, used) = of_groups.split_at_mut(self.groups.n_group);
        let chosen = &mut chosen[..self.k];
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
        if self.groups.n_used < self.groups.n_group {
            let n = self.groups.search(scores, sums, used);
            kernels.top_k(&scores[..n], weights, ids)?;
            let len = self.n_expert / self.groups.n_group;
            for id in ids.iter_mut() {
                let at = *id as usize;
                // Less than the number of experts, whose ids are 32 bits.
                *id = (used[at / len] as usize * len + at % len) as u32;
            }
        } else {
            kernels.top_k(scores, weights, ids)?;
        }
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
        let RouterGroups { n_group, n_used, n_score } = router.groups;
        let len = n_expert.checked_div(n_group).filter(|len| len * n_group == n_expert);
        let fits = |len: usize| {
            (1..=n_group).contains(&n_used) && (1..=len).contains(&n_score) && k <= n_used * len
        };
        if !len.is_some_and(fits) {
            return Err(KernelError::Shape {
                kernel: KERNEL,
                what: "n_group",
                got: n_group,
                allowed: "it must divide the number of experts, and the searched groups must hold k of them",
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
