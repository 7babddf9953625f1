//! Exponential, hyperbolic tangent and error function on vectors, each within about two units in the last place.

use super::Simd;

/// `e^x`, correct to about 1 ulp; 0 below -104 and infinity above 88.73. NaN stays NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; ln 2 is split so that `n * high` is exact without a fused multiply-add. The
/// polynomial is the Taylor series to the seventh power, whose remainder is below 6e-9. `2^n` is applied as two
/// factors, so that results below the normal range round once and those above it become infinite.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let x = s.max(s.splat(-104.0), x);
    let x = s.min(s.splat(89.0), x);
    let n = s.round(s.mul(x, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-0.693_359_4), x);
    let r = s.fma(n, s.splat(2.121_944_4e-4), r);
    let mut p = s.splat(1.0 / 5040.0);
    for c in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = s.fma(p, r, s.splat(c));
    }
    let n = s.to_int(n);
    let half = s.isub(s.ishr(s.iadd(n, s.isplat(256)), 1), s.isplat(128));
    s.mul(s.mul(p, s.exp2i(half)), s.exp2i(s.isub(n, half)))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), x))))
}

/// Hyperbolic tangent: an odd polynomial (Cephes, tanhf) below 0.625, where the other form would cancel, and
/// `1 - 2 / (e^2|x| + 1)` above.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let a = s.abs(x);
    let z = s.mul(x, x);
    let mut p = s.splat(-5.704_988_7e-3);
    for c in [2.063_908_8e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1] {
        p = s.fma(p, z, s.splat(c));
    }
    let small = s.fma(s.mul(p, z), x, x);
    let e = exp(s, s.add(a, a));
    let large = s.sub(s.splat(1.0), s.div(s.splat(2.0), s.add(e, s.splat(1.0))));
    s.select_gt(a, s.splat(0.625), s.copysign(large, x), small)
}

/// Error function, after N. Juffa's two-range approximation: a polynomial below 0.9277, `1 - e^(polynomial)` above.
#[inline(always)]
pub(crate) fn erf<S: Simd>(s: S, x: S::F) -> S::F {
    let t = s.abs(x);
    let z = s.mul(x, x);
    let r = s.fma(s.splat(-1.728_534_7e-5), t, s.splat(3.831_971_3e-4));
    let u = s.fma(s.splat(-3.883_964_4e-3), t, s.splat(2.425_462_2e-2));
    let mut r = s.fma(r, z, u);
    for c in [-1.067_778_8e-1, -6.348_468_7e-1, -1.287_175_1e-1] {
        r = s.fma(r, t, s.splat(c));
    }
    let r = s.fma(r, t, s.sub(s.splat(0.0), t));
    let large = s.copysign(s.sub(s.splat(1.0), exp(s, r)), x);
    let mut p = s.splat(-5.967_617e-4);
    for c in [4.991_194_2e-3, -2.676_813_5e-2, 1.128_199_2e-1, -3.761_253_4e-1, 1.283_791_7e-1] {
        p = s.fma(p, z, s.splat(c));
    }
    let small = s.fma(p, x, x);
    s.select_gt(t, s.splat(0.927_734_4), large, small)
}

/// `x Phi(x)` with the tanh approximation of Hendrycks and Gimpel, `0.5 x (1 + tanh u)`, written as `x / (1 + e^-2u)`:
/// the same function, without cancellation where x is negative.
#[inline(always)]
pub(crate) fn gelu_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    // 2 sqrt(2 / pi) (x + 0.044715 x^3).
    let cubic = s.fma(s.mul(s.mul(x, x), x), s.splat(0.044_715), x);
    let u2 = s.mul(cubic, s.splat(1.595_769));
    s.div(x, s.add(s.splat(1.0), exp(s, s.sub(s.splat(0.0), u2))))
}

/// `x Phi(x)` through the error function. Left of about -4 only the absolute error is bounded, as in the definition.
#[inline(always)]
pub(crate) fn gelu_erf<S: Simd>(s: S, x: S::F) -> S::F {
    let phi2 = s.add(s.splat(1.0), erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2))));
    s.mul(s.mul(x, s.splat(0.5)), phi2)
}

/// `x / (1 + e^-1.702x)`.
#[inline(always)]
pub(crate) fn gelu_quick<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(x, s.add(s.splat(1.0), exp(s, s.mul(x, s.splat(-1.702)))))
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
pub(crate) fn softcap<S: Simd>(s: S, x: S::F, cap: f32) -> S::F {
    s.mul(s.splat(cap), tanh(s, s.div(x, s.splat(cap))))
}
