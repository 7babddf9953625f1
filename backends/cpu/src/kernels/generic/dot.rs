//! Decode: a few activation rows times packed weight rows, without writing the decoded weights anywhere.
//!
//! In plain words: `y[t][row] = sum over i of weight(row, i) * x[t][i]`. Three departures from that:
//! - **Rows in groups.** `R` rows advance together, so that their sums are independent and `x` is loaded once for all.
//! - **One token: factored scales.** With `w = value * scale + min`, a sub-block contributes
//!   `scale * sum(value * x) + min * sum(x)`: one multiply-add per vector, two per sub-block, and the sum of `x` is
//!   shared by the rows of the group. Decoding each weight first would take twice the multiply-adds.
//! - **Several tokens: decoded vectors.** A decoded vector is then used `T` times from its register, which beats `T`
//!   factored sums.

use super::Simd;
use super::weight::{Weight, apply};

/// Dot products of `R` weight rows of `n` elements with `T` rows of `x`.
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
) -> [[f32; T]; R] {
    // SAFETY: block `b`, sub-block and vector offsets stay below `n`, which the caller vouches for.
    unsafe {
        let blocks = n / W::BLOCK_LEN;
        let mut acc = [[s.splat(0.0); T]; R];
        for b in 0..blocks {
            let mut p = rows;
            for r in &mut p {
                *r = r.add(b * W::BLOCK_BYTES);
            }
            let mut xb = x;
            for t in &mut xb {
                *t = t.add(b * W::BLOCK_LEN);
            }
            if T == 1 && W::SCALED {
                block_factored::<S, W, R, T>(s, p, xb, &mut acc);
            } else {
                block_decoded::<S, W, R, T>(s, p, xb, &mut acc);
            }
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

/// Sub-blocks are handled in pairs, so that the parity of their number is a constant.
const fn step<W: Weight>() -> usize {
    if W::BLOCK_LEN / W::SUB > 1 { 2 } else { 1 }
}

/// Vectors of a sub-block of 32 at the smallest vector length.
const VECTORS_MAX: usize = 4;

/// # Safety
/// One block is readable at each of `p`, and its elements at each of `x`.
#[inline(always)]
unsafe fn block_factored<S: Simd, W: Weight, const R: usize, const T: usize>(
    s: S,
    p: [*const u8; R],
    x: [*const f32; T],
    acc: &mut [[S::F; T]; R],
) {
    // SAFETY: offsets stay inside the block.
    unsafe {
        let vectors = W::SUB / S::LANES;
        let mut scales = [W::scales(s, p[0]); R];
        for r in 1..R {
            scales[r] = W::scales(s, p[r]);
        }
        for first in 0..W::BLOCK_LEN / W::SUB / step::<W>() {
            for second in 0..step::<W>() {
                let sub = first * step::<W>() + second;
                let mut xv = [s.splat(0.0); VECTORS_MAX];
                for (v, x_at) in xv.iter_mut().enumerate().take(vectors) {
                    *x_at = s.load(x[0].add(sub * W::SUB + v * S::LANES));
                }
                let x_sum = match vectors {
                    1 => xv[0],
                    2 => s.add(xv[0], xv[1]),
                    _ => s.add(s.add(xv[0], xv[1]), s.add(xv[2], xv[3])),
                };
                for r in 0..R {
                    let mut sum = s.mul(W::values(s, p[r], sub, 0), xv[0]);
                    for (v, &x_at) in xv.iter().enumerate().take(vectors).skip(1) {
                        sum = s.fma(W::values(s, p[r], sub, v * S::LANES), x_at, sum);
                    }
                    let mut total = s.fma(sum, W::scale(s, &scales[r], sub), acc[r][0]);
                    if W::HAS_MIN {
                        total = s.fma(x_sum, W::min(s, &scales[r], sub), total);
                    }
                    acc[r][0] = total;
                }
            }
        }
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
        for first in 0..W::BLOCK_LEN / W::SUB / step::<W>() {
            for second in 0..step::<W>() {
                let sub = first * step::<W>() + second;
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
}
