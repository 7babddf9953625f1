//! Norms over whole rows, over heads and over single elements, with and without weight and bias.

use super::simple;
use crate::Result;
use crate::bounds::NORM;
use crate::case::Case;
use tegula_program::Norm;

pub(crate) fn cases() -> Result<Vec<Case>> {
    let mut out = Vec::new();
    for (row, n) in [
        (1u64, 1u32),
        (33, 33),
        (576, 576),
        (2049, 2049),
        (4096, 4096),
        (9 * 64, 64),
        (2 * 80, 80),
        (256, 256),
        (7 * 3, 3),
    ] {
        let norm = Norm { eps: 1e-5, n };
        let len = u64::from(n);
        let name = |what: &str| format!("{what} {row} by {n}");
        out.push(simple(&name("rms_norm/plain"), NORM, (&[row], 3.0), &[], |b, x, _| {
            vec![b.rms_norm(x[0], None, norm)]
        })?);
        out.push(simple(&name("rms_norm/weight"), NORM, (&[row], 3.0), &[len], |b, x, w| {
            vec![b.rms_norm(x[0], Some(w[0]), norm)]
        })?);
        out.push(simple(&name("layer_norm/weight"), NORM, (&[row], 3.0), &[len], |b, x, w| {
            vec![b.layer_norm(x[0], w[0], None, norm)]
        })?);
        out.push(simple(&name("layer_norm/bias"), NORM, (&[row], 3.0), &[len, len], |b, x, w| {
            vec![b.layer_norm(x[0], w[0], Some(w[1]), norm)]
        })?);
    }
    // Rows so small that eps is most of the sum, and one where it is all that keeps the quotient finite.
    let tiny = Norm { eps: 1e-6, n: 96 };
    out.push(simple("rms_norm/tiny rows", NORM, (&[96], 1e-4), &[96], |b, x, w| {
        vec![b.rms_norm(x[0], Some(w[0]), tiny)]
    })?);
    out.push(simple("rms_norm/rows of zeros", NORM, (&[96], 0.0), &[], |b, x, _| {
        vec![b.rms_norm(x[0], None, tiny)]
    })?);
    Ok(out)
}
