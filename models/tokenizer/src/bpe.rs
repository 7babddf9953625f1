//! Byte-pair encoding by ranked merges.
//!
//! Two kinds of vocabulary share it. Byte-level ones (`gpt2`) cut text into
//! words and merge the bytes of each. Character-level ones (`gemma4`) merge the
//! characters of whole lines and write characters they do not know as bytes.
//!
//! Merges are looked up by the ids of both sides, never by text. A merge that
//! names a text outside the vocabulary can therefore not be used: it is left
//! out and counted ([`Bpe::n_merges_skipped`]), since such merges occur in
//! published files whose vocabulary was cut down, and are harmless there.

use std::collections::HashMap;

use crate::joins::{IntHash, Joins};
use crate::merge::{Merger, NEVER, NO_TOKEN, PairRule, Symbol};
use crate::pretok::{self, PreSpec};
use crate::texts::TextMap;
use crate::{Texts, TokenId, bytes};

/// What the symbols of a word are at first.
#[derive(Debug)]
enum Unit {
    /// Bytes; the token of each, [`NO_TOKEN`] for bytes without one.
    Bytes(Box<[TokenId; 256]>),
    /// Characters, with the tokens that spell out unknown ones.
    Chars { fallback: Box<[TokenId; 256]>, joins: Box<Joins> },
}

/// A byte-pair encoder.
#[derive(Debug)]
pub(crate) struct Bpe {
    pairs: HashMap<u64, (u32, TokenId), IntHash>,
    unit: Unit,
    pre: &'static PreSpec,
    n_merges_skipped: usize,
}

impl PairRule for HashMap<u64, (u32, TokenId), IntHash> {
    #[inline]
    fn rate(&self, left: Symbol, right: Symbol) -> (u32, TokenId) {
        self.get(&key(left.id, right.id)).copied().unwrap_or((NEVER, NO_TOKEN))
    }
}

#[inline]
fn key(left: TokenId, right: TokenId) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

impl Bpe {
    /// A byte-level encoder.
    pub(crate) fn byte_level(
        texts: &Texts,
        map: &TextMap,
        merges: &Texts,
        pre: &'static PreSpec,
    ) -> Self {
        let ids = std::array::from_fn(|byte| {
            let c = bytes::CHAR_OF.get(byte).copied().unwrap_or_default();
            map.get(texts, c.encode_utf8(&mut [0; 4]).as_bytes()).unwrap_or(NO_TOKEN)
        });
        Self::new(texts, map, merges, pre, Unit::Bytes(Box::new(ids)))
    }

    /// A character-level encoder with `<0xXX>` tokens for what it does not know.
    pub(crate) fn char_level(texts: &Texts, map: &TextMap, merges: &Texts) -> Self {
        let joins = Box::new(Joins::new(texts));
        let fallback = byte_tokens(texts, map);
        Self::new(texts, map, merges, &pretok::LINES, Unit::Chars { fallback, joins })
    }

    fn new(
        texts: &Texts,
        map: &TextMap,
        merges: &Texts,
        pre: &'static PreSpec,
        unit: Unit,
    ) -> Self {
        let mut pairs = HashMap::with_capacity_and_hasher(merges.len(), IntHash::seeded());
        let mut n_merges_skipped = 0;
        for (rank, merge) in (0..NEVER).zip(merges.iter()) {
            match resolve(texts, map, merge) {
                Some((left, right, merged)) => {
                    pairs.entry(key(left, right)).or_insert((rank, merged));
                }
                None => n_merges_skipped += 1,
            }
        }
        Self { pairs, unit, pre, n_merges_skipped }
    }

    /// Merges that name a text outside the vocabulary.
    pub(crate) fn n_merges_skipped(&self) -> usize {
        self.n_merges_skipped
    }

    /// Bytes that can occur in a text and have no token.
    pub(crate) fn n_bytes_missing(&self) -> usize {
        let ids = match &self.unit {
            Unit::Bytes(ids) => ids,
            Unit::Chars { fallback, .. } => fallback,
        };
        let in_utf8 = |byte: usize| !matches!(byte, 0xc0 | 0xc1 | 0xf5..);
        ids.iter().enumerate().filter(|&(byte, &id)| in_utf8(byte) && id == NO_TOKEN).count()
    }

    /// Appends the tokens of `text`, which holds no special tokens.
    pub(crate) fn encode(
        &self,
        texts: &Texts,
        map: &TextMap,
        unk: Option<TokenId>,
        text: &str,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) {
        match &self.unit {
            Unit::Bytes(ids) => {
                let mut coded = String::new();
                pretok::split(text, self.pre.stages, &mut |word| {
                    if self.pre.ignore_merges {
                        coded.clear();
                        coded.extend(
                            word.bytes().filter_map(|b| bytes::CHAR_OF.get(usize::from(b))),
                        );
                        if let Some(id) = map.get(texts, coded.as_bytes()) {
                            return out.push(id);
                        }
                    }
                    self.encode_bytes(ids, unk, word, merger, out);
                });
            }
            Unit::Chars { fallback, joins } => {
                let escaped = text.replace(' ', "▁");
                pretok::split(&escaped, self.pre.stages, &mut |line| {
                    if line.starts_with('\n')
                        && let Some(id) = map.get(texts, line.as_bytes())
                    {
                        return out.push(id);
                    }
                    joins.split(line, &mut |piece| {
                        self.encode_chars(texts, map, fallback, unk, piece, merger, out);
                    });
                });
            }
        }
    }

    fn encode_bytes(
        &self,
        ids: &[TokenId; 256],
        unk: Option<TokenId>,
        word: &str,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) {
        if merger.cache.replay(word.as_bytes(), out) {
            return;
        }
        let n_before = out.len();
        merger.symbols.clear();
        merger.symbols.extend(word.bytes().enumerate().map(|(i, byte)| {
            let id = ids.get(usize::from(byte)).copied().unwrap_or(NO_TOKEN);
            Symbol { start: i, end: i + 1, id }
        }));
        merger.merge(&self.pairs);
        out.extend(
            merger.symbols.iter().filter_map(|s| if s.id == NO_TOKEN { unk } else { Some(s.id) }),
        );
        merger.cache.remember(word.as_bytes(), out.get(n_before..).unwrap_or_default());
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of one tokenizer, borrowed apart")]
    fn encode_chars(
        &self,
        texts: &Texts,
        map: &TextMap,
        fallback: &[TokenId; 256],
        unk: Option<TokenId>,
        piece: &str,
        merger: &mut Merger,
        out: &mut Vec<TokenId>,
    ) {
        if merger.cache.replay(piece.as_bytes(), out) {
            return;
        }
        let n_before = out.len();
        merger.symbols.clear();
        merger.symbols.extend(piece.char_indices().map(|(start, c)| {
            let id = map.get(texts, c.encode_utf8(&mut [0; 4]).as_bytes()).unwrap_or(NO_TOKEN);
            Symbol { start, end: start + c.len_utf8(), id }
        }));
        merger.merge(&self.pairs);
        for symbol in &merger.symbols {
            if symbol.id == NO_TOKEN {
                let unknown = piece.as_bytes().get(symbol.start..symbol.end).unwrap_or_default();
                spell_bytes(fallback, unk, unknown, out);
            } else {
                out.push(symbol.id);
            }
        }
        merger.cache.remember(piece.as_bytes(), out.get(n_before..).unwrap_or_default());
    }
}

/// The ids of both sides of a merge and of their concatenation.
fn resolve(texts: &Texts, map: &TextMap, merge: &[u8]) -> Option<(TokenId, TokenId, TokenId)> {
    // A side may begin with a space, so the first byte is not the separator.
    let at = 1 + merge.get(1..)?.iter().position(|&b| b == b' ')?;
    let (left, right) = (merge.get(..at)?, merge.get(at + 1..)?);
    Some((map.get(texts, left)?, map.get(texts, right)?, map.get(texts, &[left, right].concat())?))
}

/// The `<0xXX>` tokens of a vocabulary, or tokens that are the byte itself.
pub(crate) fn byte_tokens(texts: &Texts, map: &TextMap) -> Box<[TokenId; 256]> {
    Box::new(std::array::from_fn(|byte| {
        map.get(texts, format!("<0x{byte:02X}>").as_bytes())
            .or_else(|| map.get(texts, &[byte as u8]))
            .unwrap_or(NO_TOKEN)
    }))
}

/// Appends the tokens of single bytes; a byte without a token is `unk`, or nothing if there is none.
pub(crate) fn spell_bytes(
    fallback: &[TokenId; 256],
    unk: Option<TokenId>,
    text: &[u8],
    out: &mut Vec<TokenId>,
) {
    out.extend(text.iter().filter_map(|&byte| {
        let id = fallback.get(usize::from(byte)).copied().unwrap_or(NO_TOKEN);
        if id == NO_TOKEN { unk } else { Some(id) }
    }));
}
