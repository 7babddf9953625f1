//! Mixture of experts: a router sends each token to a few of many MLPs (Shazeer et al., "Outrageously Large Neural Networks"; Fedus et
//! al., "Switch Transformers").

use tegula_program::{Activation, Router, RouterGating, RouterGroups, ValueId};

use crate::graph::{Bias, Graph};
use crate::hparams::ExpertHparams;

/// What gates an expert's MLP.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Gate {
    /// `act(gate) * up`.
    Plain(Activation),
    /// `a sigmoid(alpha a) (b + 1)`, both sides within `limit`.
    Clamped { alpha: f32, limit: f32 },
}

/// The sizes and functions of a mixture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moe {
    pub(crate) n_embd: u32,
    pub(crate) experts: ExpertHparams,
    pub(crate) gating: RouterGating,
    /// Whether weights are divided by their sum where the file does not say.
    pub(crate) normalise: bool,
    pub(crate) gate: Gate,
    /// Of the router and of every expert.
    pub(crate) bias: Bias,
    /// Added to what the experts are chosen by, and not to their weights: `exp_probs_b`, where the file has it.
    pub(crate) selection_bias: bool,
    /// Only the experts of the best groups are searched.
    pub(crate) groups: Option<RouterGroups>,
}

impl Moe {
    /// The most common form: SiLU, softmax over all experts, weights divided by their sum.
    pub(crate) fn new(n_embd: u32, experts: ExpertHparams) -> Self {
        let (gating, gate) = (RouterGating::Softmax, Gate::Plain(Activation::Silu));
        let (bias, selection_bias, groups) = (Bias::None, false, None);
        Self { n_embd, experts, gating, normalise: true, gate, bias, selection_bias, groups }
    }
}

/// The weighted sum of the experts of each row of x, f32\[n, n_embd\], in layer `il`; with the shared expert where there is one.
pub(crate) fn moe(g: &mut Graph<'_>, il: u32, x: ValueId, moe: &Moe) -> ValueId {
    let e = &moe.experts;
    let [n_embd, n_expert, n_ff] = [moe.n_embd, e.n_expert, e.n_ff].map(u64::from);
    let name = |part: &str| format!("blk.{il}.{part}");

    let logits = g.linear(x, &name("ffn_gate_inp"), [n_expert, n_embd], moe.bias);
    let router = Router {
        k: e.n_used,
        gating: moe.gating,
        normalise: e.normalise.unwrap_or(moe.normalise),
        scale: e.scale,
    };
    let bias = moe.selection_bias.then(|| name("exp_probs_b.bias"));
    let bias = bias.and_then(|bias| g.vector_if_present(&bias, e.n_expert));
    let (ids, weights) = match moe.groups {
        None => g.ops.router_topk(logits, bias, router),
        Some(groups) => g.ops.router_topk_grouped(logits, bias, router, groups),
    }; // [n, n_used]

    let into = [n_expert, n_ff, n_embd];
    let gate = product(g, x, ids, &name("ffn_gate_exps"), into, moe.bias);
    let up = product(g, x, ids, &name("ffn_up_exps"), into, moe.bias);
    let inner = match moe.gate {
        Gate::Plain(activation) => g.ops.glu(activation, gate, up),
        Gate::Clamped { alpha, limit } => g.ops.glu_clamped(gate, up, alpha, limit),
    }; // [n, n_used * n_ff]
    let out = product(g, inner, ids, &name("ffn_down_exps"), [n_expert, n_embd, n_ff], moe.bias);
    let out = g.ops.combine_experts(out, weights); // [n, n_embd]
    if e.n_ff_shared == 0 {
        return out;
    }
    let shared = shared_expert(g, il, x, moe);
    g.ops.add(out, shared)
}

/// `x W_e^T + b_e` for every expert of a row, side by side.
fn product(
    g: &mut Graph<'_>,
    x: ValueId,
    ids: ValueId,
    name: &str,
    [n_expert, n_rows, n_in]: [u64; 3],
    bias: Bias,
) -> ValueId {
    let weight = g.experts(&format!("{name}.weight"), [n_expert, n_rows, n_in]);
    let bias =
        (bias == Bias::Required).then(|| g.table(&format!("{name}.bias"), [n_expert, n_rows]));
    // The number of experts is capped far below 2^32.
    g.ops.matmul_experts(x, weight, ids, bias, u32::try_from(n_expert).unwrap_or(u32::MAX))
}

/// The MLP that every token has, times the sigmoid of a number of its own where the file has a row for it.
fn shared_expert(g: &mut Graph<'_>, il: u32, x: ValueId, moe: &Moe) -> ValueId {
    let [n_embd, n_ff] = [moe.n_embd, moe.experts.n_ff_shared].map(u64::from);
    let name = |part: &str| format!("blk.{il}.{part}");
    let gate = g.linear(x, &name("ffn_gate_shexp"), [n_ff, n_embd], Bias::None);
    let up = g.linear(x, &name("ffn_up_shexp"), [n_ff, n_embd], Bias::None);
    let inner = g.ops.glu(Activation::Silu, gate, up);
    let out = g.linear(inner, &name("ffn_down_shexp"), [n_embd, n_ff], Bias::None);
    let row = name("ffn_gate_inp_shexp");
    if !g.has(&format!("{row}.weight")) {
        return out;
    }
    let weight = g.linear(x, &row, [1, n_embd], Bias::None); // [n, 1]
    let weight = g.ops.unary(Activation::Sigmoid, weight);
    g.ops.combine_experts(out, weight)
}
