//! Words seen before in the same text.
//!
//! Natural text repeats few words. A direct-mapped table of short words and
//! their tokens saves merging them again. It lives as long as one call, so the
//! tokenizer itself stays immutable, and short texts do without.

use crate::TokenId;
use crate::texts::fold;

const N_ENTRIES: usize = 4096;
const WORD_BYTES_MAX: usize = 31;
const N_IDS_MAX: usize = 7;
/// Below this, building the table costs more than it saves.
pub(crate) const TEXT_BYTES_MIN: usize = 8192;

#[derive(Debug, Clone, Copy)]
struct Entry {
    word: [u8; WORD_BYTES_MAX],
    /// 0 for an empty entry.
    word_len: u8,
    n_ids: u8,
    ids: [TokenId; N_IDS_MAX],
}

const EMPTY: Entry =
    Entry { word: [0; WORD_BYTES_MAX], word_len: 0, n_ids: 0, ids: [0; N_IDS_MAX] };

/// A table of words; empty and idle unless enabled.
#[derive(Debug, Default)]
pub(crate) struct WordCache {
    entries: Vec<Entry>,
}

impl WordCache {
    pub(crate) fn enable(&mut self) {
        self.entries = vec![EMPTY; N_ENTRIES];
    }

    fn index(word: &[u8]) -> usize {
        let mut h = word.len() as u64;
        let (words, rest) = word.as_chunks::<8>();
        for part in words {
            h = fold(h ^ u64::from_le_bytes(*part));
        }
        h = rest.iter().fold(h, |h, &b| h << 8 ^ u64::from(b) ^ h >> 56);
        fold(h) as usize % N_ENTRIES
    }

    /// Appends the tokens of a word seen before; `false` if it is new.
    #[inline]
    pub(crate) fn replay(&self, word: &[u8], out: &mut Vec<TokenId>) -> bool {
        let Some(entry) = self.entries.get(Self::index(word)) else { return false };
        let len = usize::from(entry.word_len);
        if len == 0 || entry.word.get(..len) != Some(word) {
            return false;
        }
        out.extend_from_slice(entry.ids.get(..usize::from(entry.n_ids)).unwrap_or_default());
        true
    }

    /// Remembers the tokens of a word, if both are short.
    #[inline]
    pub(crate) fn remember(&mut self, word: &[u8], ids: &[TokenId]) {
        if self.entries.is_empty() || word.len() > WORD_BYTES_MAX || ids.len() > N_IDS_MAX {
            return;
        }
        if let Some(entry) = self.entries.get_mut(Self::index(word)) {
            let mut new = Entry { word_len: word.len() as u8, n_ids: ids.len() as u8, ..EMPTY };
            new.word.iter_mut().zip(word).for_each(|(slot, &b)| *slot = b);
            new.ids.iter_mut().zip(ids).for_each(|(slot, &id)| *slot = id);
            *entry = new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_word_is_replayed() {
        let mut cache = WordCache::default();
        let mut out = Vec::new();
        cache.remember(b"idle", &[1]);
        assert!(!cache.replay(b"idle", &mut out));
        cache.enable();
        cache.remember(b"word", &[1, 2]);
        cache.remember(&[b'x'; 40], &[3]);
        assert!(cache.replay(b"word", &mut out));
        assert!(!cache.replay(b"wort", &mut out) && !cache.replay(&[b'x'; 40], &mut out));
        assert!(!cache.replay(b"", &mut out));
        assert_eq!(out, [1, 2]);
    }
}
