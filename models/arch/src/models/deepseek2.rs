//! DeepSeek V2, V3 and R1 (`deepseek2`; "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model", "DeepSeek-V3
//! Technical Report").
//!
//! - Multi-head latent attention: keys and values of all heads are made of one short vector of a token, `c`, of `kv_lora_rank`
//!   elements, and a part of the keys that has rope is one for all heads. Queries may come from a short vector too.
//! - Files that have `attn_k_b` and `attn_v_b` let the cache hold `c` in place of keys and values (section 2.1.2 of the first paper): a head's
//!   query is multiplied by its `attn_k_b` before attention, and what it gives by its `attn_v_b` after. Older files have both in one matrix,
//!   `attn_kv_b`, and keys and values are made before they are stored.
//! - The first layers have an MLP, the others experts, some of which every token has. V3 chooses by a sigmoid and a bias; the largest
//!   models search the best groups of experts only: V2 by a group's best expert, V3 by the sum of its best two.
//! - Where YaRN extends the context, the scores of attention are scaled, and rope's magnitude stays.

use tegula_program::{
    Activation, Norm, Rope, RopeStyle, Router, RouterGating, RouterGroups, ValueId,
};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{ExpertHparams, Hparams, Keys, LayerHparams};
use crate::layers::{Attention, Mlp, Moe, mlp, moe, output};
use crate::registry::Architecture;
use crate::rope;

const RANK: std::ops::RangeInclusive<u32> = 1..=1 << 16;
/// `expert_gating_func` of a softmax and of a sigmoid.
const GATING_SOFTMAX: u32 = 1;
const GATING_SIGMOID: u32 = 2;

#[derive(Debug)]
struct DeepSeek2 {
    hparams: Hparams,
    rope: Rope,
    latent: Latent,
    /// Layers from the start that have no experts.
    n_dense: u32,
    moe: Moe,
}

/// The sizes of latent attention.
#[derive(Debug, Clone, Copy)]
struct Latent {
    /// Elements of the vector that queries are made of; 0 where they are made of the row itself.
    q_rank: u32,
    /// Elements of the vector that keys and values are made of.
    kv_rank: u32,
    /// Elements of a key without rope.
    head_dim_nope: u32,
    /// Elements of a value.
    head_dim_v: u32,
    /// The cache holds the vector itself.
    absorbed: bool,
    /// Multiplies scores.
    scale: f32,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    let hparams = Hparams::read(keys)?;
    let rope = rope::read(keys, RopeStyle::Adjacent, &hparams)?;
    let latent = Latent::read(keys, &hparams, &rope)?;
    // What `Latent` scales by is not rope's magnitude as well.
    let attn_factor = keys.f32_or("rope.scaling.attn_factor", 1e-6..=1e6, 1.0)?;
    let rope = Rope { attn_factor, head_dim: rope.n_rot, ..rope };
    let mut experts = ExpertHparams::required(keys, &hparams)?;
    let n_shared = keys.opt_u32("expert_shared_count", 0..=1 << 6)?.unwrap_or(0);
    // Sizes of experts are capped at 2^24.
    experts.n_ff_shared = n_shared * experts.n_ff;
    let n_dense = keys.opt_u32("leading_dense_block_count", 0..=u32::MAX)?.unwrap_or(0);
    let gating = match keys.opt_u32("expert_gating_func", 0..=u32::MAX)?.unwrap_or(0) {
        0 | GATING_SOFTMAX => RouterGating::Softmax,
        GATING_SIGMOID => RouterGating::Sigmoid,
        other => return Err(keys.unsupported("this gating is", "expert_gating_func", other)),
    };
    let groups = read_groups(keys, &experts, gating)?;
    let plain = Moe::new(hparams.n_embd, experts);
    let moe = Moe { gating, normalise: false, selection_bias: true, groups, ..plain };
    Ok(Box::new(DeepSeek2 { hparams, rope, latent, n_dense, moe }))
}

fn read_groups(
    keys: &Keys<'_>,
    experts: &ExpertHparams,
    gating: RouterGating,
) -> Result<Option<RouterGroups>, ArchError> {
    let n_group = keys.opt_u32("expert_group_count", 0..=experts.n_expert)?.unwrap_or(0);
    if n_group <= 1 {
        return Ok(None);
    }
    let n_group_used = keys.u32("expert_group_used_count", 1..=n_group)?;
    if !experts.n_expert.is_multiple_of(n_group) {
        let allowed = format!("it must divide the {} experts", experts.n_expert);
        return Err(keys.bad("expert_group_count", n_group, allowed));
    }
    let of_v3 = if gating == RouterGating::Sigmoid { 2 } else { 1 };
    let n_score = of_v3.min(experts.n_expert / n_group);
    Ok(Some(RouterGroups { n_group, n_group_used, n_score }))
}

impl Latent {
    fn read(keys: &Keys<'_>, hparams: &Hparams, rope: &Rope) -> Result<Self, ArchError> {
        let has_q = keys.tensors.has("blk.0.attn_q.weight");
        let q_rank = if has_q { 0 } else { keys.u32("attention.q_lora_rank", RANK)? };
        let kv_rank = keys.u32("attention.kv_lora_rank", RANK)?;
        let absorbed = !keys.tensors.has("blk.0.attn_kv_b.weight");
        let (key, head_dim_k, head_dim_v) = if absorbed {
            let head_dim_v = keys.u32("attention.value_length_mla", RANK)?;
            let key = "attention.key_length_mla";
            for (key, got, wanted) in [
                ("attention.key_length", hparams.head_dim_k, kv_rank + rope.n_rot),
                ("attention.value_length", hparams.head_dim_v, kv_rank),
            ] {
                if got != wanted {
                    let allowed = format!("the cache of a latent vector has {wanted}");
                    return Err(keys.bad(key, got, allowed));
                }
            }
            (key, keys.u32(key, RANK)?, head_dim_v)
        } else {
            ("attention.key_length", hparams.head_dim_k, hparams.head_dim_v)
        };
        let Some(head_dim_nope @ 1..) = head_dim_k.checked_sub(rope.n_rot) else {
            let allowed = format!("it must be more than the {} elements with rope", rope.n_rot);
            return Err(keys.bad(key, head_dim_k, allowed));
        };
        let log_mul = keys.f32_or("rope.scaling.yarn_log_multiplier", 0.0..=1e3, 0.0)?;
        let is_yarn = rope.ext_factor > 0.0;
        let magnitude = if is_yarn { 1.0 + log_mul * (1.0 / rope.freq_scale).ln() } else { 1.0 };
        let scale = magnitude * magnitude / (head_dim_k as f32).sqrt();
        Ok(Self { q_rank, kv_rank, head_dim_nope, head_dim_v, absorbed, scale })
    }
}

impl DeepSeek2 {
    /// Latent attention of layer `il` over x, f32\[n_tokens, n_embd\]. `heads` are the numbers of all heads, i32\[n_tokens, n_head\].
    fn attention(
        &self,
        g: &mut Graph<'_>,
        (il, layer): (u32, LayerHparams),
        x: ValueId,
        heads: ValueId,
    ) -> ValueId {
        let a = &self.latent;
        let (n_rot, nope) = (self.rope.n_rot, a.head_dim_nope);
        let [n_embd, n_head] = [self.hparams.n_embd, layer.n_head].map(u64::from);
        let name = |part: &str| format!("blk.{il}.{part}");

        let q = self.queries(g, (il, layer), x); // per head: nope, then rope
        let q_nope = g.ops.slice_groups(q, nope + n_rot, 0, nope);
        let q_rot = g.ops.slice_groups(q, nope + n_rot, nope, n_rot);
        let q_rot = g.ops.rope(q_rot, g.positions, None, self.rope);

        let n_kv = u64::from(a.kv_rank) + u64::from(n_rot);
        let both = g.linear(x, &name("attn_kv_a_mqa"), [n_kv, n_embd], Bias::None);
        let k_rot = g.ops.slice(both, a.kv_rank, n_rot);
        let k_rot = g.ops.rope(k_rot, g.positions, None, self.rope); // [n_tokens, n_rot]
        let c = g.ops.slice(both, 0, a.kv_rank);
        let norm = Norm { eps: self.hparams.norm_eps, n: a.kv_rank };
        let c = g.rms_norm(c, &name("attn_kv_a_norm"), norm); // [n_tokens, kv_rank]

        let y = if a.absorbed {
            self.absorbed(g, (il, layer), [q_rot, q_nope], [k_rot, c], heads)
        } else {
            let q = g.ops.concat_groups(q_rot, n_rot, q_nope, nope);
            self.decompressed(g, (il, layer), q, [k_rot, c])
        };
        let n_in = n_head * u64::from(a.head_dim_v);
        g.linear(y, &name("attn_output"), [n_embd, n_in], Bias::None)
    }

    /// Queries of all heads: f32\[n_tokens, n_head * (nope + n_rot)\].
    fn queries(&self, g: &mut Graph<'_>, (il, layer): (u32, LayerHparams), x: ValueId) -> ValueId {
        let rank = self.latent.q_rank;
        let head_dim = self.latent.head_dim_nope + self.rope.n_rot;
        let rows = u64::from(layer.n_head) * u64::from(head_dim);
        let n_embd = u64::from(self.hparams.n_embd);
        let name = |part: &str| format!("blk.{il}.{part}");
        if rank == 0 {
            return g.linear(x, &name("attn_q"), [rows, n_embd], Bias::None);
        }
        let c = g.linear(x, &name("attn_q_a"), [rank.into(), n_embd], Bias::None);
        let norm = Norm { eps: self.hparams.norm_eps, n: rank };
        let c = g.rms_norm(c, &name("attn_q_a_norm"), norm);
        g.linear(c, &name("attn_q_b"), [rows, rank.into()], Bias::None)
    }

    /// All heads read the same key, the rope's part and c, and the same value, c.
    fn absorbed(
        &self,
        g: &mut Graph<'_>,
        (il, layer): (u32, LayerHparams),
        [q_rot, q_nope]: [ValueId; 2],
        [k_rot, c]: [ValueId; 2],
        heads: ValueId,
    ) -> ValueId {
        let a = &self.latent;
        let (n_rot, n_head) = (self.rope.n_rot, layer.n_head);
        let [heads_n, rank, nope, dim_v] =
            [n_head, a.kv_rank, a.head_dim_nope, a.head_dim_v].map(u64::from);
        let name = |part: &str| format!("blk.{il}.{part}");

        let k_b = g.experts(&name("attn_k_b.weight"), [heads_n, rank, nope]);
        let q = g.ops.matmul_experts(q_nope, k_b, heads, None, n_head); // [n_tokens, n_head * rank]
        let q = g.ops.concat_groups(q_rot, n_rot, q, a.kv_rank);
        let k = g.ops.concat(k_rot, c);
        let kv = g.kv_layer(Attention::kv_group(), 1, [n_rot + a.kv_rank, a.kv_rank]);
        g.ops.kv_store(kv, k, c);
        let y = g.ops.attention(kv, q, None, n_head, a.scale, 0.0, 0); // [n_tokens, n_head * rank]
        let v_b = g.experts(&name("attn_v_b.weight"), [heads_n, dim_v, rank]);
        g.ops.matmul_experts(y, v_b, heads, None, n_head)
    }

    /// Every head has a key and a value of its own.
    fn decompressed(
        &self,
        g: &mut Graph<'_>,
        (il, layer): (u32, LayerHparams),
        q: ValueId,
        [k_rot, c]: [ValueId; 2],
    ) -> ValueId {
        let a = &self.latent;
        let (n_rot, n_head) = (self.rope.n_rot, layer.n_head);
        let (nope, dim_v) = (a.head_dim_nope, a.head_dim_v);
        let rows = u64::from(n_head) * u64::from(nope + dim_v);
        let kv_b = format!("blk.{il}.attn_kv_b");
        let both = g.linear(c, &kv_b, [rows, a.kv_rank.into()], Bias::None);
        let k = g.ops.slice_groups(both, nope + dim_v, 0, nope);
        let k = g.ops.concat_groups(k_rot, n_rot, k, nope);
        let v = g.ops.slice_groups(both, nope + dim_v, nope, dim_v);
        let kv = g.kv_layer(Attention::kv_group(), n_head, [n_rot + nope, dim_v]);
        g.ops.kv_store(kv, k, v);
        g.ops.attention(kv, q, None, n_head, a.scale, 0.0, 0)
    }
}

/// 0, 1, 2 and so on for every row, i32\[n_tokens, n\]: of equal scores the first ones are chosen before the others.
fn numbers(g: &mut Graph<'_>, x: ValueId, n: u32) -> ValueId {
    let x = g.ops.slice(x, 0, n);
    let equal = g.ops.scale(x, 0.0);
    let gating = RouterGating::Softmax;
    g.ops.router_topk(equal, None, Router { k: n, gating, normalise: false, scale: 1.0 }).0
}

impl Architecture for DeepSeek2 {
    fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    fn window(&self) -> Option<u32> {
        None
    }

    fn hidden(&self, g: &mut Graph<'_>) -> ValueId {
        let hp = &self.hparams;
        let norm = hp.norm();
        let table = g.matrix("token_embd.weight", [hp.n_vocab.into(), hp.n_embd.into()]);

        let mut x = g.ops.embed(g.tokens, table); // [n_tokens, n_embd]
        for (il, layer) in hp.numbered_layers() {
            g.ops.layer(Some(il));
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let heads = if self.latent.absorbed { numbers(g, h, layer.n_head) } else { h };
            let mut h = self.attention(g, (il, layer), h, heads);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::None);
            let h = g.rms_norm(x, &format!("blk.{il}.ffn_norm"), norm);
            let h = if il < self.n_dense {
                mlp(g, il, h, &Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias })
            } else {
                moe(g, il, h, &self.moe)
            };
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        output(g, hidden, &self.hparams)
    }
}
