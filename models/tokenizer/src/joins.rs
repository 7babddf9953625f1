//! Which neighbouring characters can end up in one token.
//!
//! Vocabularies that merge over spaces treat a whole text as one word, and
//! merging a long word is slow. But a pair of characters that no token has side
//! by side is a place where no merge ever crosses, so the text can be cut there
//! without changing the result. With natural text this leaves short pieces.

use std::collections::HashSet;
use std::hash::{BuildHasher, Hasher, RandomState};

use crate::Texts;
use crate::texts::fold;

/// A seeded hash of one integer, for maps whose keys are chosen by a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IntHash(u64);

impl IntHash {
    pub(crate) fn seeded() -> Self {
        Self(RandomState::new().hash_one(0x7e60_1a55_u32))
    }
}

impl BuildHasher for IntHash {
    type Hasher = Self;
    fn build_hasher(&self) -> Self {
        *self
    }
}

impl Hasher for IntHash {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = fold(self.0 ^ u64::from(byte));
        }
    }
    #[inline]
    fn write_u64(&mut self, x: u64) {
        self.0 = fold(self.0 ^ x);
    }
}

/// Pairs of characters that occur side by side in some token.
#[derive(Debug)]
pub(crate) struct Joins {
    /// Bit b of entry a: the ASCII characters a and b.
    ascii: [u128; 128],
    others: HashSet<u64, IntHash>,
}

impl Joins {
    pub(crate) fn new(texts: &Texts) -> Self {
        let mut joins = Self { ascii: [0; 128], others: HashSet::with_hasher(IntHash::seeded()) };
        for text in texts.iter().filter_map(|t| std::str::from_utf8(t).ok()) {
            for (a, b) in text.chars().zip(text.chars().skip(1)) {
                joins.insert(a, b);
            }
        }
        joins
    }

    fn insert(&mut self, a: char, b: char) {
        match self.ascii.get_mut(a as usize) {
            Some(row) if b.is_ascii() => *row |= 1 << (b as u32),
            _ => {
                self.others.insert(key(a, b));
            }
        }
    }

    #[inline]
    fn contains(&self, a: char, b: char) -> bool {
        match self.ascii.get(a as usize) {
            Some(row) if b.is_ascii() => row >> (b as u32) & 1 != 0,
            _ => self.others.contains(&key(a, b)),
        }
    }

    /// Cuts `text` where no token can reach across.
    pub(crate) fn split<'t>(&self, text: &'t str, piece: &mut impl FnMut(&'t str)) {
        let mut start = 0;
        let mut before: Option<char> = None;
        for (at, c) in text.char_indices() {
            if before.is_some_and(|b| !self.contains(b, c)) {
                piece(text.get(start..at).unwrap_or_default());
                start = at;
            }
            before = Some(c);
        }
        if start < text.len() {
            piece(text.get(start..).unwrap_or_default());
        }
    }
}

fn key(a: char, b: char) -> u64 {
    u64::from(a as u32) << 32 | u64::from(b as u32)
}
