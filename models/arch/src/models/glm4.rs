//! GLM-4 of April 2025 (`glm4`; "ChatGLM: A Family of Large Language Models from GLM-130B to GLM-4 All Tools").
//!
//! - Attention and the MLP are normalised before and after.
//! - Rope turns neighbouring elements of the first part of a head, `rope.dimension_count`.
//! - Queries, keys and values have biases; the gate and the linear side of the MLP are one matrix.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Hparams, Keys};
use crate::layers::{Attention, Mlp, attention, mlp_together, output};
use crate::registry::Architecture;
use crate::rope;

#[derive(Debug)]
struct Glm4 {
    hparams: Hparams,
    rope: Rope,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let hparams = Hparams::read(keys)?;
    let rope = rope::read(keys, RopeStyle::Adjacent, &hparams)?;
    Ok(Box::new(Glm4 { hparams, rope }))
}

impl Architecture for Glm4 {
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
            let name = |part: &str| format!("blk.{il}.{part}");
            let plain = Attention::new(hp, layer, self.rope);
            let how = Attention { qkv_bias: Bias::IfPresent, ..plain };
            let h = g.rms_norm(x, &name("attn_norm"), norm);
            let mut h = attention(g, il, h, &how);
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            let h = g.rms_norm(h, &name("post_attention_norm"), norm);
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::None);
            let how = Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias };
            let h = g.rms_norm(x, &name("ffn_norm"), norm);
            let h = mlp_together(g, il, h, &how);
            let h = g.rms_norm(h, &name("post_ffw_norm"), norm);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "output_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        output(g, hidden, &self.hparams)
    }
}
