//! LFM 2, dense ("LFM2 Technical Report").
//!
//! - Most layers are short convolutions between two gates: `W_out (c * conv(b * x))` with b, c and x from one matrix. Their state is the last
//!   few rows. A layer whose `attention.head_count_kv` is not 0 attends instead.
//! - Every query and key head is normalised before rope.
//! - Files call the norm of the last layer `token_embd_norm`.

use tegula_program::{Activation, Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::{Bias, Graph};
use crate::hparams::{Form, Hparams, Keys};
use crate::layers::{Attention, Mlp, QkNorm, attention, mlp, output};
use crate::registry::Architecture;
use crate::rope;

#[derive(Debug)]
struct Lfm2 {
    hparams: Hparams,
    rope: Rope,
    /// Taps of a convolution.
    kernel: u32,
}

pub(crate) fn read(keys: &Keys<'_>) -> Result<Box<dyn Architecture>, ArchError> {
    keys.refuse_experts()?;
    let form = Form { layers_without_kv: true, ..Form::default() };
    let hparams = Hparams::read_as(keys, form)?;
    let rope = rope::read(keys, RopeStyle::Neox, &hparams)?;
    let kernel = keys.u32("shortconv.l_cache", 2..=64)?;
    Ok(Box::new(Lfm2 { hparams, rope, kernel }))
}

impl Lfm2 {
    /// Layer `il` over x, f32\[n_tokens, n_embd\].
    fn short_conv(&self, g: &mut Graph<'_>, il: u32, x: ValueId) -> ValueId {
        let n = self.hparams.n_embd;
        let n_embd = u64::from(n);
        let name = |part: &str| format!("blk.{il}.shortconv.{part}");
        let bcx = g.linear(x, &name("in_proj"), [3 * n_embd, n_embd], Bias::IfPresent);
        let [b, c, x] = [0, n, 2 * n].map(|begin| g.ops.slice(bcx, begin, n)); // [n_tokens, n_embd]

        let kernel = g.table(&name("conv.weight"), [n_embd, self.kernel.into()]);
        let bias = g.vector_if_present(&name("conv.bias"), n);
        let bx = g.ops.mul(b, x);
        let y = g.ops.conv_state(bx, kernel, bias);
        let y = g.ops.mul(c, y);
        g.linear(y, &name("out_proj"), [n_embd, n_embd], Bias::IfPresent)
    }
}

impl Architecture for Lfm2 {
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
            let h = g.rms_norm(x, &format!("blk.{il}.attn_norm"), norm);
            let mut h = if layer.n_head_kv == 0 {
                self.short_conv(g, il, h)
            } else {
                let plain = Attention::new(hp, layer, self.rope);
                let how = Attention { qk_norm: QkNorm::Heads(hp.norm_eps), ..plain };
                attention(g, il, h, &how)
            };
            if hp.is_last(il) {
                h = g.ops.gather_rows(h, g.output_rows); // [n_outputs, n_embd]
                x = g.ops.gather_rows(x, g.output_rows);
            }
            x = g.ops.add(x, h);

            let (activation, bias) = (Activation::Silu, Bias::None);
            let how = Mlp { n_embd: hp.n_embd, n_ff: layer.n_ff, activation, bias };
            let h = g.rms_norm(x, &format!("blk.{il}.ffn_norm"), norm);
            let h = mlp(g, il, h, &how);
            x = g.ops.add(x, h);
        }
        g.ops.layer(None);
        g.rms_norm(x, "token_embd_norm", norm)
    }

    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId {
        output(g, hidden, &self.hparams)
    }
}
