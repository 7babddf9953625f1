//! The cases: a file for each kind of op.

pub(crate) mod attention;
pub(crate) mod chain;
pub(crate) mod elementwise;
pub(crate) mod experts;
pub(crate) mod matrix;
pub(crate) mod norm;
pub(crate) mod rank;
pub(crate) mod rope;
pub(crate) mod rows;
pub(crate) mod state;

use crate::case::{Case, Step, WeightData};
use crate::data::{Rng, f32_bytes};
use crate::{Result, bounds::Bound};
use tegula_program::{DType, Dim, ProgramBuilder, ValueId};

/// Numbers of tokens that take every path: one, few, an odd number above any vector, a full ubatch. From many to few, so
/// that what an earlier run left behind would show.
pub(crate) const TOKENS: [u32; 4] = [64, 17, 3, 1];

/// `[n_tokens, n]` of f32.
pub(crate) fn tokens_by(b: &mut ProgramBuilder, name: &str, n: u64) -> ValueId {
    b.input(name, DType::F32, &[Dim::NTokens, Dim::Fixed(n)])
}

/// A weight of f32 in `-scale..scale`.
pub(crate) fn f32_weight(rng: &mut Rng, name: &str, n: u64, scale: f32) -> WeightData {
    WeightData { name: name.into(), bytes: f32_bytes(&rng.vec(n, scale)) }
}

/// A run for each of [`TOKENS`], with inputs of so many elements a token, in `-scale..scale`.
pub(crate) fn steps(rng: &mut Rng, inputs: &[u64], scale: f32) -> Vec<Step> {
    let step = |n_tokens: u32| Step {
        n_tokens,
        inputs: inputs
            .iter()
            .map(|n| f32_bytes(&rng.vec(n * u64::from(n_tokens), scale)))
            .collect(),
        ..Step::default()
    };
    TOKENS.map(step).into()
}

/// A case of one op over f32 inputs of these numbers of elements a token, and weight vectors of these lengths.
pub(crate) fn simple(
    name: &str,
    bound: &'static Bound,
    (inputs, scale): (&[u64], f32),
    vectors: &[u64],
    op: impl FnOnce(&mut ProgramBuilder, &[ValueId], &[ValueId]) -> Vec<ValueId>,
) -> Result<Case> {
    let mut rng = Rng::of(name);
    let mut b = ProgramBuilder::new(name);
    let ids: Vec<_> =
        inputs.iter().enumerate().map(|(i, n)| tokens_by(&mut b, &format!("x{i}"), *n)).collect();
    let names: Vec<_> = (0..vectors.len()).map(|i| format!("w{i}")).collect();
    let weights: Vec<_> =
        names.iter().zip(vectors).map(|(name, n)| b.weight(name, DType::F32, &[*n])).collect();
    for (i, output) in op(&mut b, &ids, &weights).into_iter().enumerate() {
        b.output(&format!("y{i}"), output);
    }
    let mut case = Case::new(name, b.finish()?, bound);
    case.weights =
        names.iter().zip(vectors).map(|(name, n)| f32_weight(&mut rng, name, *n, 2.0)).collect();
    case.steps = steps(&mut rng, inputs, scale);
    Ok(case)
}
