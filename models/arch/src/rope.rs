//! Rope's parameters from metadata, with the two scalings that files have in metadata: linear and YaRN.
//!
//! Llama 3's scaling is in the tensor `rope_freqs.weight` instead; the model that has it passes it to the op.
//!
//! **Magnitude.** YaRN multiplies cosine and sine by `0.1 ln(s) + 1` for a context extended s times (Peng et al., "YaRN:
//! Efficient Context Window Extension of Large Language Models", section 3.4), times `rope.scaling.attn_factor` of the file.
//! [`Rope::attn_factor`] is that whole product: backends multiply by it once and add no logarithm of their own.

use tegula_program::{Rope, RopeStyle};

use crate::ArchError;
use crate::hparams::{Hparams, Keys};

const FACTORS: std::ops::RangeInclusive<f32> = 1e-6..=1e6;
const BASE_DEFAULT: f32 = 10_000.0;
const BASES: std::ops::RangeInclusive<f32> = 1.0..=1e30;

/// The frequency base under `key`, 10000 where it is absent.
pub(crate) fn base(keys: &Keys<'_>, key: &str) -> Result<f32, ArchError> {
    keys.f32_or(key, BASES, BASE_DEFAULT)
}

/// Rope as the file says.
pub(crate) fn read(
    keys: &Keys<'_>,
    style: RopeStyle,
    hparams: &Hparams,
) -> Result<Rope, ArchError> {
    let base = base(keys, "rope.freq_base")?;
    let rope = Rope::new(style, hparams.head_dim_k, hparams.n_rot, base);
    let factor = factor(keys)?;
    let freq_scale = 1.0 / factor;
    let attn_factor = keys.f32_or("rope.scaling.attn_factor", FACTORS, 1.0)?;
    // A factor without a type is from the time before YaRN.
    match keys.opt_str("rope.scaling.type")?.unwrap_or("linear") {
        "none" => Ok(Rope { attn_factor, ..rope }),
        "linear" => Ok(Rope { freq_scale, attn_factor, ..rope }),
        "yarn" => yarn(keys, factor, Rope { freq_scale, attn_factor, ..rope }, hparams),
        other => Err(keys.unsupported("this rope scaling is", "rope.scaling.type", other)),
    }
}

fn yarn(keys: &Keys<'_>, factor: f32, rope: Rope, hparams: &Hparams) -> Result<Rope, ArchError> {
    let ext_factor = keys.f32_or("rope.scaling.yarn_ext_factor", 0.0..=1.0, 1.0)?;
    let yarn_attn_factor = keys.f32_or("rope.scaling.yarn_attn_factor", FACTORS, 1.0)?;
    let beta_fast = keys.f32_or("rope.scaling.yarn_beta_fast", FACTORS, rope.beta_fast)?;
    let beta_slow = keys.f32_or("rope.scaling.yarn_beta_slow", FACTORS, rope.beta_slow)?;
    let n_ctx_orig = keys.opt_u32("rope.scaling.original_context_length", 1..=u32::MAX)?;
    let stretched = factor > 1.0 && ext_factor > 0.0;
    let magnitude = if stretched { 0.1 * factor.ln() + 1.0 } else { 1.0 };
    Ok(Rope {
        ext_factor,
        attn_factor: rope.attn_factor * yarn_attn_factor * magnitude,
        n_ctx_orig: n_ctx_orig.unwrap_or(hparams.n_ctx_train),
        beta_fast,
        beta_slow,
        ..rope
    })
}

/// How many times the context is stretched; 1 for not at all, which some files write as 0.
fn factor(keys: &Keys<'_>) -> Result<f32, ArchError> {
    for key in ["rope.scaling.factor", "rope.scale_linear"] {
        match keys.opt_f32(key, 0.0..=1e6)? {
            Some(0.0) => return Ok(1.0),
            Some(factor) if FACTORS.contains(&factor) => return Ok(factor),
            Some(factor) => return Err(keys.bad(key, factor, "it must be 0 or at least 1e-6")),
            None => {}
        }
    }
    Ok(1.0)
}
