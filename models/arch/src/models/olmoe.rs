//! OLMoE (Muennighoff et al., "OLMoE: Open Mixture-of-Experts Language Models"): experts in every layer, their weights the softmax over all
//! experts, as they are. Queries and keys are normalised before rope, all heads together.

use tegula_program::{Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::Graph;
use crate::hparams::{ExpertHparams, Hparams, Keys};
use crate::layers::{Attention, Moe, QkNorm, attention, moe, output};
use crate::registry::Architecture;
use crate::rope;

#[derive(Debug)]
struct Olmoe {
    hparams: Hparams,
    experts: ExpertHparams,
    rope: Rope,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    let hparams = Hparams::read(keys)?;
    let experts = ExpertHparams::required(keys, &hparams)?;
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    Ok(Box::new(Olmoe { hparams, experts, rope }))
}

impl Architecture for Olmoe {
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
            let how = Attention { qk_norm: QkNorm::Row(hp.norm_eps), ..plain };
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let how = Moe { normalise: false, ..Moe::new(hp.n_embd, self.experts) };
            let h = g.rms_norm(x, &format!("blk.{il}.ffn_norm"), norm);
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
