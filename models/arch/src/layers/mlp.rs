//! MLPs: gated ones, SwiGLU and GEGLU (Shazeer, "GLU Variants Improve Transformer"), and the plain one (Vaswani et al., "Attention Is All
//! You Need").

use tegula_program::{Activation, ValueId};

use crate::graph::{Bias, Graph};

/// The sizes and the function of an MLP.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mlp {
    pub(crate) n_embd: u32,
    pub(crate) n_ff: u32,
    pub(crate) activation: Activation,
    pub(crate) bias: Bias,
}

/// `W_down (act(W_gate x) * W_up x)` of layer `il`, where x is f32\[n, n_embd\].
pub(crate) fn mlp(g: &mut Graph<'_>, il: u32, x: ValueId, mlp: &Mlp) -> ValueId {
    let [n_embd, n_ff] = [mlp.n_embd, mlp.n_ff].map(u64::from);
    let gate = g.linear(x, &format!("blk.{il}.ffn_gate"), [n_ff, n_embd], mlp.bias);
    let up = g.linear(x, &format!("blk.{il}.ffn_up"), [n_ff, n_embd], mlp.bias);
    let inner = g.ops.glu(mlp.activation, gate, up); // [n, n_ff]
    g.linear(inner, &format!("blk.{il}.ffn_down"), [n_embd, n_ff], mlp.bias)
}

/// The same from one matrix, `ffn_up`, that has the rows of `W_gate` and then those of `W_up`.
pub(crate) fn mlp_together(g: &mut Graph<'_>, il: u32, x: ValueId, mlp: &Mlp) -> ValueId {
    let [n_embd, n_ff] = [mlp.n_embd, mlp.n_ff].map(u64::from);
    let both = g.linear(x, &format!("blk.{il}.ffn_up"), [2 * n_ff, n_embd], mlp.bias);
    let gate = g.ops.slice(both, 0, mlp.n_ff);
    let up = g.ops.slice(both, mlp.n_ff, mlp.n_ff);
    let inner = g.ops.glu(mlp.activation, gate, up); // [n, n_ff]
    g.linear(inner, &format!("blk.{il}.ffn_down"), [n_embd, n_ff], mlp.bias)
}

/// `W_down act(W_up x)`.
pub(crate) fn mlp_plain(g: &mut Graph<'_>, il: u32, x: ValueId, mlp: &Mlp) -> ValueId {
    let [n_embd, n_ff] = [mlp.n_embd, mlp.n_ff].map(u64::from);
    let up = g.linear(x, &format!("blk.{il}.ffn_up"), [n_ff, n_embd], mlp.bias);
    let inner = g.ops.unary(mlp.activation, up); // [n, n_ff]
    g.linear(inner, &format!("blk.{il}.ffn_down"), [n_embd, n_ff], mlp.bias)
}
