//! What ops with recurrent state share: the records of a run's sequences, which are read and written in place.

use std::ops::Range;

use crate::kernels::KernelError;

/// The record of one sequence and its rows in a run.
#[derive(Clone, Copy, Debug)]
pub struct StateSeq {
    /// The record, aligned to 4 bytes.
    pub record: *mut f32,
    /// The sequence begins with this run: the record's contents do not matter.
    pub is_new: bool,
    /// The first of its rows, and how many.
    pub first_row: usize,
    /// Rows; a sequence without any keeps its record as it is.
    pub n_rows: usize,
}

// SAFETY: the pointer is followed by the kernels alone, whose callers promise that it is valid and that no two sequences share a
// record; tasks touch disjoint parts of it.
unsafe impl Send for StateSeq {}
// SAFETY: as above.
unsafe impl Sync for StateSeq {}

/// Elements of state times rows below which one thread does it all: about ten microseconds.
pub(super) const WORK_SHARED_MIN: usize = 64 * 1024;

/// Rows of all sequences; fails unless they follow each other from row 0 on, which keeps what they write apart.
pub(super) fn check_seqs(
    kernel: &'static str,
    seqs: &[StateSeq],
    n_rows: usize,
) -> Result<(), KernelError> {
    let mut next = 0usize;
    for seq in seqs {
        let fits = seq.first_row == next && seq.n_rows <= n_rows - next;
        if !fits {
            return Err(KernelError::Shape {
                kernel,
                what: "the first row of a sequence",
                got: seq.first_row,
                allowed: "sequences follow each other and lie inside the run",
            });
        }
        next += seq.n_rows;
    }
    crate::kernels::expect_len(kernel, "the sequences", &[n_rows], next)
}

/// Piece `index` of `0..n` in pieces of `len`.
pub(super) fn piece(index: usize, len: usize, n: usize) -> Range<usize> {
    index * len..n.min((index + 1) * len)
}
