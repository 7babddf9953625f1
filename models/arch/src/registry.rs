//! The list of architectures: `general.architecture` to the file that knows it.

use std::fmt::Debug;

use tegula_program::ValueId;

use crate::graph::Graph;
use crate::hparams::{Hparams, Keys};
use crate::{ArchError, models};

/// A model of one architecture, its hyperparameters read and checked.
pub(crate) trait Architecture: Debug + Send + Sync {
    /// What it shares with the others.
    fn hparams(&self) -> &Hparams;

    /// Positions that a query sees at most where not all: the smallest window of all layers.
    fn window(&self) -> Option<u32>;

    /// From tokens to the rows that are wanted, after the final norm: f32\[n_outputs, n_embd\].
    fn hidden(&self, g: &mut Graph<'_>) -> ValueId;

    /// From those to scores: f32\[n_outputs, n_vocab\].
    fn logits(&self, g: &mut Graph<'_>, hidden: ValueId) -> ValueId;
}

type Read = fn(&Keys<'_>) -> Result<Box<dyn Architecture>, ArchError>;

const ARCHITECTURES: [(&str, Read); 24] = [
    ("cohere2", models::cohere::read_2),
    ("command-r", models::cohere::read),
    ("deepseek2", models::deepseek2::read),
    ("gemma2", models::gemma2::read),
    ("gemma3", models::gemma3::read),
    ("gemma4", models::gemma4::read),
    ("glm4", models::glm4::read),
    ("gpt-oss", models::gpt_oss::read),
    ("granite", models::granite::read),
    ("granitemoe", models::granite::read_moe),
    ("lfm2", models::lfm2::read),
    ("llama", models::llama::read),
    ("olmo2", models::olmo2::read),
    ("olmoe", models::olmoe::read),
    ("phi3", models::phi3::read),
    ("qwen2", models::qwen2::read),
    ("qwen2moe", models::qwen2::read_moe),
    ("qwen3", models::qwen3::read),
    ("qwen35", models::qwen3next::read_35),
    ("qwen35moe", models::qwen3next::read_35_moe),
    ("qwen3moe", models::qwen3::read_moe),
    ("qwen3next", models::qwen3next::read_next),
    ("smollm3", models::smollm3::read),
    ("starcoder2", models::starcoder2::read),
];

/// The names that `general.architecture` may have.
pub fn known_architectures() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|(name, _)| *name)
}

/// The name as a constant, and the reader.
pub(crate) fn find(arch: &str) -> Option<(&'static str, Read)> {
    ARCHITECTURES.iter().find(|(name, _)| *name == arch).copied()
}
