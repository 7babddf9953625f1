//! From the last hidden rows to scores.

use tegula_program::ValueId;

use crate::graph::Graph;
use crate::hparams::Hparams;

/// Scores of all tokens, f32\[n_outputs, n_vocab\]: by `output.weight`, or by the embedding in files without one.
pub(crate) fn output(g: &mut Graph<'_>, hidden: ValueId, hparams: &Hparams) -> ValueId {
    let name = if g.has("output.weight") { "output.weight" } else { "token_embd.weight" };
    let weight = g.matrix(name, [hparams.n_vocab.into(), hparams.n_embd.into()]);
    g.ops.matmul(hidden, weight, None)
}
