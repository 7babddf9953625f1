//! OLMo 2 and 3 (`olmo2`; "2 OLMo 2 Furious").
//!
//! - Attention and the MLP read the residual stream as it is; what they give is normalised before it is added.
//! - Queries and keys are normalised before rope, all heads together.
//! - OLMo 3 has a window in three layers of four; the fourth sees everything, and only its rope is scaled for long contexts.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, Keys};
use crate::layers::{Attention, Mlp, QkNorm, attention, mlp, output};
use crate::registry::Architecture;
use crate::{rope, window};

const PERIOD_DEFAULT: u32 = 4;

#[derive(Debug)]
struct Olmo2 {
    hparams: Hparams,
    rope: Rope,
    rope_windowed: Rope,
    /// Per layer: positions a query sees; 0 for all.
    windows: Vec<u32>,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read(keys)?;
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    let rope_windowed = Rope::new(rope.style, rope.head_dim, rope.n_rot, rope.base);
    let windows = window::read(keys, &hparams, PERIOD_DEFAULT, 0)?;
    Ok(Box::new(Olmo2 { hparams, rope, rope_windowed, windows }))
}

impl Architecture for Olmo2 {
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
            let rope = if window > 0 { self.rope_windowed } else { self.rope };
            let (qk_norm, plain) = (QkNorm::Row(hp.norm_eps), Attention::new(hp, layer, rope));
            let mut h = attention(g, il, x, &Attention { qk_norm, window, ..plain });
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            let h = g.rms_norm(h, &format!("blk.{il}.post_attention_norm"), norm);
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::None);
            let how = Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias };
            let h = mlp(g, il, x, &how);
            let h = g.rms_norm(h, &format!("blk.{il}.post_ffw_norm"), norm);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        output(g, hidden, &self.hparams)
    }
}
