//! Cutting a text at its special tokens.
//!
//! Longer special tokens win over shorter ones anywhere in the text, equal
//! lengths by the lower id, and within one token the leftmost occurrence. One
//! pass of an Aho-Corasick automaton finds all occurrences, however many
//! special tokens there are (Gemma has thousands); they are then claimed in
//! that order.

use aho_corasick::{AhoCorasick, MatchKind};

use crate::special::{PARSED, PARSED_ON_REQUEST, TokenAttr};
use crate::{Texts, TokenId, TokenizerError};

/// A part of a text: to be encoded, or a token already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fragment<'t> {
    Text(&'t str),
    Token(TokenId),
}

/// Finds the special tokens of one kind of request.
#[derive(Debug)]
struct Finder {
    automaton: AhoCorasick,
    /// The token of each pattern.
    ids: Vec<TokenId>,
}

/// Finds special tokens in texts.
#[derive(Debug)]
pub(crate) struct Partition {
    /// User-defined tokens, found in every text.
    always: Option<Finder>,
    /// All special tokens.
    all: Option<Finder>,
}

/// A claimed stretch of the text; white space the token strips is included.
struct Claim {
    start: usize,
    end: usize,
    id: TokenId,
}

impl Partition {
    pub(crate) fn new(texts: &Texts, attrs: &[TokenAttr]) -> Result<Self, TokenizerError> {
        let pick = |on_request: bool| -> Vec<TokenId> {
            let wanted = |a: &TokenAttr| a.has(PARSED) && (on_request || !a.has(PARSED_ON_REQUEST));
            let ids = attrs.iter().enumerate().filter(|(_, a)| wanted(a));
            // Half a character cannot be cut out of a text, so such tokens are never found.
            ids.map(|(i, _)| i as TokenId)
                .filter(|&id| !texts.of(id).is_empty() && std::str::from_utf8(texts.of(id)).is_ok())
                .collect()
        };
        Ok(Self { always: Finder::new(texts, pick(false))?, all: Finder::new(texts, pick(true))? })
    }

    /// The fragments of `text` in order.
    pub(crate) fn split<'t>(
        &self,
        text: &'t str,
        attrs: &[TokenAttr],
        parse_special: bool,
        fragment: &mut impl FnMut(Fragment<'t>),
    ) {
        let finder = if parse_special { &self.all } else { &self.always };
        let claims = finder.as_ref().map(|f| f.claims(text, attrs)).unwrap_or_default();
        let mut at = 0;
        for claim in claims {
            if let Some(before) = text.get(at..claim.start).filter(|t| !t.is_empty()) {
                fragment(Fragment::Text(before));
            }
            fragment(Fragment::Token(claim.id));
            at = claim.end;
        }
        if let Some(rest) = text.get(at..).filter(|t| !t.is_empty()) {
            fragment(Fragment::Text(rest));
        }
    }
}

impl Finder {
    fn new(texts: &Texts, ids: Vec<TokenId>) -> Result<Option<Self>, TokenizerError> {
        if ids.is_empty() {
            return Ok(None);
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::Standard)
            .build(ids.iter().map(|&id| texts.of(id)))
            .map_err(|e| TokenizerError::SpecialTokens { reason: e.to_string() })?;
        Ok(Some(Self { automaton, ids }))
    }

    /// The claimed stretches, in the order of the text.
    fn claims(&self, text: &str, attrs: &[TokenAttr]) -> Vec<Claim> {
        let mut found: Vec<(usize, TokenId, usize)> = self
            .automaton
            .find_overlapping_iter(text)
            .filter_map(|m| Some((m.len(), *self.ids.get(m.pattern().as_usize())?, m.start())))
            .collect();
        if found.is_empty() {
            return Vec::new();
        }
        found.sort_unstable_by_key(|&(len, id, start)| (std::cmp::Reverse(len), id, start));
        let mut taken = vec![false; text.len()];
        let mut claims = Vec::new();
        for (len, id, start) in found {
            let end = start + len;
            if taken.get(start..end).is_none_or(|t| t.contains(&true)) {
                continue;
            }
            let attr = attrs.get(id as usize).copied().unwrap_or(TokenAttr::UNDEFINED);
            let (start, end) = strip(text.as_bytes(), &taken, start, end, attr);
            if let Some(stretch) = taken.get_mut(start..end) {
                stretch.fill(true);
            }
            claims.push(Claim { start, end, id });
        }
        claims.sort_unstable_by_key(|claim| claim.start);
        claims
    }
}

/// Widens a match over the free white space that its token strips.
fn strip(text: &[u8], taken: &[bool], start: usize, end: usize, attr: TokenAttr) -> (usize, usize) {
    // The white space of C's `isspace`.
    let is_space = |b: u8| matches!(b, b' ' | b'\t'..=b'\r');
    let free = |i: usize| {
        text.get(i).copied().is_some_and(is_space) && taken.get(i).is_some_and(|taken| !taken)
    };
    let (mut start, mut end) = (start, end);
    if attr.has(TokenAttr::LSTRIP) {
        while start.checked_sub(1).is_some_and(free) {
            start -= 1;
        }
    }
    if attr.has(TokenAttr::RSTRIP) {
        while free(end) {
            end += 1;
        }
    }
    (start, end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, parse_special: bool, want: &[Fragment<'_>]) {
        let texts: Texts = ["<s>", "<s><s>", "ab", "bcd", "<r>"].into_iter().collect();
        let user = TokenAttr::USER_DEFINED;
        let control = TokenAttr::CONTROL;
        let attrs = [control, control, user, user, control.with(TokenAttr::RSTRIP)];
        let mut got = Vec::new();
        let partition = Partition::new(&texts, &attrs).unwrap();
        partition.split(text, &attrs, parse_special, &mut |f| got.push(f));
        assert_eq!(got, want, "{text:?}");
    }

    #[test]
    fn longest_special_token_wins_and_control_text_stays_text_unless_asked() {
        use Fragment::{Text, Token};
        check("", true, &[]);
        check("x<s>y", false, &[Text("x<s>y")]);
        check("x<s>y", true, &[Text("x"), Token(0), Text("y")]);
        check("<s><s><s>", true, &[Token(1), Token(0)]);
        check("abcd", false, &[Text("a"), Token(3)]);
        check("<r> \n x ", true, &[Token(4), Text("x ")]);
    }
}
