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

/// Fills `table` for these positions: per token one cosine for each frequency, then as many sines, all times `magnitude`. Pair `i` turns by
/// `position * frequencies[i]` radians; angles are f64, so that position 100,000 is as exact as position 1.
///
/// # Errors
/// [`KernelError`] when the table's length does not fit.
pub fn rope_table(
    frequencies: &[f64],
    magnitude: f64,
    positions: &[i32],
    table: &mut [f32],
) -> Result<(), KernelError> {
    let half = frequencies.len();
    expect_len("rope", "table", &[positions.len(), half * 2], table.len())?;
    for (token, position) in table.chunks_exact_mut((half * 2).max(1)).zip(positions) {
        let (cosines, sines) = token.split_at_mut(half);
        for ((frequency, c), s) in frequencies.iter().zip(cosines).zip(sines) {
            let (sin, cos) = (f64::from(*position) * frequency).sin_cos();
            *c = (cos * magnitude) as f32;
            *s = (sin * magnitude) as f32;
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
