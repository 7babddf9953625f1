//! What treats every element alike, over rows of one element, of odd lengths, and long enough to be cut into pieces.

use super::simple;
use crate::Result;
use crate::bounds::{ACTIVATION, ELEMENTWISE};
use crate::case::Case;
use crate::data::f32_bytes;
use tegula_program::Activation;

const ROWS: [u64; 4] = [1, 33, 160, 4097];

/// Where functions saturate, underflow, or have their corners.
const CORNERS: [f32; 20] = [
    0.0, -0.0, 1e-30, -1e-30, 1e-6, -1e-6, 0.5, -0.5, 1.0, -1.0, 9.5, -9.5, 20.0, -20.0, 87.0,
    -87.0, 89.0, -89.0, 104.0, -104.0,
];

pub(crate) fn cases() -> Result<Vec<Case>> {
    let mut out = Vec::new();
    for n in ROWS {
        let two = [n, n];
        let name = |what: &str| format!("{what}, rows of {n}");
        out.push(simple(&name("add/two matrices"), ELEMENTWISE, (&two, 3.0), &[], |b, x, _| {
            vec![b.add(x[0], x[1])]
        })?);
        out.push(simple(&name("mul/two matrices"), ELEMENTWISE, (&two, 3.0), &[], |b, x, _| {
            vec![b.mul(x[0], x[1])]
        })?);
        out.push(simple(&name("add/one row"), ELEMENTWISE, (&[n], 3.0), &[n], |b, x, w| {
            vec![b.add(x[0], w[0])]
        })?);
        out.push(simple(&name("mul/one row"), ELEMENTWISE, (&[n], 3.0), &[n], |b, x, w| {
            vec![b.mul(x[0], w[0])]
        })?);
        out.push(simple(&name("add/itself"), ELEMENTWISE, (&[n], 3.0), &[], |b, x, _| {
            vec![b.add(x[0], x[0])]
        })?);
        out.push(simple(&name("scale/negative"), ELEMENTWISE, (&[n], 3.0), &[], |b, x, _| {
            vec![b.scale(x[0], -0.37)]
        })?);
        out.push(simple(&name("softcap/30"), ACTIVATION, (&[n], 90.0), &[], |b, x, _| {
            vec![b.softcap(x[0], 30.0)]
        })?);
        for (activation, _) in Activation::ALL {
            let unary = name(&format!("unary/{activation:?}"));
            out.push(simple(&unary, ACTIVATION, (&[n], 6.0), &[], |b, x, _| {
                vec![b.unary(activation, x[0])]
            })?);
            let glu = name(&format!("glu/{activation:?}"));
            out.push(simple(&glu, ACTIVATION, (&two, 6.0), &[], |b, x, _| {
                vec![b.glu(activation, x[0], x[1])]
            })?);
        }
    }
    for (activation, _) in Activation::ALL {
        let n = CORNERS.len() as u64;
        let name = format!("unary/{activation:?}, corners");
        let mut case =
            simple(&name, ACTIVATION, (&[n], 1.0), &[], |b, x, _| vec![b.unary(activation, x[0])])?;
        for step in &mut case.steps {
            step.inputs = vec![f32_bytes(&CORNERS.repeat(step.n_tokens as usize))];
        }
        out.push(case);
    }
    Ok(out)
}
