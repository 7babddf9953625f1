//! Rope: both styles, every head size, positions up to 100,000, and all ways to scale frequencies.

use super::{TOKENS, f32_weight, tokens_by};
use crate::Result;
use crate::bounds::ROPE;
use crate::case::{Case, Step};
use crate::data::{Rng, f32_bytes, i32_bytes};
use tegula_program::{DType, Dim, ProgramBuilder, Rope, RopeStyle};

/// Contexts in use reach this far.
const POSITION_MAX: u64 = 100_000;

fn case(what: &str, n_head: u64, has_factors: bool, rope: Rope) -> Result<Case> {
    let style = match rope.style {
        RopeStyle::Adjacent => "adjacent",
        RopeStyle::Neox => "neox",
    };
    let (dim, n_rot) = (rope.head_dim, rope.n_rot);
    let name = format!("rope/{style}/{what}, {n_head} heads of {dim}, {n_rot} turn");
    let mut rng = Rng::of(&name);
    let mut b = ProgramBuilder::new(&name);
    let row = n_head * u64::from(dim);
    let x = tokens_by(&mut b, "x", row);
    let positions = b.input("positions", DType::I32, &[Dim::NTokens]);
    let n_pairs = u64::from(n_rot / 2);
    let factors = has_factors.then(|| b.weight("factors", DType::F32, &[n_pairs]));
    let y = b.rope(x, positions, factors, rope);
    b.output("y", y);
    let mut case = Case::new(&name, b.finish()?, ROPE);
    case.n_ctx_max = u32::try_from(POSITION_MAX).unwrap_or(u32::MAX) + 1;
    case.weights.extend(factors.map(|_| {
        let mut weight = f32_weight(&mut rng, "factors", n_pairs, 0.0);
        let factors: Vec<f32> = (0..n_pairs).map(|_| 2.5 + 1.5 * rng.unit()).collect();
        weight.bytes = f32_bytes(&factors);
        weight
    }));
    let step = |n_tokens: u32| Step {
        n_tokens,
        inputs: vec![
            f32_bytes(&rng.vec(row * u64::from(n_tokens), 3.0)),
            i32_bytes(&rng.ids(n_tokens, POSITION_MAX + 1)),
        ],
        ..Step::default()
    };
    case.steps = TOKENS.map(step).into();
    Ok(case)
}

pub(crate) fn cases() -> Result<Vec<Case>> {
    let mut out = Vec::new();
    for style in [RopeStyle::Adjacent, RopeStyle::Neox] {
        for (n_head, dim) in [(1, 32), (2, 64), (9, 80), (9, 128), (2, 256), (3, 2)] {
            out.push(case("plain", n_head, false, Rope::new(style, dim, dim, 10_000.0))?);
        }
        for (dim, n_rot) in [(80, 32), (128, 64), (256, 2), (64, 62)] {
            out.push(case("partial", 3, false, Rope::new(style, dim, n_rot, 10_000.0))?);
        }
        let plain = Rope::new(style, 128, 128, 500_000.0);
        let yarn = Rope {
            n_ctx_orig: 4096,
            freq_scale: 1.0 / 40.0,
            ext_factor: 1.0,
            attn_factor: 1.3689,
            ..plain
        };
        out.push(case("great base", 2, false, Rope { base: 10_000_000.0, ..plain })?);
        out.push(case("factors", 2, true, plain)?);
        out.push(case("linear", 2, false, Rope { freq_scale: 0.125, ..plain })?);
        out.push(case("magnitude", 2, false, Rope { attn_factor: 0.75, ..plain })?);
        out.push(case("yarn", 2, false, yarn)?);
        out.push(case("yarn and factors", 2, true, yarn)?);
        out.push(case("half of yarn", 2, false, Rope { ext_factor: 0.5, ..yarn })?);
        let steep = Rope { beta_fast: 1.0, beta_slow: 1.0, ..yarn };
        out.push(case("yarn without a ramp", 2, false, steep)?);
        let late = Rope { n_ctx_orig: 262_144, beta_fast: 32.0, beta_slow: 1.0, ..yarn };
        out.push(case("yarn of a long context", 2, false, late)?);
    }
    Ok(out)
}
