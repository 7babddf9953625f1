//! Qwen 3, dense (`qwen3`) and with experts (`qwen3moe`) ("Qwen3 Technical Report"): Qwen 2's form without biases; queries and keys are
//! normalised by head before rope. The experts' weights are divided by their sum, and there is no shared expert.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{ExpertHparams, Hparams, Keys};
use crate::layers::{Attention, Mlp, Moe, QkNorm, attention, mlp, moe, output};
use crate::registry::Architecture;
use crate::rope;

#[derive(Debug)]
struct Qwen3 {
    hparams: Hparams,
    experts: Option<ExpertHparams>,
    rope: Rope,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read(keys)?;
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    Ok(Box::new(Qwen3 { hparams, experts: None, rope }))
}

pub(crate) fn read_moe(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    let hparams = Hparams::read(keys)?;
    let experts = Some(ExpertHparams::required(keys, &hparams)?);
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    Ok(Box::new(Qwen3 { hparams, experts, rope }))
}

impl Architecture for Qwen3 {
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
            let plain = Attention::new(hp, layer, self.rope);
            let how = Attention { qk_norm: QkNorm::Heads(hp.norm_eps), ..plain };
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::None);
            let h = g.rms_norm(x, &format!("blk.{il}.ffn_norm"), norm);
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
