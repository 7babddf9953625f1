//! Causal convolution over time, each column by itself: `y[t] = bias + sum over j of W[:, j] * x[t - (kernel - 1) + j]`, where rows before
//! the run are in the record, `[kernel - 1][m]`, oldest first.
//!
//! Columns are the vector. W is stored column by column, so a task, which owns some columns of one sequence, first lays its taps down as
//! rows. Then it goes over time: the `kernel` rows that a result reads are a few KiB, and stay in the first-level cache until the next
//! result has read them. At the end it writes the last rows to the record; nobody else reads its columns.

use std::ops::Range;

use tegula_quant::{DType, dequantize_row_fn};

use super::matmul::{RowTile, check_tiles, pieces};
use super::shared::SharedMut;
use super::state::{StateSeq, WORK_SHARED_MIN, check_seqs, piece};
use super::{Kernel, Simd};
use crate::kernels::{KernelError, Kernels, expect_len, expect_scratch};
use crate::pool::Pool;

/// Most columns of a task; a multiple of every vector.
const COLUMNS: usize = 256;

/// The arguments of a convolution.
#[derive(Debug)]
pub struct ConvState<'a> {
    /// Columns.
    pub m: usize,
    /// Taps of a column, at least 2.
    pub kernel: usize,
    /// The type of W.
    pub dtype: DType,
    /// The rows of W, `[m, kernel]`, in order and without gaps.
    pub tiles: &'a [RowTile],
    /// `[m]`.
    pub bias: Option<&'a [f32]>,
    /// The sequences, whose rows are those of X in order.
    pub seqs: &'a [StateSeq],
    /// `[n, m]`.
    pub x: &'a [f32],
    /// `[n, m]`, written entirely.
    pub y: &'a mut [f32],
}

impl ConvState<'_> {
    /// f32 of scratch for up to `n_threads`: taps of a task as rows, and those of one column.
    pub fn scratch_len(n_threads: usize, kernel: usize) -> usize {
        n_threads.saturating_mul(kernel.saturating_mul(COLUMNS + 1))
    }

    fn check(&self) -> Result<(), KernelError> {
        const KERNEL: &str = "conv_state";
        if self.kernel < 2 || self.m == 0 || !self.kernel.is_multiple_of(self.dtype.block_len()) {
            return Err(KernelError::Shape {
                kernel: KERNEL,
                what: "the number of taps",
                got: self.kernel,
                allowed: "there are columns, with at least 2 taps each and whole blocks of them",
            });
        }
        let rows = self.x.len() / self.m;
        expect_len(KERNEL, "x", &[rows, self.m], self.x.len())?;
        expect_len(KERNEL, "y", &[rows, self.m], self.y.len())?;
        if let Some(bias) = self.bias {
            expect_len(KERNEL, "bias", &[self.m], bias.len())?;
        }
        check_tiles(self.tiles, self.m)?;
        check_seqs(KERNEL, self.seqs, rows)
    }
}

/// Some columns of one sequence.
struct ConvTask<'a> {
    args: &'a ConvState<'a>,
    y: SharedMut<'a, f32>,
    seq: StateSeq,
    columns: Range<usize>,
    /// `[kernel][COLUMNS]`.
    taps: &'a [f32],
}

impl Kernel for ConvTask<'_> {
    type Output = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let ConvState { m, kernel, .. } = *self.args;
        let (n, before) = (self.seq.n_rows, kernel - 1);
        let first = self.columns.start;
        // SAFETY: rows `0..before` of the window are the record, those after it the sequence's rows of X, `m` columns each; the
        // columns of this sequence in Y and the record are this task's own.
        unsafe {
            let x = self.args.x.as_ptr().add(self.seq.first_row * m + first);
            let y = self.y.as_mut_ptr().add(self.seq.first_row * m + first);
            let record = self.seq.record.add(first);
            let bias = self.args.bias.map_or(std::ptr::null(), |b| b.as_ptr().add(first));
            let len = self.columns.len();
            let whole = len / S::LANES * S::LANES;
            for t in 0..n {
                // Taps on rows before position 0 multiply zeros.
                let begin = if self.seq.is_new { before.saturating_sub(t) } else { 0 };
                for c in (0..whole).step_by(S::LANES) {
                    let mut sum = if bias.is_null() { s.splat(0.0) } else { s.load(bias.add(c)) };
                    for j in begin..kernel {
                        let row = row(t + j, before, record, x, m);
                        let tap = s.load(self.taps.as_ptr().add(j * COLUMNS + c));
                        sum = s.fma(tap, s.load(row.add(c)), sum);
                    }
                    s.store(y.add(t * m + c), sum);
                }
                for c in whole..len {
                    let mut sum = if bias.is_null() { 0.0 } else { bias.add(c).read() };
                    for j in begin..kernel {
                        let row = row(t + j, before, record, x, m);
                        sum += self.taps[j * COLUMNS + c] * row.add(c).read();
                    }
                    y.add(t * m + c).write(sum);
                }
            }
            // Row i becomes row i + n of the window, which is not yet overwritten when rows are taken from the oldest on.
            for i in 0..before {
                let to = record.add(i * m);
                if self.seq.is_new && i + n < before {
                    to.write_bytes(0, len);
                } else {
                    std::ptr::copy(row(i + n, before, record, x, m), to, len);
                }
            }
        }
    }
}

/// Row `at` of the window: the record's, then those of X.
///
/// # Safety
/// The row is there.
#[inline(always)]
unsafe fn row(at: usize, before: usize, record: *const f32, x: *const f32, m: usize) -> *const f32 {
    // SAFETY: the caller's promise.
    unsafe { if at < before { record.add(at * m) } else { x.add((at - before) * m) } }
}

/// Lays the taps of some columns down as rows of [`COLUMNS`]; `column` has room for the taps of one.
///
/// # Safety
/// The tiles are readable.
unsafe fn turn_taps(
    args: &ConvState<'_>,
    columns: &Range<usize>,
    taps: &mut [f32],
    column: &mut [f32],
) {
    let row_bytes = args.kernel / args.dtype.block_len() * args.dtype.block_bytes();
    let decode = dequantize_row_fn(args.dtype);
    for (data, first, n) in pieces(args.tiles, row_bytes, columns.clone()) {
        for i in 0..n {
            // SAFETY: the row lies in its tile.
            let row =
                unsafe { std::slice::from_raw_parts(data.wrapping_add(i * row_bytes), row_bytes) };
            decode(row, column);
            let at = first + i - columns.start;
            for (j, tap) in column.iter().enumerate() {
                taps[j * COLUMNS + at] = *tap;
            }
        }
    }
}

impl Kernels {
    /// The convolution, on the threads of `pool`; records become what the next run needs.
    ///
    /// `scratch` holds at least [`ConvState::scratch_len`] for the pool's threads; its contents do not matter.
    ///
    /// # Errors
    /// [`KernelError`] when lengths, tiles or sequences do not fit each other (nothing is written then), or when a task panicked.
    ///
    /// # Safety
    /// Every tile is readable for `n_rows` rows of `kernel` elements of `dtype`; records are valid for `(kernel - 1) * m` f32, each
    /// of them once; nobody else touches either meanwhile.
    pub unsafe fn conv_state(
        self,
        pool: &Pool,
        args: &mut ConvState<'_>,
        scratch: &mut [f32],
    ) -> Result<(), KernelError> {
        args.check()?;
        let (m, kernel) = (args.m, args.kernel);
        expect_scratch(
            "conv_state",
            ConvState::scratch_len(pool.n_threads(), kernel),
            scratch.len(),
        )?;
        let n_rows = args.x.len() / m;
        let y = SharedMut::new(std::mem::take(&mut args.y));
        let args = &*args;
        let scratch = SharedMut::new(scratch);
        let parts = m.div_ceil(COLUMNS);
        let task = |worker: usize, task: usize| {
            let (seq, columns) = (args.seqs[task / parts], piece(task % parts, COLUMNS, m));
            if seq.n_rows == 0 {
                return;
            }
            let len = kernel * (COLUMNS + 1);
            // SAFETY: a worker number is in use once at a time, so this thread's part is its own.
            let own = unsafe { scratch.slice(worker * len, len) };
            let (taps, column) = own.split_at_mut(kernel * COLUMNS);
            // SAFETY: the caller's promise.
            unsafe { turn_taps(args, &columns, taps, column) };
            self.dispatch(ConvTask { args, y, seq, columns, taps });
        };
        let n_tasks = args.seqs.len() * parts;
        // Turning the taps takes about as long as one row.
        if (n_rows + args.seqs.len()).saturating_mul(m * kernel) < WORK_SHARED_MIN {
            (0..n_tasks).for_each(|index| task(0, index));
            return Ok(());
        }
        Ok(pool.run(n_tasks, task)?)
    }
}
