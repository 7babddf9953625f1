//! Merging of neighbouring symbols, best pair first.
//!
//! Byte-pair encoding and SentencePiece's BPE differ only in how a pair is
//! rated: by its rank in a list of merges, or by the score of the merged text.
//! Both rate by a [`PairRule`]; lower is better, the leftmost pair wins a tie.
//!
//! Words are short, so the usual way is to scan all pairs for the best one:
//! no allocation, one cache line. Its cost is quadratic, so words of more than
//! [`SCAN_MAX`] symbols take a heap over a linked list instead, which is
//! `O(n log n)`. Both give the same result (a test compares them).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::TokenId;
use crate::cache::WordCache;

/// Above this many symbols a heap is used.
const SCAN_MAX: usize = 48;
/// The rating of a pair that never merges.
pub(crate) const NEVER: u32 = u32::MAX;
/// The id of a symbol that is no token by itself.
pub(crate) const NO_TOKEN: TokenId = TokenId::MAX;

/// A run of the word's bytes, and its token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Symbol {
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// [`NO_TOKEN`] if the bytes are no token.
    pub(crate) id: TokenId,
}

/// Rates pairs of neighbours.
pub(crate) trait PairRule {
    /// The rating (lower first, [`NEVER`] = not at all) and the merged token.
    fn rate(&self, left: Symbol, right: Symbol) -> (u32, TokenId);
}

/// A symbol and the rating of merging it with its right neighbour.
#[derive(Debug, Clone, Copy)]
struct Rated {
    symbol: Symbol,
    rating: u32,
    merged: TokenId,
}

/// Rating, left and right symbol, end of the right one, merged token.
type Pair = (u32, usize, usize, usize, TokenId);

/// Buffers reused from word to word.
#[derive(Debug, Default)]
pub(crate) struct Merger {
    /// In: the symbols of a word. Out: what is left after merging.
    pub(crate) symbols: Vec<Symbol>,
    rated: Vec<Rated>,
    links: Vec<(usize, usize)>,
    heap: BinaryHeap<Reverse<Pair>>,
    pub(crate) cache: WordCache,
}

impl Merger {
    /// Merges `self.symbols` in place until no pair is left.
    pub(crate) fn merge(&mut self, rule: &impl PairRule) {
        match self.symbols.len() {
            0 | 1 => {}
            2..=SCAN_MAX => self.merge_scanning(rule),
            _ => self.merge_by_heap(rule),
        }
    }

    fn merge_scanning(&mut self, rule: &impl PairRule) {
        let rated = &mut self.rated;
        rated.clear();
        for (i, &symbol) in self.symbols.iter().enumerate() {
            let (rating, merged) = match self.symbols.get(i + 1) {
                Some(&next) => rule.rate(symbol, next),
                None => (NEVER, NO_TOKEN),
            };
            rated.push(Rated { symbol, rating, merged });
        }
        while let Some((at, best)) = best_pair(rated) {
            let end = rated.get(at + 1).map_or(best.symbol.end, |right| right.symbol.end);
            let symbol = Symbol { end, id: best.merged, ..best.symbol };
            rated.remove(at + 1);
            rerate(rated, at, symbol, rule);
            if let Some(before) = at.checked_sub(1)
                && let Some(left) = rated.get(before).map(|r| r.symbol)
            {
                rerate(rated, before, left, rule);
            }
        }
        self.symbols.clear();
        self.symbols.extend(rated.iter().map(|r| r.symbol));
    }

    fn merge_by_heap(&mut self, rule: &impl PairRule) {
        let n = self.symbols.len();
        self.heap.clear();
        self.links.clear();
        self.links.extend((0..n).map(|i| (i.wrapping_sub(1), i + 1)));
        for left in 0..n {
            self.push_pair(left, left + 1, rule);
        }
        while let Some(Reverse((_, left, right, end, merged))) = self.heap.pop() {
            if !self.is_current(left, right, end) {
                continue;
            }
            let before = self.links.get(left).map_or(usize::MAX, |l| l.0);
            let after = self.links.get(right).map_or(n, |l| l.1);
            if let Some(symbol) = self.symbols.get_mut(left) {
                symbol.end = end;
                symbol.id = merged;
            }
            if let Some(dead) = self.symbols.get_mut(right) {
                dead.end = dead.start;
            }
            if let Some(link) = self.links.get_mut(left) {
                link.1 = after;
            }
            if let Some(link) = self.links.get_mut(after) {
                link.0 = left;
            }
            self.push_pair(before, left, rule);
            self.push_pair(left, after, rule);
        }
        self.symbols.retain(|s| s.start < s.end);
    }

    /// Whether neither side changed since the pair was pushed: symbols only
    /// grow or die, so equal bounds mean equal symbols.
    fn is_current(&self, left: usize, right: usize, end: usize) -> bool {
        match (self.symbols.get(left), self.symbols.get(right)) {
            (Some(l), Some(r)) => {
                l.start < l.end && r.start < r.end && l.end == r.start && r.end == end
            }
            _ => false,
        }
    }

    fn push_pair(&mut self, left: usize, right: usize, rule: &impl PairRule) {
        let (Some(&l), Some(&r)) = (self.symbols.get(left), self.symbols.get(right)) else {
            return;
        };
        let (rating, merged) = rule.rate(l, r);
        if rating != NEVER {
            self.heap.push(Reverse((rating, left, right, r.end, merged)));
        }
    }
}

/// The leftmost pair of the lowest rating.
#[inline]
fn best_pair(rated: &[Rated]) -> Option<(usize, Rated)> {
    let mut best: Option<(usize, Rated)> = None;
    let mut lowest = NEVER;
    for (i, r) in rated.iter().enumerate() {
        if r.rating < lowest {
            lowest = r.rating;
            best = Some((i, *r));
        }
    }
    best
}

#[inline]
fn rerate(rated: &mut [Rated], at: usize, symbol: Symbol, rule: &impl PairRule) {
    let (rating, merged) = match rated.get(at + 1) {
        Some(next) => rule.rate(symbol, next.symbol),
        None => (NEVER, NO_TOKEN),
    };
    if let Some(slot) = rated.get_mut(at) {
        *slot = Rated { symbol, rating, merged };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Merges pairs whose sum is listed; the position in the list is the rank.
    struct Sums(Vec<u32>);

    impl PairRule for Sums {
        fn rate(&self, left: Symbol, right: Symbol) -> (u32, TokenId) {
            let sum = left.id + right.id;
            self.0.iter().position(|&s| s == sum).map_or((NEVER, NO_TOKEN), |r| (r as u32, sum))
        }
    }

    proptest! {
        /// A long word must not be tokenized differently from a short one.
        #[test]
        fn heap_and_scan_agree(
            ids in prop::collection::vec(1u32..4, 2..80),
            sums in prop::collection::vec(2u32..12, 0..8),
        ) {
            let symbols: Vec<_> = ids.iter().enumerate()
                .map(|(i, &id)| Symbol { start: i, end: i + 1, id }).collect();
            let rule = Sums(sums);
            let mut scanning = Merger { symbols: symbols.clone(), ..Merger::default() };
            scanning.merge_scanning(&rule);
            let mut heap = Merger { symbols, ..Merger::default() };
            heap.merge_by_heap(&rule);
            prop_assert_eq!(scanning.symbols, heap.symbols);
        }
    }
}
