//! Qwen3-Next (`qwen3next`), Qwen3.5 and 3.6 (`qwen35`, with experts `qwen35moe`): hybrids of gated delta nets and gated attention.
//!
//! - Three layers of four are delta nets, whose memory does not grow with the context; the fourth attends to everything.
//!   `attention.recurrent_layers` may say for each layer, `full_attention_interval` gives the period.
//! - Attention has a gate for every element of every head; rope turns the first part of a head. Qwen3.5 gives rope a position for time,
//!   height and width; those of text are equal, which is plain rope.
//! - Files of Qwen3-Next have heads of values that share keys side by side; those of Qwen3.5 have them `n_head_k` apart.
//! - `nextn_predict_layers` at the end predict further tokens; they are not part of the model that predicts the next.

use tegula_program::{Activation, HeadOrder, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{ExpertHparams, Hparams, Keys};
use crate::layers::{
    Attention, DeltaNet, Mlp, Moe, QkNorm, attention, delta_net, mlp, moe, output,
};
use crate::registry::Architecture;
use crate::rope;

const INTERVAL_DEFAULT: u32 = 4;

#[derive(Debug)]
struct Qwen3Next {
    hparams: Hparams,
    experts: Option<ExpertHparams>,
    rope: Rope,
    net: DeltaNet,
    /// Per layer, whether it is a delta net.
    recurrent: Vec<bool>,
}

pub(crate) fn read_next(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    read(keys, true, HeadOrder::Grouped, true)
}

pub(crate) fn read_35(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    read(keys, false, HeadOrder::Tiled, false)
}

pub(crate) fn read_35_moe(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    read(keys, true, HeadOrder::Tiled, false)
}

fn read(
    keys: &Keys<'_>,
    has_experts: bool,
    order: HeadOrder,
    beta_alpha_together: bool,
) -> Result<Box<dyn Architecture>, ArchError> {
    let mut hparams = Hparams::read(keys)?;
    let recurrent = read_recurrent(keys, &hparams)?;
    let n_predict = keys.opt_u32("nextn_predict_layers", 0..=u32::MAX)?.unwrap_or(0) as usize;
    match hparams.layers.len().checked_sub(n_predict) {
        Some(left @ 1..) => hparams.layers.truncate(left),
        _ => {
            let allowed = format!("it must be less than the {} layers", hparams.layers.len());
            return Err(keys.bad("nextn_predict_layers", n_predict, allowed));
        }
    }
    let experts = if has_experts { Some(ExpertHparams::required(keys, &hparams)?) } else { None };
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    let net = DeltaNet::read(keys, &hparams, order, beta_alpha_together)?;
    Ok(Box::new(Qwen3Next { hparams, experts, rope, net, recurrent }))
}

fn read_recurrent(keys: &Keys<'_>, hparams: &Hparams) -> Result<Vec<bool>, ArchError> {
    let n_layer = hparams.layers.len();
    let key = keys.full("attention.recurrent_layers");
    if let Some(layers) = keys.metadata.optional_per_layer::<bool>(&key, n_layer)? {
        return Ok(layers);
    }
    let interval = keys.opt_u32("full_attention_interval", 1..=u32::MAX)?;
    let interval = interval.unwrap_or(INTERVAL_DEFAULT) as usize;
    Ok((1..=n_layer).map(|nth| !nth.is_multiple_of(interval)).collect())
}

impl Architecture for Qwen3Next {
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
        for ((il, layer), recurrent) in hp.numbered_layers().zip(self.recurrent.iter().copied()) {
            g.ops.layer(Some(il));
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = if recurrent {
                delta_net(g, il, h, &self.net)
            } else {
                let plain = Attention::new(hp, layer, self.rope);
                let how = Attention { qk_norm: QkNorm::Heads(hp.norm_eps), gated: true, ..plain };
                attention(g, il, h, &how)
            };
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::None);
            let h = g.rms_norm(x, &format!("blk.{il}.post_attention_norm"), norm);
            let h = match self.experts {
                None => {
                    mlp(g, il, h, &Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias })
                }
                Some(experts) => moe(g, il, h, &Moe::new(hp.n_embd, experts)),
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
