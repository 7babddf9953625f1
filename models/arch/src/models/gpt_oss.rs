//! gpt-oss ("gpt-oss-120b & gpt-oss-20b Model Card"): experts in every layer, attention with sinks, biases everywhere.
//!
//! - Every second layer sees a window, beginning with the first; `attention.sliding_window_pattern` may give another period.
//! - Each head has a sink: a score that takes part in the softmax and has no value.
//! - The router chooses by its logits; the weights are a softmax over the chosen. Experts are SwiGLU with both sides bounded, the linear side
//!   offset by 1.
//! - Rope is YaRN's, its ranges rounded outward where files do not say otherwise.

use tegula_program::{Rope, RopeStyle, RouterGating, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{ExpertHparams, Hparams, Keys};
use crate::layers::{Attention, Gate, Moe, attention, moe, output};
use crate::registry::Architecture;
use crate::rope;

const PERIOD_DEFAULT: u32 = 2;
/// Of the published models; files have no keys for them.
const GATE: Gate = Gate::Clamped { alpha: 1.702, limit: 7.0 };

#[derive(Debug)]
struct GptOss {
    hparams: Hparams,
    experts: ExpertHparams,
    rope: Rope,
    window: u32,
    /// Every layer of this number sees everything; 0 for none.
    period: u32,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    let hparams = Hparams::read(keys)?;
    let experts = ExpertHparams::required(keys, &hparams)?;
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    let window = keys.u32("attention.sliding_window", 1..=u32::MAX)?;
    let period = keys.opt_u32("attention.sliding_window_pattern", 0..=u32::MAX)?;
    let period = period.unwrap_or(PERIOD_DEFAULT);
    Ok(Box::new(GptOss { hparams, experts, rope, window, period }))
}

impl GptOss {
    fn window_of(&self, il: u32) -> u32 {
        if (il + 1).is_multiple_of(self.period) { 0 } else { self.window }
    }
}

impl Architecture for GptOss {
    fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    fn window(&self) -> Option<u32> {
        Some(self.window)
    }

    fn hidden(&self, g: &mut Graph<'_>) -> ValueId {
        let hp = &self.hparams;
        let norm = hp.norm();
        let table = g.matrix("token_embd.weight", [hp.n_vocab.into(), hp.n_embd.into()]);

        let mut x = g.ops.embed(g.tokens, table); // [n_tokens, n_embd]
        for (il, layer) in hp.numbered_layers() {
            g.ops.layer(Some(il));
            let how = Attention {
                qkv_bias: Bias::Required,
                output_bias: Bias::Required,
                sinks: true,
                window: self.window_of(il),
                ..Attention::new(hp, layer, self.rope)
            };
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let how = Moe {
                gating: RouterGating::SoftmaxSelected,
                normalise: false,
                gate: GATE,
                bias: Bias::Required,
                ..Moe::new(hp.n_embd, self.experts)
            };
            let h = g.rms_norm(x, &format!("blk.{il}.post_attention_norm"), norm);
            let h = moe(g, il, h, &how);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        output(g, hidden, &self.hparams)
    }
}
