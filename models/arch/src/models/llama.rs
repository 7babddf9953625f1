//! Llama 1 to 3, Mistral, and the many models of that form (Touvron et al., "LLaMA: Open and Efficient Foundation Language
//! Models").
//!
//! - Rope turns neighbouring elements: files of this architecture have the rows of W_q and W_k permuted for that.
//! - Llama 3.1's rope scaling is in `rope_freqs.weight`, one divisor per frequency.
//! - Biases are used where a file has them; the published Llamas have none.
//! - Mistral 0.1's sliding window holds for all layers.
//! - Mixtral (Jiang et al., "Mixtral of Experts") has experts in place of the MLP: two of eight, their weights a softmax over the two.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{ExpertHparams, Hparams, Keys};
use crate::layers::{Attention, Mlp, Moe, attention, mlp, moe, output};
use crate::registry::Architecture;
use crate::rope;

#[derive(Debug)]
struct Llama {
    hparams: Hparams,
    experts: Option<ExpertHparams>,
    rope: Rope,
    /// 0 for none.
    window: u32,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    let hparams = Hparams::read(keys)?;
    let experts = ExpertHparams::read(keys, &hparams)?;
    let rope = rope::read_with_factors(keys, RopeStyle::Adjacent, &hparams)?;
    let window = keys.opt_u32("attention.sliding_window", 0..=u32::MAX)?.unwrap_or(0);
    Ok(Box::new(Llama { hparams, experts, rope, window }))
}

impl Architecture for Llama {
    fn hparams(&self) -> &Hparams {
        &self.hparams
    }

    fn window(&self) -> Option<u32> {
        (self.window > 0).then_some(self.window)
    }

    fn hidden(&self, g: &mut Graph<'_>) -> ValueId {
        let hp = &self.hparams;
        let norm = hp.norm();
        let table = g.matrix("token_embd.weight", [hp.n_vocab.into(), hp.n_embd.into()]);
        let rope_factors = rope::factors(g, hp, &self.rope);

        let mut x = g.ops.embed(g.tokens, table); // [n_tokens, n_embd]
        for (il, layer) in hp.numbered_layers() {
            g.ops.layer(Some(il));
            let (qkv_bias, output_bias) = (Bias::IfPresent, Bias::IfPresent);
            let plain = Attention::new(hp, layer, self.rope);
            let how =
                Attention { rope_factors, qkv_bias, output_bias, window: self.window, ..plain };
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let h = g.rms_norm(x, &format!("blk.{il}.ffn_norm"), norm);
            let (activation, bias) = (Activation::Silu, Bias::IfPresent);
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
