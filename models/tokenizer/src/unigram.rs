//! SentencePiece's unigram encoding: the tokens whose scores add up to the most.
//!
//! After normalisation the best cover of every prefix is found from the left
//! (Viterbi), in steps of one character. A character without a token of its own
//! may be covered by the unknown token, at a score ten below the worst token;
//! a run of unknown characters is one token.

use std::collections::HashMap;

use crate::charsmap::Charsmap;
use crate::joins::IntHash;
use crate::special::TokenAttr;
use crate::{Texts, TokenId, TokenizerError};

/// How much worse than the worst token the unknown token is.
const UNKNOWN_PENALTY: f64 = 10.0;
const SPACE: &[u8] = "▁".as_bytes();

/// A trie over bytes. Node 0 is the root.
#[derive(Debug)]
struct Trie {
    children: HashMap<u64, u32, IntHash>,
    /// The token that ends at each node.
    tokens: Vec<Option<TokenId>>,
}

impl Trie {
    fn new() -> Self {
        Self { children: HashMap::with_hasher(IntHash::seeded()), tokens: vec![None] }
    }

    fn insert(&mut self, text: &[u8], id: TokenId) {
        let mut node = 0;
        for &byte in text {
            let next = self.tokens.len() as u32;
            node = *self.children.entry(u64::from(node) << 8 | u64::from(byte)).or_insert(next);
            if node == next {
                self.tokens.push(None);
            }
        }
        if let Some(token) = self.tokens.get_mut(node as usize) {
            *token = Some(id);
        }
    }

    /// All tokens that `text` begins with, shortest first, with their lengths.
    fn prefixes<'a>(&'a self, text: &'a [u8]) -> impl Iterator<Item = (usize, TokenId)> + 'a {
        let mut node = 0u32;
        let walk = text.iter().map_while(move |&byte| {
            node = *self.children.get(&(u64::from(node) << 8 | u64::from(byte)))?;
            Some(self.tokens.get(node as usize).copied().flatten())
        });
        walk.enumerate().filter_map(|(i, token)| Some((i + 1, token?)))
    }
}

/// A unigram encoder.
#[derive(Debug)]
pub(crate) struct Unigram {
    tokens: Trie,
    user_defined: Trie,
    scores: Vec<f64>,
    unknown_score: f64,
    charsmap: Charsmap,
    add_space_prefix: bool,
    merge_spaces: bool,
}

/// The best cover of a prefix: its score, and its last token with that token's start.
#[derive(Clone, Copy)]
struct Best {
    score: f64,
    start: usize,
    id: Option<TokenId>,
}

impl Unigram {
    /// `attrs` and `scores` have one entry a token; no score is NaN.
    pub(crate) fn new(
        texts: &Texts,
        attrs: &[TokenAttr],
        scores: &[f32],
        charsmap: &[u8],
        add_space_prefix: bool,
        merge_spaces: bool,
    ) -> Result<Self, TokenizerError> {
        let matched = TokenAttr::NORMAL.with(TokenAttr::USER_DEFINED).with(TokenAttr::UNUSED);
        let (mut tokens, mut user_defined) = (Trie::new(), Trie::new());
        let mut worst = f32::MAX;
        let mut all_scores = Vec::with_capacity(texts.len());
        for ((id, text), (attr, &score)) in (0..).zip(texts.iter()).zip(attrs.iter().zip(scores)) {
            // User-defined tokens win over any cover by others.
            let is_user_defined = attr.has(TokenAttr::USER_DEFINED);
            all_scores.push(if is_user_defined { 0.0 } else { f64::from(score) });
            if attr.has(TokenAttr::NORMAL) {
                worst = worst.min(score);
            }
            if attr.has(matched) {
                tokens.insert(text, id);
            }
            if is_user_defined {
                user_defined.insert(text, id);
            }
        }
        Ok(Self {
            tokens,
            user_defined,
            scores: all_scores,
            unknown_score: f64::from(worst) - UNKNOWN_PENALTY,
            charsmap: Charsmap::parse(charsmap)?,
            add_space_prefix,
            merge_spaces,
        })
    }

    /// Appends the tokens of `text`.
    pub(crate) fn encode(&self, unk: Option<TokenId>, text: &str, out: &mut Vec<TokenId>) {
        let normalized = self.normalize(text.as_bytes());
        let best = self.best_covers(unk, &normalized);
        let before = out.len();
        let mut at = normalized.len();
        let mut after_unknown = false;
        while at > 0 {
            let Some(last) = best.get(at).filter(|b| b.start < at) else { break };
            let is_unknown = last.id == unk;
            if !(is_unknown && after_unknown) {
                out.extend(last.id);
            }
            after_unknown = is_unknown;
            at = last.start;
        }
        if let Some(new) = out.get_mut(before..) {
            new.reverse();
        }
    }

    /// The best cover of each prefix of `text`.
    fn best_covers(&self, unk: Option<TokenId>, text: &[u8]) -> Vec<Best> {
        let none = Best { score: f64::MIN, start: 0, id: unk };
        let mut best = vec![none; text.len() + 1];
        if let Some(empty) = best.first_mut() {
            empty.score = 0.0;
        }
        let mut start = 0;
        while let Some(rest) = text.get(start..).filter(|r| !r.is_empty()) {
            let so_far = best.get(start).map_or(f64::MIN, |b| b.score);
            let n_char = char_len(rest);
            let mut offer = |len: usize, score: f64, id: Option<TokenId>| {
                if let Some(slot) = best.get_mut(start + len)
                    && so_far + score > slot.score
                {
                    *slot = Best { score: so_far + score, start, id };
                }
            };
            let mut char_is_token = false;
            for (len, id) in self.tokens.prefixes(rest) {
                char_is_token |= len == n_char;
                offer(len, self.scores.get(id as usize).copied().unwrap_or(f64::MIN), Some(id));
            }
            if !char_is_token {
                offer(n_char, self.unknown_score, unk);
            }
            start += n_char;
        }
        best
    }

    /// Replaces characters as the table says and writes spaces as `▁`.
    fn normalize(&self, text: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(text.len() + text.len() / 2 + SPACE.len());
        let mut rest = text;
        let (mut prefixed, mut in_word) = (false, false);
        while !rest.is_empty() {
            let (n_read, part) = self.normalized_prefix(rest);
            for &byte in part {
                if byte == b' ' {
                    in_word = false;
                    if !self.merge_spaces {
                        out.extend_from_slice(SPACE);
                    }
                    continue;
                }
                if !in_word {
                    in_word = true;
                    if self.merge_spaces || (self.add_space_prefix && !prefixed) {
                        out.extend_from_slice(SPACE);
                        prefixed = true;
                    }
                }
                out.push(byte);
            }
            rest = rest.get(n_read..).unwrap_or_default();
        }
        out
    }

    /// The next part of the normalised text, and how many bytes it stands for.
    fn normalized_prefix<'a>(&'a self, rest: &'a [u8]) -> (usize, &'a [u8]) {
        let own = |n: usize| (n, rest.get(..n).unwrap_or_default());
        if let Some((n, _)) = self.user_defined.prefixes(rest).last() {
            return own(n);
        }
        self.charsmap.longest(rest).unwrap_or_else(|| own(char_len(rest)))
    }
}

/// Length of the character at the start of `text`, by its first byte.
fn char_len(text: &[u8]) -> usize {
    let n = match text.first() {
        Some(0xc0..=0xdf) => 2,
        Some(0xe0..=0xef) => 3,
        Some(0xf0..) => 4,
        _ => 1,
    };
    n.min(text.len().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_sum_of_scores_wins() {
        let texts: Texts = ["<unk>", "▁a", "b", "▁ab", "c", "bc"].into_iter().collect();
        let scores = [0.0, -1.0, -2.0, -2.5, -3.0, -1.2];
        let attrs = [TokenAttr::NORMAL; 6];
        let unigram = Unigram::new(&texts, &attrs, &scores, b"", true, true).unwrap();
        for (text, want) in
            [("abc", vec![1, 5]), ("ab", vec![3]), ("a  b", vec![1, 0, 2]), ("", vec![])]
        {
            let mut out = Vec::new();
            unigram.encode(Some(0), text, &mut out);
            assert_eq!(out, want, "{text:?}");
        }
    }
}
