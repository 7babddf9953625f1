//! Arithmetic of attention on the host: small matrix products, exponentials, decoding of stored rows.
//!
//! Plain loops over arrays of fixed size, which the compiler turns into vectors. The same code is compiled for AVX2 with fused multiply-adds and for the
//! target's baseline; the choice is made once.

#![expect(
    unsafe_code,
    reason = "functions compiled for more than the baseline are called after asking the processor"
)]

use half::slice::HalfFloatSliceExt;
use tegula_sdk::quant::{DType, dequantize_row_fn};

/// Columns of a register tile.
const N: usize = 16;

/// A matrix in memory: elements, and elements from one row to the next.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
}

/// Which code runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernels {
    has_fma: bool,
}

impl Kernels {
    /// The best this processor can do.
    pub(crate) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        let has_fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        #[cfg(not(target_arch = "x86_64"))]
        let has_fma = false;
        Self { has_fma }
    }

    /// `c[m, n] += a[m, k] * b[k, n]`; rows of `c` are `ldc` apart.
    pub(crate) fn product(
        self,
        (m, n, k): (usize, usize, usize),
        a: Matrix<'_>,
        b: Matrix<'_>,
        c: &mut [f32],
        ldc: usize,
    ) {
        #[cfg(target_arch = "x86_64")]
        if self.has_fma {
            // SAFETY: the processor has AVX2 and FMA.
            return unsafe { product_avx2((m, n, k), a, b, c, ldc) };
        }
        product::<false>((m, n, k), a, b, c, ldc);
    }

    /// `out[r, j] = a[r] . b[j]` for few rows.
    pub(crate) fn dots(
        self,
        (m, n, k): (usize, usize, usize),
        a: Matrix<'_>,
        b: Matrix<'_>,
        out: &mut [f32],
        ldc: usize,
    ) {
        #[cfg(target_arch = "x86_64")]
        if self.has_fma {
            // SAFETY: the processor has AVX2 and FMA.
            return unsafe { dots_avx2((m, n, k), a, b, out, ldc) };
        }
        dots::<false>((m, n, k), a, b, out, ldc);
    }

    /// `x = exp(x - top)` for all elements, none of which is above `top`; gives their sum.
    pub(crate) fn exponentials(self, x: &mut [f32], top: f32) -> f32 {
        #[cfg(target_arch = "x86_64")]
        if self.has_fma {
            // SAFETY: the processor has AVX2 and FMA.
            return unsafe { exponentials_avx2(x, top) };
        }
        exponentials::<false>(x, top)
    }

    /// Decodes stored rows.
    pub(crate) fn decode(self, dtype: DType, src: &[u8], dst: &mut [f32]) {
        match dtype {
            DType::F16 if src.as_ptr().cast::<half::f16>().is_aligned() => {
                // SAFETY: aligned, and any two bytes are an f16.
                let halves = unsafe {
                    std::slice::from_raw_parts(src.as_ptr().cast::<half::f16>(), src.len() / 2)
                };
                let n = halves.len().min(dst.len());
                halves[..n].convert_to_f32_slice(&mut dst[..n]);
            }
            _ => dequantize_row_fn(dtype)(src, dst),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn product_avx2(
    shape: (usize, usize, usize),
    a: Matrix<'_>,
    b: Matrix<'_>,
    c: &mut [f32],
    ldc: usize,
) {
    product::<true>(shape, a, b, c, ldc);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn dots_avx2(
    shape: (usize, usize, usize),
    a: Matrix<'_>,
    b: Matrix<'_>,
    c: &mut [f32],
    ldc: usize,
) {
    dots::<true>(shape, a, b, c, ldc);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn exponentials_avx2(x: &mut [f32], top: f32) -> f32 {
    exponentials::<true>(x, top)
}

#[inline(always)]
fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn product<const FMA: bool>(
    (m, n, k): (usize, usize, usize),
    a: Matrix<'_>,
    b: Matrix<'_>,
    c: &mut [f32],
    ldc: usize,
) {
    let mut row = 0;
    while row < m {
        let rows = (m - row).min(4);
        match rows {
            4 => rows_of::<4, FMA>(row, n, k, a, b, c, ldc),
            3 => rows_of::<3, FMA>(row, n, k, a, b, c, ldc),
            2 => rows_of::<2, FMA>(row, n, k, a, b, c, ldc),
            _ => rows_of::<1, FMA>(row, n, k, a, b, c, ldc),
        }
        row += rows;
    }
}

#[inline(always)]
#[expect(
    clippy::needless_range_loop,
    reason = "indices of fixed arrays, which the compiler keeps in registers"
)]
fn rows_of<const M: usize, const FMA: bool>(
    row: usize,
    n: usize,
    k: usize,
    a: Matrix<'_>,
    b: Matrix<'_>,
    c: &mut [f32],
    ldc: usize,
) {
    let a: [&[f32]; M] = std::array::from_fn(|i| &a.data[(row + i) * a.stride..][..k]);
    let mut column = 0;
    while column + N <= n {
        let mut sums = [[0.0f32; N]; M];
        for p in 0..k {
            let b: &[f32; N] = match b.data[p * b.stride + column..].first_chunk() {
                Some(b) => b,
                None => return,
            };
            for i in 0..M {
                for j in 0..N {
                    sums[i][j] = fma::<FMA>(a[i][p], b[j], sums[i][j]);
                }
            }
        }
        for i in 0..M {
            let out = &mut c[(row + i) * ldc + column..][..N];
            for j in 0..N {
                out[j] += sums[i][j];
            }
        }
        column += N;
    }
    for column in column..n {
        for i in 0..M {
            let sum =
                (0..k).fold(0.0, |sum, p| fma::<FMA>(a[i][p], b.data[p * b.stride + column], sum));
            c[(row + i) * ldc + column] += sum;
        }
    }
}

#[inline(always)]
fn dots<const FMA: bool>(
    (m, n, k): (usize, usize, usize),
    a: Matrix<'_>,
    b: Matrix<'_>,
    out: &mut [f32],
    ldc: usize,
) {
    for j in 0..n {
        let y = &b.data[j * b.stride..][..k];
        for r in 0..m {
            let x = &a.data[r * a.stride..][..k];
            let mut sums = [0.0f32; N];
            let (xs, x_rest) = x.as_chunks::<N>();
            let (ys, y_rest) = y.as_chunks::<N>();
            for (x, y) in xs.iter().zip(ys) {
                for i in 0..N {
                    sums[i] = fma::<FMA>(x[i], y[i], sums[i]);
                }
            }
            let mut sum: f32 = sums.iter().sum();
            for (x, y) in x_rest.iter().zip(y_rest) {
                sum = fma::<FMA>(*x, *y, sum);
            }
            out[r * ldc + j] = sum;
        }
    }
}

/// `e^x` for x at most 0: `2^n * e^r` with `r` within half a `ln 2`, whose series is cut after the seventh power (1e-8 of the value).
#[inline(always)]
fn exponential<const FMA: bool>(x: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let x = x.max(-87.0);
    let n = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND) - ROUND;
    // ln 2 in two parts, the first of few bits, so that `n` times it is exact.
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    let mut p = 1.0 / 5040.0;
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = fma::<FMA>(p, r, c);
    }
    p * f32::from_bits(((n as i32 + 127) as u32) << 23)
}

#[inline(always)]
fn exponentials<const FMA: bool>(x: &mut [f32], top: f32) -> f32 {
    let mut sums = [0.0f32; N];
    let (chunks, rest) = x.as_chunks_mut::<N>();
    for chunk in chunks {
        for i in 0..N {
            chunk[i] = exponential::<FMA>(chunk[i] - top);
            sums[i] += chunk[i];
        }
    }
    let mut sum: f32 = sums.iter().sum();
    for x in rest {
        *x = exponential::<FMA>(*x - top);
        sum += *x;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_dots_are_those_of_f64() {
        let kernels = [Kernels::detect(), Kernels { has_fma: false }];
        for (m, n, k) in [(1, 1, 1), (3, 17, 5), (4, 32, 64), (7, 48, 33), (9, 16, 80)] {
            let number = |i: usize| ((i * 7919 % 1000) as f32 - 500.0) / 300.0;
            let a: Vec<f32> = (0..m * k).map(number).collect();
            let b: Vec<f32> = (0..k * n).map(|i| number(i + 13)).collect();
            let mut bt = vec![0.0; n * k];
            for p in 0..k {
                for j in 0..n {
                    bt[j * k + p] = b[p * n + j];
                }
            }
            for kernels in kernels {
                let mut c = vec![1.0f32; m * n];
                kernels.product(
                    (m, n, k),
                    Matrix { data: &a, stride: k },
                    Matrix { data: &b, stride: n },
                    &mut c,
                    n,
                );
                let mut d = vec![0.0f32; m * n];
                kernels.dots(
                    (m, n, k),
                    Matrix { data: &a, stride: k },
                    Matrix { data: &bt, stride: k },
                    &mut d,
                    n,
                );
                for i in 0..m {
                    for j in 0..n {
                        let want: f64 =
                            (0..k).map(|p| f64::from(a[i * k + p]) * f64::from(b[p * n + j])).sum();
                        assert!((f64::from(c[i * n + j]) - 1.0 - want).abs() < 1e-4);
                        assert!((f64::from(d[i * n + j]) - want).abs() < 1e-4);
                    }
                }
            }
        }
    }

    #[test]
    fn exponentials_are_right_to_the_last_places() {
        for kernels in [Kernels::detect(), Kernels { has_fma: false }] {
            let mut x: Vec<f32> = (0..4000).map(|i| -(i as f32) / 50.0).collect();
            let want: Vec<f64> = x.iter().map(|x| f64::from(*x).exp()).collect();
            let sum = kernels.exponentials(&mut x, 0.0);
            for (got, want) in x.iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() <= 3e-7 * want + 1e-37, "{got} {want}");
            }
            assert!((f64::from(sum) / want.iter().sum::<f64>() - 1.0).abs() < 1e-6);
        }
    }
}
