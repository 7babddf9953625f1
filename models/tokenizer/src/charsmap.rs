//! The normalisation table of SentencePiece's unigram vocabularies.
//!
//! The blob is a length, a double-array trie of that many bytes, and
//! zero-terminated replacement strings that the trie's values point into. Each
//! trie node is a little-endian u32: the low byte is the label (with bit 31 set
//! in value nodes, which match no byte), bit 8 says that a value follows, bits
//! 10 to 31 are the offset of the children, shifted left by 8 if bit 9 is set.

use crate::TokenizerError;

/// A checked table; empty if the vocabulary has none.
#[derive(Debug, Default)]
pub(crate) struct Charsmap {
    nodes: Vec<u32>,
    replacements: Vec<u8>,
}

impl Charsmap {
    /// Reads the blob.
    pub(crate) fn parse(blob: &[u8]) -> Result<Self, TokenizerError> {
        let bad = |reason| TokenizerError::BadCharsmap { reason };
        if blob.is_empty() {
            return Ok(Self::default());
        }
        let (len, rest) =
            blob.split_first_chunk::<4>().ok_or(bad("it is shorter than its header"))?;
        let (trie, replacements) = rest
            .split_at_checked(u32::from_le_bytes(*len) as usize)
            .ok_or(bad("its trie is longer than the table"))?;
        let (nodes, odd) = trie.as_chunks::<4>();
        if !odd.is_empty() {
            return Err(bad("its trie is not made of 4-byte nodes"));
        }
        if replacements.last() != Some(&0) {
            return Err(bad("its replacement strings are not terminated"));
        }
        let nodes = nodes.iter().map(|n| u32::from_le_bytes(*n)).collect();
        Ok(Self { nodes, replacements: replacements.to_vec() })
    }

    /// The longest mapped prefix of `text`: its length and its replacement.
    pub(crate) fn longest(&self, text: &[u8]) -> Option<(usize, &[u8])> {
        let offset = |node: u32| (node >> 10) << ((node & 1 << 9) >> 6);
        let mut at = offset(*self.nodes.first()?);
        let mut found = None;
        for (i, &byte) in text.iter().enumerate() {
            if byte == 0 {
                break;
            }
            at ^= u32::from(byte);
            let Some(&node) = self.nodes.get(at as usize) else { break };
            if node & (1 << 31 | 0xff) != u32::from(byte) {
                break;
            }
            at ^= offset(node);
            if node >> 8 & 1 == 1
                && let Some(value) = self.nodes.get(at as usize)
            {
                found = Some((i + 1, value & !(1 << 31)));
            }
        }
        let (len, start) = found?;
        let tail = self.replacements.get(start as usize..)?;
        let end = tail.iter().position(|&b| b == 0)?;
        Some((len, tail.get(..end)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_tables_are_refused_and_odd_ones_match_nothing() {
        assert!(Charsmap::parse(b"\x01").is_err());
        assert!(Charsmap::parse(b"\xff\xff\xff\xffabc").is_err());
        assert!(Charsmap::parse(b"\x04\0\0\0abcdx").is_err());
        // A root that points far outside.
        let map = Charsmap::parse(b"\x04\0\0\0\xff\xff\xff\xffx\0").unwrap();
        assert_eq!(map.longest(b"abc"), None);
    }

    #[test]
    fn a_mapped_character_is_replaced() {
        // Root offset 0x100; node 0x100^'a' labelled 'a' with a value at its own offset 1.
        let mut nodes = vec![0u32; 0x200];
        nodes[0] = 0x100 << 10;
        let a = 0x100 ^ usize::from(b'a');
        nodes[a] = u32::from(b'a') | 1 << 8 | 1 << 10;
        nodes[a ^ 1] = 1 << 31 | 2;
        let mut blob = (nodes.len() as u32 * 4).to_le_bytes().to_vec();
        blob.extend(nodes.iter().flat_map(|n| n.to_le_bytes()));
        blob.extend(b"x\0yz\0");
        let map = Charsmap::parse(&blob).unwrap();
        assert_eq!(map.longest(b"ab"), Some((1, &b"yz"[..])));
        assert_eq!(map.longest(b"b"), None);
    }
}
