//! Gemma 2 ("Gemma 2: Improving Open Language Models at a Practical Size").
//!
//! - Embeddings are scaled by the root of their length. Norm weights in files hold the 1 that the paper adds.
//! - Every second layer sees a window, beginning with the first.
//! - Scores of attention and logits are bounded softly, by 50 and 30 where files do not say otherwise.
//! - The MLP and attention are normalised before and after.
//! - Scores are divided by the root of a head's length, in the 27B model (46 layers) of `n_embd / n_head`: it has no key of its own in files.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, Keys};
use crate::layers::{Attention, Mlp, attention, mlp, output};
use crate::registry::Architecture;
use crate::{rope, window};

const PERIOD_DEFAULT: u32 = 2;
/// Of files that were written before the key.
const WINDOW_DEFAULT: u32 = 4096;
const SOFTCAP_DEFAULT: f32 = 50.0;
const SOFTCAP_FINAL_DEFAULT: f32 = 30.0;
const N_LAYER_27B: usize = 46;

#[derive(Debug)]
struct Gemma2 {
    hparams: Hparams,
    rope: Rope,
    scale: f32,
    /// Bounds scores of attention; 0 for not.
    softcap: f32,
    /// Bounds logits; 0 for not.
    softcap_final: f32,
    /// Per layer: positions a query sees; 0 for all.
    windows: Vec<u32>,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read(keys)?;
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    let scale = match keys.opt_f32("attention.scale", 1e-6..=1e6)? {
        Some(scale) => scale,
        None if hparams.layers.len() == N_LAYER_27B => {
            let n_head = hparams.layers.first().map_or(1, |layer| layer.n_head);
            1.0 / (hparams.n_embd as f32 / n_head as f32).sqrt()
        }
        None => hparams.attention_scale(),
    };
    let softcap = keys.f32_or("attn_logit_softcapping", 0.0..=1e6, SOFTCAP_DEFAULT)?;
    let softcap_final = keys.f32_or("final_logit_softcapping", 0.0..=1e6, SOFTCAP_FINAL_DEFAULT)?;
    let windows = window::read(keys, &hparams, PERIOD_DEFAULT, WINDOW_DEFAULT)?;
    Ok(Box::new(Gemma2 { hparams, rope, scale, softcap, softcap_final, windows }))
}

impl Architecture for Gemma2 {
    fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    fn window(&self) -> Option<u32> {
        window::smallest(&self.windows)
    }

    fn hidden(&self, g: &mut Graph<'_>) -> ValueId {
        let hp = &self.hparams;
        let norm = hp.norm();
        let table = g.matrix("token_embd.weight", [hp.n_vocab.into(), hp.n_embd.into()]);

        let x = g.ops.embed(g.tokens, table); // [n_tokens, n_embd]
        let mut x = g.ops.scale(x, (hp.n_embd as f32).sqrt());
        for ((il, layer), window) in hp.numbered_layers().zip(self.windows.iter().copied()) {
            g.ops.layer(Some(il));
            let name = |part: &str| format!("blk.{il}.{part}");
            let (scale, softcap) = (self.scale, self.softcap);
            let how = Attention { scale, softcap, window, ..Attention::new(hp, layer, self.rope) };
            let h = g.rms_norm(x, &name("attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            let h = g.rms_norm(h, &name("post_attention_norm"), norm);
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::GeluTanh, Bias::None);
            let how = Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias };
            let h = g.rms_norm(x, &name("ffn_norm"), norm);
            let h = mlp(g, il, h, &how);
            let h = g.rms_norm(h, &name("post_ffw_norm"), norm);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        let logits = output(g, hidden, &self.hparams);
        if self.softcap_final > 0.0 { g.ops.softcap(logits, self.softcap_final) } else { logits }
    }
}
