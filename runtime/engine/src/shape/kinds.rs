//! Layers beyond attention and an MLP: experts, gated delta nets, and Gemma 4's.

use super::{Shape, Tensors};
use serde::Deserialize;
use tegula_gguf::GgufWriter;

/// Sizes of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Experts {
    /// Experts of a layer.
    pub n_expert: u32,
    /// Experts of a token.
    pub n_used: u32,
    /// Elements between the two halves of an expert's MLP.
    pub n_ff: u32,
    /// The same of the expert that every token has.
    pub n_ff_shared: u32,
}

/// Sizes of gated delta nets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct DeltaNet {
    /// Heads of queries and keys.
    pub n_head_k: u32,
    /// Heads of values.
    pub n_head_v: u32,
    /// Elements of a query or key.
    pub head_dim_k: u32,
    /// Elements of a value.
    pub head_dim_v: u32,
    /// Taps of the convolution.
    pub kernel: u32,
    /// Every layer of this number attends instead.
    pub attention_every: u32,
}

/// What Gemma 4 has beside Gemma 3's numbers. `head_dim` of the shape is that of layers that see everything.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Gemma4 {
    /// Elements of a head of layers with a window.
    pub head_dim_windowed: u32,
    /// Every layer of this number sees everything.
    pub full_every: u32,
    /// Layers at the end that read the keys and values of earlier ones.
    pub n_layer_shared_kv: u32,
    /// Elements between the two halves of their MLP.
    pub n_ff_shared_kv: u32,
    /// Elements of a layer's own input for each token.
    pub n_own: u32,
    /// Bounds logits.
    pub softcap: f32,
}

impl Gemma4 {
    fn sees_all(&self, il: u32) -> bool {
        (il + 1).is_multiple_of(self.full_every)
    }

    fn shares_kv(&self, il: u32, n_layer: u32) -> bool {
        il >= n_layer.saturating_sub(self.n_layer_shared_kv)
    }
}

/// The keys that these kinds add.
pub(super) fn metadata(mut out: GgufWriter<'static>, s: &Shape) -> GgufWriter<'static> {
    let key = |part: &str| format!("{}.{part}", s.arch);
    if let Some(n_rot) = s.n_rot {
        out = out.meta(key("rope.dimension_count"), n_rot);
    }
    if let Some(e) = s.experts {
        out = out
            .meta(key("expert_count"), e.n_expert)
            .meta(key("expert_used_count"), e.n_used)
            .meta(key("expert_feed_forward_length"), e.n_ff)
            .meta(key("expert_shared_feed_forward_length"), e.n_ff_shared);
    }
    if let Some(d) = s.delta_net {
        out = out
            .meta(key("ssm.conv_kernel"), d.kernel)
            .meta(key("ssm.state_size"), d.head_dim_k)
            .meta(key("ssm.group_count"), d.n_head_k)
            .meta(key("ssm.time_step_rank"), d.n_head_v)
            .meta(key("ssm.inner_size"), d.n_head_v.saturating_mul(d.head_dim_v))
            .meta(key("full_attention_interval"), d.attention_every);
    }
    match s.gemma4 {
        None => out.meta(key("feed_forward_length"), s.n_ff),
        Some(g) => {
            let n_ff = |il| if g.shares_kv(il, s.n_layer) { g.n_ff_shared_kv } else { s.n_ff };
            let layers = 0..s.n_layer;
            let windowed: Vec<bool> = layers.clone().map(|il| !g.sees_all(il)).collect();
            out.meta(key("feed_forward_length"), layers.map(n_ff).collect::<Vec<u32>>())
                .meta(key("attention.sliding_window_pattern"), windowed)
                .meta(key("attention.key_length_swa"), g.head_dim_windowed)
                .meta(key("attention.value_length_swa"), g.head_dim_windowed)
                .meta(key("attention.shared_kv_layers"), g.n_layer_shared_kv)
                .meta(key("embedding_length_per_layer_input"), g.n_own)
                .meta(key("final_logit_softcapping"), g.softcap)
        }
    }
}

impl Tensors<'_> {
    /// Layer `il` of a hybrid of delta nets and gated attention, with or without experts.
    pub(super) fn hybrid_layer(&mut self, il: u32, d: DeltaNet) {
        let s = self.shape;
        let [n_embd, head_dim] = [s.n_embd, s.head_dim].map(u64::from);
        let name = |part: &str| format!("blk.{il}.{part}");
        self.vector(name("attn_norm.weight"), n_embd);
        if (il + 1).is_multiple_of(d.attention_every) {
            let (n_q, n_kv) = (u64::from(s.n_head) * head_dim, u64::from(s.n_head_kv) * head_dim);
            self.matrix("attn_q", Some(il), n_embd, 2 * n_q);
            self.matrix("attn_k", Some(il), n_embd, n_kv);
            self.matrix("attn_v", Some(il), n_embd, n_kv);
            self.matrix("attn_output", Some(il), n_q, n_embd);
            self.vector(name("attn_q_norm.weight"), head_dim);
            self.vector(name("attn_k_norm.weight"), head_dim);
        } else {
            let [heads_k, heads_v, dim_k, dim_v] =
                [d.n_head_k, d.n_head_v, d.head_dim_k, d.head_dim_v].map(u64::from);
            let (n_qk, n_v) = (heads_k * dim_k, heads_v * dim_v);
            self.matrix("attn_qkv", Some(il), n_embd, 2 * n_qk + n_v);
            self.matrix("attn_gate", Some(il), n_embd, n_v);
            self.matrix("ssm_alpha", Some(il), n_embd, heads_v);
            self.matrix("ssm_beta", Some(il), n_embd, heads_v);
            self.matrix("ssm_out", Some(il), n_v, n_embd);
            self.floats(name("ssm_conv1d.weight"), &[d.kernel.into(), 2 * n_qk + n_v]);
            self.vector(name("ssm_a"), heads_v);
            self.vector(name("ssm_dt.bias"), heads_v);
            self.vector(name("ssm_norm.weight"), dim_v);
        }
        self.vector(name("post_attention_norm.weight"), n_embd);
        match s.experts {
            Some(experts) => self.experts(il, experts),
            None => self.mlp(il, s.n_ff.into()),
        }
    }

    fn experts(&mut self, il: u32, e: Experts) {
        let [n_embd, n_expert, n_ff, n_shared] =
            [self.shape.n_embd, e.n_expert, e.n_ff, e.n_ff_shared].map(u64::from);
        self.floats(format!("blk.{il}.ffn_gate_inp.weight"), &[n_embd, n_expert]);
        for (part, n_in, n_rows) in
            [("ffn_gate", n_embd, n_ff), ("ffn_up", n_embd, n_ff), ("ffn_down", n_ff, n_embd)]
        {
            self.stack(part, il, &[n_in, n_rows, n_expert]);
        }
        if n_shared > 0 {
            self.floats(format!("blk.{il}.ffn_gate_inp_shexp.weight"), &[n_embd, 1]);
            self.matrix("ffn_gate_shexp", Some(il), n_embd, n_shared);
            self.matrix("ffn_up_shexp", Some(il), n_embd, n_shared);
            self.matrix("ffn_down_shexp", Some(il), n_shared, n_embd);
        }
    }

    /// What Gemma 4 has beside its layers.
    pub(super) fn gemma4_inputs(&mut self, g: Gemma4) {
        let [n_layer, n_own, n_embd, n_vocab] =
            [self.shape.n_layer, g.n_own, self.shape.n_embd, self.shape.n_vocab].map(u64::from);
        if n_own > 0 {
            self.matrix("per_layer_token_embd", None, n_layer * n_own, n_vocab);
            self.matrix("per_layer_model_proj", None, n_embd, n_layer * n_own);
            self.vector("per_layer_proj_norm.weight".into(), n_own);
        }
    }

    /// Layer `il` of Gemma 4.
    pub(super) fn gemma4_layer(&mut self, il: u32, g: Gemma4) {
        let s = self.shape;
        let head_dim = if g.sees_all(il) { s.head_dim } else { g.head_dim_windowed };
        let [n_embd, head_dim, n_own] = [s.n_embd, head_dim, g.n_own].map(u64::from);
        let (n_q, n_kv) = (u64::from(s.n_head) * head_dim, u64::from(s.n_head_kv) * head_dim);
        let shares_kv = g.shares_kv(il, s.n_layer);
        let name = |part: &str| format!("blk.{il}.{part}.weight");
        for part in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
            self.vector(name(part), n_embd);
        }
        self.matrix("attn_q", Some(il), n_embd, n_q);
        self.vector(name("attn_q_norm"), head_dim);
        self.matrix("attn_output", Some(il), n_q, n_embd);
        if !shares_kv {
            self.matrix("attn_k", Some(il), n_embd, n_kv);
            self.vector(name("attn_k_norm"), head_dim);
            self.matrix("attn_v", Some(il), n_embd, n_kv);
        }
        self.mlp(il, if shares_kv { g.n_ff_shared_kv } else { s.n_ff }.into());
        if n_own > 0 {
            self.matrix("inp_gate", Some(il), n_embd, n_own);
            self.matrix("proj", Some(il), n_own, n_embd);
            self.vector(name("post_norm"), n_embd);
        }
        self.vector(name("layer_output_scale"), 1);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Quant, Shape};
    use tegula_arch::ProgramOptions;

    /// Whether it fits is decided by these totals: a model whose every layer were thought to have keys would be refused where it runs.
    #[test]
    fn totals_are_those_of_the_models() {
        // Parameters in millions; bytes of F16 keys and values of a token; bytes of state of a sequence.
        // Qwen: ten layers of 2 x 2 x 256; thirty of 3 x 8192 and 32 x 128 x 128 f32.
        // Gemma: published as 2.3 billion "effective" ones, which are those without the layers' own embeddings (2,348.8 million). Of fifteen layers with keys, twelve with heads of 256 and three of 512.
        for (name, millions, kv, state) in [
            ("qwen3.6-35b-a3b", 34_660.6, 20_480, 30 * (3 * 8192 + 32 * 128 * 128) * 4),
            ("gemma-4-e2b", 4_628.6, 2 * 2 * (12 * 256 + 3 * 512), 0),
        ] {
            let gguf = Shape::find(name).unwrap().gguf(Quant::default()).unwrap();
            let model = tegula_arch::load(&gguf).unwrap();
            let found = model.info().n_params as f64 / 1e6;
            assert!((found - millions).abs() / millions < 1e-4, "{name}: {found}");
            let program = model.program(&ProgramOptions::default()).unwrap();
            let token = program.kv_layers.iter().map(|kv| kv.block_bytes(1).unwrap());
            assert_eq!(token.map(|(k, v)| k + v).sum::<u64>(), kv, "{name}");
            let records = program.state_layers.iter().map(tegula_program::StateLayer::bytes);
            assert_eq!(records.sum::<u64>(), state, "{name}");
        }
    }
}
