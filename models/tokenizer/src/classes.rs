//! Classes of characters that pre-tokenizers tell apart.
//!
//! The general categories come from the tables of `regex-syntax`, spread once
//! per process into a two-level table, so that one look-up answers all
//! questions about a character.

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// `\p{L}`
pub(crate) const LETTER: u16 = 1;
/// `\p{N}`
pub(crate) const NUMBER: u16 = 2;
/// `\p{P}`
pub(crate) const PUNCT: u16 = 4;
/// `\p{M}`
pub(crate) const MARK: u16 = 8;
/// `\p{S}`
pub(crate) const SYMBOL: u16 = 16;
/// `\s`, the White_Space property
pub(crate) const SPACE: u16 = 32;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`
pub(crate) const UPPER_LIKE: u16 = 64;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`
pub(crate) const LOWER_LIKE: u16 = 128;
/// `\p{C}` without unassigned and surrogate code points
pub(crate) const CONTROL: u16 = 256;
/// `\p{Mn}`
pub(crate) const MARK_NONSPACING: u16 = 512;

const PAGE: usize = 256;

struct Table {
    pages: Vec<[u16; PAGE]>,
    page_of: Vec<u16>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| {
    let mut flat = vec![0u16; 0x11_0000];
    for (pattern, flag) in [
        (r"\p{L}", LETTER),
        (r"\p{N}", NUMBER),
        (r"\p{P}", PUNCT),
        (r"\p{M}", MARK),
        (r"\p{S}", SYMBOL),
        (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", UPPER_LIKE),
        (r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", LOWER_LIKE),
        (r"[\p{Cc}\p{Cf}\p{Co}]", CONTROL),
        (r"\p{Mn}", MARK_NONSPACING),
    ] {
        for (first, last) in class_ranges(pattern) {
            for flags in flat.get_mut(first as usize..=last as usize).unwrap_or_default() {
                *flags |= flag;
            }
        }
    }
    for (cp, flags) in flat.iter_mut().enumerate() {
        if char::from_u32(cp as u32).is_some_and(char::is_whitespace) {
            *flags |= SPACE;
        }
    }
    compress(&flat)
});

/// Shares equal pages.
fn compress(flat: &[u16]) -> Table {
    let mut table = Table { pages: Vec::new(), page_of: Vec::new() };
    let (pages, _) = flat.as_chunks::<PAGE>();
    for page in pages {
        let known = table.pages.iter().position(|p| p == page);
        let index = known.unwrap_or_else(|| {
            table.pages.push(*page);
            table.pages.len() - 1
        });
        table.page_of.push(index as u16);
    }
    table
}

/// The ranges of a character class such as `\p{L}` or `[a-zα-ω]`; empty if it is not one.
pub(crate) fn class_ranges(pattern: &str) -> Vec<(char, char)> {
    let Ok(hir) = regex_syntax::parse(pattern) else { return Vec::new() };
    match hir.kind() {
        HirKind::Class(Class::Unicode(class)) => {
            class.iter().map(|range| (range.start(), range.end())).collect()
        }
        _ => Vec::new(),
    }
}

/// All class flags of a character.
#[inline]
pub(crate) fn classes(c: char) -> u16 {
    let table = &*TABLE;
    let page = table.page_of.get(c as usize / PAGE).copied().unwrap_or(0);
    table.pages.get(usize::from(page)).and_then(|p| p.get(c as usize % PAGE)).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_have_their_general_category() {
        for (c, want) in [
            ('a', LETTER | LOWER_LIKE),
            ('Z', LETTER | UPPER_LIKE),
            ('中', LETTER | UPPER_LIKE | LOWER_LIKE),
            ('7', NUMBER),
            ('Ⅷ', NUMBER),
            ('!', PUNCT),
            ('+', SYMBOL),
            ('\u{301}', MARK | MARK_NONSPACING | UPPER_LIKE | LOWER_LIKE),
            ('\u{3000}', SPACE),
            ('\n', SPACE | CONTROL),
            ('\u{10ffff}', 0),
        ] {
            assert_eq!(classes(c), want, "{c:?}");
        }
    }
}
