//! Types with a scale and an offset: `x = d * level + m`, levels from 0 to `top`.

use super::{costs, each_block, level, reciprocal, stored};
use crate::block::{q4_1, q5_1};
use crate::quantize::{fifth_bits, pack_nibbles, put_f16};

const ROUNDS: usize = 3;

/// A scale, an offset and the levels.
#[derive(Clone, Copy)]
pub(super) struct Fit<const N: usize> {
    pub(super) d: f32,
    pub(super) m: f32,
    pub(super) levels: [f32; N],
}

/// Levels of the values at a scale and an offset, and their weighted error.
#[inline(always)]
pub(super) fn levels_at<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    (d, m): (f32, f32),
    top: f32,
) -> (Fit<N>, f32) {
    let id = reciprocal(d);
    let mut levels = [0.0; N];
    for (level_, x) in levels.iter_mut().zip(x) {
        *level_ = level((x - m) * id, 0.0, top);
    }
    let mut lanes = [0.0f32; 8];
    let chunks = x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0);
    for ((x, w), l) in chunks.zip(levels.as_chunks::<8>().0) {
        for i in 0..8 {
            let off = x[i] - (d * l[i] + m);
            lanes[i] += w[i] * off * off;
        }
    }
    (Fit { d, m, levels }, lanes.iter().sum())
}

/// The scale and offset that fit the levels best. An offset above 0 is none where it must not be.
#[inline(always)]
fn least_squares<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    levels: &[f32; N],
    may_rise: bool,
) -> Option<(f32, f32)> {
    // Sums of w, w l, w l^2, w x, w x l.
    let mut sums = [[0.0f32; 8]; 5];
    let chunks = x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0);
    for ((x, w), l) in chunks.zip(levels.as_chunks::<8>().0) {
        for i in 0..8 {
            let (wl, wx) = (w[i] * l[i], w[i] * x[i]);
            sums[0][i] += w[i];
            sums[1][i] += wl;
            sums[2][i] += wl * l[i];
            sums[3][i] += wx;
            sums[4][i] += wx * l[i];
        }
    }
    let [s, l, ll, x, xl] = sums.map(|lanes| lanes.iter().map(|v| f64::from(*v)).sum::<f64>());
    let determinant = s * ll - l * l;
    let (mut d, mut m) = if determinant > 0.0 {
        ((s * xl - x * l) / determinant, (ll * x - l * xl) / determinant)
    } else {
        return None;
    };
    if m > 0.0 && !may_rise {
        (d, m) = (xl / ll, 0.0);
    }
    (d > 0.0).then_some((d as f32, m as f32))
}

/// The best scale and offset, not rounded to anything. Without `may_rise` the offset is at most 0.
pub(super) fn search<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    top: f32,
    may_rise: bool,
) -> Fit<N> {
    let low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let low = if may_rise { low } else { low.min(0.0) };
    let width = high - low;
    if !(width > 0.0 && width.is_finite()) {
        let m = if low.is_finite() { low } else { 0.0 };
        return Fit { d: 0.0, m, levels: [0.0; N] };
    }
    let (mut best, mut least) = levels_at(x, w, (width / top, low), top);
    for step in -5..=10 {
        // The ends may be cut off, or a level be left over.
        let id = (top + step as f32 * 0.1) / width;
        let (tried, _) = levels_at(x, w, (1.0 / id, low), top);
        let mut levels = tried.levels;
        for _ in 0..ROUNDS {
            let Some(fitted) = least_squares(x, w, &levels, may_rise) else { break };
            let (next, error) = levels_at(x, w, fitted, top);
            if error >= least {
                break;
            }
            (best, least, levels) = (next, error, next.levels);
        }
    }
    best
}

/// The best scale and offset that f16s can hold.
fn search_stored<const N: usize>(x: &[f32; N], importance: &[f32; N], top: f32) -> Fit<N> {
    let w = costs(x, importance);
    let rounded = |d: f32, m: f32| levels_at(x, &w, (stored(d), stored(m)), top);
    let free = search(x, &w, top, true);
    let (mut best, mut least) = rounded(free.d, free.m);
    for _ in 0..ROUNDS {
        let Some((d, m)) = least_squares(x, &w, &best.levels, true) else { break };
        let (next, error) = rounded(d, m);
        if error >= least {
            break;
        }
        (best, least) = (next, error);
    }
    best
}

pub(super) fn to_q4_1(src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) {
    each_block(src, importance, dst, |x: &[f32; q4_1::LEN], importance| {
        let fit = search_stored(x, importance, 15.0);
        let q = fit.levels.map(|level| level as u8);
        let mut block = [0; q4_1::BYTES];
        put_f16(&mut block, q4_1::D, fit.d);
        put_f16(&mut block, q4_1::M, fit.m);
        pack_nibbles(&q, &mut block[q4_1::QS..]);
        block
    });
}

pub(super) fn to_q5_1(src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) {
    each_block(src, importance, dst, |x: &[f32; q5_1::LEN], importance| {
        let fit = search_stored(x, importance, 31.0);
        let q = fit.levels.map(|level| level as u8);
        let mut block = [0; q5_1::BYTES];
        put_f16(&mut block, q5_1::D, fit.d);
        put_f16(&mut block, q5_1::M, fit.m);
        block[q5_1::QH..q5_1::QS].copy_from_slice(&fifth_bits(&q));
        pack_nibbles(&q, &mut block[q5_1::QS..]);
        block
    });
}
