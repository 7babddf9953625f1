//! Rope's parameters from metadata, with the two scalings that files have in metadata: linear and YaRN.
//!
//! Two others are divisors of frequencies in tensors, for architectures that ask for them by [`read_with_factors`] and [`factors`]:
//! Llama 3's `rope_freqs.weight`, and LongRoPE's two, `rope_factors_short.weight` within the context of the training before scaling and
//! `rope_factors_long.weight` beyond it. Keys are stored turned, so one program has one of the two: the longest context that a sequence may
//! have decides, whatever its length is now.
//!
//! **Magnitude.** YaRN multiplies cosine and sine by `0.1 ln(s) + 1` for a context extended s times (Peng et al., "YaRN:
//! Efficient Context Window Extension of Large Language Models", section 3.4), times `rope.scaling.attn_factor` of the file.
//! [`Rope::attn_factor`] is that whole product: backends multiply by it once and add no logarithm of their own.

use tegula_program::{Rope, RopeStyle, ValueId};

use crate::ArchError;
use crate::graph::Graph;
use crate::hparams::{Hparams, Keys};

const FACTORS: std::ops::RangeInclusive<f32> = 1e-6..=1e6;
const SHORT: &str = "rope_factors_short.weight";
const LONG: &str = "rope_factors_long.weight";
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
    read_scaled(keys, style, hparams, false)
}

/// Rope as the file says, for an architecture that passes [`factors`] to the op.
pub(crate) fn read_with_factors(
    keys: &Keys<'_>,
    style: RopeStyle,
    hparams: &Hparams,
) -> Result<Rope, ArchError> {
    let rope = read_scaled(keys, style, hparams, true)?;
    if !keys.tensors.has(LONG) {
        return Ok(rope);
    }
    let n_ctx_orig = keys.opt_u32("rope.scaling.original_context_length", 1..=u32::MAX)?;
    Ok(Rope { n_ctx_orig: n_ctx_orig.unwrap_or(hparams.n_ctx_train), ..rope })
}

/// Divisors of rope's frequencies, f32\[n_rot / 2\], where the file has them.
pub(crate) fn factors(g: &mut Graph<'_>, hparams: &Hparams, rope: &Rope) -> Option<ValueId> {
    let n = rope.n_rot / 2;
    if g.has("rope_freqs.weight") || !g.has(LONG) {
        return g.vector_if_present("rope_freqs.weight", n);
    }
    let n_ctx = g.n_ctx().unwrap_or(hparams.n_ctx_train);
    Some(g.vector(if n_ctx > rope.n_ctx_orig { LONG } else { SHORT }, n))
}

fn read_scaled(
    keys: &Keys<'_>,
    style: RopeStyle,
    hparams: &Hparams,
    with_factors: bool,
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
        // Without its factors LongRoPE is another model.
        "longrope" if with_factors => Ok(Rope { attn_factor, ..rope }),
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
