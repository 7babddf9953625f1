//! Normalisation of rows: RMS, layer and L2.
//!
//! Sums run in four vectors of f32, which bounds their error by `n / (4 * lanes)` roundings; the one division and square
//! root per row are done in f64.

use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels, expect_len};

/// Which of the three, with its epsilon.
#[derive(Clone, Copy)]
enum Norm {
    /// `x / sqrt(mean(x^2) + eps)`.
    Rms(f32),
    /// `(x - mean) / sqrt(mean((x - mean)^2) + eps)`.
    Layer(f32),
    /// `x / sqrt(sum(x^2) + eps)`.
    L2(f32),
}

/// `out = (x - mean) * scale * weight + bias` for each row of `n`.
struct NormKernel<'a> {
    norm: Norm,
    n: usize,
    x: &'a [f32],
    weight: Option<&'a [f32]>,
    bias: Option<&'a [f32]>,
    out: &'a mut [f32],
}

/// `sum((x - mean)^2)`, or `sum(x)` where `squares` is false.
#[inline(always)]
fn sum<S: Simd>(s: S, x: &[f32], mean: f32, squares: bool) -> f32 {
    let m = s.splat(mean);
    let mut acc = [s.splat(0.0); 4];
    let step = 4 * S::LANES;
    let whole = x.len() / step * step;
    for i in (0..whole).step_by(step) {
        for (v, sum) in acc.iter_mut().enumerate() {
            // SAFETY: `i + step <= x.len()`.
            let value = unsafe { s.load(x.as_ptr().add(i + v * S::LANES)) };
            if squares {
                let d = s.sub(value, m);
                *sum = s.fma(d, d, *sum);
            } else {
                *sum = s.add(*sum, value);
            }
        }
    }
    let mut total = s.sum(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])));
    for &value in &x[whole..] {
        let d = value - mean;
        total += if squares { d * d } else { value };
    }
    total
}

impl Kernel for NormKernel<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = self.n;
        for (x, out) in self.x.chunks_exact(n).zip(self.out.chunks_exact_mut(n)) {
            let count = n as f64;
            let mean = match self.norm {
                Norm::Layer(_) => (f64::from(sum(s, x, 0.0, false)) / count) as f32,
                Norm::Rms(_) | Norm::L2(_) => 0.0,
            };
            let squares = f64::from(sum(s, x, mean, true));
            let scale = match self.norm {
                Norm::Rms(eps) | Norm::Layer(eps) => {
                    (squares / count + f64::from(eps)).sqrt().recip()
                }
                Norm::L2(eps) => (squares + f64::from(eps)).sqrt().recip(),
            } as f32;
            // Plain loops: the compiler vectorises them for the instruction set of the caller.
            match (self.weight, self.bias) {
                (None, None) => {
                    for (o, &v) in out.iter_mut().zip(x) {
                        *o = (v - mean) * scale;
                    }
                }
                (Some(weight), None) => {
                    for ((o, &v), &w) in out.iter_mut().zip(x).zip(weight) {
                        *o = (v - mean) * scale * w;
                    }
                }
                (weight, Some(bias)) => {
                    for (i, ((o, &v), &b)) in out.iter_mut().zip(x).zip(bias).enumerate() {
                        *o = (v - mean) * scale * weight.map_or(1.0, |w| w[i]) + b;
                    }
                }
            }
        }
    }
}

impl Kernels {
    fn norm(self, name: &'static str, kernel: NormKernel<'_>) -> Result<(), KernelError> {
        let n = kernel.n;
        if n == 0 || !kernel.x.len().is_multiple_of(n) {
            let allowed = "the row length must be positive and divide the length of x";
            return Err(KernelError::Shape {
                kernel: name,
                what: "the row length",
                got: n,
                allowed,
            });
        }
        expect_len(name, "out", &[kernel.x.len()], kernel.out.len())?;
        for (what, vector) in [("weight", kernel.weight), ("bias", kernel.bias)] {
            if let Some(vector) = vector {
                expect_len(name, what, &[n], vector.len())?;
            }
        }
        self.dispatch(kernel);
        Ok(())
    }

    /// `out = x / sqrt(mean(x^2) + eps) * weight`, for each row of `n` elements.
    ///
    /// # Errors
    /// [`KernelError`] when the lengths do not fit.
    pub fn rms_norm(
        self,
        n: usize,
        eps: f32,
        x: &[f32],
        weight: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.norm("rms_norm", NormKernel { norm: Norm::Rms(eps), n, x, weight, bias: None, out })
    }

    /// `out = (x - mean) / sqrt(variance + eps) * weight + bias`, for each row of `n` elements.
    ///
    /// # Errors
    /// [`KernelError`] when the lengths do not fit.
    pub fn layer_norm(
        self,
        n: usize,
        eps: f32,
        x: &[f32],
        weight: Option<&[f32]>,
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.norm("layer_norm", NormKernel { norm: Norm::Layer(eps), n, x, weight, bias, out })
    }

    /// `out = x / sqrt(sum(x^2) + eps)`, for each row of `n` elements.
    ///
    /// # Errors
    /// [`KernelError`] when the lengths do not fit.
    pub fn l2_norm(
        self,
        n: usize,
        eps: f32,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), KernelError> {
        self.norm(
            "l2_norm",
            NormKernel { norm: Norm::L2(eps), n, x, weight: None, bias: None, out },
        )
    }
}
