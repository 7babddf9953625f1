//! SmolLM 3: Llama's form, and no rope in every fourth layer (Yang et al., "Rope to Nope and Back Again: A New Hybrid Attention Strategy").

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, Keys};
use crate::layers::{Attention, Mlp, attention, mlp, output};
use crate::registry::Architecture;
use crate::rope;

/// The last of each so many layers has no rope; files have no key for it.
const PERIOD: u32 = 4;

#[derive(Debug)]
struct SmolLm3 {
    hparams: Hparams,
    rope: Rope,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read(keys)?;
    let rope = rope::read(keys, RopeStyle::Adjacent, &hparams)?;
    Ok(Box::new(SmolLm3 { hparams, rope }))
}

impl Architecture for SmolLm3 {
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
            let rope = (!(il + 1).is_multiple_of(PERIOD)).then_some(self.rope);
            let (qkv_bias, output_bias) = (Bias::IfPresent, Bias::IfPresent);
            let how = Attention { qkv_bias, output_bias, ..Attention::new(hp, layer, rope) };
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::IfPresent);
            let how = Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias };
            let h = g.rms_norm(x, &format!("blk.{il}.ffn_norm"), norm);
            let h = mlp(g, il, h, &how);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        output(g, hidden, &self.hparams)
    }
}
