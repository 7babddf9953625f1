//! Granite 3 and 4, dense (`granite`) and with experts (`granitemoe`) ("Granite 3.0 Language Models").
//!
//! - Llama's form with four numbers, after maximal update parametrisation: embeddings are multiplied by `embedding_scale`, what attention and
//!   the MLP give by `residual_scale`, scores of attention by `attention.scale`; logits are divided by `logit_scale`.
//! - Experts' weights are a softmax over the chosen; some models have a shared expert besides.
//! - `rope.scaling.finetuned` is false in files of models without rope.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{ExpertHparams, Hparams, Keys};
use crate::layers::{Attention, Mlp, Moe, attention, mlp, moe, output};
use crate::registry::Architecture;
use crate::rope;

#[derive(Debug)]
struct Granite {
    hparams: Hparams,
    experts: Option<ExpertHparams>,
    rope: Rope,
    has_rope: bool,
    scale_embeddings: f32,
    scale_attention: f32,
    scale_residual: f32,
    /// Divides logits.
    scale_logits: f32,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    build(keys, false)
}

pub(crate) fn read_moe(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    build(keys, true)
}

fn build(keys: &Keys<'_>, has_experts: bool) -> Result<Box<dyn Architecture>, ArchError> {
    let hparams = Hparams::read(keys)?;
    let experts = if has_experts { Some(ExpertHparams::required(keys, &hparams)?) } else { None };
    let rope = rope::read_with_factors(keys, RopeStyle::Adjacent, &hparams)?;
    let has_rope = keys.metadata.opt_bool(&keys.full("rope.scaling.finetuned"))?.unwrap_or(true);
    // Files write 0 for a factor that is not used.
    let factor = |key: &str, default: f32| {
        let factor = keys.f32_or(key, 0.0..=1e6, default)?;
        Ok::<_, ArchError>(if factor == 0.0 { default } else { factor })
    };
    let scale_embeddings = factor("embedding_scale", 1.0)?;
    let scale_attention = factor("attention.scale", hparams.attention_scale())?;
    let scale_residual = factor("residual_scale", 1.0)?;
    let scale_logits = factor("logit_scale", 1.0)?;
    Ok(Box::new(Granite {
        hparams,
        experts,
        rope,
        has_rope,
        scale_embeddings,
        scale_attention,
        scale_residual,
        scale_logits,
    }))
}

impl Architecture for Granite {
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
        let rope = self.has_rope.then_some(self.rope);
        let rope_factors = rope.and_then(|rope| rope::factors(g, hp, &rope));

        let x = g.ops.embed(g.tokens, table); // [n_tokens, n_embd]
        let mut x = g.ops.scale(x, self.scale_embeddings);
        for (il, layer) in hp.numbered_layers() {
            g.ops.layer(Some(il));
            let (qkv_bias, output_bias) = (Bias::IfPresent, Bias::IfPresent);
            let (scale, plain) = (self.scale_attention, Attention::new(hp, layer, rope));
            let how = Attention { rope_factors, qkv_bias, output_bias, scale, ..plain };
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            let h = g.ops.scale(h, self.scale_residual);
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::IfPresent);
            let h = g.rms_norm(x, &format!("blk.{il}.ffn_norm"), norm);
            let h = match self.experts {
                None => {
                    mlp(g, il, h, &Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias })
                }
                // Divided by their sum, a softmax over all is the softmax over the chosen.
                Some(experts) => moe(g, il, h, &Moe::new(hp.n_embd, experts)),
            };
            let h = g.ops.scale(h, self.scale_residual);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        let logits = output(g, hidden, &self.hparams);
        g.ops.scale(logits, 1.0 / self.scale_logits)
    }
}
