//! Building blocks of the integer matrix product: unpacked panels of weights, packed activations, the micro-kernel.
//!
//! In plain words: `c[i][j] += sum over runs of scale(i, run) * scale(j, run) * sum over k of a(i, k) * b(k, j)`, the inner
//! sum in integers. The layout follows the f32 product of `gemm`, with pairs of adjacent `k` in the place of one `k`: a
//! panel row holds words as they were unpacked, whose pairs are broadcast, and activations are turned so that the same
//! pair of adjacent tokens is one vector. A step multiplies twice as many terms as an f32 step, and sums come back to f32
//! once for each run.

use std::mem::offset_of;

use super::activations::{Activations, GROUP, RUN, quantize_group};
use super::ints::IntWeight;
use super::{Pairs, Words};

/// Distance of panel rows in words: off the power of two, so that the rows of a micro-kernel use different cache sets.
pub(crate) const WORDS_STRIDE: usize = GROUP + 32;
/// f32 of a packed group for each token: 128 pairs, 8 scales, 8 sums.
pub(crate) const PACKED_FLOATS: usize = GROUP / 2 + 2 * (GROUP / RUN);

/// A panel of weight rows, 256 elements of each.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    /// `[rows][WORDS_STRIDE]`.
    pub(crate) words: *mut i16,
    /// `[rows][16]`.
    pub(crate) scale: *mut f32,
    /// `[rows][8]`.
    pub(crate) min: *mut f32,
}

/// f32 of a panel of `rows`.
pub(crate) const fn panel_floats(rows: usize) -> usize {
    rows * (WORDS_STRIDE / 2 + 24)
}

impl Panel {
    /// The parts of a panel of `rows` in `memory`, which holds at least [`panel_floats`] of it.
    pub(crate) fn new(memory: *mut f32, rows: usize) -> Panel {
        let scale = memory.wrapping_add(rows * WORDS_STRIDE / 2);
        Panel { words: memory.cast(), scale, min: scale.wrapping_add(rows * 16) }
    }
}

/// Unpacks `runs` times 32 elements of a row to row `i` of a panel.
///
/// # Safety
/// `p` is readable for these elements, and the panel has a row `i`.
#[inline(always)]
pub(crate) unsafe fn unpack_row<S: Words, W: IntWeight>(
    s: S,
    p: *const u8,
    runs: usize,
    panel: Panel,
    i: usize,
) {
    // SAFETY: the caller's promise; a row holds 256 words, 16 scales and 8 minima.
    unsafe {
        let scales = W::scales(s, p, runs);
        let to = panel.scale.add(16 * i);
        s.store(to, scales.scale[0]);
        if W::SUB == 16 {
            s.store(to.add(8), scales.scale[1]);
        }
        if W::HAS_MIN {
            s.store(panel.min.add(8 * i), scales.min);
        }
        let to = panel.words.add(WORDS_STRIDE * i);
        if W::BLOCK_LEN == GROUP {
            unpack_32::<S, W, 0, 1>(s, p, to);
            unpack_32::<S, W, 2, 3>(s, p, to.add(32));
            unpack_32::<S, W, 4, 5>(s, p, to.add(64));
            unpack_32::<S, W, 6, 7>(s, p, to.add(96));
            unpack_32::<S, W, 8, 9>(s, p, to.add(128));
            unpack_32::<S, W, 10, 11>(s, p, to.add(160));
            unpack_32::<S, W, 12, 13>(s, p, to.add(192));
            unpack_32::<S, W, 14, 15>(s, p, to.add(224));
        } else {
            for run in 0..runs {
                unpack_32::<S, W, 0, 1>(s, p.add(W::BLOCK_BYTES * run), to.add(RUN * run));
            }
        }
    }
}

/// # Safety
/// A block is readable at `p`, and 32 words are writable at `to`.
#[inline(always)]
unsafe fn unpack_32<S: Words, W: IntWeight, const A: usize, const B: usize>(
    s: S,
    p: *const u8,
    to: *mut i16,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (mut a, mut b) = (W::words::<S, A>(s, p), W::words::<S, B>(s, p));
        if W::OFFSET != 0 {
            (a, b) = (s.wsub(a, s.wsplat(W::OFFSET)), s.wsub(b, s.wsplat(W::OFFSET)));
        }
        s.store_words(to, a);
        s.store_words(to.add(16), b);
    }
}

/// Quantises `n` activations (at most 256), from element `at` on, of up to `width` rows and turns them into a packed group: pairs
/// `[128][width]`, scales `[8][width]`, sums `[8][width]`, with zeros where there is no token. Gives whether all are finite.
///
/// # Safety
/// Each of `rows` is readable for `at + n` f32; `out` is writable for `width * PACKED_FLOATS`; there are at most `width`
/// rows, a multiple of 8; `n` is a multiple of 32.
#[inline(always)]
pub(crate) unsafe fn pack_group<S: Words>(
    s: S,
    rows: &[*const f32],
    at: usize,
    n: usize,
    out: *mut f32,
    width: usize,
) -> bool {
    // SAFETY: tokens stay below `width` in `out`.
    unsafe {
        let mut finite = true;
        let scales = out.add(width * (GROUP / 2));
        let sums = scales.add(width * (GROUP / RUN));
        let mut eight = [Activations::ZERO; 8];
        for first in (0..width).step_by(8) {
            for (i, row) in eight.iter_mut().enumerate() {
                match rows.get(first + i) {
                    Some(x) => finite &= quantize_group(s, x.add(at), n, row),
                    None => *row = Activations::ZERO,
                }
            }
            let (from, row) = (eight.as_ptr().cast::<f32>(), size_of::<Activations>() / 4);
            for k in (0..n / 2).step_by(8) {
                s.transpose(from.add(k), row, out.add(k * width + first), width);
            }
            let scale = from.byte_add(offset_of!(Activations, scale));
            s.transpose(scale, row, scales.add(first), width);
            let sum = from.byte_add(offset_of!(Activations, sum));
            s.transpose(sum, row, sums.add(first), width);
        }
        finite
    }
}

/// Where the micro-kernel reads and writes.
#[derive(Clone, Copy)]
pub(crate) struct Micro {
    /// From the first of its rows.
    pub(crate) panel: Panel,
    /// Runs of 32 in the group.
    pub(crate) runs: usize,
    /// Elements that share a weight scale: 16 or 32.
    pub(crate) sub: usize,
    pub(crate) has_min: bool,
    /// The packed group, `2 * LANES` tokens wide.
    pub(crate) b: *const f32,
    pub(crate) c: *mut f32,
    pub(crate) c_row: usize,
    /// Adds to `c` instead of writing it.
    pub(crate) accumulate: bool,
}

/// `MR` rows times `NV` vectors of tokens, for one group.
///
/// # Safety
/// The panel holds `MR` rows, `b` a packed group, and `c` is valid for `MR` rows of `NV` vectors.
#[inline(always)]
pub(crate) unsafe fn micro_int<S: Pairs, const MR: usize, const NV: usize>(s: S, m: Micro) {
    // SAFETY: the caller vouches for all of it.
    unsafe {
        let width = 2 * S::LANES;
        let mut sums = [[s.splat(0.0); NV]; MR];
        if m.accumulate {
            for (i, row) in sums.iter_mut().enumerate() {
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = s.load(m.c.add(i * m.c_row + v * S::LANES));
                }
            }
        }
        if m.sub == 16 {
            runs::<S, MR, NV, 16>(s, &m, &mut sums);
        } else {
            runs::<S, MR, NV, 32>(s, &m, &mut sums);
        }
        if m.has_min {
            let x_sums = m.b.add(width * (GROUP / 2 + GROUP / RUN));
            for run in 0..m.runs {
                for v in 0..NV {
                    let x_sum = s.load(x_sums.add(run * width + v * S::LANES));
                    for (i, row) in sums.iter_mut().enumerate() {
                        let min = s.splat(m.panel.min.add(8 * i + run).read());
                        row[v] = s.fma(x_sum, min, row[v]);
                    }
                }
            }
        }
        for (i, row) in sums.iter().enumerate() {
            for (v, &sum) in row.iter().enumerate() {
                s.store(m.c.add(i * m.c_row + v * S::LANES), sum);
            }
        }
    }
}

/// Adds all runs of `SUB` elements to the sums.
///
/// # Safety
/// As [`micro_int`].
#[inline(always)]
unsafe fn runs<S: Pairs, const MR: usize, const NV: usize, const SUB: usize>(
    s: S,
    m: &Micro,
    sums: &mut [[S::F; NV]; MR],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let width = 2 * S::LANES;
        let scales = m.b.add(width * (GROUP / 2));
        for sub in 0..m.runs * RUN / SUB {
            let k = sub * SUB;
            let a = m.panel.words.cast_const().add(k);
            let ints = pairs::<S, MR, NV, SUB>(s, a, m.b.cast::<i16>().add(k * width));
            let mut x_scale = [s.splat(0.0); NV];
            for (v, x_scale) in x_scale.iter_mut().enumerate() {
                *x_scale = s.load(scales.add(k / RUN * width + v * S::LANES));
            }
            for i in 0..MR {
                let scale = s.splat(m.panel.scale.add(16 * i + sub).read());
                for v in 0..NV {
                    let scaled = s.mul(s.to_float(ints[i][v]), x_scale[v]);
                    sums[i][v] = s.fma(scaled, scale, sums[i][v]);
                }
            }
        }
    }
}

/// The integer sums of one run of `SUB` elements.
///
/// # Safety
/// `a` is readable for `MR` rows of `SUB` words, and `b` for `SUB / 2` rows of `2 * LANES` pairs.
#[inline(always)]
unsafe fn pairs<S: Pairs, const MR: usize, const NV: usize, const SUB: usize>(
    s: S,
    a: *const i16,
    b: *const i16,
) -> [[S::I; NV]; MR] {
    // SAFETY: the caller's promise.
    unsafe {
        let mut ints = [[s.isplat(0); NV]; MR];
        for k in 0..SUB / 2 {
            let mut bv = [s.isplat(0); NV];
            for (v, b_v) in bv.iter_mut().enumerate() {
                *b_v = s.load_pairs(b.add(2 * (2 * k * S::LANES + v * S::LANES)));
            }
            for (i, row) in ints.iter_mut().enumerate() {
                let a_i = s.splat_pair(a.add(WORDS_STRIDE * i + 2 * k));
                for (sum, &b_v) in row.iter_mut().zip(&bv) {
                    *sum = s.dot_pairs(*sum, a_i, b_v);
                }
            }
        }
        ints
    }
}
