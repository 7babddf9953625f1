//! Ranking: ties go to the first, zeros of both signs are equal, infinities are numbers.

use super::{TOKENS, tokens_by};
use crate::Result;
use crate::bounds::COPY;
use crate::case::{Case, Step};
use crate::data::{Rng, f32_bytes};
use tegula_program::ProgramBuilder;

/// A row's element: distinct numbers, or few values many times.
type Element = fn(&mut Rng) -> f32;

fn distinct(rng: &mut Rng) -> f32 {
    rng.unit()
}

fn ties(rng: &mut Rng) -> f32 {
    rng.below(3) as f32 - 1.0
}

fn zeros(rng: &mut Rng) -> f32 {
    [0.0, -0.0][usize::from(rng.below(2) == 1)]
}

fn infinities(rng: &mut Rng) -> f32 {
    [f32::INFINITY, f32::NEG_INFINITY, 1.0, f32::MAX][usize::try_from(rng.below(4)).unwrap_or(0)]
}

pub(crate) fn cases() -> Result<Vec<Case>> {
    let kinds: [(&str, Element); 4] =
        [("distinct", distinct), ("ties", ties), ("zeros", zeros), ("infinities", infinities)];
    let mut out = Vec::new();
    for (what, element) in kinds {
        for n in [1, 7, 64, 1000, 32_003] {
            out.push(case(what, element, n, 0)?);
            for k in [1, 3, 7, 40, 64, 1000] {
                if u64::from(k) <= n {
                    out.push(case(what, element, n, k)?);
                }
            }
        }
    }
    Ok(out)
}

/// `k` 0 is argmax.
fn case(what: &str, element: Element, n: u64, k: u32) -> Result<Case> {
    let name = match k {
        0 => format!("argmax/{what}, rows of {n}"),
        _ => format!("top_k/{what}, {k} of {n}"),
    };
    let mut rng = Rng::of(&name);
    let mut b = ProgramBuilder::new(&name);
    let x = tokens_by(&mut b, "x", n);
    if k == 0 {
        let best = b.argmax(x);
        b.output("best", best);
    } else {
        let (ids, values) = b.top_k(x, k);
        b.output("ids", ids);
        b.output("values", values);
    }
    let mut case = Case::new(&name, b.finish()?, COPY);
    // Long rows are a vocabulary, of which a run ranks few.
    for n_tokens in TOKENS.into_iter().filter(|n_tokens| n * u64::from(*n_tokens) < 1 << 18) {
        let row: Vec<f32> = (0..n * u64::from(n_tokens)).map(|_| element(&mut rng)).collect();
        case.steps.push(Step { n_tokens, inputs: vec![f32_bytes(&row)], ..Step::default() });
    }
    Ok(case)
}
