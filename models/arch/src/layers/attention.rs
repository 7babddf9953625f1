//! Grouped-query self-attention with rotary positions.

use tegula_program::{Activation, Norm, Rope, ValueId};

use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, LayerHparams};

/// The norm of queries and keys before rope, with its epsilon.
#[derive(Debug, Clone, Copy)]
pub(crate) enum QkNorm {
    None,
    /// Of every head by itself; heads share the weights.
    Heads(f32),
    /// Of all heads together.
    Row(f32),
}

/// How a layer attends.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attention {
    pub(crate) n_embd: u32,
    pub(crate) n_head: u32,
    pub(crate) n_head_kv: u32,
    pub(crate) head_dim_k: u32,
    pub(crate) head_dim_v: u32,
    /// `None` where order is not told to the layer.
    pub(crate) rope: Option<Rope>,
    /// Divisors of rope's frequencies.
    pub(crate) rope_factors: Option<ValueId>,
    pub(crate) qkv_bias: Bias,
    pub(crate) output_bias: Bias,
    pub(crate) qk_norm: QkNorm,
    /// `attn_q` makes for each head its query and a gate; what the head gives is multiplied by the gate's sigmoid.
    pub(crate) gated: bool,
    /// Each head has a sink in its softmax.
    pub(crate) sinks: bool,
    /// Multiplies scores.
    pub(crate) scale: f32,
    /// Bounds scores; 0 for not.
    pub(crate) softcap: f32,
    /// Positions a query sees; 0 for all before it.
    pub(crate) window: u32,
}

impl Attention {
    /// The plain form: no biases, no norms, no window.
    pub(crate) fn new(
        hparams: &Hparams,
        layer: LayerHparams,
        rope: impl Into<Option<Rope>>,
    ) -> Self {
        Self {
            n_embd: hparams.n_embd,
            n_head: layer.n_head,
            n_head_kv: layer.n_head_kv,
            head_dim_k: hparams.head_dim_k,
            head_dim_v: hparams.head_dim_v,
            rope: rope.into(),
            rope_factors: None,
            qkv_bias: Bias::None,
            output_bias: Bias::None,
            qk_norm: QkNorm::None,
            gated: false,
            sinks: false,
            scale: hparams.attention_scale(),
            softcap: 0.0,
            window: 0,
        }
    }

    /// Layers of a group share block tables, so they keep the same positions. All layers keep everything now; layers with a
    /// window could have a group of their own that forgets.
    pub(crate) fn kv_group() -> u32 {
        0
    }
}

/// `W_o softmax(scale Q K^T) V` of layer `il`, where x is f32\[n_tokens, n_embd\].
pub(crate) fn attention(g: &mut Graph<'_>, il: u32, x: ValueId, a: &Attention) -> ValueId {
    let [n_embd, n_head, dim_v] = [a.n_embd, a.n_head, a.head_dim_v].map(u64::from);
    let name = |part: &str| format!("blk.{il}.{part}");

    let Qkv { mut q, mut k, v, gate } = qkv(g, il, x, a);
    let norms = match a.qk_norm {
        QkNorm::None => None,
        QkNorm::Heads(eps) => Some([Norm { eps, n: a.head_dim_k }; 2]),
        QkNorm::Row(eps) => {
            Some([a.n_head, a.n_head_kv].map(|n| Norm { eps, n: n * a.head_dim_k }))
        }
    };
    if let Some([norm_q, norm_k]) = norms {
        q = g.rms_norm(q, &name("attn_q_norm"), norm_q);
        k = g.rms_norm(k, &name("attn_k_norm"), norm_k);
    }
    if let Some(rope) = a.rope {
        q = g.ops.rope(q, g.positions, a.rope_factors, rope);
        k = g.ops.rope(k, g.positions, a.rope_factors, rope);
    }

    let kv = g.kv_layer(Attention::kv_group(), a.n_head_kv, [a.head_dim_k, a.head_dim_v]);
    g.ops.kv_store(kv, k, v);
    // [n_tokens, n_head * dim_v]
    let sinks = a.sinks.then(|| g.vector(&name("attn_sinks.weight"), a.n_head));
    let mut heads = g.ops.attention(kv, q, sinks, a.n_head, a.scale, a.softcap, a.window);
    if let Some(gate) = gate {
        heads = g.ops.glu(Activation::Sigmoid, gate, heads);
    }
    g.linear(heads, &name("attn_output"), [n_embd, n_head * dim_v], a.output_bias)
}

/// Queries, keys and values of a row, and the gate of gated attention.
struct Qkv {
    q: ValueId,
    k: ValueId,
    v: ValueId,
    gate: Option<ValueId>,
}

/// By a matrix for each, or where a file has it by one for all three, `attn_qkv`.
fn qkv(g: &mut Graph<'_>, il: u32, x: ValueId, a: &Attention) -> Qkv {
    let [n_embd, n_head, n_head_kv] = [a.n_embd, a.n_head, a.n_head_kv].map(u64::from);
    let [dim_k, dim_v] = [a.head_dim_k, a.head_dim_v].map(u64::from);
    let name = |part: &str| format!("blk.{il}.{part}");

    if !a.gated && g.has(&name("attn_qkv.weight")) {
        // Heads and their lengths are capped at 2^14 each.
        let (n_q, n_k) = (a.n_head * a.head_dim_k, a.n_head_kv * a.head_dim_k);
        let n_v = a.n_head_kv * a.head_dim_v;
        let n_rows = [n_q, n_k, n_v].map(u64::from).iter().sum();
        let all = g.linear(x, &name("attn_qkv"), [n_rows, n_embd], a.qkv_bias);
        let q = g.ops.slice(all, 0, n_q);
        let k = g.ops.slice(all, n_q, n_k);
        let v = g.ops.slice(all, n_q + n_k, n_v);
        return Qkv { q, k, v, gate: None };
    }
    let parts = if a.gated { 2 } else { 1 };
    let mut q = g.linear(x, &name("attn_q"), [n_head * dim_k * parts, n_embd], a.qkv_bias);
    let mut gate = None;
    if a.gated {
        let both = a.head_dim_k * 2; // per head: the query, then the gate
        gate = Some(g.ops.slice_groups(q, both, a.head_dim_k, a.head_dim_k));
        q = g.ops.slice_groups(q, both, 0, a.head_dim_k);
    }
    let k = g.linear(x, &name("attn_k"), [n_head_kv * dim_k, n_embd], a.qkv_bias);
    let v = g.linear(x, &name("attn_v"), [n_head_kv * dim_v, n_embd], a.qkv_bias);
    Qkv { q, k, v, gate }
}
