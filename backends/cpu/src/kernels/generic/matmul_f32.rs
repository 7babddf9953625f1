//! Matmul on f32: weights of F32, F16 and BF16, and of the types without a vectorised form, which are decoded by their
//! scalar decoder.
//!
//! - **Few tokens (decode)**: bound by reading W once. Each task multiplies some rows of W with fused decoding (`dot`).
//! - **Many tokens (prefill)**: bound by arithmetic, so W is decoded once per ubatch, panel by panel, and multiplied as dense
//!   f32 (`gemm`). A task owns up to `PANEL_ROWS` rows of W for all tokens: for each slice of `SLICE_K` inputs it
//!   decodes its panel (stays in L2) and passes over the packed tokens, whose slice of one panel (16 KiB) stays in L1 while
//!   the rows pass; sums are kept in `C`, turned and written once. X is packed once and shared by all tasks.

use std::ops::Range;

use tegula_quant::DType;

use super::gemm::{micro, pack_panel, pack_rows};
use super::int_tasks::StoreTask;
use super::matmul::{
    DOT_TOKENS_MAX, LINE, MatMul, NARROW_ROWS, PANEL_ROWS, TASK_WORK_MIN, TOKENS_ALIGN,
    pass_tokens, pieces,
};
use super::product::{Input, Product, Tokens};
use super::shared::SharedMut;
use super::source::{Decoded, Fused, Source};
use super::{Kernel, Simd, weight};
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

/// Runs `$call` with `$source` standing for how rows of a type are read.
macro_rules! with_source {
    ($dtype:expr, $source:ident => $call:expr) => {
        match $dtype {
            DType::F32 => {
                let $source = Fused::<weight::F32>::NEW;
                $call
            }
            DType::F16 => {
                let $source = Fused::<weight::F16>::NEW;
                $call
            }
            DType::BF16 => {
                let $source = Fused::<weight::BF16>::NEW;
                $call
            }
            dtype => {
                let $source = Decoded { dtype };
                $call
            }
        }
    };
}

/// A plain product.
pub(super) fn run(
    kernels: Kernels,
    pool: &Pool,
    args: &mut MatMul<'_>,
    scratch: &mut [f32],
) -> Result<(), KernelError> {
    let (n_tokens, input) = (args.n_tokens, Input { x: args.x, n_in: args.n_in });
    let product = args.product();
    if n_tokens <= DOT_TOKENS_MAX {
        let tokens = Tokens::run(0..n_tokens);
        let rows_min = (TASK_WORK_MIN / (product.n_in.max(1) * n_tokens)).max(4);
        let rows = product.n_out.div_ceil(16 * pool.n_threads()).max(rows_min).next_multiple_of(4);
        pool.run(product.n_out.div_ceil(rows), |_, task| {
            let rows = task * rows..product.n_out.min((task + 1) * rows);
            dot_rows(kernels, &product, rows, input, tokens);
        })?;
        return Ok(());
    }
    let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let scratch = &mut scratch[skip..];
    let needed = |tokens| pass_scratch(pool.n_threads(), product.n_in, tokens);
    let pass = pass_tokens(n_tokens, scratch.len(), needed);
    for first in (0..n_tokens).step_by(pass) {
        let tokens = Tokens::run(first..n_tokens.min(first + pass));
        run_gemm(kernels, pool, &product, input, tokens, scratch)?;
    }
    Ok(())
}

/// f32 of scratch for a pass over so many tokens, padded.
pub(super) fn pass_scratch(n_threads: usize, n_in: usize, tokens_padded: usize) -> usize {
    n_in * tokens_padded + n_threads * thread_scratch(tokens_padded)
}

/// One pass.
fn run_gemm(
    kernels: Kernels,
    pool: &Pool,
    product: &Product<'_>,
    input: Input<'_>,
    tokens: Tokens<'_>,
    scratch: &mut [f32],
) -> Result<(), KernelError> {
    let padded = tokens.len().next_multiple_of(TOKENS_ALIGN);
    let (packed, threads) = scratch.split_at_mut(product.n_in * padded);
    let packed = SharedMut::new(packed);
    let threads = SharedMut::new(threads);
    let width = panel_width(kernels);
    pool.run(tokens.len().div_ceil(width), |_, panel| {
        // Panels are disjoint, and the padded tokens hold a whole number of them.
        let out = packed.as_mut_ptr().wrapping_add(panel * width * input.n_in);
        kernels.dispatch(PackTask { input, tokens: tokens.part(panel * width, width), out });
    })?;
    let rows_fair = product.n_out.div_ceil(4 * pool.n_threads()).next_multiple_of(NARROW_ROWS);
    let rows = rows_fair.clamp(NARROW_ROWS, PANEL_ROWS);
    pool.run(product.n_out.div_ceil(rows), |worker, task| {
        let rows = task * rows..product.n_out.min((task + 1) * rows);
        // SAFETY: a worker number is in use once at a time, so this thread's part is its own.
        let own = unsafe { threads.slice(worker * thread_scratch(padded), thread_scratch(padded)) };
        gemm_rows(kernels, product, &rows, tokens, packed.as_mut_ptr(), own);
    })?;
    Ok(())
}

/// The product of some rows of W with at most [`DOT_TOKENS_MAX`] tokens.
pub(super) fn dot_rows(
    kernels: Kernels,
    product: &Product<'_>,
    rows: Range<usize>,
    input: Input<'_>,
    tokens: Tokens<'_>,
) {
    with_source!(product.dtype, source =>
        kernels.dispatch(DotTask { source, product, rows, input, tokens }));
}

/// The product of many tokens: up to [`PANEL_ROWS`] rows of W with panels of packed activations that follow each other at
/// `packed`. `own` holds [`thread_scratch`] for the tokens, padded.
pub(super) fn gemm_rows(
    kernels: Kernels,
    product: &Product<'_>,
    rows: &Range<usize>,
    tokens: Tokens<'_>,
    packed: *const f32,
    own: &mut [f32],
) {
    let (n_in, padded) = (product.n_in, tokens.len().next_multiple_of(TOKENS_ALIGN));
    let (panel, sums) = own.split_at_mut(PANEL_ROWS * PANEL_STRIDE);
    let rows_padded = rows.len().next_multiple_of(NARROW_ROWS);
    let unit = product.dtype.block_len().max(32);
    let slices = n_in.div_ceil(SLICE_K).max(1);
    let slice_k = n_in.div_ceil(slices).next_multiple_of(unit).max(unit);
    for k in (0..n_in).step_by(slice_k) {
        let (len, rows) = (slice_k.min(n_in - k), rows.clone());
        let decoded = &mut *panel;
        with_source!(product.dtype, source =>
            kernels.dispatch(DecodeTask { source, product, rows, rows_padded, k, len, panel: decoded }));
        kernels.dispatch(GemmTask {
            packed,
            n_in,
            n_tokens: tokens.len(),
            rows_padded,
            k,
            len,
            panel,
            sums,
            padded,
        });
    }
    kernels.dispatch(StoreTask { product, tokens, rows: rows.clone(), sums, padded });
}

/// Tokens of a panel of packed ones.
pub(super) fn panel_width(kernels: Kernels) -> usize {
    kernels.dispatch(Width)
}

struct DotTask<'a, D> {
    source: D,
    product: &'a Product<'a>,
    /// Columns of Y.
    rows: Range<usize>,
    input: Input<'a>,
    tokens: Tokens<'a>,
}

impl<D: Source> Kernel for DotTask<'_, D> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.product;
        for (data, row, n_rows) in pieces(p.tiles, p.row_bytes, p.rows_of_w(&self.rows)) {
            // SAFETY: the piece lies in its tile, and these columns of the tokens belong to nobody else.
            unsafe {
                match self.tokens.len() {
                    1 => self.piece::<S, 4, 1>(s, data, row, n_rows),
                    2 => self.piece::<S, 4, 2>(s, data, row, n_rows),
                    3 => self.piece::<S, 2, 3>(s, data, row, n_rows),
                    _ => self.piece::<S, 2, 4>(s, data, row, n_rows),
                }
            }
        }
    }
}

impl<D: Source> DotTask<'_, D> {
    /// # Safety
    /// `data` is readable for `n_rows` rows from `row` of W on; what they make of the tokens is written by nobody else; there are
    /// `T` tokens.
    #[inline(always)]
    unsafe fn piece<S: Simd, const R: usize, const T: usize>(
        &self,
        s: S,
        data: *const u8,
        row: usize,
        n_rows: usize,
    ) {
        let p = self.product;
        // SAFETY: rows stay below `n_rows` and tokens below `T`; the caller vouches for both.
        unsafe {
            let (mut x, mut y) = ([self.input.x.as_ptr(); T], [p.y.as_mut_ptr(); T]);
            for t in 0..T {
                x[t] = x[t].add(self.tokens.x(t) * p.n_in);
                y[t] = y[t].add(self.tokens.y(t) * p.n_out + row - p.first_row);
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
                    sums = self.source.dot::<S, R, T>(s, rows, x, p.n_in, R * p.row_bytes);
                } else {
                    let row = data.add(done * p.row_bytes);
                    sums[0] = self.source.dot::<S, 1, T>(s, [row], x, p.n_in, p.row_bytes)[0];
                }
                for (r, sums) in sums.iter().enumerate().take(group) {
                    let bias = p.bias.map_or(0.0, |b| b[row - p.first_row + done + r]);
                    for (y, sum) in y.iter().zip(sums) {
                        y.add(done + r).write(sum + bias);
                    }
                }
                done += group;
            }
        }
    }
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

/// Packs one panel of tokens.
pub(super) struct PackTask<'a> {
    pub(super) input: Input<'a>,
    /// At most [`panel_width`].
    pub(super) tokens: Tokens<'a>,
    /// Room for the panel: `panel_width * n_in`.
    pub(super) out: *mut f32,
}

impl Kernel for PackTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Input { x, n_in } = self.input;
        if let Some(first) = self.tokens.first_of_run() {
            let x = x[first * n_in..].as_ptr();
            // SAFETY: the rows of the tokens follow each other in X.
            unsafe { pack_panel(s, x, n_in, self.tokens.len(), n_in, self.out) };
            return;
        }
        let mut rows = [std::ptr::null(); TOKENS_ALIGN];
        let rows = &mut rows[..self.tokens.len()];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = x[self.tokens.x(i) * n_in..].as_ptr();
        }
        // SAFETY: each row holds `n_in`, and the panel is written by this task alone.
        unsafe { pack_rows(s, rows, n_in, self.out) };
    }
}

struct DecodeTask<'a, D> {
    source: D,
    product: &'a Product<'a>,
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
        let p = self.product;
        let mut at = 0;
        for (data, _, n_rows) in pieces(p.tiles, p.row_bytes, p.rows_of_w(&self.rows)) {
            for r in 0..n_rows {
                let out = &mut self.panel[at * PANEL_STRIDE..][..self.len];
                // SAFETY: the piece lies in its tile; `out` has `len` elements.
                unsafe {
                    let row = data.add(r * p.row_bytes);
                    self.source.decode(s, row, self.k, self.len, out.as_mut_ptr());
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
    packed: *const f32,
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
                    let b = self.packed.add(first * self.n_in + self.k * width);
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
