//! Many short byte strings in one allocation, and a map from text to id.
//!
//! Vocabularies hold up to some hundred thousand strings of a few bytes. One
//! arena with end offsets costs four bytes a string instead of an allocation
//! each. The map stores ids only and compares in the arena; its hash is seeded
//! at random, so that a hostile vocabulary cannot choose colliding texts.

use std::hash::{BuildHasher, RandomState};

use crate::TokenId;

/// A list of byte strings, in one arena. Strings need not be UTF-8.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Texts {
    /// An empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty list with room for `n` strings of `n_bytes` bytes together.
    pub fn with_capacity(n: usize, n_bytes: usize) -> Self {
        Self { bytes: Vec::with_capacity(n_bytes), ends: Vec::with_capacity(n) }
    }

    /// Appends a string.
    pub fn push(&mut self, text: &[u8]) {
        self.bytes.extend_from_slice(text);
        self.ends.push(self.bytes.len());
    }

    /// The string at `index`, or `None` past the end.
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let end = *self.ends.get(index)?;
        let start = match index.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => 0,
        };
        self.bytes.get(start..end)
    }

    /// Number of strings.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are no strings.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The strings in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).filter_map(|i| self.get(i))
    }

    /// The string of a token, empty for an id outside the list.
    pub(crate) fn of(&self, id: TokenId) -> &[u8] {
        self.get(id as usize).unwrap_or_default()
    }
}

impl<T: AsRef<[u8]>> FromIterator<T> for Texts {
    fn from_iter<I: IntoIterator<Item = T>>(iter: I) -> Self {
        let mut texts = Texts::new();
        for text in iter {
            texts.push(text.as_ref());
        }
        texts
    }
}

/// Marks a slot without a token.
const FREE: TokenId = TokenId::MAX;

/// Open-addressing map from text to id, at most half full.
#[derive(Debug, Clone)]
pub(crate) struct TextMap {
    /// Upper half of the hash (to skip most comparisons) and the id.
    slots: Vec<(u32, TokenId)>,
    mask: usize,
    seed: u64,
    len_max: usize,
}

impl TextMap {
    /// Indexes `texts`. On a repeated text returns both ids.
    pub(crate) fn new(texts: &Texts) -> Result<Self, (TokenId, TokenId)> {
        let n_slots = texts.len().saturating_mul(2).max(8).next_power_of_two();
        let mut map = Self {
            slots: vec![(0, FREE); n_slots],
            mask: n_slots - 1,
            seed: RandomState::new().hash_one(0x7e60_1a55_u32),
            len_max: texts.iter().map(<[u8]>::len).max().unwrap_or(0),
        };
        for (id, text) in texts.iter().enumerate() {
            let id = id as TokenId;
            if let Some(first) = map.insert(texts, text, id) {
                return Err((first, id));
            }
        }
        Ok(map)
    }

    fn insert(&mut self, texts: &Texts, text: &[u8], id: TokenId) -> Option<TokenId> {
        let hash = hash(self.seed, text);
        let mut at = hash as usize & self.mask;
        while let Some(slot) = self.slots.get_mut(at) {
            if slot.1 == FREE {
                *slot = ((hash >> 32) as u32, id);
                return None;
            }
            if slot.0 == (hash >> 32) as u32 && texts.of(slot.1) == text {
                return Some(slot.1);
            }
            at = (at + 1) & self.mask;
        }
        None
    }

    /// The id of `text`. `texts` must be the list that was indexed.
    #[inline]
    pub(crate) fn get(&self, texts: &Texts, text: &[u8]) -> Option<TokenId> {
        if text.len() > self.len_max {
            return None;
        }
        let hash = hash(self.seed, text);
        let mut at = hash as usize & self.mask;
        loop {
            let &(tag, id) = self.slots.get(at)?;
            if id == FREE {
                return None;
            }
            if tag == (hash >> 32) as u32 && texts.of(id) == text {
                return Some(id);
            }
            at = (at + 1) & self.mask;
        }
    }

    /// Length in bytes of the longest text.
    pub(crate) fn len_max(&self) -> usize {
        self.len_max
    }
}

/// Multiply-and-fold hash of a short byte string.
#[inline]
fn hash(seed: u64, text: &[u8]) -> u64 {
    let mut h = seed ^ text.len() as u64;
    let (words, rest) = text.as_chunks::<8>();
    for word in words {
        h = fold(h ^ u64::from_le_bytes(*word));
    }
    if !rest.is_empty() {
        let mut last = 0u64;
        for &byte in rest {
            last = last << 8 | u64::from(byte);
        }
        h = fold(h ^ last);
    }
    fold(h)
}

/// Mixes the halves of a 64×64 product; the constant is odd and without pattern (2⁶⁴ / golden ratio).
#[inline]
pub(crate) fn fold(x: u64) -> u64 {
    let wide = u128::from(x) * 0x9e37_79b9_7f4a_7c15_u128;
    (wide as u64) ^ (wide >> 64) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_is_found_under_its_own_id() {
        let texts: Texts = (0..5000).map(|i| format!("{i}")).chain(["".into()]).collect();
        let map = TextMap::new(&texts).unwrap();
        for (id, text) in texts.iter().enumerate() {
            assert_eq!(map.get(&texts, text), Some(id as TokenId));
        }
        assert_eq!(map.get(&texts, b"5000"), None);
        assert_eq!(map.get(&texts, b"a text longer than all others"), None);
    }

    #[test]
    fn repeated_text_is_reported_with_both_ids() {
        let texts: Texts = ["a", "b", "a"].into_iter().collect();
        assert_eq!(TextMap::new(&texts).err(), Some((0, 2)));
    }
}
