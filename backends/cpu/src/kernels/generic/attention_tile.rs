//! The inner part of attention: some tokens of one sequence, the query heads of one kv head, a range of positions.
//!
//! Rows `m = token * group + head in group` are the fast axis of scores, so maxima and sums over positions are vertical:
//! no lane ever meets another. Per [`CELLS`] positions:
//! 1. decode K to f32 (once for all rows); `S[c][m] = K[c] . q[m]`, by the matrix micro-kernel with packed queries, or as
//!    dot products for fewer than eight rows, where the packed form would mostly multiply padding;
//! 2. cap and mask, new maxima, `P = e^(S - max)`, and the factor by which older results shrink;
//! 3. decode V; `O[m] = O[m] * factor + sum over c of P[c][m] V[c]`, by the micro-kernel with V as its vectors.

use std::ops::Range;

use tegula_quant::DType;

use super::attention::{Attention, AttnSeq, Sizes};
use super::dot::dot_rows;
use super::gemm::micro;
use super::shared::SharedMut;
use super::source::{Decoded, Fused, Source};
use super::{Kernel, Simd, math, weight};
use crate::kernels::Kernels;

/// Positions per step: a multiple of all micro-kernel rows; K, V and scores of a step stay in the second-level cache.
pub(crate) const CELLS: usize = 48;
/// Rows from which queries are packed.
const PACKED_ROWS_MIN: usize = 8;

/// Some tokens of one sequence for one kv head.
pub(crate) struct Tile<'a> {
    pub(crate) seq: &'a AttnSeq<'a>,
    pub(crate) kv_head: usize,
    pub(crate) first_row: usize,
    pub(crate) positions: &'a [u32],
    pub(crate) pos_min: usize,
    pub(crate) pos_max: usize,
    /// Positions that at least one of the tokens sees.
    pub(crate) cells: Range<usize>,
}

/// The running state of a piece: per row the maximum, the sum and the unnormalised output.
pub(crate) struct Piece<'a> {
    max: &'a mut [f32],
    sum: &'a mut [f32],
    out: &'a mut [f32],
}

impl<'a> Piece<'a> {
    pub(crate) fn new(sizes: &Sizes, state: &'a mut [f32]) -> Piece<'a> {
        let (max, rest) = state.split_at_mut(sizes.m_pad);
        let (sum, out) = rest.split_at_mut(sizes.m_pad);
        Piece { max, sum, out }
    }
}

/// Scratch of a step.
struct Step<'a> {
    q: &'a mut [f32],
    k: &'a mut [f32],
    v: &'a mut [f32],
    scores: &'a mut [f32],
    /// A row sees cell `c` if `above < c < below`.
    below: &'a mut [f32],
    above: &'a mut [f32],
    shrink: &'a mut [f32],
}

impl<'a> Step<'a> {
    fn new(sizes: &Sizes, own: &'a mut [f32]) -> Step<'a> {
        let (q, own) = own.split_at_mut(sizes.dk * sizes.m_pad);
        let (k, own) = own.split_at_mut(CELLS * sizes.dk);
        let (v, own) = own.split_at_mut(CELLS * sizes.v_pad);
        let (scores, own) = own.split_at_mut(CELLS * sizes.m_pad);
        let (below, own) = own.split_at_mut(sizes.m_pad);
        let (above, shrink) = own.split_at_mut(sizes.m_pad);
        Step { q, k, v, scores, below, above, shrink }
    }
}

/// One piece as an algorithm.
pub(crate) struct RunPiece<'a> {
    kernels: Kernels,
    args: &'a Attention<'a>,
    sizes: &'a Sizes,
    tile: &'a Tile<'a>,
    cells: Range<usize>,
    step: Step<'a>,
    state: Piece<'a>,
}

/// The algorithm that fills `state` from `cells`; `own` is scratch of `sizes.thread() - sizes.state()`.
pub(crate) fn run_piece<'a>(
    kernels: Kernels,
    args: &'a Attention<'a>,
    sizes: &'a Sizes,
    tile: &'a Tile<'a>,
    cells: Range<usize>,
    own: &'a mut [f32],
    state: Piece<'a>,
) -> RunPiece<'a> {
    RunPiece { kernels, args, sizes, tile, cells, step: Step::new(sizes, own), state }
}

impl Kernel for RunPiece<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        self.state.max.fill(f32::NEG_INFINITY);
        self.state.sum.fill(0.0);
        self.state.out.fill(0.0);
        self.load_queries();
        for first in self.cells.clone().step_by(CELLS) {
            let n = CELLS.min(self.cells.end - first);
            if self.n_rows() < PACKED_ROWS_MIN {
                match self.args.k_dtype {
                    DType::F16 => self.scores_in_place::<S, weight::F16>(s, first, n),
                    DType::BF16 => self.scores_in_place::<S, weight::BF16>(s, first, n),
                    _ => {
                        self.load_k(first, n);
                        self.scores_decoded(s, n);
                    }
                }
            } else {
                self.load_k(first, n);
                self.scores_packed(s, n);
            }
            self.softmax(s, first, n);
            self.load_v(first, n);
            self.accumulate(s, n);
        }
    }
}

impl RunPiece<'_> {
    #[inline(always)]
    fn n_rows(&self) -> usize {
        self.tile.positions.len() * self.sizes.group
    }

    /// Scaled queries, packed (`[dk][m]`, padding zero) or row by row (`[m][dk]`), and the bounds of what rows see.
    fn load_queries(&mut self) {
        let (args, tile, m_pad, dk) = (self.args, self.tile, self.sizes.m_pad, self.sizes.dk);
        let n_rows = self.n_rows();
        let packed = n_rows >= PACKED_ROWS_MIN;
        if packed {
            self.step.q.fill(0.0);
        }
        self.step.below.fill(0.0);
        self.step.above.fill(0.0);
        for m in 0..n_rows {
            let (token, head) = (m / self.sizes.group, m % self.sizes.group);
            let head = tile.kv_head * self.sizes.group + head;
            let query = &args.q[((tile.first_row + token) * args.n_head + head) * dk..][..dk];
            for (d, &value) in query.iter().enumerate() {
                let at = if packed { d * m_pad + m } else { m * dk + d };
                self.step.q[at] = value * args.scale;
            }
            let position = tile.positions[token] as f32;
            self.step.below[m] = if args.causal { position + 1.0 } else { f32::INFINITY };
            self.step.above[m] = args.window.map_or(-1.0, |w| position - w as f32);
        }
    }

    fn load_k(&mut self, first: usize, n: usize) {
        let (args, dk) = (self.args, self.sizes.dk);
        let blocks = self.tile.seq.k_blocks;
        load_cells(
            self.kernels,
            args,
            self.tile,
            args.k_dtype,
            blocks,
            dk,
            dk,
            first..first + n,
            self.step.k,
        );
    }

    fn load_v(&mut self, first: usize, n: usize) {
        let (args, dv, v_pad) = (self.args, self.args.head_dim_v, self.sizes.v_pad);
        let blocks = self.tile.seq.v_blocks;
        load_cells(
            self.kernels,
            args,
            self.tile,
            args.v_dtype,
            blocks,
            dv,
            v_pad,
            first..first + n,
            self.step.v,
        );
    }

    /// `scores[c][m] = K[c] . q[m]` with K as the broadcast side.
    #[inline(always)]
    fn scores_packed<S: Simd>(&mut self, s: S, n: usize) {
        let (m_pad, dk, width) = (self.sizes.m_pad, self.sizes.dk, 2 * S::LANES);
        let n_rows = self.n_rows();
        for m in (0..n_rows).step_by(width) {
            let narrow = n_rows - m <= S::LANES;
            let step = if narrow { 12 } else { S::GEMM_ROWS };
            for c in (0..n).step_by(step) {
                // SAFETY: cells are padded to `CELLS`, a multiple of `step`, and columns to `m_pad`, one of `width`.
                unsafe {
                    let a = self.step.k.as_ptr().add(c * dk);
                    let b = self.step.q.as_ptr().add(m);
                    let out = self.step.scores.as_mut_ptr().add(c * m_pad + m);
                    if narrow {
                        micro::<S, 12, 1>(s, dk, a, dk, 1, b, m_pad, out, m_pad, false);
                    } else if S::GEMM_ROWS == 12 {
                        micro::<S, 12, 2>(s, dk, a, dk, 1, b, m_pad, out, m_pad, false);
                    } else {
                        micro::<S, 6, 2>(s, dk, a, dk, 1, b, m_pad, out, m_pad, false);
                    }
                }
            }
        }
    }

    /// The same as dot products, for fewer than eight rows, with K where it was decoded to.
    #[inline(always)]
    fn scores_decoded<S: Simd>(&mut self, s: S, n: usize) {
        let k = self.step.k.as_ptr().cast();
        // SAFETY: `n` rows of K were decoded.
        unsafe { self.scores_dot::<S, weight::F32>(s, k, 0, n) }
    }

    /// The same with K where it lies, which saves writing and reading it once more.
    #[inline(always)]
    fn scores_in_place<S: Simd, W: weight::Weight>(&mut self, s: S, first: usize, n: usize) {
        let (blocks, block_len, kv_head) =
            (self.tile.seq.k_blocks, self.args.block_len, self.tile.kv_head);
        let row_bytes = self.sizes.dk * W::BLOCK_BYTES / W::BLOCK_LEN;
        let mut cell = first;
        while cell < first + n {
            let (index, offset) = (cell / block_len, cell % block_len);
            let count = (block_len - offset).min(first + n - cell);
            let k = blocks[index].wrapping_add((kv_head * block_len + offset) * row_bytes);
            // SAFETY: the KvBlock holds these rows, which the caller of `attention` vouches for.
            unsafe { self.scores_dot::<S, W>(s, k, cell - first, count) };
            cell += count;
        }
    }

    /// Scores of `n` rows of K, which follow each other from `k`, as cells `at..at + n` of the step.
    ///
    /// # Safety
    /// These rows are readable.
    #[inline(always)]
    unsafe fn scores_dot<S: Simd, W: weight::Weight>(
        &mut self,
        s: S,
        k: *const u8,
        at: usize,
        n: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.n_rows() {
                1 => self.scores_rows::<S, W, 4, 1>(s, k, at, n),
                2 => self.scores_rows::<S, W, 4, 2>(s, k, at, n),
                3 => self.scores_rows::<S, W, 2, 3>(s, k, at, n),
                4 => self.scores_rows::<S, W, 2, 4>(s, k, at, n),
                5 => self.scores_rows::<S, W, 1, 5>(s, k, at, n),
                6 => self.scores_rows::<S, W, 1, 6>(s, k, at, n),
                _ => self.scores_rows::<S, W, 1, 7>(s, k, at, n),
            }
        }
    }

    /// # Safety
    /// As [`Self::scores_dot`]; the tile has `T` rows.
    #[inline(always)]
    unsafe fn scores_rows<S: Simd, W: weight::Weight, const R: usize, const T: usize>(
        &mut self,
        s: S,
        k: *const u8,
        at: usize,
        n: usize,
    ) {
        let dk = self.sizes.dk;
        let row_bytes = dk * W::BLOCK_BYTES / W::BLOCK_LEN;
        // SAFETY: rows stay below `n`, which the caller vouches for.
        unsafe {
            let mut q = [self.step.q.as_ptr(); T];
            for (m, q_m) in q.iter_mut().enumerate() {
                *q_m = q_m.add(m * dk);
            }
            let mut c = 0;
            while c + R <= n {
                let mut rows = [k.add(c * row_bytes); R];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row = row.add(r * row_bytes);
                }
                let sums = dot_rows::<S, W, R, T>(s, rows, q, dk, R * row_bytes);
                for (r, sums) in sums.iter().enumerate() {
                    self.put_scores::<S, T>(at + c + r, sums);
                }
                c += R;
            }
            while c < n {
                let sums = dot_rows::<S, W, 1, T>(s, [k.add(c * row_bytes)], q, dk, row_bytes);
                self.put_scores::<S, T>(at + c, &sums[0]);
                c += 1;
            }
        }
    }

    #[inline(always)]
    fn put_scores<S: Simd, const T: usize>(&mut self, cell: usize, sums: &[f32; T]) {
        let row = &mut self.step.scores[cell * self.sizes.m_pad..][..S::LANES];
        row[T..].fill(0.0);
        row[..T].copy_from_slice(sums);
    }

    /// Scores to probabilities, in place, with the running maximum and sum.
    #[inline(always)]
    fn softmax<S: Simd>(&mut self, s: S, first: usize, n: usize) {
        let (args, tile, m_pad) = (self.args, self.tile, self.sizes.m_pad);
        // Most steps lie inside what all rows see.
        let all_visible = (!args.causal || first + n <= tile.pos_min + 1)
            && args.window.is_none_or(|w| first + w as usize > tile.pos_max);
        let hidden = s.splat(f32::NEG_INFINITY);
        for m in (0..self.n_rows()).step_by(S::LANES) {
            // SAFETY: all vectors of rows are padded to `m_pad`, a multiple of the lanes.
            unsafe {
                let scores = self.step.scores.as_mut_ptr().add(m);
                let below = s.load(self.step.below.as_ptr().add(m));
                let above = s.load(self.step.above.as_ptr().add(m));
                let old = s.load(self.state.max.as_ptr().add(m));
                let mut max = old;
                for c in 0..n {
                    let at = scores.add(c * m_pad);
                    let mut score = s.load(at);
                    if let Some(cap) = args.softcap {
                        score = math::softcap(s, score, cap);
                    }
                    if !all_visible {
                        let cell = s.splat((first + c) as f32);
                        score = s.select_gt(below, cell, score, hidden);
                        score = s.select_gt(cell, above, score, hidden);
                    }
                    s.store(at, score);
                    max = s.max(score, max);
                }
                // Rows that have seen nothing yet: any finite base gives zeros.
                let base = s.select_gt(max, s.splat(f32::MIN), max, s.splat(0.0));
                let mut sum = s.splat(0.0);
                for c in 0..n {
                    let at = scores.add(c * m_pad);
                    let p = math::exp(s, s.sub(s.load(at), base));
                    s.store(at, p);
                    sum = s.add(sum, p);
                }
                let shrink = math::exp(s, s.sub(old, base));
                let total = self.state.sum.as_mut_ptr().add(m);
                s.store(total, s.fma(s.load(total), shrink, sum));
                s.store(self.state.max.as_mut_ptr().add(m), max);
                s.store(self.step.shrink.as_mut_ptr().add(m), shrink);
            }
        }
    }

    /// Shrinks the output by the new maxima and adds this step's part.
    #[inline(always)]
    fn accumulate<S: Simd>(&mut self, s: S, n: usize) {
        let (v_pad, n_rows) = (self.sizes.v_pad, self.n_rows());
        for (row, &shrink) in
            self.state.out.chunks_exact_mut(v_pad).zip(&self.step.shrink[..n_rows])
        {
            if shrink != 1.0 {
                for value in row {
                    *value *= shrink;
                }
            }
        }
        let mut m = 0;
        while m < n_rows {
            let left = n_rows - m;
            m += match left {
                1 => self.accumulate_rows::<S, 1>(s, m, n),
                2 => self.accumulate_rows::<S, 2>(s, m, n),
                3 => self.accumulate_rows::<S, 3>(s, m, n),
                4 => self.accumulate_rows::<S, 4>(s, m, n),
                5 => self.accumulate_rows::<S, 5>(s, m, n),
                _ if left >= 12 && S::GEMM_ROWS == 12 => self.accumulate_rows::<S, 12>(s, m, n),
                _ => self.accumulate_rows::<S, 6>(s, m, n),
            };
        }
    }

    /// Rows `m..m + R`; gives `R`.
    #[inline(always)]
    fn accumulate_rows<S: Simd, const R: usize>(&mut self, s: S, m: usize, n: usize) -> usize {
        let (m_pad, v_pad) = (self.sizes.m_pad, self.sizes.v_pad);
        for d in (0..self.args.head_dim_v).step_by(2 * S::LANES) {
            // SAFETY: `m + R` rows exist, and columns are padded to `v_pad`, a multiple of the width.
            unsafe {
                let p = self.step.scores.as_ptr().add(m);
                let v = self.step.v.as_ptr().add(d);
                let out = self.state.out.as_mut_ptr().add(m * v_pad + d);
                micro::<S, R, 2>(s, n, p, 1, m_pad, v, v_pad, out, v_pad, true);
            }
        }
        R
    }
}

/// Decodes the rows of one head at these positions to `out`, `stride` apart.
#[expect(clippy::too_many_arguments, reason = "K and V differ in all of these")]
fn load_cells(
    kernels: Kernels,
    args: &Attention<'_>,
    tile: &Tile<'_>,
    dtype: DType,
    blocks: &[*const u8],
    dim: usize,
    stride: usize,
    cells: Range<usize>,
    out: &mut [f32],
) {
    let row_bytes = dim / dtype.block_len() * dtype.block_bytes();
    let mut cell = cells.start;
    while cell < cells.end {
        let (index, offset) = (cell / args.block_len, cell % args.block_len);
        let count = (args.block_len - offset).min(cells.end - cell);
        let from = blocks[index].wrapping_add((tile.kv_head * args.block_len + offset) * row_bytes);
        let to = &mut out[(cell - cells.start) * stride..];
        kernels.dispatch(DecodeCells { dtype, from, row_bytes, dim, count, to, stride });
        cell += count;
    }
}

/// Consecutive rows of one KvBlock.
struct DecodeCells<'a> {
    dtype: DType,
    from: *const u8,
    row_bytes: usize,
    dim: usize,
    count: usize,
    to: &'a mut [f32],
    stride: usize,
}

impl Kernel for DecodeCells<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.dtype {
            DType::F32 => self.decode(s, Fused::<weight::F32>::NEW),
            DType::F16 => self.decode(s, Fused::<weight::F16>::NEW),
            DType::BF16 => self.decode(s, Fused::<weight::BF16>::NEW),
            DType::Q8_0 => self.decode(s, Fused::<weight::Q8_0>::NEW),
            DType::Q4_0 => self.decode(s, Fused::<weight::Q4_0>::NEW),
            dtype => self.decode(s, Decoded { dtype }),
        }
    }
}

impl DecodeCells<'_> {
    #[inline(always)]
    fn decode<S: Simd, D: Source>(self, s: S, source: D) {
        // Rows that follow each other on both sides are one long row.
        let (rows, dim) = if self.stride == self.dim {
            (1, self.dim * self.count)
        } else {
            (self.count, self.dim)
        };
        for (row, out) in
            self.to.chunks_mut(self.stride * self.count / rows.max(1)).take(rows).enumerate()
        {
            let out = &mut out[..dim];
            // SAFETY: the KvBlock holds these rows, which the caller of `attention` vouches for.
            unsafe {
                source.decode(s, self.from.add(row * self.row_bytes), 0, dim, out.as_mut_ptr());
            }
        }
    }
}

/// Normalises the combination of pieces and writes it out.
pub(crate) struct Finish<'a> {
    args: &'a Attention<'a>,
    sizes: &'a Sizes,
    tile: &'a Tile<'a>,
    state: &'a [f32],
    pieces: usize,
    out: SharedMut<'a, f32>,
}

/// The algorithm that combines `pieces` states, which follow each other, into the output rows of the tile.
///
/// # Safety
/// Nobody else accesses the tile's rows and heads in `out` while it runs.
pub(crate) unsafe fn finish<'a>(
    args: &'a Attention<'a>,
    sizes: &'a Sizes,
    tile: &'a Tile<'a>,
    state: &'a [f32],
    pieces: usize,
    out: SharedMut<'a, f32>,
) -> Finish<'a> {
    Finish { args, sizes, tile, state, pieces, out }
}

impl Kernel for Finish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let (args, sizes, dv) = (self.args, self.sizes, self.args.head_dim_v);
        for m in 0..self.tile.positions.len() * sizes.group {
            let head = self.tile.kv_head * sizes.group + m % sizes.group;
            let row = self.tile.first_row + m / sizes.group;
            // SAFETY: this row and head belong to the tile.
            let out = unsafe { self.out.slice((row * args.n_head + head) * dv, dv) };
            out.fill(0.0);
            let sink = args.sinks.map_or(f32::NEG_INFINITY, |sinks| sinks[head]);
            let states = self.state.chunks_exact(sizes.state()).take(self.pieces);
            let mut max = sink;
            for state in states.clone() {
                max = max.max(state[m]);
            }
            if max == f32::NEG_INFINITY {
                continue;
            }
            let mut sum = (sink - max).exp();
            for state in states.clone() {
                sum += state[sizes.m_pad + m] * (state[m] - max).exp();
            }
            for state in states {
                let factor = (state[m] - max).exp() / sum;
                let part = &state[2 * sizes.m_pad + m * sizes.v_pad..][..dv];
                for (o, &value) in out.iter_mut().zip(part) {
                    *o += value * factor;
                }
            }
        }
    }
}
