//! Types with a scale alone: `x = d * level`, levels from `-z` to `z - 1`.

use super::{costs, each_block, level, reciprocal, stored};
use crate::block::{q4_0, q5_0};
use crate::quantize::{fifth_bits, pack_nibbles, put_f16};

/// Rounds of the two alternating steps; the error hardly falls after so many.
const ROUNDS: usize = 3;

/// A scale and its levels.
#[derive(Clone, Copy)]
pub(super) struct Fit<const N: usize> {
    pub(super) d: f32,
    pub(super) levels: [f32; N],
}

/// Levels of the values at a scale.
#[inline(always)]
pub(super) fn levels_at<const N: usize>(x: &[f32; N], id: f32, z: f32) -> [f32; N] {
    let mut out = [0.0; N];
    for (out, x) in out.iter_mut().zip(x) {
        *out = level(x * id, -z, z - 1.0);
    }
    out
}

/// `sum w x l` and `sum w l^2`.
#[inline(always)]
fn sums<const N: usize>(x: &[f32; N], w: &[f32; N], levels: &[f32; N]) -> (f32, f32) {
    let (mut xl, mut ll) = ([0.0f32; 8], [0.0f32; 8]);
    let chunks = x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0);
    for ((x, w), l) in chunks.zip(levels.as_chunks::<8>().0) {
        for i in 0..8 {
            let wl = w[i] * l[i];
            xl[i] += wl * x[i];
            ll[i] += wl * l[i];
        }
    }
    (xl.iter().sum(), ll.iter().sum())
}

/// The best scale, not rounded to anything, and its levels.
///
/// With the best scale for its levels the error is `sum w x^2 - (sum w x l)^2 / sum w l^2`, so the quotient is what is searched for. The scales that
/// are tried send the value of greatest magnitude near the last level of either end: the negative end has one level more.
pub(super) fn search<const N: usize>(x: &[f32; N], w: &[f32; N], z: f32) -> Fit<N> {
    let extreme = x.iter().fold(0.0f32, |max, x| if x.abs() > max.abs() { *x } else { max });
    let mut best = Fit { d: 0.0, levels: [0.0; N] };
    let mut score = 0.0;
    let inverse = reciprocal(extreme);
    if inverse == 0.0 {
        return best;
    }
    for step in -10..=10 {
        let shift = step as f32 * 0.1;
        for end in [-z + shift, z - 1.0 + shift] {
            let levels = levels_at(x, end * inverse, z);
            let (xl, ll) = sums(x, w, &levels);
            // Multiplied out, because a division costs as much as the rest.
            if ll > 0.0 && xl * xl > score * ll {
                score = xl * xl / ll;
                best = Fit { d: xl / ll, levels };
            }
        }
    }
    best
}

/// The weighted error of a scale with these levels.
#[inline(always)]
fn error<const N: usize>(x: &[f32; N], w: &[f32; N], fit: &Fit<N>) -> f32 {
    let terms = x.iter().zip(w).zip(&fit.levels);
    terms.map(|((x, w), l)| w * (x - fit.d * l) * (x - fit.d * l)).sum()
}

/// The best scale that an f16 can hold, and its levels.
fn search_stored<const N: usize>(x: &[f32; N], importance: &[f32; N], z: f32) -> Fit<N> {
    let w = costs(x, importance);
    let rounded = |d: f32| {
        let d = stored(d);
        Fit { d, levels: levels_at(x, reciprocal(d), z) }
    };
    let mut best = rounded(search(x, &w, z).d);
    let mut least = error(x, &w, &best);
    for _ in 0..ROUNDS {
        let (xl, ll) = sums(x, &w, &best.levels);
        let next = rounded(if ll > 0.0 { xl / ll } else { 0.0 });
        let its = error(x, &w, &next);
        if its >= least {
            break;
        }
        (best, least) = (next, its);
    }
    best
}

pub(super) fn to_q4_0(src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) {
    each_block(src, importance, dst, |x: &[f32; q4_0::LEN], importance| {
        let fit = search_stored(x, importance, 8.0);
        let q = fit.levels.map(|level| (level + 8.0) as u8);
        let mut block = [0; q4_0::BYTES];
        put_f16(&mut block, q4_0::D, fit.d);
        pack_nibbles(&q, &mut block[q4_0::QS..]);
        block
    });
}

pub(super) fn to_q5_0(src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) {
    each_block(src, importance, dst, |x: &[f32; q5_0::LEN], importance| {
        let fit = search_stored(x, importance, 16.0);
        let q = fit.levels.map(|level| (level + 16.0) as u8);
        let mut block = [0; q5_0::BYTES];
        put_f16(&mut block, q5_0::D, fit.d);
        block[q5_0::QH..q5_0::QS].copy_from_slice(&fifth_bits(&q));
        pack_nibbles(&q, &mut block[q5_0::QS..]);
        block
    });
}
