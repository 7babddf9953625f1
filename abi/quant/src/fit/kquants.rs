//! K-quants: sub-blocks are searched one by one, their scales are rounded to the few bits that a block has for them, and then scales, minima and
//! levels are chosen again with the rounding known.

use super::{
    affine, costs, each_block, level, nearest, reciprocal, stored, stored_above, symmetric,
};
use crate::block::{q4_k, q5_k, q6_k};
use crate::quantize::put_f16;

const ROUNDS: usize = 2;
/// The greatest scale and minimum of a sub-block of Q4_K and Q5_K.
const SIX_BITS: f32 = 63.0;

/// A block of 8 sub-blocks of 32: `x = d * scale * level - dmin * minimum`.
#[derive(Clone, Copy)]
struct Block {
    d: f32,
    dmin: f32,
    scales: [f32; 8],
    minima: [f32; 8],
    levels: [[f32; 32]; 8],
}

/// The values of a block and what errors of them cost, by sub-block.
struct Values {
    x: [[f32; 32]; 8],
    w: [[f32; 32]; 8],
}

impl Values {
    fn new(x: &[f32; 256], importance: &[f32; 256]) -> Self {
        let mut out = Self { x: [[0.0; 32]; 8], w: [[0.0; 32]; 8] };
        let subs = x.as_chunks::<32>().0.iter().zip(importance.as_chunks::<32>().0);
        for ((x, importance), (to, w)) in subs.zip(out.x.iter_mut().zip(&mut out.w)) {
            (*to, *w) = (*x, costs(x, importance));
        }
        out
    }

    /// The best block with these scales of scales: of every sub-block's scale and minimum the rounded ones and their neighbours are tried.
    fn choose(&self, d: f32, dmin: f32, wanted: &[(f32, f32); 8], top: f32) -> (Block, f32) {
        let (d, dmin) = (stored(d), stored(dmin));
        let (id, idmin) = (reciprocal(d), reciprocal(dmin));
        let mut out = Block { d, dmin, scales: [0.0; 8], minima: [0.0; 8], levels: [[0.0; 32]; 8] };
        let mut total = 0.0;
        for (i, (scale, minimum)) in wanted.iter().enumerate() {
            let (near_s, near_m) = (nearest(scale * id), nearest(minimum * idmin));
            let mut least = f32::INFINITY;
            for s in [near_s, near_s - 1.0, near_s + 1.0] {
                for m in [near_m, near_m - 1.0, near_m + 1.0] {
                    let (s, m) = (level(s, 0.0, SIX_BITS), level(m, 0.0, SIX_BITS));
                    let at = (d * s, -(dmin * m));
                    let (fit, error) = affine::levels_at(&self.x[i], &self.w[i], at, top);
                    if error < least {
                        least = error;
                        (out.scales[i], out.minima[i], out.levels[i]) = (s, m, fit.levels);
                    }
                }
            }
            total += least;
        }
        (out, total)
    }

    /// The scales of scales that fit everything else of a block best.
    fn least_squares(&self, block: &Block) -> Option<(f32, f32)> {
        // Of a = scale * level and b = minimum: sums of w a^2, w a b, w b^2, w x a, w x b.
        let mut sums = [0.0f64; 5];
        for i in 0..8 {
            let (scale, b) = (block.scales[i], block.minima[i]);
            let values = self.x[i].iter().zip(&self.w[i]).zip(&block.levels[i]);
            for ((x, w), l) in values {
                let [a, b, x, w] = [scale * l, b, *x, *w].map(f64::from);
                sums[0] += w * a * a;
                sums[1] += w * a * b;
                sums[2] += w * b * b;
                sums[3] += w * x * a;
                sums[4] += w * x * b;
            }
        }
        let [aa, ab, bb, xa, xb] = sums;
        let determinant = aa * bb - ab * ab;
        let (d, dmin) = if determinant > 0.0 {
            ((xa * bb - xb * ab) / determinant, (xa * ab - xb * aa) / determinant)
        } else if aa > 0.0 {
            (xa / aa, f64::from(block.dmin))
        } else {
            return None;
        };
        (d > 0.0 && dmin >= 0.0).then_some((d as f32, dmin as f32))
    }

    fn search(&self, top: f32) -> Block {
        let mut wanted = [(0.0f32, 0.0f32); 8];
        for (i, wanted) in wanted.iter_mut().enumerate() {
            let fit = affine::search(&self.x[i], &self.w[i], top, false);
            *wanted = (fit.d, -fit.m);
        }
        let greatest = |of: fn(&(f32, f32)) -> f32| wanted.iter().map(of).fold(0.0, f32::max);
        let (d, dmin) = (greatest(|w| w.0) / SIX_BITS, greatest(|w| w.1) / SIX_BITS);
        let (d, dmin) = (stored_above(d), stored_above(dmin));
        let (mut best, mut least) = self.choose(d, dmin, &wanted, top);
        for _ in 0..ROUNDS {
            let Some((d, dmin)) = self.least_squares(&best) else { break };
            let (next, error) = self.choose(d, dmin, &wanted, top);
            if error >= least {
                break;
            }
            (best, least) = (next, error);
        }
        best
    }
}

/// 8 scales and 8 minima in 12 bytes, as [`q4_k::SCALES`] says.
fn pack_scales(block: &Block) -> [u8; 12] {
    let (s, m) = (block.scales.map(|s| s as u8), block.minima.map(|m| m as u8));
    let mut out = [0; 12];
    for i in 0..4 {
        out[i] = s[i] & 0x3f | s[4 + i] >> 4 << 6;
        out[4 + i] = m[i] & 0x3f | m[4 + i] >> 4 << 6;
        out[8 + i] = s[4 + i] & 0x0f | m[4 + i] << 4;
    }
    out
}

/// Low four bits: a pair of sub-blocks in each 32 bytes.
fn pack_pairs(levels: &[[u8; 32]; 8], out: &mut [u8]) {
    for (pair, out) in levels.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<32>().0) {
        for ((out, low), high) in out.iter_mut().zip(&pair[0]).zip(&pair[1]) {
            *out = low & 0x0f | high << 4;
        }
    }
}

pub(super) fn to_q4_k(src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) {
    each_block(src, importance, dst, |x: &[f32; q4_k::LEN], importance| {
        let fit = Values::new(x, importance).search(15.0);
        let mut block = [0; q4_k::BYTES];
        put_f16(&mut block, q4_k::D, fit.d);
        put_f16(&mut block, q4_k::DMIN, fit.dmin);
        block[q4_k::SCALES..q4_k::QS].copy_from_slice(&pack_scales(&fit));
        let levels = fit.levels.map(|sub| sub.map(|level| level as u8));
        pack_pairs(&levels, &mut block[q4_k::QS..]);
        block
    });
}

pub(super) fn to_q5_k(src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) {
    each_block(src, importance, dst, |x: &[f32; q5_k::LEN], importance| {
        let fit = Values::new(x, importance).search(31.0);
        let mut block = [0; q5_k::BYTES];
        put_f16(&mut block, q5_k::D, fit.d);
        put_f16(&mut block, q5_k::DMIN, fit.dmin);
        block[q5_k::SCALES..q5_k::QH].copy_from_slice(&pack_scales(&fit));
        let levels = fit.levels.map(|sub| sub.map(|level| level as u8));
        for (i, sub) in levels.iter().enumerate() {
            for (out, level) in block[q5_k::QH..q5_k::QS].iter_mut().zip(sub) {
                *out |= (level >> 4 & 1) << i;
            }
        }
        pack_pairs(&levels, &mut block[q5_k::QS..]);
        block
    });
}

/// A block of 16 sub-blocks of 16: `x = d * scale * level`, levels from -32 to 31, scales from -128 to 127.
#[derive(Clone, Copy)]
struct Block6 {
    d: f32,
    scales: [f32; 16],
    levels: [[f32; 16]; 16],
}

const LEVELS_6: f32 = 32.0;

/// The best block with this scale of scales: of every sub-block's scale the rounded one and its neighbours are tried.
fn choose_6(
    (x, w): (&[[f32; 16]; 16], &[[f32; 16]; 16]),
    d: f32,
    wanted: &[f32; 16],
) -> (Block6, f32) {
    let d = stored(d);
    let id = reciprocal(d);
    let mut out = Block6 { d, scales: [0.0; 16], levels: [[0.0; 16]; 16] };
    let mut total = 0.0;
    for (i, scale) in wanted.iter().enumerate() {
        let near = nearest(scale * id);
        let mut least = f32::INFINITY;
        for s in [near, near - 1.0, near + 1.0] {
            let s = level(s, -128.0, 127.0);
            let levels = symmetric::levels_at(&x[i], reciprocal(d * s), LEVELS_6);
            let terms = x[i].iter().zip(&w[i]).zip(&levels);
            let error: f32 = terms
                .map(|((x, w), l)| {
                    let off = x - d * s * l;
                    w * off * off
                })
                .sum();
            if error < least {
                least = error;
                (out.scales[i], out.levels[i]) = (s, levels);
            }
        }
        total += least;
    }
    (out, total)
}

fn search_6(values: &[f32; 256], importance: &[f32; 256]) -> Block6 {
    let (mut x, mut w) = ([[0.0; 16]; 16], [[0.0; 16]; 16]);
    let subs = values.as_chunks::<16>().0.iter().zip(importance.as_chunks::<16>().0);
    for ((from, importance), (x, w)) in subs.zip(x.iter_mut().zip(&mut w)) {
        (*x, *w) = (*from, costs(from, importance));
    }
    let mut wanted = [0.0f32; 16];
    for (wanted, (x, w)) in wanted.iter_mut().zip(x.iter().zip(&w)) {
        *wanted = symmetric::search(x, w, LEVELS_6).d;
    }
    let greatest = wanted.iter().fold(0.0f32, |max, s| if s.abs() > max.abs() { *s } else { max });
    let first = stored_above(greatest / -128.0);
    let (mut best, mut least) = choose_6((&x, &w), first, &wanted);
    for _ in 0..ROUNDS {
        let (mut xa, mut aa) = (0.0f64, 0.0f64);
        for i in 0..16 {
            for ((x, w), l) in x[i].iter().zip(&w[i]).zip(&best.levels[i]) {
                let [a, x, w] = [best.scales[i] * l, *x, *w].map(f64::from);
                xa += w * x * a;
                aa += w * a * a;
            }
        }
        if aa <= 0.0 {
            break;
        }
        let (next, error) = choose_6((&x, &w), (xa / aa) as f32, &wanted);
        if error >= least {
            break;
        }
        (best, least) = (next, error);
    }
    best
}

pub(super) fn to_q6_k(src: &[f32], importance: Option<&[f32]>, dst: &mut [u8]) {
    each_block(src, importance, dst, |x: &[f32; q6_k::LEN], importance| {
        let fit = search_6(x, importance);
        let mut block = [0; q6_k::BYTES];
        put_f16(&mut block, q6_k::D, fit.d);
        for (out, scale) in block[q6_k::SCALES..].iter_mut().zip(fit.scales) {
            *out = scale as i8 as u8;
        }
        for (i, levels) in fit.levels.iter().enumerate() {
            let (half, quarter, part) = (i / 8, i / 2 % 4, i % 2);
            let low = q6_k::QL + (half * 4 + quarter % 2 * 2 + part) * 16;
            let high = q6_k::QH + (half * 2 + part) * 16;
            for (e, level) in levels.iter().enumerate() {
                let q = (level + 32.0) as u8;
                block[low + e] |= (q & 0x0f) << (quarter / 2 * 4);
                block[high + e] |= (q >> 4) << (quarter * 2);
            }
        }
        block
    });
}
