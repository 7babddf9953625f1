//! Decode on integers: a few activation rows times packed weight rows.
//!
//! In plain words: `y[t][row] = sum over i of weight(row, i) * x[t][i]`, where weights are unpacked to 16-bit words that
//! meet 16-bit activations. What it does for speed:
//! - **Rows in groups.** `R` rows advance together, so their sums are independent and activations are loaded once.
//! - **Scales apart.** The scales of 256 elements are worked out as vectors, times those of the activations, and laid
//!   down; each is then one broadcast load. Offsets and minima meet the sums of activations the same way, eight runs at a
//!   time.
//! - **The next rows are asked for.** `R` short streams side by side are more than the machine's own prefetching follows, and
//!   without help each group waits for memory.
//! - For 32 elements there remain, with nibbles: one widening load, a mask, a shift, two multiply-adds of pairs, an addition,
//!   a conversion and the multiply-add by the scale.

use super::Words;
use super::activations::{Activations, GROUP, RUN};
use super::ints::IntWeight;

/// Bytes of a cache line.
const LINE: usize = 64;

/// The scales of a group, weight times activation.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Table([f32; 16]);

/// Dot products of `R` weight rows of `n` elements with `T` rows of activations. What lies `ahead` bytes after each row is
/// wanted next.
///
/// # Safety
/// Each of `rows` is readable for `n` elements of type `W`, and each of `x` for the groups of `n` elements; `n` is a
/// multiple of the block length.
#[inline(always)]
pub(crate) unsafe fn int_dot<S: Words, W: IntWeight, const R: usize, const T: usize>(
    s: S,
    rows: [*const u8; R],
    x: [*const Activations; T],
    n: usize,
    ahead: usize,
) -> [[f32; T]; R] {
    // SAFETY: groups and runs stay below `n`, which the caller vouches for.
    unsafe {
        let mut acc = [[s.splat(0.0); T]; R];
        let mut rest = [[s.splat(0.0); T]; R];
        let mut group = 0;
        let mut p = rows;
        while group * GROUP < n {
            let runs = ((n - group * GROUP) / RUN).min(GROUP / RUN);
            let mut xg = [&Activations::ZERO; T];
            for (xg, x) in xg.iter_mut().zip(x) {
                *xg = &*x.add(group);
            }
            let mut table = [[Table([0.0; 16]); T]; R];
            for r in 0..R {
                for line in 0..(GROUP / W::BLOCK_LEN * W::BLOCK_BYTES).div_ceil(LINE) {
                    s.prefetch(p[r].wrapping_add(ahead + line * LINE));
                }
                fill::<S, W, T>(s, p[r], xg, runs, &mut table[r], &mut rest[r]);
            }
            if W::BLOCK_LEN == GROUP {
                run::<S, W, R, T, 0, 1>(s, p, xg, 0, &table, &mut acc);
                run::<S, W, R, T, 2, 3>(s, p, xg, 1, &table, &mut acc);
                run::<S, W, R, T, 4, 5>(s, p, xg, 2, &table, &mut acc);
                run::<S, W, R, T, 6, 7>(s, p, xg, 3, &table, &mut acc);
                run::<S, W, R, T, 8, 9>(s, p, xg, 4, &table, &mut acc);
                run::<S, W, R, T, 10, 11>(s, p, xg, 5, &table, &mut acc);
                run::<S, W, R, T, 12, 13>(s, p, xg, 6, &table, &mut acc);
                run::<S, W, R, T, 14, 15>(s, p, xg, 7, &table, &mut acc);
                for p in &mut p {
                    *p = p.add(W::BLOCK_BYTES);
                }
            } else {
                for at in 0..runs {
                    run::<S, W, R, T, 0, 1>(s, p, xg, at, &table, &mut acc);
                    for p in &mut p {
                        *p = p.add(W::BLOCK_BYTES);
                    }
                }
            }
            group += 1;
        }
        let mut out = [[0.0; T]; R];
        for r in 0..R {
            for t in 0..T {
                out[r][t] = s.sum(s.add(acc[r][t], rest[r][t]));
            }
        }
        out
    }
}

/// The scales of one row's group, and what its offset or minima contribute.
///
/// # Safety
/// The blocks of `runs` times 32 elements are readable at `p`.
#[inline(always)]
unsafe fn fill<S: Words, W: IntWeight, const T: usize>(
    s: S,
    p: *const u8,
    x: [&Activations; T],
    runs: usize,
    table: &mut [Table; T],
    rest: &mut [S::F; T],
) {
    // SAFETY: all tables hold eight or sixteen f32.
    unsafe {
        let scales = W::scales(s, p, runs);
        let offset = s.splat(-f32::from(W::OFFSET));
        for t in 0..T {
            let to = table[t].0.as_mut_ptr();
            if W::SUB == 16 {
                for (half, &scale) in scales.scale.iter().enumerate() {
                    let at = 8 * half;
                    s.store(to.add(at), s.mul(scale, s.load(x[t].scale16.as_ptr().add(at))));
                    if W::OFFSET != 0 {
                        let sum = s.load(x[t].sum16.as_ptr().add(at));
                        rest[t] = s.fma(s.mul(scale, offset), sum, rest[t]);
                    }
                }
            } else {
                s.store(to, s.mul(scales.scale[0], s.load(x[t].scale.as_ptr())));
                if W::HAS_MIN {
                    rest[t] = s.fma(scales.min, s.load(x[t].sum.as_ptr()), rest[t]);
                } else if W::OFFSET != 0 {
                    let min = s.mul(scales.scale[0], offset);
                    rest[t] = s.fma(min, s.load(x[t].sum.as_ptr()), rest[t]);
                }
            }
        }
    }
}

/// Run `at` of the group, whose elements are words `A` and `B` of the block at each of `p`.
///
/// # Safety
/// A block is readable at each of `p`; `at` is below 8.
#[inline(always)]
unsafe fn run<
    S: Words,
    W: IntWeight,
    const R: usize,
    const T: usize,
    const A: usize,
    const B: usize,
>(
    s: S,
    p: [*const u8; R],
    x: [&Activations; T],
    at: usize,
    table: &[[Table; T]; R],
    acc: &mut [[S::F; T]; R],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut xv = [[s.isplat(0); 2]; T];
        for (xv, x) in xv.iter_mut().zip(x) {
            let words = x.words.as_ptr().add(RUN * at);
            *xv = [s.load_pairs(words), s.load_pairs(words.add(16))];
        }
        for r in 0..R {
            let (a, b) = (W::words::<S, A>(s, p[r]), W::words::<S, B>(s, p[r]));
            for t in 0..T {
                let scale = table[r][t].0.as_ptr();
                let low = s.dot_pairs(s.isplat(0), a, xv[t][0]);
                if W::SUB == 16 {
                    let high = s.dot_pairs(s.isplat(0), b, xv[t][1]);
                    let first = s.splat(scale.add(2 * at).read());
                    let second = s.splat(scale.add(2 * at + 1).read());
                    acc[r][t] = s.fma(s.to_float(low), first, acc[r][t]);
                    acc[r][t] = s.fma(s.to_float(high), second, acc[r][t]);
                } else {
                    let both = s.dot_pairs(low, b, xv[t][1]);
                    acc[r][t] = s.fma(s.to_float(both), s.splat(scale.add(at).read()), acc[r][t]);
                }
            }
        }
    }
}
