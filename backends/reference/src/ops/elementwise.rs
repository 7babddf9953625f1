//! What treats every element alike, in place.

use std::f64::consts::{FRAC_1_SQRT_2, PI};
use tegula_sdk::program::Activation;

/// Applies a function in f64.
fn each(x: &mut [f32], f: impl Fn(f64) -> f64) {
    for x in x {
        *x = f(f64::from(*x)) as f32;
    }
}

/// `f(a, b)`; a shorter `b` is one row that serves every row of `a`.
pub(crate) fn combine(a: &mut [f32], b: &[f32], f: impl Fn(f64, f64) -> f64) {
    for (a, b) in a.iter_mut().zip(b.iter().cycle()) {
        *a = f(f64::from(*a), f64::from(*b)) as f32;
    }
}

/// `act(gate) * up`.
pub(crate) fn glu(activation: Activation, gate: &mut [f32], up: &[f32]) {
    combine(gate, up, |gate, up| activate(activation, gate) * up);
}

/// `a / (1 + exp(-alpha a)) * (b + 1)` of the two sides within `limit`.
pub(crate) fn glu_clamped(alpha: f32, limit: f32, gate: &mut [f32], up: &[f32]) {
    let (alpha, limit) = (f64::from(alpha), f64::from(limit));
    combine(gate, up, |gate, up| {
        let gate = gate.min(limit);
        gate / (1.0 + (-alpha * gate).exp()) * (up.max(-limit).min(limit) + 1.0)
    });
}

/// `act(x)`.
pub(crate) fn unary(activation: Activation, x: &mut [f32]) {
    each(x, |x| activate(activation, x));
}

/// `x * factor`.
pub(crate) fn scale(x: &mut [f32], factor: f32) {
    each(x, |x| x * f64::from(factor));
}

/// `cap * tanh(x / cap)`.
pub(crate) fn softcap(x: &mut [f32], cap: f32) {
    each(x, |x| f64::from(cap) * (x / f64::from(cap)).tanh());
}

fn activate(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::GeluErf => 0.5 * x * (1.0 + erf(x * FRAC_1_SQRT_2)),
        Activation::Relu => x.max(0.0),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Activation::Tanh => x.tanh(),
        // For a large x, exp(x) is too; this form has no such overflow.
        Activation::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
    }
}

/// The error function by the series `2 / sqrt(pi) exp(-x^2) sum_n 2^n x^(2n + 1) / (1 3 5 .. (2n + 1))` (Abramowitz and Stegun,
/// 7.1.6). All its terms have one sign, so nothing cancels. From 6 on, 1 is the nearest f64.
fn erf(x: f64) -> f64 {
    if x.is_nan() || x.abs() >= 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > sum.abs() * 1e-17 {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    2.0 / PI.sqrt() * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GELU by erf is built on this; the values are from tables of the function.
    #[test]
    fn erf_agrees_with_its_tables() {
        for (x, expected) in [
            (0.0, 0.0),
            (1e-300, 1.1283791670955126e-300),
            (0.5, 0.5204998778130465),
            (1.0, 0.8427007929497149),
            (2.0, 0.9953222650189527),
            (3.5, 0.9999992569016276),
            (5.9, 1.0),
            (7.0, 1.0),
            (f64::INFINITY, 1.0),
        ] {
            assert!((erf(x) - expected).abs() <= 4e-15 * expected.abs(), "{x}: {}", erf(x));
            assert_eq!(erf(-x).to_bits(), (-erf(x)).to_bits());
        }
        assert!(erf(f64::NAN).is_nan());
    }
}
