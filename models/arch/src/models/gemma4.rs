//! Gemma 4, text, dense (E2B, E4B, 31B).
//!
//! - Layers see a window or everything, as `attention.sliding_window_pattern` says for each. Layers that see everything have longer heads, and
//!   a rope that turns only their first part: the other frequencies are divided by a huge `rope_freqs.weight`.
//! - The last `attention.shared_kv_layers` have no keys and values: they read those of the last layer of their kind that has.
//! - Queries and keys are normalised by head, values without a weight; scores are not scaled. Without `attn_v`, values are made of the keys.
//! - In the small models a layer also has an input of its own for each token: a row of `per_layer_token_embd` plus a projection of the
//!   embedding, gated into the residual stream after the MLP.
//! - What a layer gives is multiplied by one number.

use tegula_program::{Activation, Norm, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, Keys, LayerHparams};
use crate::layers::{Attention, Mlp, mlp, output};
use crate::registry::Architecture;
use crate::rope;

/// One kind of layer.
#[derive(Debug, Clone, Copy)]
struct Kind {
    head_dim_k: u32,
    head_dim_v: u32,
    rope: Rope,
    /// 0 for all positions.
    window: u32,
}

#[derive(Debug)]
struct Gemma4 {
    hparams: Hparams,
    full: Kind,
    windowed: Kind,
    /// Per layer, whether it has the window.
    is_windowed: Vec<bool>,
    /// Layers from the start that have keys and values of their own.
    n_layer_kv: usize,
    /// Elements of a layer's own input; 0 for none.
    n_own: u32,
    softcap_final: Option<f32>,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read(keys)?;
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    let (head_dim_k, head_dim_v) = (hparams.head_dim_k, hparams.head_dim_v);
    let full = Kind { head_dim_k, head_dim_v, rope, window: 0 };
    let windowed = read_windowed(keys, &hparams)?;
    let n_layer = hparams.layers.len();
    let key = keys.full("attention.sliding_window_pattern");
    let is_windowed = keys.metadata.optional_per_layer::<bool>(&key, n_layer)?;
    let missing = || keys.bad("attention.sliding_window_pattern", "absent", "layers differ by it");
    let is_windowed = is_windowed.ok_or_else(missing)?;
    let n_shared = keys.opt_u32("attention.shared_kv_layers", 0..=u32::MAX)?.unwrap_or(0);
    let n_layer_kv = n_layer.saturating_sub(n_shared as usize);
    for (il, windowed) in is_windowed.iter().enumerate().skip(n_layer_kv) {
        if is_windowed.iter().take(n_layer_kv).all(|other| other != windowed) {
            let allowed = format!("layer {il} has no layer of its kind to share with");
            return Err(keys.bad("attention.shared_kv_layers", n_shared, allowed));
        }
    }
    let n_own = keys.opt_u32("embedding_length_per_layer_input", 0..=1 << 16)?.unwrap_or(0);
    let cap = keys.opt_f32("final_logit_softcapping", 0.0..=1e6)?;
    let softcap_final = cap.filter(|cap| *cap > 0.0);
    Ok(Box::new(Gemma4 { hparams, full, windowed, is_windowed, n_layer_kv, n_own, softcap_final }))
}

fn read_windowed(keys: &Keys<'_>, hparams: &Hparams) -> Result<Kind, ArchError> {
    const HEAD_DIM: std::ops::RangeInclusive<u32> = 1..=1 << 14;
    let head_dim_k = keys.opt_u32("attention.key_length_swa", HEAD_DIM)?;
    let head_dim_k = head_dim_k.unwrap_or(hparams.head_dim_k);
    let head_dim_v = keys.opt_u32("attention.value_length_swa", HEAD_DIM)?;
    let head_dim_v = head_dim_v.unwrap_or(hparams.head_dim_v);
    let n_rot = keys.opt_u32("rope.dimension_count_swa", 1..=head_dim_k)?.unwrap_or(head_dim_k);
    let base = rope::base(keys, "rope.freq_base_swa")?;
    let rope = Rope::new(RopeStyle::Neox, head_dim_k, n_rot, base);
    let window = keys.u32("attention.sliding_window", 1..=u32::MAX)?;
    Ok(Kind { head_dim_k, head_dim_v, rope, window })
}

impl Gemma4 {
    fn kind(&self, il: u32) -> (bool, Kind) {
        match self.is_windowed.get(il as usize) {
            Some(true) => (true, self.windowed),
            _ => (false, self.full),
        }
    }

    /// Every layer's own input side by side: f32\[n_tokens, n_layer * n_own\].
    fn own_inputs(&self, g: &mut Graph<'_>, x: ValueId) -> Option<ValueId> {
        let hp = &self.hparams;
        // Layers and the length are capped, so the product fits.
        let n = u64::try_from(hp.layers.len()).unwrap_or(0) * u64::from(self.n_own);
        if n == 0 {
            return None;
        }
        let table = g.matrix("per_layer_token_embd.weight", [hp.n_vocab.into(), n]);
        let own = g.ops.embed(g.tokens, table);
        let own = g.ops.scale(own, (self.n_own as f32).sqrt());

        let from_x = g.linear(x, "per_layer_model_proj", [n, hp.n_embd.into()], Bias::None);
        let from_x = g.ops.scale(from_x, 1.0 / (hp.n_embd as f32).sqrt());
        let norm = Norm { eps: hp.norm_eps, n: self.n_own };
        let from_x = g.rms_norm(from_x, "per_layer_proj_norm", norm);
        let sum = g.ops.add(from_x, own);
        Some(g.ops.scale(sum, std::f32::consts::FRAC_1_SQRT_2))
    }

    /// Attention of layer `il`; `kv` is the KV layer of earlier layers by kind, and becomes this one's.
    fn attention(
        &self,
        g: &mut Graph<'_>,
        (il, layer): (u32, LayerHparams),
        x: ValueId,
        (rope_factors, kv): (Option<ValueId>, &mut [Option<u32>; 2]),
    ) -> ValueId {
        let (is_windowed, kind) = self.kind(il);
        let [n_embd, n_head, n_head_kv] =
            [self.hparams.n_embd, layer.n_head, layer.n_head_kv].map(u64::from);
        let [dim_k, dim_v] = [kind.head_dim_k, kind.head_dim_v].map(u64::from);
        let name = |part: &str| format!("blk.{il}.{part}");
        let norm_k = Norm { eps: self.hparams.norm_eps, n: kind.head_dim_k };
        let factors = if is_windowed { None } else { rope_factors };

        let q = g.linear(x, &name("attn_q"), [n_head * dim_k, n_embd], Bias::None);
        let q = g.rms_norm(q, &name("attn_q_norm"), norm_k);
        let q = g.ops.rope(q, g.positions, factors, kind.rope);
        let [full, windowed] = kv;
        let known = if is_windowed { windowed } else { full };
        if (il as usize) < self.n_layer_kv {
            let k = g.linear(x, &name("attn_k"), [n_head_kv * dim_k, n_embd], Bias::None);
            let v = if g.has(&name("attn_v.weight")) {
                g.linear(x, &name("attn_v"), [n_head_kv * dim_v, n_embd], Bias::None)
            } else {
                k
            };
            let k = g.rms_norm(k, &name("attn_k_norm"), norm_k);
            let k = g.ops.rope(k, g.positions, factors, kind.rope);
            let v = g.ops.rms_norm(v, None, Norm { n: kind.head_dim_v, ..norm_k });
            let dims = [kind.head_dim_k, kind.head_dim_v];
            let own = g.kv_layer(Attention::kv_group(), layer.n_head_kv, dims);
            g.ops.kv_store(own, k, v);
            *known = Some(own);
        }
        // `read` has found a layer of the kind before this one.
        let kv_layer = known.unwrap_or(0);
        let heads = g.ops.attention(kv_layer, q, None, layer.n_head, 1.0, 0.0, kind.window);
        g.linear(heads, &name("attn_output"), [n_embd, n_head * dim_v], Bias::None)
    }

    /// Adds the layer's own input, f32\[n, n_own\], to x.
    fn add_own(&self, g: &mut Graph<'_>, il: u32, x: ValueId, own: ValueId) -> ValueId {
        let [n_embd, n_own] = [self.hparams.n_embd, self.n_own].map(u64::from);
        let name = |part: &str| format!("blk.{il}.{part}");
        let gate = g.linear(x, &name("inp_gate"), [n_own, n_embd], Bias::None);
        let h = g.ops.glu(Activation::GeluTanh, gate, own);
        let h = g.linear(h, &name("proj"), [n_embd, n_own], Bias::None);
        let h = g.rms_norm(h, &name("post_norm"), self.hparams.norm());
        g.ops.add(x, h)
    }
}

impl Architecture for Gemma4 {
    fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    fn window(&self) -> Option<u32> {
        self.is_windowed.contains(&true).then_some(self.windowed.window)
    }

    fn hidden(&self, g: &mut Graph<'_>) -> ValueId {
        let hp = &self.hparams;
        let norm = hp.norm();
        let table = g.matrix("token_embd.weight", [hp.n_vocab.into(), hp.n_embd.into()]);
        let rope_factors = g.vector_if_present("rope_freqs.weight", hp.n_rot / 2);

        let x = g.ops.embed(g.tokens, table); // [n_tokens, n_embd]
        let mut x = g.ops.scale(x, (hp.n_embd as f32).sqrt());
        let own_inputs = self.own_inputs(g, x);
        let mut kv = [None; 2];
        for (il, layer) in hp.numbered_layers() {
            g.ops.layer(Some(il));
            let name = |part: &str| format!("blk.{il}.{part}");
            let h = g.rms_norm(x, &name("attn_norm"), norm);
            let mut h = self.attention(g, (il, layer), h, (rope_factors, &mut kv));
            let mut own = own_inputs.map(|own| g.ops.slice(own, il * self.n_own, self.n_own));
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
                own = own.map(|own| g.ops.gather_rows(own, g.output_rows));
            }
            let h = g.rms_norm(h, &name("post_attention_norm"), norm);
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::GeluTanh, Bias::None);
            let how = Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias };
            let h = g.rms_norm(x, &name("ffn_norm"), norm);
            let h = mlp(g, il, h, &how);
            let h = g.rms_norm(h, &name("post_ffw_norm"), norm);
            x = g.ops.add(x, h);
            if let Some(own) = own {
                x = self.add_own(g, il, x, own);
            }
            if let Some(factor) = g.vector_if_present(&name("layer_output_scale.weight"), 1) {
                x = g.ops.mul(x, factor);
            }
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        let logits = output(g, hidden, &self.hparams);
        match self.softcap_final {
            Some(cap) => g.ops.softcap(logits, cap),
            None => logits,
        }
    }
}
