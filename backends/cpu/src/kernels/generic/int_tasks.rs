//! The tasks of an integer product: quantising and packing activations, the product of some rows of W with a few tokens, and with
//! many. Plain products and those of experts are made of the same tasks.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use tegula_quant::DType;

use super::activations::{Activations, GROUP, RUN, quantize_group};
use super::gemm::store;
use super::int_dot::int_dot;
use super::int_gemm::{
    Micro, PACKED_FLOATS, Panel, WORDS_STRIDE, micro_int, pack_group, panel_floats, unpack_row,
};
use super::ints::{IQ4_NL, IntWeight, MXFP4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use super::ints_k::{IQ4_XS, Q3_K, Q4_K, Q5_K, Q6_K};
use super::matmul::{DOT_TOKENS_MAX, NARROW_ROWS, PANEL_ROWS, TOKENS_ALIGN, pieces};
use super::product::{Input, Product, Tokens};
use super::{Kernel, Pairs, PairsKernel, Simd, Words, WordsKernel};
use crate::kernels::Kernels;

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

/// Quantises some tokens, `[tokens][groups]`.
pub(super) struct Quantize<'a> {
    pub(super) input: Input<'a>,
    pub(super) tokens: Tokens<'a>,
    /// Aligned, with room for them all.
    pub(super) out: *mut Activations,
    /// Set to false if a value is not finite.
    pub(super) finite: &'a AtomicBool,
}

impl WordsKernel for Quantize<'_> {
    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        let (groups, n_in) = (self.input.groups(), self.input.n_in);
        let mut finite = true;
        for i in 0..self.tokens.len() {
            for group in 0..groups {
                // SAFETY: the token's row holds these elements, and the scratch `groups` for each token; it is aligned.
                unsafe {
                    let x = self.input.x.as_ptr().add(self.tokens.x(i) * n_in + group * GROUP);
                    let out = &mut *self.out.add(i * groups + group);
                    finite &= quantize_group(s, x, self.input.group_len(group), out);
                }
            }
        }
        if !finite {
            self.finite.store(false, Ordering::Relaxed);
        }
    }
}

/// The product of a few tokens.
pub(super) struct DotTask<'a> {
    pub(super) product: &'a Product<'a>,
    /// Columns of Y.
    pub(super) rows: Range<usize>,
    /// At most [`DOT_TOKENS_MAX`].
    pub(super) tokens: Tokens<'a>,
    /// The quantised rows of the tokens.
    pub(super) x: [*const Activations; DOT_TOKENS_MAX],
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
        for (data, row, n_rows) in pieces(p.tiles, p.row_bytes, p.rows_of_w(&self.rows)) {
            // SAFETY: the piece lies in its tile, and these columns of the tokens belong to nobody else.
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
    /// `data` is readable for `n_rows` rows from `row` of W on; what they make of the tokens is written by nobody else; there are
    /// at most `T` tokens.
    #[inline(always)]
    unsafe fn piece<S: Words, W: IntWeight, const R: usize, const T: usize>(
        &self,
        s: S,
        data: *const u8,
        row: usize,
        n_rows: usize,
    ) {
        let (p, n_tokens) = (self.product, self.tokens.len());
        // SAFETY: rows stay below `n_rows`; the caller vouches for them. Tokens that are not there repeat the last one.
        unsafe {
            let (mut x, mut y) = ([self.x[0]; T], [p.y.as_mut_ptr(); T]);
            for t in 0..T {
                let token = t.min(n_tokens - 1);
                x[t] = self.x[token];
                y[t] = y[t].add(self.tokens.y(token) * p.n_out + row - p.first_row);
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
                let sums = int_dot::<S, W, R, T>(s, rows, x, p.n_in, R * p.row_bytes);
                for (r, sums) in sums.iter().enumerate().take(group) {
                    let bias = p.bias.map_or(0.0, |b| b[row - p.first_row + done + r]);
                    for (y, sum) in y.iter().zip(sums).take(n_tokens) {
                        y.add(done + r).write(sum + bias);
                    }
                }
                done += group;
            }
        }
    }
}

/// Packs one panel of tokens, `[groups]` packed groups.
pub(super) struct PackTask<'a> {
    pub(super) input: Input<'a>,
    /// At most `width`.
    pub(super) tokens: Tokens<'a>,
    /// Twice the lanes of the product's vectors.
    pub(super) width: usize,
    /// Room for the panel: `width * groups * PACKED_FLOATS`.
    pub(super) out: *mut f32,
    /// Set to false if a value is not finite.
    pub(super) finite: &'a AtomicBool,
}

impl WordsKernel for PackTask<'_> {
    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        let (groups, n_in) = (self.input.groups(), self.input.n_in);
        let mut rows = [std::ptr::null(); TOKENS_ALIGN];
        let rows = &mut rows[..self.tokens.len()];
        for (i, row) in rows.iter_mut().enumerate() {
            *row = self.input.x[self.tokens.x(i) * n_in..].as_ptr();
        }
        let mut finite = true;
        for group in 0..groups {
            // SAFETY: rows hold these elements, and the panel `groups` packed groups.
            unsafe {
                let out = self.out.add(group * self.width * PACKED_FLOATS);
                let n = self.input.group_len(group);
                finite &= pack_group(s, rows, group * GROUP, n, out, self.width);
            }
        }
        if !finite {
            self.finite.store(false, Ordering::Relaxed);
        }
    }
}

/// Unpacked panel and sums of one thread.
pub(super) fn thread_scratch(tokens_padded: usize) -> usize {
    panel_floats(PANEL_ROWS) + PANEL_ROWS * tokens_padded
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
    let input = Input { x: &[], n_in: product.n_in };
    let padded = tokens.len().next_multiple_of(TOKENS_ALIGN);
    let (panel, sums) = own.split_at_mut(panel_floats(PANEL_ROWS));
    let panel = Panel::new(panel.as_mut_ptr(), PANEL_ROWS);
    let rows_padded = rows.len().next_multiple_of(NARROW_ROWS);
    let (sub, has_min) = shape(product.dtype);
    for group in 0..input.groups() {
        let runs = input.group_len(group) / RUN;
        let rows = rows.clone();
        kernels.dispatch_words(UnpackTask { product, rows, rows_padded, group, runs, panel });
        kernels.dispatch_pairs(GemmTask {
            packed,
            groups: input.groups(),
            group,
            n_tokens: tokens.len(),
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
    kernels.dispatch(StoreTask { product, tokens, rows: rows.clone(), sums, padded });
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
        for (data, _, n_rows) in pieces(p.tiles, p.row_bytes, p.rows_of_w(&self.rows)) {
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

struct GemmTask {
    packed: *const f32,
    groups: usize,
    group: usize,
    n_tokens: usize,
    rows_padded: usize,
    micro: Micro,
}

impl PairsKernel for GemmTask {
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
                    micro.b = self.packed.add(panel * width * PACKED_FLOATS);
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

/// Writes the sums of some rows of W to their places in Y.
pub(super) struct StoreTask<'a> {
    pub(super) product: &'a Product<'a>,
    pub(super) tokens: Tokens<'a>,
    pub(super) rows: Range<usize>,
    pub(super) sums: &'a [f32],
    pub(super) padded: usize,
}

impl Kernel for StoreTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.product;
        let bias = p.bias.map_or(std::ptr::null(), |b| b[self.rows.start..].as_ptr());
        // SAFETY: these columns of the tokens are this task's own.
        unsafe {
            let y = p.y.as_mut_ptr().add(self.rows.start);
            let c = self.sums.as_ptr();
            store(s, c, self.padded, bias, self.rows.len(), &self.tokens, y, p.n_out);
        }
    }
}
