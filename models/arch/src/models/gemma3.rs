//! Gemma 3, text ("Gemma 3 Technical Report").
//!
//! - Embeddings are scaled by the root of their length. Norm weights in files hold the 1 that the paper adds.
//! - Five layers see a window, the sixth everything; the last of each six. `attention.sliding_window_pattern` may say
//!   otherwise: a period, or for each layer whether it has the window.
//! - Layers with a window have their own rope base, 10000 unless the file says, and no rope scaling: only the others see
//!   positions far apart.
//! - Every query and key head is normalised before rope; the MLP and attention are normalised before and after.
//! - Scores are divided by the root of a head's length, in the 27B model (62 layers) of `n_embd / n_head`: it has no key of
//!   its own in most files. `attention.scale` is used where a file has it.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, Keys, LayerHparams};
use crate::layers::{Attention, Mlp, QkNorm, attention, mlp, output};
use crate::registry::Architecture;
use crate::{rope, window};

const PERIOD_DEFAULT: u32 = 6;
const N_LAYER_27B: usize = 62;

#[derive(Debug)]
struct Gemma3 {
    hparams: Hparams,
    rope: Rope,
    rope_windowed: Rope,
    scale: f32,
    /// Bounds scores of attention; 0 for not.
    softcap: f32,
    /// Bounds logits.
    softcap_final: Option<f32>,
    /// Per layer: positions a query sees; 0 for all.
    windows: Vec<u32>,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read(keys)?;
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    let base_windowed = rope::base(keys, "rope.freq_base_swa")?;
    let rope_windowed = Rope::new(rope.style, rope.head_dim, rope.n_rot, base_windowed);
    let scale = match keys.opt_f32("attention.scale", 1e-6..=1e6)? {
        Some(scale) => scale,
        None if hparams.layers.len() == N_LAYER_27B => {
            let n_head = hparams.layers.first().map_or(1, |layer| layer.n_head);
            1.0 / (hparams.n_embd as f32 / n_head as f32).sqrt()
        }
        None => hparams.attention_scale(),
    };
    let softcap = keys.f32_or("attn_logit_softcapping", 0.0..=1e6, 0.0)?;
    let softcap_final =
        keys.opt_f32("final_logit_softcapping", 0.0..=1e6)?.filter(|cap| *cap > 0.0);
    let windows = window::read(keys, &hparams, PERIOD_DEFAULT, 0)?;
    Ok(Box::new(Gemma3 { hparams, rope, rope_windowed, scale, softcap, softcap_final, windows }))
}

impl Gemma3 {
    fn attention_of(&self, layer: LayerHparams, window: u32) -> Attention {
        let rope = if window > 0 { self.rope_windowed } else { self.rope };
        Attention {
            qk_norm: QkNorm::Heads(self.hparams.norm_eps),
            scale: self.scale,
            softcap: self.softcap,
            window,
            ..Attention::new(&self.hparams, layer, rope)
        }
    }
}

impl Architecture for Gemma3 {
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
            let how = self.attention_of(layer, window);
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
        match self.softcap_final {
            Some(cap) => g.ops.softcap(logits, cap),
            None => logits,
        }
    }
}
