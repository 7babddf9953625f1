//! Hyperparameters: typed reading of metadata with a range for every number, and those that all architectures share.
//!
//! The caps are far above every published model and low enough that any product of two of them fits 64 bits with room.

use std::fmt::Display;
use std::ops::RangeInclusive;

use tegula_gguf::Metadata;
use tegula_program::Norm;

use crate::ArchError;
use crate::error::clip;
use crate::tensors::TensorTable;

const N_LAYER: RangeInclusive<u32> = 1..=4096;
const N_EMBD: RangeInclusive<u32> = 1..=1 << 20;
const N_HEAD: RangeInclusive<u32> = 1..=1 << 14;
const HEAD_DIM: RangeInclusive<u32> = 1..=1 << 14;
const N_FF: RangeInclusive<u32> = 1..=1 << 24;
const N_EXPERT_MAX: u32 = 1 << 16;
/// Token ids are i32.
const N_VOCAB: RangeInclusive<u64> = 1..=i32::MAX as u64;

/// A file's facts under one architecture's prefix.
pub(crate) struct Keys<'a> {
    pub(crate) arch: &'static str,
    pub(crate) metadata: &'a Metadata,
    pub(crate) tensors: &'a TensorTable,
}

impl Keys<'_> {
    /// `{arch}.{key}`.
    pub(crate) fn full(&self, key: &str) -> String {
        format!("{}.{key}", self.arch)
    }

    /// An error about the value of `key`.
    pub(crate) fn bad(
        &self,
        key: &str,
        got: impl Display,
        allowed: impl Into<String>,
    ) -> ArchError {
        let (file, key) = (self.tensors.file(), self.full(key));
        ArchError::BadHparam { file, key, got: got.to_string(), allowed: allowed.into() }
    }

    /// An error about something that the architecture cannot do yet; `what` ends with its verb.
    pub(crate) fn unsupported(
        &self,
        what: &'static str,
        key: &str,
        got: impl Display,
    ) -> ArchError {
        let (file, key, got) = (self.tensors.file(), self.full(key), clip(&got.to_string()));
        ArchError::Unsupported { file, arch: self.arch, what, key, got }
    }

    fn within<T: PartialOrd + Display + Copy>(
        &self,
        key: &str,
        value: T,
        range: &RangeInclusive<T>,
    ) -> Result<T, ArchError> {
        if range.contains(&value) {
            return Ok(value);
        }
        let allowed = format!("it must be from {} to {}", range.start(), range.end());
        Err(self.bad(key, value, allowed))
    }

    pub(crate) fn u32(&self, key: &str, range: RangeInclusive<u32>) -> Result<u32, ArchError> {
        let value = self.metadata.get_u32(&self.full(key))?;
        self.within(key, value, &range)
    }

    pub(crate) fn opt_u32(
        &self,
        key: &str,
        range: RangeInclusive<u32>,
    ) -> Result<Option<u32>, ArchError> {
        let value = self.metadata.opt_u32(&self.full(key))?;
        value.map(|value| self.within(key, value, &range)).transpose()
    }

    /// A value per layer, from an array or one number for all.
    pub(crate) fn per_layer(
        &self,
        key: &str,
        n_layer: u32,
        range: RangeInclusive<u32>,
    ) -> Result<Option<Vec<u32>>, ArchError> {
        let values = self.metadata.optional_per_layer(&self.full(key), n_layer as usize)?;
        for value in values.iter().flatten() {
            self.within(key, *value, &range)?;
        }
        Ok(values)
    }

    /// NaN is in no range.
    pub(crate) fn f32(&self, key: &str, range: RangeInclusive<f32>) -> Result<f32, ArchError> {
        let value = self.metadata.get_f32(&self.full(key))?;
        self.within(key, value, &range)
    }

    pub(crate) fn opt_f32(
        &self,
        key: &str,
        range: RangeInclusive<f32>,
    ) -> Result<Option<f32>, ArchError> {
        let value = self.metadata.opt_f32(&self.full(key))?;
        value.map(|value| self.within(key, value, &range)).transpose()
    }

    pub(crate) fn f32_or(
        &self,
        key: &str,
        range: RangeInclusive<f32>,
        default: f32,
    ) -> Result<f32, ArchError> {
        Ok(self.opt_f32(key, range)?.unwrap_or(default))
    }

    pub(crate) fn opt_str(&self, key: &str) -> Result<Option<&str>, ArchError> {
        Ok(self.metadata.opt_str(&self.full(key))?)
    }

    /// Refuses a file with experts, for architectures that would run it without.
    pub(crate) fn refuse_experts(&self) -> Result<(), ArchError> {
        match self.opt_u32("expert_count", 0..=u32::MAX)?.unwrap_or(0) {
            0 => Ok(()),
            n => Err(self.unsupported("mixture of experts is", "expert_count", n)),
        }
    }

    /// Refuses what no architecture here can do and what would otherwise run with wrong results.
    fn refuse_unsupported(&self) -> Result<(), ArchError> {
        let causal = self.metadata.opt_bool(&self.full("attention.causal"))?.unwrap_or(true);
        if !causal {
            return Err(self.unsupported(
                "attention to later tokens is",
                "attention.causal",
                causal,
            ));
        }
        Ok(())
    }
}

/// What differs between layers in some files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerHparams {
    pub(crate) n_head: u32,
    pub(crate) n_head_kv: u32,
    pub(crate) n_ff: u32,
}

/// What every architecture has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Hparams {
    pub(crate) n_vocab: u32,
    /// Context length of the training; nothing is sized by it.
    pub(crate) n_ctx_train: u32,
    pub(crate) n_embd: u32,
    /// Elements of a query or key head.
    pub(crate) head_dim_k: u32,
    /// Elements of a value head.
    pub(crate) head_dim_v: u32,
    /// Elements of a head that rope turns.
    pub(crate) n_rot: u32,
    /// Added before a norm's root.
    pub(crate) norm_eps: f32,
    /// One entry per layer, at least one.
    pub(crate) layers: Vec<LayerHparams>,
}

/// How an architecture's files differ from the most common form, which is the default.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Form {
    /// The key of [`Hparams::norm_eps`].
    pub(crate) eps_key: &'static str,
    /// Layers may have no heads of keys and values: they do not attend.
    pub(crate) layers_without_kv: bool,
}

impl Default for Form {
    fn default() -> Self {
        Self { eps_key: "attention.layer_norm_rms_epsilon", layers_without_kv: false }
    }
}

impl Form {
    /// Norms that subtract the mean.
    pub(crate) const LAYER_NORM: Self =
        Self { eps_key: "attention.layer_norm_epsilon", layers_without_kv: false };
}

impl Hparams {
    pub(crate) fn read(keys: &Keys<'_>) -> Result<Self, ArchError> {
        Self::read_as(keys, Form::default())
    }

    pub(crate) fn read_as(keys: &Keys<'_>, form: Form) -> Result<Self, ArchError> {
        keys.refuse_unsupported()?;
        let n_layer = keys.u32("block_count", N_LAYER)?;
        let n_embd = keys.u32("embedding_length", N_EMBD)?;
        let n_ctx_train = keys.u32("context_length", 1..=u32::MAX)?;
        let norm_eps = keys.f32(form.eps_key, 0.0..=1.0)?;
        let layers = Self::read_layers(keys, n_layer, form.layers_without_kv)?;
        let head_dim_k = Self::head_dim(keys, "attention.key_length", n_embd, &layers)?;
        let head_dim_v = Self::head_dim(keys, "attention.value_length", n_embd, &layers)?;
        let n_rot = keys.opt_u32("rope.dimension_count", 1..=head_dim_k)?.unwrap_or(head_dim_k);
        if !n_rot.is_multiple_of(2) {
            return Err(keys.bad(
                "rope.dimension_count",
                n_rot,
                "rope turns pairs, so it must be even (where the key is absent, it is the length of a head)",
            ));
        }
        let n_vocab = Self::n_vocab(keys, n_embd)?;
        Ok(Self { n_vocab, n_ctx_train, n_embd, head_dim_k, head_dim_v, n_rot, norm_eps, layers })
    }

    fn read_layers(
        keys: &Keys<'_>,
        n_layer: u32,
        without_kv: bool,
    ) -> Result<Vec<LayerHparams>, ArchError> {
        let required = |key: &str, range| {
            let missing = || keys.bad(key, "absent", "the architecture needs it");
            keys.per_layer(key, n_layer, range)?.ok_or_else(missing)
        };
        let n_head = required("attention.head_count", N_HEAD)?;
        // Models whose layers all have experts need no size of another MLP, and some files have none.
        let n_ff = match keys.opt_u32("expert_feed_forward_length", N_FF)? {
            Some(n_ff) => keys
                .per_layer("feed_forward_length", n_layer, 0..=*N_FF.end())?
                .unwrap_or_else(|| vec![n_ff; n_layer as usize]),
            None => required("feed_forward_length", N_FF)?,
        };
        let n_head_kv_min = if without_kv { 0 } else { *N_HEAD.start() };
        let range = n_head_kv_min..=*N_HEAD.end();
        let n_head_kv = keys.per_layer("attention.head_count_kv", n_layer, range)?;
        // Without the key every query head has its own keys.
        let n_head_kv = n_head_kv.unwrap_or_else(|| n_head.clone());
        let layers = n_head.iter().zip(&n_head_kv).zip(&n_ff);
        layers
            .map(|((&n_head, &n_head_kv), &n_ff)| {
                if n_head_kv == 0 || n_head.is_multiple_of(n_head_kv) {
                    return Ok(LayerHparams { n_head, n_head_kv, n_ff });
                }
                let allowed = format!("it must divide the {n_head} heads of queries");
                Err(keys.bad("attention.head_count_kv", n_head_kv, allowed))
            })
            .collect()
    }

    /// The key, or the embedding split over the heads.
    pub(crate) fn head_dim(
        keys: &Keys<'_>,
        key: &str,
        n_embd: u32,
        layers: &[LayerHparams],
    ) -> Result<u32, ArchError> {
        if let Some(head_dim) = keys.opt_u32(key, HEAD_DIM)? {
            return Ok(head_dim);
        }
        let n_head = layers.first().map_or(1, |layer| layer.n_head);
        match n_embd.checked_rem(n_head) {
            Some(0) => keys.within(key, n_embd / n_head, &HEAD_DIM),
            _ => {
                let allowed = format!(
                    "it is needed where {n_embd} elements do not split over {n_head} heads"
                );
                Err(keys.bad(key, "absent", allowed))
            }
        }
    }

    fn n_vocab(keys: &Keys<'_>, n_embd: u32) -> Result<u32, ArchError> {
        let (file, tensor) = (keys.tensors.file(), "token_embd.weight".to_owned());
        let Some(n_rows) = keys.tensors.n_rows(&tensor) else {
            return Err(ArchError::MissingTensor {
                file,
                tensor,
                expected: format!("[n_vocab, {n_embd}]"),
            });
        };
        match u32::try_from(n_rows) {
            Ok(n_vocab) if N_VOCAB.contains(&n_rows) => Ok(n_vocab),
            _ => Err(ArchError::BadHparam {
                file,
                key: "the number of rows of token_embd.weight".into(),
                got: n_rows.to_string(),
                allowed: format!("it must be from {} to {}", N_VOCAB.start(), N_VOCAB.end()),
            }),
        }
    }

    /// The norm over a whole row of the residual stream.
    pub(crate) fn norm(&self) -> Norm {
        Norm { eps: self.norm_eps, n: self.n_embd }
    }

    /// Scores are divided by the root of the length of a head, so that their variance does not grow with it.
    pub(crate) fn attention_scale(&self) -> f32 {
        1.0 / (self.head_dim_k as f32).sqrt()
    }

    /// Layers by number.
    pub(crate) fn numbered_layers(&self) -> impl Iterator<Item = (u32, LayerHparams)> {
        (0..).zip(self.layers.iter().copied())
    }

    /// Whether `layer` is the last one, where rows that nobody wants are dropped.
    pub(crate) fn is_last(&self, layer: u32) -> bool {
        layer as usize + 1 == self.layers.len()
    }
}

/// Sizes of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ExpertHparams {
    pub(crate) n_expert: u32,
    /// Experts of a token.
    pub(crate) n_used: u32,
    /// Elements between the two halves of an expert's MLP.
    pub(crate) n_ff: u32,
    /// Of the expert that every token has; 0 for none.
    pub(crate) n_ff_shared: u32,
    /// Whether weights are divided by their sum, where the file says.
    pub(crate) normalise: Option<bool>,
    /// Multiplies weights.
    pub(crate) scale: f32,
}

impl ExpertHparams {
    /// `None` for a file without experts.
    pub(crate) fn read(keys: &Keys<'_>, hparams: &Hparams) -> Result<Option<Self>, ArchError> {
        let n_expert = keys.opt_u32("expert_count", 0..=N_EXPERT_MAX)?.unwrap_or(0);
        if n_expert == 0 {
            return Ok(None);
        }
        let n_used = keys.u32("expert_used_count", 1..=n_expert)?;
        let n_ff = match keys.opt_u32("expert_feed_forward_length", N_FF)? {
            Some(n_ff) => n_ff,
            None => hparams.layers.first().map_or(1, |layer| layer.n_ff),
        };
        let shared = keys.opt_u32("expert_shared_feed_forward_length", 0..=*N_FF.end())?;
        let normalise = keys.metadata.opt_bool(&keys.full("expert_weights_norm"))?;
        // Some files write 0 where there is nothing to multiply by.
        let scale = keys.f32_or("expert_weights_scale", 0.0..=1e6, 1.0)?;
        let scale = if scale == 0.0 { 1.0 } else { scale };
        Ok(Some(Self {
            n_expert,
            n_used,
            n_ff,
            n_ff_shared: shared.unwrap_or(0),
            normalise,
            scale,
        }))
    }

    /// For an architecture whose layers all have experts.
    pub(crate) fn required(keys: &Keys<'_>, hparams: &Hparams) -> Result<Self, ArchError> {
        let missing = || keys.bad("expert_count", "absent or 0", "the architecture needs experts");
        Self::read(keys, hparams)?.ok_or_else(missing)
    }
}
