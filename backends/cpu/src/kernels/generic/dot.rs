//! Decode in f32: a few activation rows times weight rows, without writing the decoded weights anywhere.
//!
//! In plain words: `y[t][row] = sum over i of weight(row, i) * x[t][i]`. `R` rows advance together, so that their sums are
//! independent and `x` is loaded once for all, and a decoded vector is used `T` times from its register.

use super::Simd;
use super::weight::{Weight, apply};

/// Dot products of `R` weight rows of `n` elements with `T` rows of `x`. What lies `ahead` bytes after each row is wanted next:
/// several short streams side by side are more than the machine's own prefetching follows.
///
/// # Safety
/// Each of `rows` is readable for `n` elements of type `W` and each of `x` for `n` f32; `n` is a multiple of the block
/// length unless `W` is plain.
#[inline(always)]
pub(crate) unsafe fn dot_rows<S: Simd, W: Weight, const R: usize, const T: usize>(
    s: S,
    rows: [*const u8; R],
    x: [*const f32; T],
    n: usize,
    ahead: usize,
) -> [[f32; T]; R] {
    // SAFETY: block `b`, sub-block and vector offsets stay below `n`, which the caller vouches for.
    unsafe {
        let blocks = n / W::BLOCK_LEN;
        let mut acc = [[s.splat(0.0); T]; R];
        for b in 0..blocks {
            let mut p = rows;
            for r in &mut p {
                *r = r.add(b * W::BLOCK_BYTES);
                for line in 0..W::BLOCK_BYTES.div_ceil(64) {
                    s.prefetch(r.wrapping_add(ahead + 64 * line));
                }
            }
            let mut xb = x;
            for t in &mut xb {
                *t = t.add(b * W::BLOCK_LEN);
            }
            block_decoded::<S, W, R, T>(s, p, xb, &mut acc);
        }
        let mut out = [[0.0; T]; R];
        for r in 0..R {
            for t in 0..T {
                let mut sum = s.sum(acc[r][t]);
                for i in 0..n - blocks * W::BLOCK_LEN {
                    let w = W::element(rows[r].add(blocks * W::BLOCK_BYTES), i);
                    sum += w * x[t].add(blocks * W::BLOCK_LEN + i).read();
                }
                out[r][t] = sum;
            }
        }
        out
    }
}

/// # Safety
/// One block is readable at each of `p`, and its elements at each of `x`.
#[inline(always)]
unsafe fn block_decoded<S: Simd, W: Weight, const R: usize, const T: usize>(
    s: S,
    p: [*const u8; R],
    x: [*const f32; T],
    acc: &mut [[S::F; T]; R],
) {
    // SAFETY: offsets stay inside the block.
    unsafe {
        let mut scales = [W::scales(s, p[0]); R];
        for r in 1..R {
            scales[r] = W::scales(s, p[r]);
        }
        for sub in 0..W::BLOCK_LEN / W::SUB {
            for r in 0..R {
                let scale = W::scale(s, &scales[r], sub);
                let min = W::min(s, &scales[r], sub);
                for v in 0..W::SUB / S::LANES {
                    let w = apply::<S, W>(s, W::values(s, p[r], sub, v * S::LANES), scale, min);
                    for t in 0..T {
                        let x_at = s.load(x[t].add(sub * W::SUB + v * S::LANES));
                        acc[r][t] = s.fma(w, x_at, acc[r][t]);
                    }
                }
            }
        }
    }
}
