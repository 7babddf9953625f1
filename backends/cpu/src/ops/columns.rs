//! Ops that move columns, and compute nothing.

use super::pieces;
use crate::executable::Frame;
use tegula_sdk::program::{Op, ValueId};
use tegula_sdk::{Error, Result};

/// Columns `begin .. begin + len` of every group of `group` columns.
pub(super) fn slice(
    frame: &Frame<'_>,
    x: ValueId,
    out: ValueId,
    (group, begin, len): (usize, u32, u32),
) -> Result<()> {
    let (x, y) = (frame.f32s(x)?, frame.f32s_mut(out)?);
    let (begin, len) = (begin as usize, len as usize);
    pieces(&frame.executable.workers.pool, y, len, |at, y| {
        let x = &x[at.start / len * group..];
        for (y, x) in y.chunks_exact_mut(len).zip(x.chunks_exact(group)) {
            y.copy_from_slice(&x[begin..begin + len]);
        }
        Ok(())
    })
}

/// For every group its columns of the first input and then of the second; a first input of one group serves them all.
pub(super) fn concat_groups(
    frame: &Frame<'_>,
    op: &Op,
    out: ValueId,
    [p, q]: [usize; 2],
) -> Result<()> {
    let [a, b] = op.inputs.as_slice() else {
        return Err(Error::invalid("concat_groups without its values"));
    };
    let (row_a, row_b, row) = (frame.row_len(*a)?, frame.row_len(*b)?, frame.row_len(out)?);
    let (a, b, y) = (frame.f32s(*a)?, frame.f32s(*b)?, frame.f32s_mut(out)?);
    pieces(&frame.executable.workers.pool, y, row, |at, y| {
        let first = at.start / row;
        let rows =
            a[first * row_a..].chunks_exact(row_a).zip(b[first * row_b..].chunks_exact(row_b));
        for (y, (a, b)) in y.chunks_exact_mut(row).zip(rows) {
            let groups = a.chunks_exact(p).cycle().zip(b.chunks_exact(q));
            for (y, (a, b)) in y.chunks_exact_mut(p + q).zip(groups) {
                y[..p].copy_from_slice(a);
                y[p..].copy_from_slice(b);
            }
        }
        Ok(())
    })
}
