//! What moves rows and columns. A run may want no rows at all: a piece of a prompt whose logits nobody reads.

use super::{simple, tokens_by};
use crate::Result;
use crate::bounds::COPY;
use crate::case::{Case, Step};
use crate::data::{Rng, f32_bytes, i32_bytes};
use tegula_program::{DType, Dim, ProgramBuilder};

pub(crate) fn cases() -> Result<Vec<Case>> {
    let mut out = Vec::new();
    for (row, begin, len) in
        [(1, 0, 1), (33, 0, 33), (33, 7, 11), (160, 159, 1), (4097, 2048, 2049)]
    {
        let name = format!("slice/{len} from {begin} of {row}");
        out.push(simple(&name, COPY, (&[row], 3.0), &[], |b, x, _| {
            vec![b.slice(x[0], begin, len)]
        })?);
    }
    for (n, group, begin, len) in
        [(1u64, 33, 7, 11), (16, 512, 0, 256), (16, 512, 256, 256), (67, 3, 2, 1), (9, 64, 0, 64)]
    {
        let name = format!("slice_groups/{len} from {begin} of {n} times {group}");
        out.push(simple(&name, COPY, (&[n * u64::from(group)], 3.0), &[], |b, x, _| {
            vec![b.slice_groups(x[0], group, begin, len)]
        })?);
    }
    for (p, q) in [(1, 1), (33, 7), (1, 160), (4097, 3)] {
        let name = format!("concat/{p} and {q}");
        out.push(simple(&name, COPY, (&[p, q], 3.0), &[], |b, x, _| vec![b.concat(x[0], x[1])])?);
    }
    for (n_a, p, n, q) in
        [(1u64, 1u32, 1u64, 1u32), (4, 16, 4, 32), (1, 64, 16, 128), (67, 2, 67, 1), (1, 7, 9, 33)]
    {
        let name = format!("concat_groups/{n_a} times {p} and {n} times {q}");
        let rows = [n_a * u64::from(p), n * u64::from(q)];
        out.push(simple(&name, COPY, (&rows, 3.0), &[], |b, x, _| {
            vec![b.concat_groups(x[0], p, x[1], q)]
        })?);
    }
    for row in [1, 33, 4097] {
        out.push(gather(row)?);
    }
    Ok(out)
}

/// Steps that want all rows, some, one, and none.
fn gather(row: u64) -> Result<Case> {
    let name = format!("gather_rows/rows of {row}");
    let mut rng = Rng::of(&name);
    let mut b = ProgramBuilder::new(&name);
    let x = tokens_by(&mut b, "x", row);
    let rows = b.input("rows", DType::I32, &[Dim::NOutputs]);
    let y = b.gather_rows(x, rows);
    b.output("y", y);
    let mut case = Case::new(&name, b.finish()?, COPY);
    for (n_tokens, n_outputs) in [(64, 64), (17, 5), (3, 1), (1, 1), (17, 0), (1, 0)] {
        case.steps.push(Step {
            n_tokens,
            n_outputs,
            inputs: vec![
                f32_bytes(&rng.vec(row * u64::from(n_tokens), 3.0)),
                i32_bytes(&rng.ids(n_outputs, n_tokens.into())),
            ],
            ..Step::default()
        });
    }
    Ok(case)
}
