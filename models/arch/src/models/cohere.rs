//! Command R (`command-r`) and Command R7B, Command A (`cohere2`) (Cohere, "Command A: An Enterprise-Ready Large Language Model").
//!
//! - One norm in a layer, a layer norm without a bias: attention and the MLP read the same and are added side by side.
//! - The embedding is the output matrix; scores are multiplied by `logit_scale`.
//! - Rope turns neighbouring elements.
//! - Of four layers of `cohere2`, three see a window; the fourth sees everything, and has no rope, so that nothing in it depends on distance.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Form, Hparams, Keys};
use crate::layers::{Attention, Mlp, attention, mlp, output};
use crate::registry::Architecture;
use crate::{rope, window};

const PERIOD_DEFAULT: u32 = 4;

#[derive(Debug)]
struct Cohere {
    hparams: Hparams,
    rope: Rope,
    scale_logits: f32,
    /// Per layer: positions a query sees; 0 for all.
    windows: Vec<u32>,
    /// Whether layers that see everything have rope.
    rope_everywhere: bool,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    let hparams = read_hparams(keys)?;
    let windows = vec![0; hparams.layers.len()];
    build(keys, hparams, windows, true)
}

pub(crate) fn read_2(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    let hparams = read_hparams(keys)?;
    keys.u32("attention.sliding_window", 1..=u32::MAX)?;
    let windows = window::read(keys, &hparams, PERIOD_DEFAULT, 0)?;
    build(keys, hparams, windows, false)
}

fn read_hparams(keys: &Keys<'_>) -> Result<Hparams, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read_as(keys, Form::LAYER_NORM)?;
    // Command R+ has a layer norm of every head with weights of its own for each.
    if keys.tensors.has("blk.0.attn_q_norm.weight") {
        let n_layer = hparams.layers.len();
        return Err(keys.unsupported("a norm of queries and keys is", "block_count", n_layer));
    }
    Ok(hparams)
}

fn build(
    keys: &Keys<'_>,
    hparams: Hparams,
    windows: Vec<u32>,
    rope_everywhere: bool,
) -> Result<Box<dyn Architecture>, ArchError> {
    let rope = rope::read(keys, RopeStyle::Adjacent, &hparams)?;
    let scale_logits = keys.f32("logit_scale", 1e-6..=1e6)?;
    Ok(Box::new(Cohere { hparams, rope, scale_logits, windows, rope_everywhere }))
}

impl Architecture for Cohere {
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

        let mut x = g.ops.embed(g.tokens, table); // [n_tokens, n_embd]
        for ((il, layer), window) in hp.numbered_layers().zip(self.windows.iter().copied()) {
            g.ops.layer(Some(il));
            let rope = (self.rope_everywhere || window > 0).then_some(self.rope);
            let (qkv_bias, output_bias) = (Bias::IfPresent, Bias::IfPresent);
            let plain = Attention::new(hp, layer, rope);
            let how = Attention { qkv_bias, output_bias, window, ..plain };
            let mut h = g.layer_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut attended = attention(g, il, h, &how);
            if hp.is_last(il) {
                attended = g.ops.gather_rows(attended, g.output_rows); // [n_outputs, n_embd]
                h = g.ops.gather_rows(h, g.output_rows);
                x = g.ops.gather_rows(x, g.output_rows);
            }

            let (activation, bias) = (Activation::Silu, Bias::None);
            let how = Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias };
            let h = mlp(g, il, h, &how);
            x = g.ops.add(x, attended);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.layer_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        let logits = output(g, hidden, &self.hparams);
        g.ops.scale(logits, self.scale_logits)
    }
}
