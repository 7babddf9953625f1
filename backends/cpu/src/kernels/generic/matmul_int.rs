//! Matmul on integers: activations of 16 bits, weights unpacked to 16 bits, sums of 32 products in 32 bits.
//!
//! - **Few tokens (decode)**: bound by reading W once. Activations are quantised by the caller's thread, then each task
//!   multiplies some rows of W (`int_dot`).
//! - **Many tokens (prefill)**: bound by arithmetic. Activations are quantised and packed once, shared by all tasks. A task
//!   owns up to `PANEL_ROWS` rows of W for all tokens: for each group of 256 inputs it unpacks its panel (stays in L2) and
//!   passes over the packed tokens, whose group of one panel (9 KiB) stays in L1 while the rows pass (`int_gemm`); sums are
//!   kept in `C`, turned and written once.

use std::ops::Range;
use std::sync::atomic::AtomicBool;

use super::activations::{Activations, GROUP};
use super::int_gemm::PACKED_FLOATS;
use super::int_tasks::{DotTask, PackTask, Quantize, gemm_rows, has, thread_scratch};
use super::matmul::{
    DOT_TOKENS_MAX, LINE, MatMul, NARROW_ROWS, PANEL_ROWS, TASK_WORK_MIN, TOKENS_ALIGN, pass_tokens,
};
use super::product::{Input, Product, Tokens};
use super::shared::SharedMut;
use crate::kernels::{KernelError, Kernels};
use crate::pool::Pool;

/// Most products that are run together.
pub(super) const PRODUCTS_MAX: usize = 4;

/// The products of a run, and what they share.
struct Products<'a> {
    list: [Option<Product<'a>>; PRODUCTS_MAX],
    input: Input<'a>,
}

impl Products<'_> {
    /// Tasks of all products, given those of one.
    fn count(&self, rows: impl Fn(&Product<'_>) -> usize) -> usize {
        self.list.iter().flatten().map(|p| p.n_out.div_ceil(rows(p))).sum()
    }

    /// The product and the rows of a task.
    fn task(
        &self,
        mut task: usize,
        rows: impl Fn(&Product<'_>) -> usize,
    ) -> Option<(&Product<'_>, Range<usize>)> {
        for product in self.list.iter().flatten() {
            let rows = rows(product);
            let count = product.n_out.div_ceil(rows);
            if task < count {
                return Some((product, task * rows..product.n_out.min((task + 1) * rows)));
            }
            task -= count;
        }
        None
    }
}

/// Runs those of the products whose types are integers; false if they have to be computed in f32.
pub(super) fn run(
    kernels: Kernels,
    pool: &Pool,
    products: &mut [MatMul<'_>],
    scratch: &mut [f32],
) -> Result<bool, KernelError> {
    let Some(first) = products.iter().find(|args| has(args.dtype)) else { return Ok(true) };
    let (x, n_in, n_tokens) = (first.x, first.n_in, first.n_tokens);
    let mut all = products.iter_mut();
    let list = std::array::from_fn(|_| {
        let args = all.next().filter(|args| has(args.dtype) && args.n_out > 0)?;
        Some(args.product())
    });
    let products = Products { list, input: Input { x, n_in } };
    let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let scratch = &mut scratch[skip..];
    let needed = |tokens| pass_scratch(pool.n_threads(), n_in, tokens);
    let pass = pass_tokens(n_tokens, scratch.len(), needed);
    for first in (0..n_tokens).step_by(pass) {
        let tokens = first..n_tokens.min(first + pass);
        let finite = if tokens.len() <= DOT_TOKENS_MAX {
            run_dot(kernels, pool, &products, tokens, scratch)?
        } else {
            run_gemm(kernels, pool, &products, tokens, scratch)?
        };
        if !finite {
            return Ok(false);
        }
    }
    Ok(true)
}

fn run_dot(
    kernels: Kernels,
    pool: &Pool,
    products: &Products<'_>,
    tokens: Range<usize>,
    scratch: &mut [f32],
) -> Result<bool, KernelError> {
    let finite = AtomicBool::new(true);
    let x = scratch.as_mut_ptr().cast::<Activations>();
    let (input, tokens) = (products.input, Tokens::run(tokens));
    kernels.dispatch_words(Quantize { input, tokens, out: x, finite: &finite });
    if !finite.into_inner() {
        return Ok(false);
    }
    let x = Packed(x);
    let rows = |p: &Product<'_>| {
        let rows_min = (TASK_WORK_MIN / (input.n_in.max(1) * tokens.len())).max(4);
        p.n_out.div_ceil(16 * pool.n_threads()).max(rows_min).next_multiple_of(4)
    };
    pool.run(products.count(rows), |_, task| {
        if let Some((product, rows)) = products.task(task, rows) {
            let x = std::array::from_fn(|t| x.row(t.min(tokens.len() - 1) * input.groups()));
            kernels.dispatch_words(DotTask { product, rows, tokens, x });
        }
    })?;
    Ok(true)
}

/// Quantised activations, only read.
struct Packed(*mut Activations);

impl Packed {
    fn row(&self, at: usize) -> *const Activations {
        self.0.wrapping_add(at)
    }
}

// SAFETY: written before the tasks start and only read by them.
unsafe impl Sync for Packed {}

/// f32 of scratch for a pass over so many tokens, padded.
pub(super) fn pass_scratch(n_threads: usize, n_in: usize, tokens_padded: usize) -> usize {
    n_in.div_ceil(GROUP) * PACKED_FLOATS * tokens_padded + n_threads * thread_scratch(tokens_padded)
}

/// One pass.
fn run_gemm(
    kernels: Kernels,
    pool: &Pool,
    products: &Products<'_>,
    tokens: Range<usize>,
    scratch: &mut [f32],
) -> Result<bool, KernelError> {
    let n_tokens = tokens.len();
    let padded = n_tokens.next_multiple_of(TOKENS_ALIGN);
    let (packed, threads) = scratch.split_at_mut(products.input.groups() * PACKED_FLOATS * padded);
    let packed = SharedMut::new(packed);
    let threads = SharedMut::new(threads);
    let width = 2 * kernels.pair_lanes();
    let finite = AtomicBool::new(true);
    let (input, tokens) = (products.input, Tokens::run(tokens));
    let panel_len = width * input.groups() * PACKED_FLOATS;
    pool.run(n_tokens.div_ceil(width), |_, panel| {
        let tokens = tokens.part(panel * width, width);
        // Panels are disjoint, and the padded tokens hold a whole number of them.
        let out = packed.as_mut_ptr().wrapping_add(panel * panel_len);
        kernels.dispatch_words(PackTask { input, tokens, width, out, finite: &finite });
    })?;
    if !finite.into_inner() {
        return Ok(false);
    }
    let rows = |p: &Product<'_>| {
        let fair = p.n_out.div_ceil(4 * pool.n_threads()).next_multiple_of(NARROW_ROWS);
        fair.clamp(NARROW_ROWS, PANEL_ROWS)
    };
    pool.run(products.count(rows), |worker, task| {
        let Some((product, rows)) = products.task(task, rows) else { return };
        // SAFETY: a worker number is in use once at a time, so this thread's part is its own.
        let own = unsafe { threads.slice(worker * thread_scratch(padded), thread_scratch(padded)) };
        gemm_rows(kernels, product, &rows, tokens, packed.as_mut_ptr(), own);
    })?;
    Ok(true)
}
