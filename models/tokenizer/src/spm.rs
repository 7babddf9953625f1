//! SentencePiece's byte-pair encoding: the pair whose merged text has the best score goes first.
//!
//! Spaces are written `▁` first. There is no list of merges: any two neighbours
//! whose joined text is a token may merge. Characters that are no token are
//! spelled by byte tokens.

use crate::bpe::{byte_tokens, spell_bytes};
use crate::joins::Joins;
use crate::merge::{Merger, NEVER, NO_TOKEN, PairRule, Symbol};
use crate::texts::TextMap;
use crate::{Texts, TokenId};

/// A SentencePiece encoder.
#[derive(Debug)]
pub(crate) struct Spm {
    /// The rating of each token, by [`rating`].
    ratings: Vec<u32>,
    bytes: Box<[TokenId; 256]>,
    joins: Joins,
}

/// Rates pairs within one piece of text.
struct ByScore<'a> {
    spm: &'a Spm,
    texts: &'a Texts,
    map: &'a TextMap,
    piece: &'a [u8],
}

impl PairRule for ByScore<'_> {
    #[inline]
    fn rate(&self, left: Symbol, right: Symbol) -> (u32, TokenId) {
        let joined = self.piece.get(left.start..right.end).unwrap_or_default();
        match self.map.get(self.texts, joined) {
            Some(id) => (self.spm.ratings.get(id as usize).copied().unwrap_or(NEVER), id),
            None => (NEVER, NO_TOKEN),
        }
    }
}

/// Maps scores to integers in the opposite order, so that the best score is the lowest.
fn rating(score: f32) -> u32 {
    // Adding zero makes -0 equal to 0.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    // Only a NaN could reach NEVER, and those are refused at load.
    !ascending
}

impl Spm {
    /// `scores` has one entry a token, none of them NaN.
    pub(crate) fn new(texts: &Texts, map: &TextMap, scores: &[f32]) -> Self {
        Self {
            ratings: scores.iter().map(|&s| rating(s)).collect(),
            bytes: byte_tokens(texts, map),
            joins: Joins::new(texts),
        }
    }

    /// Bytes that can occur in a text and have no token.
    pub(crate) fn n_bytes_missing(&self) -> usize {
        let in_utf8 = |byte: usize| !matches!(byte, 0xc0 | 0xc1 | 0xf5..);
        self.bytes.iter().enumerate().filter(|&(b, &id)| in_utf8(b) && id == NO_TOKEN).count()
    }

    /// Appends the tokens of `text`, in which spaces are `▁` already.
    pub(crate) fn encode(
        &self,
        texts: &Texts,
        map: &TextMap,
        unk: Option<TokenId>,
        text: &str,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) {
        self.joins.split(text, &mut |piece| {
            if let Some(id) = single(texts, map, piece) {
                return out.push(id);
            }
            let piece_bytes = piece.as_bytes();
            if merger.cache.replay(piece_bytes, out) {
                return;
            }
            let n_before = out.len();
            merger.symbols.clear();
            merger.symbols.extend(piece.char_indices().map(|(start, c)| Symbol {
                start,
                end: start + c.len_utf8(),
                id: NO_TOKEN,
            }));
            merger.merge(&ByScore { spm: self, texts, map, piece: piece_bytes });
            for symbol in &merger.symbols {
                let text = piece_bytes.get(symbol.start..symbol.end).unwrap_or_default();
                let merged = (symbol.id != NO_TOKEN).then_some(symbol.id);
                match merged.or_else(|| map.get(texts, text)) {
                    Some(id) => out.push(id),
                    None => spell_bytes(&self.bytes, unk, text, out),
                }
            }
            merger.cache.remember(piece_bytes, out.get(n_before..).unwrap_or_default());
        });
    }
}

/// The token of a piece of one character.
fn single(texts: &Texts, map: &TextMap, piece: &str) -> Option<TokenId> {
    let c = piece.chars().next()?;
    (c.len_utf8() == piece.len()).then(|| map.get(texts, piece.as_bytes()))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn better_scores_have_lower_ratings() {
        let scores = [f32::INFINITY, 1.5, 0.0, -0.0, -1.0, -1.5, -1e9, f32::NEG_INFINITY];
        let ratings: Vec<_> = scores.iter().map(|&s| rating(s)).collect();
        assert!(ratings.is_sorted());
        assert_eq!(ratings[2], ratings[3]);
        assert!(ratings[7] < NEVER);
    }
}
