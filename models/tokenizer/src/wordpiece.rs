//! WordPiece, the encoding of BERT and its descendants.
//!
//! Text is normalised (accents and case go, as the vocabulary says), cut at
//! white space, punctuation and ideographs, and each word is covered from the
//! left by the longest tokens. A word that cannot be covered is unknown as a
//! whole. GGUF marks beginnings of words by `▁` instead of marking the rest by `##`.

use unicode_normalization::UnicodeNormalization;

use crate::classes::{CONTROL, MARK, PUNCT, SPACE, SYMBOL, classes};
use crate::texts::TextMap;
use crate::{Texts, TokenId};

/// A WordPiece encoder.
#[derive(Debug)]
pub(crate) struct WordPiece {
    lowercase: bool,
    strip_accents: bool,
}

impl WordPiece {
    /// Case is dropped unless the vocabulary says otherwise, and accents go with it.
    pub(crate) fn new(lowercase: Option<bool>, strip_accents: Option<bool>) -> Self {
        let lowercase = lowercase.unwrap_or(true);
        Self { lowercase, strip_accents: strip_accents.unwrap_or(lowercase) }
    }

    /// Appends the tokens of `text`.
    pub(crate) fn encode(
        &self,
        texts: &Texts,
        map: &TextMap,
        unk: Option<TokenId>,
        text: &str,
        out: &mut Vec<TokenId>,
    ) {
        for word in self.words(text) {
            let before = out.len();
            if !cover(texts, map, &format!("▁{word}"), out) {
                out.truncate(before);
                out.extend(unk);
            }
        }
    }

    /// The normalised words of a text.
    fn words(&self, text: &str) -> Vec<String> {
        let mut words = Vec::new();
        let mut word = String::new();
        let mut add = |c: char| {
            let k = classes(c);
            if k & SPACE != 0 {
                words.extend(take(&mut word));
            } else if c == '\0' || c == '\u{fffd}' || k & CONTROL != 0 {
                // Not text.
            } else if self.strip_accents && k & MARK != 0 {
                // An accent that decomposition set free.
            } else if k & PUNCT != 0 || (c.is_ascii() && k & SYMBOL != 0) || is_ideograph(c) {
                words.extend(take(&mut word));
                words.push(self.lower(c).to_string());
            } else {
                word.push(self.lower(c));
            }
        };
        if self.strip_accents {
            text.nfd().for_each(&mut add);
        } else {
            text.chars().for_each(&mut add);
        }
        words.extend(take(&mut word));
        words
    }

    /// One character stays one character, as in the training of these vocabularies.
    fn lower(&self, c: char) -> char {
        let mut lower = c.to_lowercase();
        match (self.lowercase, lower.next(), lower.next()) {
            (true, Some(single), None) => single,
            (true, Some(first), Some(_)) => first,
            _ => c,
        }
    }
}

/// The word, if there is one, leaving an empty one.
fn take(word: &mut String) -> Option<String> {
    (!word.is_empty()).then(|| std::mem::take(word))
}

/// Appends the longest tokens from the left; `false` if a rest has none.
fn cover(texts: &Texts, map: &TextMap, word: &str, out: &mut Vec<TokenId>) -> bool {
    let mut rest = word.as_bytes();
    while !rest.is_empty() {
        let longest = (1..=rest.len().min(map.len_max())).rev();
        let found = longest
            .filter_map(|n| rest.split_at_checked(n))
            .find_map(|(head, tail)| Some((map.get(texts, head)?, tail)));
        let Some((id, tail)) = found else { return false };
        out.push(id);
        rest = tail;
    }
    true
}

/// The blocks of ideographs that BERT's tokenizer puts apart.
fn is_ideograph(c: char) -> bool {
    matches!(u32::from(c),
        0x4e00..=0x9fff | 0x3400..=0x4dbf | 0x2_0000..=0x2_a6df | 0x2_a700..=0x2_b73f
        | 0x2_b740..=0x2_b81f | 0x2_b920..=0x2_ceaf | 0xf900..=0xfaff | 0x2_f800..=0x2_fa1f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_normalised_as_the_vocabulary_says() {
        let uncased = WordPiece::new(None, None);
        assert_eq!(
            uncased.words("Héllo, Wörld 中文\u{0}!"),
            ["hello", ",", "world", "中", "文", "!"]
        );
        let cased = WordPiece::new(Some(false), None);
        assert_eq!(cased.words("Héllo"), ["Héllo"]);
    }

    #[test]
    fn a_word_without_cover_is_unknown_as_a_whole() {
        let texts: Texts = ["[UNK]", "▁a", "b", "▁ab"].into_iter().collect();
        let map = TextMap::new(&texts).unwrap();
        let mut out = Vec::new();
        WordPiece::new(None, None).encode(&texts, &map, Some(0), "abb ax a", &mut out);
        assert_eq!(out, [3, 2, 0, 1]);
    }
}
