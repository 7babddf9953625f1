//! Rotary position embedding, with YaRN's scaling of frequencies as `RopeParams` of the boundary defines it.

use std::f64::consts::TAU;
use tegula_sdk::program::{Rope, RopeStyle};

/// Turns the first `n_rot` elements of every head of `x`, in place. Row i stands at `positions[i]`.
pub(crate) fn rope(
    x: &mut [f32],
    row_len: usize,
    positions: &[i32],
    factors: Option<&[f32]>,
    rope: &Rope,
) {
    let n_pairs = rope.n_rot as usize / 2;
    let frequencies: Vec<f64> = (0..n_pairs)
        .map(|i| frequency(rope, i, factors.map_or(1.0, |factors| f64::from(factors[i]))))
        .collect();
    for (row, position) in x.chunks_exact_mut(row_len).zip(positions) {
        for head in row.chunks_exact_mut(rope.head_dim as usize) {
            for (i, frequency) in frequencies.iter().enumerate() {
                let (a, b) = match rope.style {
                    RopeStyle::Adjacent => (2 * i, 2 * i + 1),
                    RopeStyle::Neox => (i, i + n_pairs),
                };
                let (sin, cos) = (f64::from(*position) * frequency).sin_cos();
                let (sin, cos) =
                    (sin * f64::from(rope.attn_factor), cos * f64::from(rope.attn_factor));
                let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                head[a] = (x * cos - y * sin) as f32;
                head[b] = (x * sin + y * cos) as f32;
            }
        }
    }
}

/// Radians per position of pair `i`.
fn frequency(rope: &Rope, i: usize, factor: f64) -> f64 {
    let full = f64::from(rope.base).powf(-2.0 * i as f64 / f64::from(rope.n_rot)) / factor;
    let scaled = full * f64::from(rope.freq_scale);
    if rope.ext_factor == 0.0 {
        return scaled;
    }
    let mix = ramp(rope, i) * f64::from(rope.ext_factor);
    scaled * (1.0 - mix) + full * mix
}

/// 1 for pairs that turn often within the original context and keep their frequency, 0 for those that turn seldom, between them a line.
fn ramp(rope: &Rope, i: usize) -> f64 {
    // The pair that turns `rotations` times within the original context.
    let pair = |rotations: f32| {
        let wavelength = f64::from(rope.n_ctx_orig) / (f64::from(rotations) * TAU);
        f64::from(rope.n_rot) * wavelength.ln() / (2.0 * f64::from(rope.base).ln())
    };
    let low = pair(rope.beta_fast).floor().max(0.0);
    let high = pair(rope.beta_slow).ceil().min(f64::from(rope.n_rot) - 1.0);
    1.0 - ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0)
}
