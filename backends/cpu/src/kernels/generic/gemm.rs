//! Building blocks of a dense f32 product: the micro-kernel, the packing of activations and the turning of results.
//!
//! In plain words: `c[i][j] = sum over k of a(i, k) * b[k][j]`. A row of `b` is read as vectors and each `a(i, k)` is
//! broadcast, so only `b` has to be packed: for matmul `a` is a panel of decoded weight rows exactly as they were
//! decoded and `b` the activations, turned once so that tokens are adjacent; for attention `a` is decoded K (scores)
//! or the probabilities (output), and `b` the queries or decoded V. `MR x NV` sums live in registers: with 6 rows by 2
//! vectors AVX2 does 12 multiply-adds for 8 loads, which keeps both multiply-add units busy.

use super::Simd;
use super::product::Tokens;

/// `c[i][j] (+)= sum over k of a[i * a_row + k * a_k] * b[k * b_row + j]`, for `MR` rows and `NV` vectors of `j`.
///
/// # Safety
/// `a`, `b` and `c` are valid at these strides for `MR` rows, `n_k` steps and `NV` vectors.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "three matrices, each a pointer and strides")]
pub(crate) unsafe fn micro<S: Simd, const MR: usize, const NV: usize>(
    s: S,
    n_k: usize,
    a: *const f32,
    a_row: usize,
    a_k: usize,
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    accumulate: bool,
) {
    // SAFETY: the caller vouches for all three matrices.
    unsafe {
        let mut acc = [[s.splat(0.0); NV]; MR];
        let (mut a_at, mut b_at) = (a, b);
        for _ in 0..n_k {
            let mut bv = [s.splat(0.0); NV];
            for (v, b_v) in bv.iter_mut().enumerate() {
                *b_v = s.load(b_at.add(v * S::LANES));
            }
            for (i, acc_i) in acc.iter_mut().enumerate() {
                let a_i = s.splat(a_at.add(i * a_row).read());
                for (v, sum) in acc_i.iter_mut().enumerate() {
                    *sum = s.fma(a_i, bv[v], *sum);
                }
            }
            a_at = a_at.wrapping_add(a_k);
            b_at = b_at.wrapping_add(b_row);
        }
        for (i, acc_i) in acc.iter().enumerate() {
            for (v, &sum) in acc_i.iter().enumerate() {
                let at = c.add(i * c_row + v * S::LANES);
                s.store(at, if accumulate { s.add(s.load(at), sum) } else { sum });
            }
        }
    }
}

/// Turns rows `t` of `x` into panels of `2 * LANES` adjacent tokens: `out[k * 2 LANES + t] = x[t * x_row + k]`, with
/// zeros where `t >= n_tokens`.
///
/// # Safety
/// `x` is readable for `n_tokens` rows of `n_in`, and `out` writable for `n_in * 2 * LANES`; `n_tokens` is at most
/// `2 * LANES`.
#[inline(always)]
pub(crate) unsafe fn pack_panel<S: Simd>(
    s: S,
    x: *const f32,
    x_row: usize,
    n_tokens: usize,
    n_in: usize,
    out: *mut f32,
) {
    // SAFETY: squares are turned only where all of their rows and columns exist.
    unsafe {
        let width = 2 * S::LANES;
        for half in 0..2 {
            let first = half * S::LANES;
            let whole = if n_tokens >= first + S::LANES { n_in / S::LANES * S::LANES } else { 0 };
            for k in (0..whole).step_by(S::LANES) {
                s.transpose(x.add(first * x_row + k), x_row, out.add(k * width + first), width);
            }
            for k in whole..n_in {
                for t in first..first + S::LANES {
                    let value = if t < n_tokens { x.add(t * x_row + k).read() } else { 0.0 };
                    out.add(k * width + t).write(value);
                }
            }
        }
    }
}

/// Writes a result back in the order of the output: `y[t * y_row + i] = c[i * c_row + t] + bias[i]`.
///
/// # Safety
/// `c` is readable for `n_rows` rows of `n_tokens`, `bias` (unless null) for `n_rows`, and `y` writable for `n_tokens`
/// rows of `n_rows`.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "two matrices, each a pointer and strides")]
pub(crate) unsafe fn store_turned<S: Simd>(
    s: S,
    c: *const f32,
    c_row: usize,
    bias: *const f32,
    n_rows: usize,
    n_tokens: usize,
    y: *mut f32,
    y_row: usize,
) {
    // SAFETY: squares are turned only where all of their rows and columns exist.
    unsafe {
        let rows_whole = n_rows / S::LANES * S::LANES;
        let tokens_whole = n_tokens / S::LANES * S::LANES;
        for t in (0..tokens_whole).step_by(S::LANES) {
            for i in (0..rows_whole).step_by(S::LANES) {
                s.transpose(c.add(i * c_row + t), c_row, y.add(t * y_row + i), y_row);
            }
        }
        for t in 0..n_tokens {
            let first = if t < tokens_whole { rows_whole } else { 0 };
            for i in first..n_rows {
                y.add(t * y_row + i).write(c.add(i * c_row + t).read());
            }
            if !bias.is_null() {
                for i in 0..n_rows {
                    *y.add(t * y_row + i) += bias.add(i).read();
                }
            }
        }
    }
}

/// Longest vector.
const LANES_MAX: usize = 16;

/// As [`pack_panel`], for rows that lie anywhere: `out[k * 2 LANES + t] = rows[t][k]`.
///
/// # Safety
/// Each of `rows` is readable for `n_in`, and `out` writable for `n_in * 2 * LANES`; there are at most `2 * LANES` rows.
#[inline(always)]
pub(crate) unsafe fn pack_rows<S: Simd>(s: S, rows: &[*const f32], n_in: usize, out: *mut f32) {
    let width = 2 * S::LANES;
    let mut square = [0.0f32; LANES_MAX * LANES_MAX];
    // SAFETY: places in rows stay below `n_in`, tokens in `out` below its width, and the square holds `LANES` vectors.
    unsafe {
        for first in [0, S::LANES] {
            let rows = rows.get(first..).unwrap_or_default();
            let rows = &rows[..rows.len().min(S::LANES)];
            let whole = n_in / S::LANES * S::LANES;
            // What an absent row leaves in the square is whatever was there: it must be zero.
            square.fill(0.0);
            for k in (0..whole).step_by(S::LANES) {
                for (t, row) in rows.iter().enumerate() {
                    s.store(square.as_mut_ptr().add(t * S::LANES), s.load(row.add(k)));
                }
                s.transpose(square.as_ptr(), S::LANES, out.add(k * width + first), width);
            }
            for k in whole..n_in {
                for t in 0..S::LANES {
                    let value = rows.get(t).map_or(0.0, |row| row.add(k).read());
                    out.add(k * width + first + t).write(value);
                }
            }
        }
    }
}

/// Writes a result to the rows of Y that tokens name: `y[tokens.y(t) * y_row + i] = c[i * c_row + t] + bias[i]`.
///
/// # Safety
/// `c` is readable for `n_rows` rows of as many elements as there are tokens, `bias` (unless null) for `n_rows`, and `y` writable
/// for `n_rows` at the place of each token.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "two matrices, each a pointer and strides")]
pub(crate) unsafe fn store<S: Simd>(
    s: S,
    c: *const f32,
    c_row: usize,
    bias: *const f32,
    n_rows: usize,
    tokens: &Tokens<'_>,
    y: *mut f32,
    y_row: usize,
) {
    // SAFETY: the caller's promise; squares are turned only where all of their rows exist, and copied where tokens do.
    unsafe {
        if let Some(first) = tokens.first_of_run() {
            let y = y.add(first * y_row);
            return store_turned(s, c, c_row, bias, n_rows, tokens.len(), y, y_row);
        }
        let mut square = [0.0f32; LANES_MAX * LANES_MAX];
        let whole = n_rows / S::LANES * S::LANES;
        for t in (0..tokens.len()).step_by(S::LANES) {
            let n = (tokens.len() - t).min(S::LANES);
            for i in (0..whole).step_by(S::LANES) {
                if n == S::LANES {
                    s.transpose(c.add(i * c_row + t), c_row, square.as_mut_ptr(), S::LANES);
                } else {
                    for row in 0..S::LANES {
                        for token in 0..n {
                            square[token * S::LANES + row] =
                                c.add((i + row) * c_row + t + token).read();
                        }
                    }
                }
                let bias = if bias.is_null() { s.splat(0.0) } else { s.load(bias.add(i)) };
                for token in 0..n {
                    let sums = s.load(square.as_ptr().add(token * S::LANES));
                    s.store(y.add(tokens.y(t + token) * y_row + i), s.add(sums, bias));
                }
            }
            for token in t..t + n {
                let y = y.add(tokens.y(token) * y_row);
                for i in whole..n_rows {
                    let bias = if bias.is_null() { 0.0 } else { bias.add(i).read() };
                    y.add(i).write(c.add(i * c_row + token).read() + bias);
                }
            }
        }
    }
}
