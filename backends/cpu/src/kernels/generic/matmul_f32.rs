//! Matmul on f32: weights of F32, F16 and BF16, and of the types without a vectorised form, which are decoded by their
//! scalar decoder.
//!
//! - **Few tokens (decode)**: bound by reading W once. Each task multiplies some rows of W with fused decoding (`dot`).
//! - **Many tokens (prefill)**: bound by arithmetic, so W is decoded once per ubatch, panel by panel, and multiplied as dense
//!   f32 (`gemm`). A task owns up to `PANEL_ROWS` rows of W for all tokens: for each slice of `SLICE_K` inputs it
//!   decodes its panel (stays in L2) and passes over the packed tokens, whose slice of one panel (16 KiB) stays in L1 while
//!   the rows pass; sums are kept in `C`, turned and written once. X is packed once and shared by all tasks.

use std::ops::Range;

use super::gemm::{micro, pack_panel, store_turned};
use super::matmul::{
    DOT_TOKENS_MAX, LINE, MatMul, NARROW_ROWS, PANEL_ROWS, PASS_TOKENS, TASK_WORK_MIN,
    TOKENS_ALIGN, pieces,
};
use super::shared::SharedMut;
use super::source::Source;
use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels};
use crate::pool::Pool;

/// Most inputs of a slice.
const SLICE_K: usize = 256;
/// Distance of panel rows in f32: off the power of two, so that the rows of a micro-kernel use different cache sets.
const PANEL_STRIDE: usize = SLICE_K + 16;

/// Decoded panel and sums of one thread.
pub(super) fn thread_scratch(tokens_padded: usize) -> usize {
    PANEL_ROWS * (PANEL_STRIDE + tokens_padded)
}

/// A product as the tasks see it.
struct Problem<'a, D> {
    source: D,
    tiles: &'a [super::matmul::RowTile],
    row_bytes: usize,
    n_in: usize,
    n_out: usize,
    x: &'a [f32],
    bias: Option<&'a [f32]>,
    /// Tasks own disjoint ranges of output rows.
    y: SharedMut<'a, f32>,
}

impl<D> Problem<'_, D> {
    fn pieces(&self, rows: Range<usize>) -> impl Iterator<Item = (*const u8, usize, usize)> {
        pieces(self.tiles, self.row_bytes, rows)
    }
}

/// The product with weights from `source`.
pub(super) fn run<D: Source>(
    kernels: Kernels,
    pool: &Pool,
    args: &mut MatMul<'_>,
    scratch: &mut [f32],
    source: D,
) -> Result<(), KernelError> {
    let problem = Problem {
        source,
        tiles: args.tiles,
        row_bytes: args.n_in / args.dtype.block_len() * args.dtype.block_bytes(),
        n_in: args.n_in,
        n_out: args.n_out,
        x: args.x,
        bias: args.bias,
        y: SharedMut::new(&mut *args.y),
    };
    if args.n_tokens <= DOT_TOKENS_MAX {
        return run_dot(kernels, pool, &problem, args.n_tokens);
    }
    let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let unit = args.dtype.block_len().max(32);
    for first in (0..args.n_tokens).step_by(PASS_TOKENS) {
        let tokens = first..args.n_tokens.min(first + PASS_TOKENS);
        run_gemm(kernels, pool, &problem, tokens, unit, &mut scratch[skip..])?;
    }
    Ok(())
}

fn run_dot<D: Source>(
    kernels: Kernels,
    pool: &Pool,
    problem: &Problem<'_, D>,
    n_tokens: usize,
) -> Result<(), KernelError> {
    let n_out = problem.n_out;
    let rows_min = (TASK_WORK_MIN / (problem.n_in.max(1) * n_tokens)).max(4);
    let rows = n_out.div_ceil(16 * pool.n_threads()).max(rows_min).next_multiple_of(4);
    pool.run(n_out.div_ceil(rows), |_, task| {
        let rows = task * rows..n_out.min((task + 1) * rows);
        kernels.dispatch(DotTask { problem, rows, n_tokens });
    })?;
    Ok(())
}

struct DotTask<'a, D> {
    problem: &'a Problem<'a, D>,
    rows: Range<usize>,
    n_tokens: usize,
}

impl<D: Source> Kernel for DotTask<'_, D> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (data, row, n_rows) in self.problem.pieces(self.rows.clone()) {
            // SAFETY: the piece lies in its tile, and the rows of this task belong to nobody else.
            unsafe {
                match self.n_tokens {
                    1 => dot_piece::<S, D, 4, 1>(s, self.problem, data, row, n_rows),
                    2 => dot_piece::<S, D, 4, 2>(s, self.problem, data, row, n_rows),
                    3 => dot_piece::<S, D, 2, 3>(s, self.problem, data, row, n_rows),
                    _ => dot_piece::<S, D, 2, 4>(s, self.problem, data, row, n_rows),
                }
            }
        }
    }
}

/// # Safety
/// `data` is readable for `n_rows` rows; output rows `row..row + n_rows` are written by nobody else; X has `T` rows.
#[inline(always)]
unsafe fn dot_piece<S: Simd, D: Source, const R: usize, const T: usize>(
    s: S,
    p: &Problem<'_, D>,
    data: *const u8,
    row: usize,
    n_rows: usize,
) {
    // SAFETY: rows stay below `n_rows` and tokens below `T`; the caller vouches for both.
    unsafe {
        let mut x = [p.x.as_ptr(); T];
        for (t, x_t) in x.iter_mut().enumerate() {
            *x_t = x_t.add(t * p.n_in);
        }
        let mut done = 0;
        while done < n_rows {
            let group = if n_rows - done >= R { R } else { 1 };
            let mut sums = [[0.0; T]; R];
            if group == R {
                let mut rows = [data; R];
                for (r, row_r) in rows.iter_mut().enumerate() {
                    *row_r = row_r.add((done + r) * p.row_bytes);
                }
                sums = p.source.dot::<S, R, T>(s, rows, x, p.n_in, R * p.row_bytes);
            } else {
                sums[0] = p.source.dot::<S, 1, T>(
                    s,
                    [data.add(done * p.row_bytes)],
                    x,
                    p.n_in,
                    p.row_bytes,
                )[0];
            }
            for (r, sums) in sums.iter().enumerate().take(group) {
                let out = row + done + r;
                let bias = p.bias.map_or(0.0, |b| b[out]);
                for (t, sum) in sums.iter().enumerate() {
                    p.y.as_mut_ptr().add(t * p.n_out + out).write(sum + bias);
                }
            }
            done += group;
        }
    }
}

/// One pass over at most `PASS_TOKENS` tokens.
fn run_gemm<D: Source>(
    kernels: Kernels,
    pool: &Pool,
    problem: &Problem<'_, D>,
    tokens: Range<usize>,
    unit: usize,
    scratch: &mut [f32],
) -> Result<(), KernelError> {
    let n_tokens = tokens.len();
    let padded = n_tokens.next_multiple_of(TOKENS_ALIGN);
    let (packed, threads) = scratch.split_at_mut(problem.n_in * padded);
    let packed = SharedMut::new(packed);
    let threads = SharedMut::new(threads);
    let width = kernels.dispatch(Width);
    pool.run(n_tokens.div_ceil(width), |_, panel| {
        kernels.dispatch(PackTask { problem, tokens: tokens.clone(), panel, packed });
    })?;

    let slices = problem.n_in.div_ceil(SLICE_K).max(1);
    let slice_k = problem.n_in.div_ceil(slices).next_multiple_of(unit).max(unit);
    let rows_fair = problem.n_out.div_ceil(4 * pool.n_threads()).next_multiple_of(NARROW_ROWS);
    let rows = rows_fair.clamp(NARROW_ROWS, PANEL_ROWS);
    pool.run(problem.n_out.div_ceil(rows), |worker, task| {
        let rows = task * rows..problem.n_out.min((task + 1) * rows);
        // SAFETY: a worker number is in use once at a time, so this thread's part is its own.
        let own = unsafe { threads.slice(worker * thread_scratch(padded), thread_scratch(padded)) };
        let (panel, sums) = own.split_at_mut(PANEL_ROWS * PANEL_STRIDE);
        let rows_padded = rows.len().next_multiple_of(NARROW_ROWS);
        for k in (0..problem.n_in).step_by(slice_k) {
            let len = slice_k.min(problem.n_in - k);
            kernels.dispatch(DecodeTask {
                problem,
                rows: rows.clone(),
                rows_padded,
                k,
                len,
                panel,
            });
            kernels.dispatch(GemmTask {
                packed,
                n_in: problem.n_in,
                n_tokens,
                rows_padded,
                k,
                len,
                panel,
                sums,
                padded,
            });
        }
        kernels.dispatch(StoreTask { problem, tokens: tokens.clone(), rows, sums, padded });
    })?;
    Ok(())
}

/// The width of a panel of packed tokens.
struct Width;

impl Kernel for Width {
    type Output = usize;
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> usize {
        2 * S::LANES
    }
}

struct PackTask<'a, D> {
    problem: &'a Problem<'a, D>,
    tokens: Range<usize>,
    panel: usize,
    packed: SharedMut<'a, f32>,
}

impl<D: Source> Kernel for PackTask<'_, D> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = 2 * S::LANES;
        let n_in = self.problem.n_in;
        let first = self.tokens.start + self.panel * width;
        let count = (self.tokens.end - first).min(width);
        // SAFETY: panels are disjoint, and the padded tokens hold a whole number of them.
        unsafe {
            let x = self.problem.x.as_ptr().add(first * n_in);
            pack_panel(
                s,
                x,
                n_in,
                count,
                n_in,
                self.packed.as_mut_ptr().add(self.panel * width * n_in),
            );
        }
    }
}

struct DecodeTask<'a, D> {
    problem: &'a Problem<'a, D>,
    rows: Range<usize>,
    rows_padded: usize,
    k: usize,
    len: usize,
    panel: &'a mut [f32],
}

impl<D: Source> Kernel for DecodeTask<'_, D> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut at = 0;
        for (data, _, n_rows) in self.problem.pieces(self.rows.clone()) {
            for r in 0..n_rows {
                let out = &mut self.panel[at * PANEL_STRIDE..][..self.len];
                // SAFETY: the piece lies in its tile; `out` has `len` elements.
                unsafe {
                    let row = data.add(r * self.problem.row_bytes);
                    self.problem.source.decode(s, row, self.k, self.len, out.as_mut_ptr());
                }
                at += 1;
            }
        }
        for r in at..self.rows_padded {
            self.panel[r * PANEL_STRIDE..][..self.len].fill(0.0);
        }
    }
}

struct GemmTask<'a> {
    packed: SharedMut<'a, f32>,
    n_in: usize,
    n_tokens: usize,
    rows_padded: usize,
    k: usize,
    len: usize,
    panel: &'a [f32],
    sums: &'a mut [f32],
    padded: usize,
}

impl Kernel for GemmTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = 2 * S::LANES;
        let accumulate = self.k > 0;
        for first in (0..self.n_tokens).step_by(width) {
            let narrow = self.n_tokens - first <= S::LANES;
            let rows = if narrow { NARROW_ROWS } else { S::GEMM_ROWS };
            for r in (0..self.rows_padded).step_by(rows) {
                // SAFETY: rows and tokens are padded to whole micro-tiles in all three; the packed tokens are not
                // written during this phase.
                unsafe {
                    let a = self.panel.as_ptr().add(r * PANEL_STRIDE);
                    let b = self.packed.as_mut_ptr().add(first * self.n_in + self.k * width);
                    let c = self.sums.as_mut_ptr().add(r * self.padded + first);
                    let (n, c_row) = (self.len, self.padded);
                    if narrow {
                        micro::<S, NARROW_ROWS, 1>(
                            s,
                            n,
                            a,
                            PANEL_STRIDE,
                            1,
                            b,
                            width,
                            c,
                            c_row,
                            accumulate,
                        );
                    } else if S::GEMM_ROWS == 12 {
                        micro::<S, 12, 2>(s, n, a, PANEL_STRIDE, 1, b, width, c, c_row, accumulate);
                    } else {
                        micro::<S, 6, 2>(s, n, a, PANEL_STRIDE, 1, b, width, c, c_row, accumulate);
                    }
                }
            }
        }
    }
}

struct StoreTask<'a, D> {
    problem: &'a Problem<'a, D>,
    tokens: Range<usize>,
    rows: Range<usize>,
    sums: &'a [f32],
    padded: usize,
}

impl<D: Source> Kernel for StoreTask<'_, D> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n_out = self.problem.n_out;
        let bias = self.problem.bias.map_or(std::ptr::null(), |b| b[self.rows.start..].as_ptr());
        // SAFETY: these rows of the output are this task's own, for all tokens.
        unsafe {
            let y = self.problem.y.as_mut_ptr().add(self.tokens.start * n_out + self.rows.start);
            let c = self.sums.as_ptr();
            store_turned(s, c, self.padded, bias, self.rows.len(), self.tokens.len(), y, n_out);
        }
    }
}
