//! What the colours mean.

use crate::memory::plan::ChunkReport;

pub(super) const INK: &str = "#2e2a26";
pub(super) const MUTED: &str = "#6b635a";
pub(super) const RULE: &str = "#cfc7bb";

/// What a tile holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Embedding,
    Attention,
    Ffn,
    Norm,
    Output,
    Other,
    Keys,
    Values,
    State,
    Scratch,
    Logits,
    Activations,
    Compile,
    Staging,
}

impl Kind {
    /// In the order of the numbers.
    pub(super) const ALL: [Self; 14] = [
        Self::Embedding,
        Self::Attention,
        Self::Ffn,
        Self::Norm,
        Self::Output,
        Self::Other,
        Self::Keys,
        Self::Values,
        Self::State,
        Self::Scratch,
        Self::Logits,
        Self::Activations,
        Self::Compile,
        Self::Staging,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Attention => "attention",
            Self::Ffn => "ffn",
            Self::Norm => "norms",
            Self::Output => "output",
            Self::Other => "other weights",
            Self::Keys => "keys",
            Self::Values => "values",
            Self::State => "recurrent state",
            Self::Scratch => "scratch",
            Self::Logits => "logits",
            Self::Activations => "between stages",
            Self::Compile => "compiled",
            Self::Staging => "uploads, while loading",
        }
    }

    /// Tints that stay apart for people who see few colours, by lightness too; dark text is readable on each.
    pub(super) fn color(self) -> &'static str {
        match self {
            Self::Embedding => "#7fa8d1",
            Self::Attention => "#d9734e",
            Self::Ffn => "#f0b46c",
            Self::Norm => "#7d6b91",
            Self::Output => "#b79bd0",
            Self::Other => "#a39a8e",
            Self::Keys => "#4fa597",
            Self::Values => "#9fd4c4",
            Self::State => "#86b8c9",
            Self::Scratch => "#c9c0b2",
            Self::Logits => "#e3a3b5",
            Self::Activations => "#a9bf6f",
            Self::Compile => "#ddd6ca",
            Self::Staging => "#c7d3df",
        }
    }
}

/// What a tile is, by its chunk's usage and its tensor's name.
pub(super) fn kind(usage: &str, tensor: &str) -> Kind {
    match usage {
        "scratch" => return Kind::Scratch,
        "logits" => return Kind::Logits,
        "activations" => return Kind::Activations,
        "compile" => return Kind::Compile,
        "staging" => return Kind::Staging,
        "kv" if tensor.ends_with(".v") => return Kind::Values,
        "kv" => return Kind::Keys,
        "state" => return Kind::State,
        _ => {}
    }
    if tensor.contains("norm") {
        return Kind::Norm;
    }
    if tensor.contains("attn_") {
        return Kind::Attention;
    }
    if tensor.contains("ffn_") {
        return Kind::Ffn;
    }
    match tensor.split('.').next() {
        Some("token_embd") => Kind::Embedding,
        Some("output") => Kind::Output,
        _ => Kind::Other,
    }
}

/// The kinds in a chunk with their bytes, tile by tile; a chunk without tiles is one piece.
pub(super) fn pieces(chunk: &ChunkReport) -> impl Iterator<Item = (Kind, u64)> {
    let whole = chunk.tiles.is_empty().then(|| (kind(chunk.usage, ""), chunk.size));
    let tiles = chunk.tiles.iter().map(|tile| (kind(chunk.usage, &tile.tensor), tile.size));
    whole.into_iter().chain(tiles)
}
