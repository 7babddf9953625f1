//! Scanners for patterns over general categories.
//!
//! Three families cover most vocabularies: GPT-2's pattern, the one with
//! case-insensitive contractions and an optional leading character
//! ([`leading`], used by Llama 3, Qwen 2 and others) and the one that also
//! follows capitals ([`capitals`], GPT-4o and Tekken). The rest are runs of one class.

use crate::classes::{LETTER, LOWER_LIKE, MARK, NUMBER, PUNCT, SPACE, SYMBOL, UPPER_LIKE, classes};

/// The character at byte `at`, its classes and its length.
#[inline]
fn peek(text: &str, at: usize) -> Option<(char, u16, usize)> {
    let c = text.get(at..)?.chars().next()?;
    Some((c, classes(c), c.len_utf8()))
}

/// End of the run of characters at `at` for which `belongs` holds.
#[inline]
pub(super) fn run(text: &str, at: usize, belongs: impl Fn(char, u16) -> bool) -> usize {
    let Some(rest) = text.get(at..) else { return at };
    let mut end = at;
    for c in rest.chars() {
        if !belongs(c, classes(c)) {
            break;
        }
        end += c.len_utf8();
    }
    end
}

/// End of a run of at most `n_max` characters.
#[inline]
fn run_to(text: &str, at: usize, n_max: usize, belongs: impl Fn(char, u16) -> bool) -> usize {
    let Some(rest) = text.get(at..) else { return at };
    rest.chars()
        .take(n_max)
        .take_while(|&c| belongs(c, classes(c)))
        .fold(at, |end, c| end + c.len_utf8())
}

#[inline]
fn nonempty(end: usize) -> Option<usize> {
    (end > 0).then_some(end)
}

#[inline]
fn is_newline(c: char) -> bool {
    matches!(c, '\r' | '\n')
}

/// `'s|'t|'re|'ve|'m|'ll|'d` at byte `at`.
fn contraction(text: &str, at: usize, any_case: bool) -> Option<usize> {
    let rest = text.as_bytes().get(at..)?;
    let letter = |i: usize| {
        let byte = rest.get(i).copied().unwrap_or(0);
        if any_case { byte.to_ascii_lowercase() } else { byte }
    };
    if rest.first() != Some(&b'\'') {
        return None;
    }
    match (letter(1), letter(2)) {
        (b's' | b't' | b'm' | b'd', _) => Some(at + 2),
        (b'r' | b'v', b'e') | (b'l', b'l') => Some(at + 3),
        _ => None,
    }
}

/// `\s+(?!\S)|\s+`: white space up to the last one before a word.
#[inline]
fn spaces(text: &str) -> Option<usize> {
    let end = run(text, 0, |_, k| k & SPACE != 0);
    if end == text.len() {
        return nonempty(end);
    }
    let last = text.get(..end)?.chars().next_back()?;
    let before = end - last.len_utf8();
    nonempty(if before > 0 { before } else { end })
}

/// `\s*[\r\n]+`: white space up to its last newline.
#[inline]
fn spaces_to_newline(text: &str) -> Option<usize> {
    let end = run(text, 0, |_, k| k & SPACE != 0);
    let at = text.get(..end)?.rfind(is_newline)?;
    Some(at + 1)
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
pub(super) fn gpt2(text: &str) -> Option<usize> {
    if let Some(end) = contraction(text, 0, false) {
        return Some(end);
    }
    let start = usize::from(text.as_bytes().first() == Some(&b' '));
    let (_, k, _) = peek(text, start).unwrap_or((' ', SPACE, 1));
    let end = if k & LETTER != 0 {
        run(text, start, |_, k| k & LETTER != 0)
    } else if k & NUMBER != 0 {
        run(text, start, |_, k| k & NUMBER != 0)
    } else if k & SPACE == 0 {
        run(text, start, |_, k| k & (SPACE | LETTER | NUMBER) == 0)
    } else {
        return spaces(text);
    };
    nonempty(end)
}

/// How members of the Llama 3 family differ.
#[derive(Clone, Copy)]
struct Leading {
    contractions: bool,
    /// Classes of a word's characters.
    word: u16,
    /// At most so many digits.
    n_digits: usize,
    /// Newlines belong to the punctuation before them.
    newlines_join: bool,
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?{word}+|\p{N}{1,n}| ?[^\s{word}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
#[inline]
fn leading(text: &str, how: Leading) -> Option<usize> {
    if how.contractions
        && let Some(end) = contraction(text, 0, true)
    {
        return Some(end);
    }
    let (c, k, len) = peek(text, 0)?;
    if k & how.word != 0 {
        return nonempty(run(text, 0, |_, k| k & how.word != 0));
    }
    if k & NUMBER != 0 {
        return nonempty(run_to(text, 0, how.n_digits, |_, k| k & NUMBER != 0));
    }
    if !is_newline(c) {
        let end = run(text, len, |_, k| k & how.word != 0);
        if end > len {
            return Some(end);
        }
    }
    let start = usize::from(c == ' ');
    let end = run(text, start, |_, k| k & (SPACE | NUMBER | how.word) == 0);
    if end > start {
        return Some(if how.newlines_join { run(text, end, |c, _| is_newline(c)) } else { end });
    }
    spaces_to_newline(text).or_else(|| spaces(text))
}

const LLAMA3: Leading =
    Leading { contractions: true, word: LETTER, n_digits: 3, newlines_join: true };
const QWEN2: Leading = Leading { n_digits: 1, ..LLAMA3 };

/// Words of letters, numbers of at most three digits.
pub(super) fn llama3(text: &str) -> Option<usize> {
    leading(text, LLAMA3)
}

/// As Llama 3, single digits.
pub(super) fn qwen2(text: &str) -> Option<usize> {
    leading(text, QWEN2)
}

/// As Qwen 2, combining marks belong to words.
pub(super) fn qwen35(text: &str) -> Option<usize> {
    leading(text, Leading { word: LETTER | MARK, ..QWEN2 })
}

/// As Qwen 2 without English contractions.
pub(super) fn ufakzeka(text: &str) -> Option<usize> {
    leading(text, Leading { contractions: false, ..QWEN2 })
}

/// As Llama 3, numbers of any length.
pub(super) fn minicpm5(text: &str) -> Option<usize> {
    leading(text, Leading { n_digits: usize::MAX, ..LLAMA3 })
}

/// As Qwen 2, newlines are apart from punctuation.
pub(super) fn seed_coder(text: &str) -> Option<usize> {
    leading(text, Leading { newlines_join: false, ..QWEN2 })
}

/// As Qwen 2; its `\s*[\r\n]` ends at the last newline just as `\s*[\r\n]+` does.
pub(super) fn bailingmoe(text: &str) -> Option<usize> {
    leading(text, QWEN2)
}

/// End of `U*L+` at `at`, where the classes U and L share characters; `None` without a match.
fn upper_lower(text: &str, at: usize) -> Option<usize> {
    let upper_end = run(text, at, |_, k| k & UPPER_LIKE != 0);
    let end = run(text, upper_end, |_, k| k & LOWER_LIKE != 0);
    if end > upper_end {
        return Some(end);
    }
    // The capitals give back characters until one of them can be the `L+`.
    let given = text.get(at..upper_end)?;
    given
        .char_indices()
        .rev()
        .find(|&(_, c)| classes(c) & LOWER_LIKE != 0)
        .map(|(i, c)| at + i + c.len_utf8())
}

/// End of `U+L*` at `at`.
fn uppers_lower(text: &str, at: usize) -> Option<usize> {
    let upper_end = run(text, at, |_, k| k & UPPER_LIKE != 0);
    (upper_end > at).then(|| run(text, upper_end, |_, k| k & LOWER_LIKE != 0))
}

/// `[^\r\n\p{L}\p{N}]?U*L+(?i:'s|…)?|[^\r\n\p{L}\p{N}]?U+L*(?i:'s|…)?|\p{N}{1,n}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`
/// where U = `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]` and L = `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`.
#[inline]
fn capitals(text: &str, contractions: bool, n_digits: usize) -> Option<usize> {
    let (c, k, len) = peek(text, 0)?;
    let lead = if is_newline(c) || k & (LETTER | NUMBER) != 0 { 0 } else { len };
    // The optional leading character is tried first; a mark may also be part of the word itself.
    let word = [upper_lower as fn(&str, usize) -> Option<usize>, uppers_lower]
        .iter()
        .find_map(|part| part(text, lead).or_else(|| part(text, 0)));
    if let Some(end) = word {
        let tail = if contractions { contraction(text, end, true) } else { None };
        return Some(tail.unwrap_or(end));
    }
    if k & NUMBER != 0 {
        return nonempty(run_to(text, 0, n_digits, |_, k| k & NUMBER != 0));
    }
    let start = usize::from(c == ' ');
    let end = run(text, start, |_, k| k & (SPACE | LETTER | NUMBER) == 0);
    if end > start {
        return Some(run(text, end, |c, _| is_newline(c) || c == '/'));
    }
    spaces_to_newline(text).or_else(|| spaces(text))
}

/// Capitals, contractions stay with their word, three digits.
pub(super) fn gpt4o(text: &str) -> Option<usize> {
    capitals(text, true, 3)
}

/// Capitals, no contractions, single digits.
pub(super) fn tekken(text: &str) -> Option<usize> {
    capitals(text, false, 1)
}

/// `[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
pub(super) fn deepseek3(text: &str) -> Option<usize> {
    let (c, k, len) = peek(text, 0)?;
    let word = |_: char, k: u16| k & (LETTER | MARK) != 0;
    if c.is_ascii_punctuation() {
        let end = run(text, 1, |c, _| c.is_ascii_alphabetic());
        if end > 1 {
            return Some(end);
        }
    }
    if k & LETTER != 0 {
        return nonempty(run(text, 0, word));
    }
    if !is_newline(c) && k & (PUNCT | SYMBOL) == 0 {
        let end = run(text, len, word);
        if end > len || k & MARK != 0 {
            return Some(end);
        }
    }
    let start = usize::from(c == ' ');
    let end = run(text, start, |_, k| k & (PUNCT | SYMBOL) != 0);
    if end > start {
        return Some(run(text, end, |c, _| is_newline(c)));
    }
    spaces_to_newline(text).or_else(|| spaces(text))
}

/// `\p{N}`
pub(super) fn number(text: &str) -> Option<usize> {
    nonempty(run_to(text, 0, 1, |_, k| k & NUMBER != 0))
}

/// `\p{N}+`
pub(super) fn numbers(text: &str) -> Option<usize> {
    nonempty(run(text, 0, |_, k| k & NUMBER != 0))
}

/// `\p{N}{1,3}`
pub(super) fn numbers_to_3(text: &str) -> Option<usize> {
    nonempty(run_to(text, 0, 3, |_, k| k & NUMBER != 0))
}

/// `[0-9][0-9][0-9]`
pub(super) fn three_digits(text: &str) -> Option<usize> {
    (run_to(text, 0, 3, |c, _| c.is_ascii_digit()) == 3).then_some(3)
}

/// `[\p{P}$+<=>^~|]+`
pub(super) fn ascii_punct_run(text: &str) -> Option<usize> {
    let extra = |c: char| matches!(c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|');
    nonempty(run(text, 0, |c, k| k & PUNCT != 0 || extra(c)))
}

/// ``[\p{P}$+<=>^~|`]+``
pub(super) fn ascii_punct_run_backtick(text: &str) -> Option<usize> {
    let extra = |c: char| matches!(c, '$' | '+' | '<' | '=' | '>' | '^' | '~' | '|' | '`');
    nonempty(run(text, 0, |c, k| k & PUNCT != 0 || extra(c)))
}

/// `[\r\n]`
pub(super) fn newline(text: &str) -> Option<usize> {
    text.starts_with(is_newline).then_some(1)
}

/// `[^\n]+|\n+`
pub(super) fn newline_runs(text: &str) -> Option<usize> {
    let inside = text.starts_with('\n');
    nonempty(text.find(|c| (c == '\n') != inside).unwrap_or(text.len()))
}

/// `\s+$`
pub(super) fn trailing_space(text: &str) -> Option<usize> {
    let end = run(text, 0, |_, k| k & SPACE != 0);
    if end == text.len() { nonempty(end) } else { None }
}

/// `\s?{class}+`
#[inline]
pub(super) fn space_then(text: &str, belongs: impl Fn(char, u16) -> bool) -> Option<usize> {
    let (_, k, len) = peek(text, 0)?;
    if k & SPACE != 0 {
        let end = run(text, len, &belongs);
        if end > len {
            return Some(end);
        }
    }
    nonempty(run(text, 0, belongs))
}

/// `\s?\p{L}+`
pub(super) fn space_letters(text: &str) -> Option<usize> {
    space_then(text, |_, k| k & LETTER != 0)
}

/// `\s?\p{P}+`
pub(super) fn space_puncts(text: &str) -> Option<usize> {
    space_then(text, |_, k| k & PUNCT != 0)
}
