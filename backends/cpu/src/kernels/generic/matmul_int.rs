//! Matmul on integers: activations of 16 bits, weights unpacked to 16 bits, sums of 32 products in 32 bits.
//!
//! - **Few tokens (decode)**: bound by reading W once. Activations are quantised by the caller's thread, then each task
//!   multiplies some rows of W (`int_dot`).
//! - **Many tokens (prefill)**: bound by arithmetic. Activations are quantised and packed once, shared by all tasks. A task
//!   owns up to `PANEL_ROWS` rows of W for all tokens: for each group of 256 inputs it unpacks its panel (stays in L2) and
//!   passes over the packed tokens, whose group of one panel (9 KiB) stays in L1 while the rows pass (`int_gemm`); sums are
//!   kept in `C`, turned and written once.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use tegula_quant::DType;

use super::activations::{Activations, GROUP, RUN, quantize_group};
use super::gemm::store_turned;
use super::int_dot::int_dot;
use super::int_gemm::{
    Micro, PACKED_FLOATS, Panel, WORDS_STRIDE, micro_int, pack_group, panel_floats, unpack_row,
};
use super::ints::{IQ4_NL, IntWeight, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use super::ints_k::{IQ4_XS, Q3_K, Q4_K, Q5_K, Q6_K};
use super::matmul::{
    DOT_TOKENS_MAX, LINE, MatMul, NARROW_ROWS, PANEL_ROWS, PASS_TOKENS, RowTile, TASK_WORK_MIN,
    TOKENS_ALIGN, pieces,
};
use super::shared::SharedMut;
use super::{Kernel, Pairs, PairsKernel, Simd, Words, WordsKernel};
use crate::kernels::{KernelError, Kernels};
use crate::pool::Pool;

/// Most products that are run together.
pub(super) const PRODUCTS_MAX: usize = 4;

/// Runs `$call` with `$w` standing for the [`IntWeight`] of a type, if it has one.
macro_rules! with_type {
    ($dtype:expr, $w:ident => $call:expr, else $other:expr) => {
        match $dtype {
            DType::Q4_0 => {
                type $w = Q4_0;
                $call
            }
            DType::Q4_1 => {
                type $w = Q4_1;
                $call
            }
            DType::Q5_0 => {
                type $w = Q5_0;
                $call
            }
            DType::Q5_1 => {
                type $w = Q5_1;
                $call
            }
            DType::Q8_0 => {
                type $w = Q8_0;
                $call
            }
            DType::Q4_K => {
                type $w = Q4_K;
                $call
            }
            DType::Q5_K => {
                type $w = Q5_K;
                $call
            }
            DType::Q6_K => {
                type $w = Q6_K;
                $call
            }
            DType::Q3_K => {
                type $w = Q3_K;
                $call
            }
            DType::IQ4_NL => {
                type $w = IQ4_NL;
                $call
            }
            DType::IQ4_XS => {
                type $w = IQ4_XS;
                $call
            }
            DType::MXFP4 => {
                type $w = MXFP4;
                $call
            }
            _ => $other,
        }
    };
}

/// Whether a type is multiplied as integers.
pub(super) fn has(dtype: DType) -> bool {
    with_type!(dtype, W => W::BLOCK_LEN > 0, else false)
}

/// Elements that share a scale, and whether there are minima.
fn shape(dtype: DType) -> (usize, bool) {
    with_type!(dtype, W => (W::SUB, W::HAS_MIN), else (RUN, false))
}

/// Unpacked panel and sums of one thread.
pub(super) fn thread_scratch(tokens_padded: usize) -> usize {
    panel_floats(PANEL_ROWS) + PANEL_ROWS * tokens_padded
}

/// A product as the tasks see it.
struct Product<'a> {
    dtype: DType,
    tiles: &'a [RowTile],
    row_bytes: usize,
    n_out: usize,
    bias: Option<&'a [f32]>,
    /// Tasks own disjoint ranges of output rows.
    y: SharedMut<'a, f32>,
}

/// The products of a run, and what they share.
struct Products<'a> {
    list: [Option<Product<'a>>; PRODUCTS_MAX],
    n_in: usize,
    x: &'a [f32],
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

    fn groups(&self) -> usize {
        self.n_in.div_ceil(GROUP)
    }

    /// Elements of a group, the last being shorter.
    fn group_len(&self, group: usize) -> usize {
        GROUP.min(self.n_in - group * GROUP)
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
        Some(Product {
            dtype: args.dtype,
            tiles: args.tiles,
            row_bytes: n_in / args.dtype.block_len() * args.dtype.block_bytes(),
            n_out: args.n_out,
            bias: args.bias,
            y: SharedMut::new(&mut *args.y),
        })
    });
    let products = Products { list, n_in, x };
    let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let scratch = &mut scratch[skip..];
    for first in (0..n_tokens).step_by(PASS_TOKENS) {
        let tokens = first..n_tokens.min(first + PASS_TOKENS);
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
    kernels.dispatch_words(Quantize { products, tokens: tokens.clone(), out: x, finite: &finite });
    if !finite.into_inner() {
        return Ok(false);
    }
    let x = Packed(x);
    let rows = |p: &Product<'_>| {
        let rows_min = (TASK_WORK_MIN / (products.n_in.max(1) * tokens.len())).max(4);
        p.n_out.div_ceil(16 * pool.n_threads()).max(rows_min).next_multiple_of(4)
    };
    pool.run(products.count(rows), |_, task| {
        if let Some((product, rows)) = products.task(task, rows) {
            let tokens = tokens.clone();
            kernels.dispatch_words(DotTask { products, product, rows, tokens, x: &x });
        }
    })?;
    Ok(true)
}

/// Quantised activations, only read.
struct Packed(*mut Activations);

// SAFETY: written before the tasks start and only read by them.
unsafe impl Sync for Packed {}

/// Quantises a few tokens, `[tokens][groups]`.
struct Quantize<'a> {
    products: &'a Products<'a>,
    tokens: Range<usize>,
    out: *mut Activations,
    finite: &'a AtomicBool,
}

impl WordsKernel for Quantize<'_> {
    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        let (groups, n_in) = (self.products.groups(), self.products.n_in);
        let mut finite = true;
        for (t, token) in self.tokens.enumerate() {
            for group in 0..groups {
                // SAFETY: the token's row holds these elements, and the scratch `groups` for each token; it is aligned.
                unsafe {
                    let x = self.products.x.as_ptr().add(token * n_in + group * GROUP);
                    let out = &mut *self.out.add(t * groups + group);
                    finite &= quantize_group(s, x, self.products.group_len(group), out);
                }
            }
        }
        self.finite.store(finite, Ordering::Relaxed);
    }
}

struct DotTask<'a> {
    products: &'a Products<'a>,
    product: &'a Product<'a>,
    rows: Range<usize>,
    tokens: Range<usize>,
    x: &'a Packed,
}

impl WordsKernel for DotTask<'_> {
    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        with_type!(self.product.dtype, W => self.rows::<S, W>(s), else ());
    }
}

impl DotTask<'_> {
    #[inline(always)]
    fn rows<S: Words, W: IntWeight>(&self, s: S) {
        let p = self.product;
        for (data, row, n_rows) in pieces(p.tiles, p.row_bytes, self.rows.clone()) {
            // SAFETY: the piece lies in its tile, and the rows of this task belong to nobody else.
            unsafe {
                match self.tokens.len() {
                    1 => self.piece::<S, W, 4, 1>(s, data, row, n_rows),
                    2 => self.piece::<S, W, 4, 2>(s, data, row, n_rows),
                    _ => self.piece::<S, W, 2, 4>(s, data, row, n_rows),
                }
            }
        }
    }

    /// # Safety
    /// `data` is readable for `n_rows` rows; output rows `row..row + n_rows` are written by nobody else; there are at most `T`
    /// tokens.
    #[inline(always)]
    unsafe fn piece<S: Words, W: IntWeight, const R: usize, const T: usize>(
        &self,
        s: S,
        data: *const u8,
        row: usize,
        n_rows: usize,
    ) {
        let (p, n_in, n_tokens) = (self.product, self.products.n_in, self.tokens.len());
        // SAFETY: rows stay below `n_rows`; the caller vouches for them. Tokens that are not there repeat the last one.
        unsafe {
            let mut x = [self.x.0.cast_const(); T];
            for (t, x) in x.iter_mut().enumerate() {
                *x = x.add(t.min(n_tokens - 1) * self.products.groups());
            }
            let mut done = 0;
            while done < n_rows {
                // The last rows may be fewer: then the last of them is multiplied again, which costs less than another form of
                // the product would.
                let group = R.min(n_rows - done);
                let mut rows = [data; R];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row = row.add((done + r.min(group - 1)) * p.row_bytes);
                }
                let sums = int_dot::<S, W, R, T>(s, rows, x, n_in, R * p.row_bytes);
                for (r, sums) in sums.iter().enumerate().take(group) {
                    let out = row + done + r;
                    let bias = p.bias.map_or(0.0, |b| b[out]);
                    for (token, sum) in self.tokens.clone().zip(sums) {
                        p.y.as_mut_ptr().add(token * p.n_out + out).write(sum + bias);
                    }
                }
                done += group;
            }
        }
    }
}

/// One pass over at most `PASS_TOKENS` tokens.
fn run_gemm(
    kernels: Kernels,
    pool: &Pool,
    products: &Products<'_>,
    tokens: Range<usize>,
    scratch: &mut [f32],
) -> Result<bool, KernelError> {
    let n_tokens = tokens.len();
    let padded = n_tokens.next_multiple_of(TOKENS_ALIGN);
    let (packed, threads) = scratch.split_at_mut(products.groups() * PACKED_FLOATS * padded);
    let packed = SharedMut::new(packed);
    let threads = SharedMut::new(threads);
    let width = 2 * kernels.pair_lanes();
    let finite = AtomicBool::new(true);
    pool.run(n_tokens.div_ceil(width), |_, panel| {
        let first = tokens.start + panel * width;
        let tokens = first..tokens.end.min(first + width);
        kernels.dispatch_words(PackTask {
            products,
            tokens,
            panel,
            width,
            packed,
            finite: &finite,
        });
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
        let (panel, sums) = own.split_at_mut(panel_floats(PANEL_ROWS));
        let panel = Panel::new(panel.as_mut_ptr(), PANEL_ROWS);
        let rows_padded = rows.len().next_multiple_of(NARROW_ROWS);
        for group in 0..products.groups() {
            let runs = products.group_len(group) / RUN;
            kernels.dispatch_words(UnpackTask {
                product,
                rows: rows.clone(),
                rows_padded,
                group,
                runs,
                panel,
            });
            let (sub, has_min) = shape(product.dtype);
            kernels.dispatch_pairs(GemmTask {
                packed,
                groups: products.groups(),
                group,
                n_tokens,
                rows_padded,
                micro: Micro {
                    panel,
                    runs,
                    sub,
                    has_min,
                    b: std::ptr::null(),
                    c: sums.as_mut_ptr(),
                    c_row: padded,
                    accumulate: group > 0,
                },
            });
        }
        kernels.dispatch(StoreTask { product, tokens: tokens.clone(), rows, sums, padded });
    })?;
    Ok(true)
}

/// Packs one panel of tokens, `[groups]` packed groups.
struct PackTask<'a> {
    products: &'a Products<'a>,
    tokens: Range<usize>,
    panel: usize,
    width: usize,
    packed: SharedMut<'a, f32>,
    finite: &'a AtomicBool,
}

impl WordsKernel for PackTask<'_> {
    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        let (groups, n_in) = (self.products.groups(), self.products.n_in);
        let mut finite = true;
        for group in 0..groups {
            // SAFETY: panels are disjoint, and the padded tokens hold a whole number of them.
            unsafe {
                let x = self.products.x.as_ptr().add(self.tokens.start * n_in + group * GROUP);
                let at = (self.panel * groups + group) * self.width * PACKED_FLOATS;
                let (n, out) = (self.products.group_len(group), self.packed.as_mut_ptr().add(at));
                finite &= pack_group(s, x, n_in, self.tokens.len(), n, out, self.width);
            }
        }
        if !finite {
            self.finite.store(false, Ordering::Relaxed);
        }
    }
}

/// Unpacks one group of some rows.
struct UnpackTask<'a> {
    product: &'a Product<'a>,
    rows: Range<usize>,
    rows_padded: usize,
    group: usize,
    runs: usize,
    panel: Panel,
}

impl WordsKernel for UnpackTask<'_> {
    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        with_type!(self.product.dtype, W => self.unpack::<S, W>(s), else ());
    }
}

impl UnpackTask<'_> {
    #[inline(always)]
    fn unpack<S: Words, W: IntWeight>(&self, s: S) {
        let p = self.product;
        let before = self.group * (GROUP / W::BLOCK_LEN) * W::BLOCK_BYTES;
        let mut at = 0;
        for (data, _, n_rows) in pieces(p.tiles, p.row_bytes, self.rows.clone()) {
            for r in 0..n_rows {
                // SAFETY: the piece lies in its tile, and the panel holds all rows of the task.
                unsafe {
                    let row = data.add(r * p.row_bytes + before);
                    unpack_row::<S, W>(s, row, self.runs, self.panel, at);
                }
                at += 1;
            }
        }
        for i in at..self.rows_padded {
            // SAFETY: the panel holds the padded rows. Their results are not used; zeros are merely quick.
            unsafe {
                self.panel.words.add(WORDS_STRIDE * i).write_bytes(0, GROUP);
                self.panel.scale.add(16 * i).write_bytes(0, 16);
                self.panel.min.add(8 * i).write_bytes(0, 8);
            }
        }
    }
}

struct GemmTask<'a> {
    packed: SharedMut<'a, f32>,
    groups: usize,
    group: usize,
    n_tokens: usize,
    rows_padded: usize,
    micro: Micro,
}

impl PairsKernel for GemmTask<'_> {
    #[inline(always)]
    fn run<S: Pairs>(self, s: S) {
        let width = 2 * S::LANES;
        for first in (0..self.n_tokens).step_by(width) {
            let narrow = self.n_tokens - first <= S::LANES;
            let step = if narrow { NARROW_ROWS } else { S::GEMM_ROWS };
            for r in (0..self.rows_padded).step_by(step) {
                // SAFETY: rows and tokens are padded to whole micro-tiles in all three; the packed tokens are not
                // written during this phase.
                unsafe {
                    let mut micro = self.micro;
                    let panel = first / width * self.groups + self.group;
                    micro.b = self.packed.as_mut_ptr().add(panel * width * PACKED_FLOATS);
                    micro.c = micro.c.add(r * micro.c_row + first);
                    micro.panel.words = micro.panel.words.add(WORDS_STRIDE * r);
                    micro.panel.scale = micro.panel.scale.add(16 * r);
                    micro.panel.min = micro.panel.min.add(8 * r);
                    if narrow {
                        micro_int::<S, NARROW_ROWS, 1>(s, micro);
                    } else if S::GEMM_ROWS == 12 {
                        micro_int::<S, 12, 2>(s, micro);
                    } else {
                        micro_int::<S, 6, 2>(s, micro);
                    }
                }
            }
        }
    }
}

struct StoreTask<'a> {
    product: &'a Product<'a>,
    tokens: Range<usize>,
    rows: Range<usize>,
    sums: &'a [f32],
    padded: usize,
}

impl Kernel for StoreTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.product;
        let bias = p.bias.map_or(std::ptr::null(), |b| b[self.rows.start..].as_ptr());
        // SAFETY: these rows of the output are this task's own, for all tokens.
        unsafe {
            let y = p.y.as_mut_ptr().add(self.tokens.start * p.n_out + self.rows.start);
            let c = self.sums.as_ptr();
            store_turned(s, c, self.padded, bias, self.rows.len(), self.tokens.len(), y, p.n_out);
        }
    }
}
