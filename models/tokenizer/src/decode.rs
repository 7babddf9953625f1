//! From token ids back to text.
//!
//! A token is bytes, not text: characters may be spread over several tokens.
//! Whole sequences decode to bytes; [`Detokenizer`] decodes a running
//! generation and never shows half a character.

use std::ops::Deref;

use crate::special::TokenAttr;
use crate::{Texts, TokenId, Tokenizer, TokenizerError, bytes};

/// The bytes of every token, for rendering with special tokens shown.
pub(crate) fn pieces(texts: &Texts, attrs: &[TokenAttr], byte_level: bool) -> Texts {
    let verbatim = TokenAttr::UNKNOWN.with(TokenAttr::CONTROL).with(TokenAttr::USER_DEFINED);
    let mut pieces = Texts::with_capacity(texts.len(), 8 * texts.len());
    for (text, attr) in texts.iter().zip(attrs) {
        if attr.has(verbatim) {
            pieces.push(text);
        } else if attr.has(TokenAttr::NORMAL) {
            pieces.push(&if byte_level { from_byte_level(text) } else { from_escaped(text) });
        } else if attr.has(TokenAttr::BYTE) {
            match bytes::byte_token_value(text) {
                Some(byte) => pieces.push(&[byte]),
                None => pieces.push(text),
            }
        } else {
            pieces.push(b"");
        }
    }
    pieces
}

/// Characters that stand for no byte stay as they are: some vocabularies have plain text among byte-level tokens.
fn from_byte_level(text: &[u8]) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(text) else { return text.to_vec() };
    let mut out = Vec::with_capacity(text.len());
    for c in text.chars() {
        match bytes::byte_of(c) {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    out
}

/// `▁` is a space.
fn from_escaped(text: &[u8]) -> Vec<u8> {
    const SPACE: &[u8] = "▁".as_bytes();
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, tail)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(SPACE) {
            out.push(b' ');
            rest = after;
        } else {
            out.push(first);
            rest = tail;
        }
    }
    out
}

impl Tokenizer {
    /// The bytes of a token. Control and unknown tokens are empty unless `special` is set.
    ///
    /// # Errors
    /// [`TokenizerError::TokenOutOfRange`]
    pub fn token_to_piece(&self, id: TokenId, special: bool) -> Result<&[u8], TokenizerError> {
        let out_of_range = TokenizerError::TokenOutOfRange { id, n_vocab: self.n_vocab() };
        let (Some(attr), Some(piece)) = (self.attr(id), self.pieces.get(id as usize)) else {
            return Err(out_of_range);
        };
        let hidden = attr.has(TokenAttr::CONTROL.with(TokenAttr::UNKNOWN)) && !special;
        Ok(if hidden { b"" } else { piece })
    }

    /// The bytes of a whole sequence, which need not be UTF-8.
    ///
    /// `remove_special` drops the BOS and EOS that encoding added; `unparse_special` shows control
    /// tokens as text. A space that encoding put in front is removed, and so are spaces before
    /// punctuation where the vocabulary's own decoder does that.
    ///
    /// # Errors
    /// [`TokenizerError::TokenOutOfRange`]
    pub fn detokenize(
        &self,
        ids: &[TokenId],
        remove_special: bool,
        unparse_special: bool,
    ) -> Result<Vec<u8>, TokenizerError> {
        let mut ids = ids;
        let mut strip_space = self.add_space_prefix;
        if remove_special && self.add_bos && ids.first().copied() == self.ids.bos && !ids.is_empty()
        {
            ids = ids.get(1..).unwrap_or_default();
            strip_space = false;
        }
        if remove_special && self.add_eos && ids.last().copied() == self.ids.eos && !ids.is_empty()
        {
            ids = ids.get(..ids.len() - 1).unwrap_or_default();
        }
        let mut out = Vec::with_capacity(4 * ids.len());
        for &id in ids {
            let piece = self.token_to_piece(id, unparse_special)?;
            let stripped = if strip_space { piece.strip_prefix(b" ") } else { None };
            out.extend_from_slice(stripped.unwrap_or(piece));
            strip_space = false;
        }
        if self.clean_spaces {
            clean_spaces(&mut out);
        }
        Ok(out)
    }
}

/// Undoes the spaces that word-splitting tokenizers leave, in three passes over
/// the result of the one before: the space of ` ?`, ` !`, ` .` and ` ,`; both
/// spaces of ` ' `; the space of ` 's`, ` 'm`, ` 're` and ` 've`.
fn clean_spaces(text: &mut Vec<u8>) {
    drop_spaces(text, |before, at| {
        (before == b' ' && matches!(at.first(), Some(b'?' | b'!' | b'.' | b','))).then_some(0)
    });
    drop_spaces(text, |before, at| (before == b' ' && at.starts_with(b"' ")).then_some(1));
    drop_spaces(text, |before, at| {
        let contraction =
            [&b"'s"[..], b"'m", b"'re", b"'ve"].iter().any(|short| at.starts_with(short));
        (before == b' ' && contraction).then_some(0)
    });
}

/// Where `rule` (byte before, text from here) gives n, drops the byte before and n bytes after this one.
fn drop_spaces(text: &mut Vec<u8>, rule: impl Fn(u8, &[u8]) -> Option<usize>) {
    let mut out: Vec<u8> = Vec::with_capacity(text.len());
    let mut before = None;
    let mut rest = text.as_slice();
    while let Some((&byte, tail)) = rest.split_first() {
        let dropped = before.and_then(|b| rule(b, rest));
        if dropped.is_some() {
            out.pop();
        }
        out.push(byte);
        // What follows sees the byte as it stood in the text, or a mark that no rule takes for a space.
        before = Some(if dropped.is_some_and(|n| n > 0) { 0 } else { byte });
        rest = tail.get(dropped.unwrap_or(0)..).unwrap_or_default();
    }
    *text = out;
}

/// Decodes a running generation piece by piece.
///
/// `T` is a reference to the tokenizer: `&Tokenizer` or `Arc<Tokenizer>`. The text of all calls
/// together is the text of all tokens, with bytes that are no UTF-8 replaced by U+FFFD. Spaces are
/// never cleaned up, since that needs text that is not there yet.
#[derive(Debug, Clone)]
pub struct Detokenizer<T> {
    tokenizer: T,
    special: bool,
    strip_space: bool,
    /// The beginning of a character, at most 3 bytes.
    pending: Vec<u8>,
    text: String,
}

impl<T: Deref<Target = Tokenizer>> Detokenizer<T> {
    /// For a generation that continues a prompt: a leading space is part of it.
    /// `special` shows control tokens as text.
    pub fn new(tokenizer: T, special: bool) -> Self {
        Self { tokenizer, special, strip_space: false, pending: Vec::new(), text: String::new() }
    }

    /// For a whole text: the space that encoding puts in front is removed again.
    pub fn at_text_start(tokenizer: T, special: bool) -> Self {
        let strip_space = tokenizer.add_space_prefix;
        Self { strip_space, ..Self::new(tokenizer, special) }
    }

    /// Takes a token and gives the text that is complete with it, possibly none.
    ///
    /// # Errors
    /// [`TokenizerError::TokenOutOfRange`]; the state is unchanged then.
    pub fn push(&mut self, id: TokenId) -> Result<&str, TokenizerError> {
        let piece = self.tokenizer.token_to_piece(id, self.special)?;
        let stripped = if self.strip_space { piece.strip_prefix(b" ") } else { None };
        self.strip_space &= piece.is_empty();
        self.pending.extend_from_slice(stripped.unwrap_or(piece));
        self.text.clear();
        let n_held = emit_complete(&self.pending, &mut self.text);
        self.pending.drain(..self.pending.len() - n_held);
        Ok(&self.text)
    }

    /// The end: bytes of an unfinished character come out as U+FFFD.
    pub fn finish(mut self) -> String {
        self.text.clear();
        self.text.push_str(&String::from_utf8_lossy(&self.pending));
        self.text
    }
}

/// Appends all whole characters; returns how many bytes at the end may still become one.
fn emit_complete(bytes: &[u8], text: &mut String) -> usize {
    let mut rest = bytes;
    loop {
        match std::str::from_utf8(rest) {
            Ok(valid) => {
                text.push_str(valid);
                return 0;
            }
            Err(error) => {
                let (valid, after) =
                    rest.split_at_checked(error.valid_up_to()).unwrap_or((rest, b""));
                text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                let Some(n_bad) = error.error_len() else { return after.len() };
                text.push('\u{fffd}');
                rest = after.get(n_bad..).unwrap_or_default();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spaces_before_punctuation_go_as_in_the_reference_decoder() {
        for (text, want) in [
            ("Hello , world !", "Hello, world!"),
            ("a ' b", "a'b"),
            ("it 's we 're I 'm they 've", "it's we're I'm they've"),
            ("don 't he 'll I 'd", "don 't he 'll I 'd"),
            (" ?", "?"),
            ("", ""),
            ("a  .", "a ."),
            ("a . . b", "a.. b"),
        ] {
            let mut bytes = text.as_bytes().to_vec();
            clean_spaces(&mut bytes);
            assert_eq!(String::from_utf8(bytes).unwrap(), want, "{text:?}");
        }
    }

    #[test]
    fn half_a_character_is_held_back_and_garbage_is_not() {
        let mut text = String::new();
        assert_eq!(emit_complete(b"a\xe4\xb8", &mut text), 2);
        assert_eq!(emit_complete(b"\xff\xe4x", &mut text), 0);
        assert_eq!(text, "a\u{fffd}\u{fffd}x");
    }
}
