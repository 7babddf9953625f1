//! Phi-3, 3.5 and 4 ("Phi-3 Technical Report"): Llama's form with queries, keys and values in one matrix, and the gate and the linear side
//! of the MLP in another.
//!
//! - Rope turns the halves of a head's first part, `rope.dimension_count`. Long contexts are LongRoPE's (Ding et al., "LongRoPE: Extending
//!   LLM Context Window Beyond 2 Million Tokens").
//! - A sliding window holds for all layers, where files have one.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, Keys};
use crate::layers::{Attention, Mlp, attention, mlp_together, output};
use crate::registry::Architecture;
use crate::rope;

#[derive(Debug)]
struct Phi3 {
    hparams: Hparams,
    rope: Rope,
    /// 0 for none.
    window: u32,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read(keys)?;
    let rope = rope::read_with_factors(keys, RopeStyle::Neox, &hparams)?;
    let window = keys.opt_u32("attention.sliding_window", 0..=u32::MAX)?.unwrap_or(0);
    Ok(Box::new(Phi3 { hparams, rope, window }))
}

impl Architecture for Phi3 {
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
            let plain = Attention::new(hp, layer, self.rope);
            let how = Attention { rope_factors, window: self.window, ..plain };
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::None);
            let how = Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias };
            let h = g.rms_norm(x, &format!("blk.{il}.ffn_norm"), norm);
            let h = mlp_together(g, il, h, &how);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        output(g, hidden, &self.hparams)
    }
}
