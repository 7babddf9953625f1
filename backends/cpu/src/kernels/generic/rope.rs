//! Rotary position embedding: a table of cosines and sines for the tokens of a run, then rotations.
//!
//! Angles are computed in f64 and rounded once as cosine and sine: an f32 angle at position 100,000 is already off by
//! 0.004. The table is the same for every layer with the same parameters, so its cost is paid once per run.

use super::shared::SharedMut;
use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels, expect_len};

/// Which elements of a head form a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RopeStyle {
    /// `(x[2i], x[2i + 1])`, ggml's "norm".
    Interleaved,
    /// `(x[i], x[i + n_rot / 2])`, ggml's "neox".
    Halves,
}

/// How fast each pair turns: pair `i` by `position * freq_scale * freq_base^(-2i / n_rot) / freq_factors[i]` radians.
#[derive(Clone, Copy, Debug)]
pub struct RopeParams<'a> {
    /// Elements of a head that turn; even. The others are left alone.
    pub n_rot: usize,
    /// Usually 10,000 or more.
    pub freq_base: f64,
    /// 1, or the inverse of a linear context extension.
    pub freq_scale: f64,
    /// Multiplies cosines and sines; 1 unless the model scales attention through them.
    pub magnitude: f64,
    /// `[n_rot / 2]` divisors.
    pub freq_factors: Option<&'a [f32]>,
}

impl RopeParams<'_> {
    /// f32 in the table for `n_tokens`.
    pub fn table_len(&self, n_tokens: usize) -> usize {
        n_tokens.saturating_mul(self.n_rot)
    }
}

/// Fills `table` for these positions: per token `n_rot / 2` cosines, then as many sines.
///
/// # Errors
/// [`KernelError`] when `n_rot` is odd or a length does not fit.
pub fn rope_table(
    params: &RopeParams<'_>,
    positions: &[u32],
    table: &mut [f32],
) -> Result<(), KernelError> {
    let n_rot = params.n_rot;
    if !n_rot.is_multiple_of(2) {
        return Err(KernelError::Shape {
            kernel: "rope",
            what: "n_rot",
            got: n_rot,
            allowed: "it must be even",
        });
    }
    expect_len("rope", "table", &[positions.len(), n_rot], table.len())?;
    let half = n_rot / 2;
    if let Some(factors) = params.freq_factors {
        expect_len("rope", "freq_factors", &[half], factors.len())?;
    }
    for i in 0..half {
        let exponent = -2.0 * i as f64 / n_rot as f64;
        let factor = params.freq_factors.map_or(1.0, |f| f64::from(f[i]));
        let step = params.freq_scale * params.freq_base.powf(exponent) / factor;
        for (token, &position) in table.chunks_exact_mut(n_rot).zip(positions) {
            let (sin, cos) = (f64::from(position) * step).sin_cos();
            token[i] = (cos * params.magnitude) as f32;
            token[half + i] = (sin * params.magnitude) as f32;
        }
    }
    Ok(())
}

struct RopeKernel<'a> {
    style: RopeStyle,
    n_rot: usize,
    n_head: usize,
    head_dim: usize,
    table: &'a [f32],
    x: &'a mut [f32],
}

impl Kernel for RopeKernel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let half = self.n_rot / 2;
        let tokens = self.x.chunks_exact_mut(self.n_head * self.head_dim);
        for (token, table) in tokens.zip(self.table.chunks_exact(self.n_rot)) {
            let (cos, sin) = table.split_at(half);
            for head in token.chunks_exact_mut(self.head_dim) {
                match self.style {
                    RopeStyle::Interleaved => interleaved(head, cos, sin),
                    RopeStyle::Halves => halves(s, head, cos, sin),
                }
            }
        }
    }
}

/// A plain loop: the compiler turns the strided accesses into shuffles of the caller's instruction set.
#[inline(always)]
fn interleaved(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    for ((pair, &c), &n) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
        let [a, b] = *pair;
        *pair = [a * c - b * n, a * n + b * c];
    }
}

#[inline(always)]
fn halves<S: Simd>(s: S, head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    let head = SharedMut::new(head);
    // SAFETY: the two parts do not overlap.
    let (first, second) = unsafe { (head.slice(0, half), head.slice(half, half)) };
    let whole = half / S::LANES * S::LANES;
    for i in (0..whole).step_by(S::LANES) {
        // SAFETY: all four slices have `half` elements.
        unsafe {
            let (a, b) = (s.load(first.as_ptr().add(i)), s.load(second.as_ptr().add(i)));
            let (c, n) = (s.load(cos.as_ptr().add(i)), s.load(sin.as_ptr().add(i)));
            s.store(first.as_mut_ptr().add(i), s.sub(s.mul(a, c), s.mul(b, n)));
            s.store(second.as_mut_ptr().add(i), s.fma(a, n, s.mul(b, c)));
        }
    }
    for i in whole..half {
        let (a, b) = (first[i], second[i]);
        first[i] = a * cos[i] - b * sin[i];
        second[i] = a * sin[i] + b * cos[i];
    }
}

impl Kernels {
    /// Turns the first `n_rot` elements of every head of `x`, `[n_tokens, n_head, head_dim]`, in place, by a table that
    /// [`rope_table`] has filled for the same tokens.
    ///
    /// # Errors
    /// [`KernelError`] when the lengths do not fit.
    pub fn rope(
        self,
        style: RopeStyle,
        n_rot: usize,
        n_head: usize,
        head_dim: usize,
        table: &[f32],
        x: &mut [f32],
    ) -> Result<(), KernelError> {
        if n_rot == 0
            || n_rot > head_dim
            || !n_rot.is_multiple_of(2)
            || !table.len().is_multiple_of(n_rot)
        {
            let allowed = "it must be even, positive, at most head_dim, and that of the table";
            return Err(KernelError::Shape { kernel: "rope", what: "n_rot", got: n_rot, allowed });
        }
        expect_len("rope", "x", &[table.len() / n_rot, n_head, head_dim], x.len())?;
        if !x.is_empty() {
            self.dispatch(RopeKernel { style, n_rot, n_head, head_dim, table, x });
        }
        Ok(())
    }
}
