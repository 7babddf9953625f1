//! Gated delta net: linear attention with a state of fixed size (Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with
//! Delta Rule"), as Qwen3-Next and Qwen3.5 have it.
//!
//! Queries, keys and values go through a causal convolution and SiLU; queries and keys are normalised to length 1 by head. What a head of
//! values gives is normalised and gated by SiLU of a projection of its own.

use tegula_program::{Activation, GatedDelta, HeadOrder, Norm, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, Keys};

/// Added to the sum of squares of a query or key; the models' code has it as a constant.
const L2_EPS: f32 = 1e-6;
const HEADS: std::ops::RangeInclusive<u32> = 1..=1 << 12;
const HEAD_DIM: std::ops::RangeInclusive<u32> = 1..=1 << 12;

/// The sizes of delta-net layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DeltaNet {
    n_embd: u32,
    norm_eps: f32,
    /// Taps of the convolution.
    kernel: u32,
    heads: GatedDelta,
    /// Beta and alpha are rows of one matrix, `ssm_ba`, by head of keys.
    beta_alpha_together: bool,
}

impl DeltaNet {
    pub(crate) fn read(
        keys: &Keys<'_>,
        hparams: &Hparams,
        order: HeadOrder,
        beta_alpha_together: bool,
    ) -> Result<Self, ArchError> {
        let kernel = keys.u32("ssm.conv_kernel", 2..=64)?;
        let head_dim_k = keys.u32("ssm.state_size", HEAD_DIM)?;
        let n_head_k = keys.u32("ssm.group_count", HEADS)?;
        let n_head_v = keys.u32("ssm.time_step_rank", HEADS)?;
        let inner = keys.u32("ssm.inner_size", 1..=1 << 24)?;
        if !n_head_v.is_multiple_of(n_head_k) {
            let allowed = format!("it must be a multiple of the {n_head_k} groups");
            return Err(keys.bad("ssm.time_step_rank", n_head_v, allowed));
        }
        if !inner.is_multiple_of(n_head_v) {
            let allowed = format!("it must be a multiple of the {n_head_v} heads");
            return Err(keys.bad("ssm.inner_size", inner, allowed));
        }
        let heads = GatedDelta {
            n_head_k,
            n_head_v,
            head_dim_k,
            head_dim_v: inner / n_head_v,
            order,
            // As attention's scores: so that their variance does not grow with the length of a key.
            scale: 1.0 / (head_dim_k as f32).sqrt(),
        };
        let (n_embd, norm_eps) = (hparams.n_embd, hparams.norm_eps);
        Ok(Self { n_embd, norm_eps, kernel, heads, beta_alpha_together })
    }
}

/// Layer `il` over x, f32\[n_tokens, n_embd\].
pub(crate) fn delta_net(g: &mut Graph<'_>, il: u32, x: ValueId, net: &DeltaNet) -> ValueId {
    let h = &net.heads;
    let (n_qk, n_v) = (h.n_head_k * h.head_dim_k, h.n_head_v * h.head_dim_v);
    let [n_embd, qk, v_rows] = [net.n_embd, n_qk, n_v].map(u64::from);
    let name = |part: &str| format!("blk.{il}.{part}");

    let qkv = g.linear(x, &name("attn_qkv"), [2 * qk + v_rows, n_embd], Bias::None);
    let z = g.linear(x, &name("attn_gate"), [v_rows, n_embd], Bias::None);
    let (beta, alpha) = beta_alpha(g, il, x, net);

    let kernel = g.table(&name("ssm_conv1d.weight"), [2 * qk + v_rows, net.kernel.into()]);
    let qkv = g.ops.conv_state(qkv, kernel, None);
    let qkv = g.ops.unary(Activation::Silu, qkv);
    let unit = Norm { eps: L2_EPS, n: h.head_dim_k };
    let q = g.ops.slice(qkv, 0, n_qk);
    let q = g.ops.l2_norm(q, unit);
    let k = g.ops.slice(qkv, n_qk, n_qk);
    let k = g.ops.l2_norm(k, unit);
    let v = g.ops.slice(qkv, 2 * n_qk, n_v);

    // g = -exp(A) softplus(alpha + dt); files hold -exp(A).
    let dt = g.vector(&name("ssm_dt.bias"), h.n_head_v);
    let a = g.vector(&name("ssm_a"), h.n_head_v);
    let decay = g.ops.add(alpha, dt);
    let decay = g.ops.unary(Activation::Softplus, decay);
    let decay = g.ops.mul(decay, a); // [n_tokens, n_head_v]

    let y = g.ops.gated_delta([q, k, v, decay, beta], *h); // [n_tokens, n_v]
    let norm = Norm { eps: net.norm_eps, n: h.head_dim_v };
    let y = g.rms_norm(y, &name("ssm_norm"), norm);
    let y = g.ops.glu(Activation::Silu, z, y);
    g.linear(y, &name("ssm_out"), [n_embd, v_rows], Bias::None)
}

/// How strongly each head writes, and what its decay is made of: f32\[n_tokens, n_head_v\] each.
fn beta_alpha(g: &mut Graph<'_>, il: u32, x: ValueId, net: &DeltaNet) -> (ValueId, ValueId) {
    let [n_embd, n_head_v] = [net.n_embd, net.heads.n_head_v].map(u64::from);
    let name = |part: &str| format!("blk.{il}.{part}");
    let (beta, alpha) = if net.beta_alpha_together {
        let both = g.linear(x, &name("ssm_ba"), [2 * n_head_v, n_embd], Bias::None);
        let r = net.heads.n_head_v / net.heads.n_head_k; // heads of values of a head of keys
        (g.ops.slice_groups(both, 2 * r, 0, r), g.ops.slice_groups(both, 2 * r, r, r))
    } else {
        let beta = g.linear(x, &name("ssm_beta"), [n_head_v, n_embd], Bias::None);
        (beta, g.linear(x, &name("ssm_alpha"), [n_head_v, n_embd], Bias::None))
    };
    (g.ops.unary(Activation::Sigmoid, beta), alpha)
}
