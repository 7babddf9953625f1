//! The greatest values of a row: argmax and top-k.
//!
//! NaN never wins; of equal values the one with the lower index comes first, so results do not depend on the vector
//! length.

use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels, expect_len};

struct MaxKernel<'a>(&'a [f32]);

impl Kernel for MaxKernel<'_> {
    type Output = f32;
    /// `max(value, best)` gives `best` where the value is NaN.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f32 {
        let x = self.0;
        let mut best = [s.splat(f32::NEG_INFINITY); 4];
        let step = 4 * S::LANES;
        let whole = x.len() / step * step;
        for i in (0..whole).step_by(step) {
            for (v, best) in best.iter_mut().enumerate() {
                // SAFETY: `i + step <= x.len()`.
                *best = s.max(unsafe { s.load(x.as_ptr().add(i + v * S::LANES)) }, *best);
            }
        }
        let mut max = s.max_lane(s.max(s.max(best[0], best[1]), s.max(best[2], best[3])));
        for &value in &x[whole..] {
            max = if value > max { value } else { max };
        }
        max
    }
}

/// Whether candidate `a` precedes `b`.
fn precedes(a: (f32, u32), b: (f32, u32)) -> bool {
    a.0 > b.0 || (a.0 == b.0 && a.1 < b.1)
}

/// Moves entry `i` of a heap whose root is the last in order down to its place.
fn sift_down(values: &mut [f32], indices: &mut [u32], mut i: usize) {
    let n = values.len();
    loop {
        let mut last = i;
        for child in [2 * i + 1, 2 * i + 2] {
            if child < n && precedes((values[last], indices[last]), (values[child], indices[child]))
            {
                last = child;
            }
        }
        if last == i {
            return;
        }
        values.swap(i, last);
        indices.swap(i, last);
        i = last;
    }
}

impl Kernels {
    /// The index of the greatest value, or `None` where there is none: an empty row, or NaN only.
    pub fn argmax(self, x: &[f32]) -> Option<usize> {
        let max = self.dispatch(MaxKernel(x));
        x.iter().position(|&v| v == max)
    }

    /// The `values.len()` greatest values of `x` and their indices, greatest first. Where fewer values are not NaN, the rest
    /// is filled with negative infinity and index `u32::MAX`.
    ///
    /// Values are kept in a heap whose root is the least of them; stretches of 64 that hold nothing above it, which are
    /// nearly all of a vocabulary, cost one vector maximum.
    ///
    /// # Errors
    /// [`KernelError`] when the outputs differ in length, or when `x` has 2^32 elements or more.
    pub fn top_k(
        self,
        x: &[f32],
        values: &mut [f32],
        indices: &mut [u32],
    ) -> Result<(), KernelError> {
        expect_len("top_k", "indices", &[values.len()], indices.len())?;
        if u32::try_from(x.len()).is_err() {
            let allowed = "indices are 32 bits wide";
            return Err(KernelError::Shape {
                kernel: "top_k",
                what: "the row length",
                got: x.len(),
                allowed,
            });
        }
        let k = values.len();
        if k == 0 {
            return Ok(());
        }
        values.fill(f32::NEG_INFINITY);
        indices.fill(u32::MAX);
        let mut base = 0u32;
        for part in x.chunks(64) {
            let max = self.dispatch(MaxKernel(part));
            if max > values[0] || indices[0] == u32::MAX {
                for (&value, index) in part.iter().zip(base..) {
                    if precedes((value, index), (values[0], indices[0])) {
                        (values[0], indices[0]) = (value, index);
                        sift_down(values, indices, 0);
                    }
                }
            }
            base = base.wrapping_add(64);
        }
        for end in (1..k).rev() {
            values.swap(0, end);
            indices.swap(0, end);
            sift_down(&mut values[..end], &mut indices[..end], 0);
        }
        Ok(())
    }
}
