//! Rust source as its three layers: code, comments and the text of literals.
//!
//! The rules of `tidy` speak of one layer each ("`unsafe` in code", "a backend's name in code or text"), so a plain
//! search would find too much. Everything here keeps the length and the lines of what it is given: what is left out
//! becomes spaces, and a finding in the result has the same line number in the file.

use std::ops::Range;

/// Which layer a byte of the source belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Layer {
    Code,
    Comment,
    /// Between the quotes of a string or character literal; the quotes are code.
    Text,
}

/// The source without comments and without the text of literals.
pub(crate) fn code(source: &str) -> String {
    keep(source, |layer| layer == Layer::Code)
}

/// The source without comments.
pub(crate) fn code_and_text(source: &str) -> String {
    keep(source, |layer| layer != Layer::Comment)
}

/// `text`, which is as long as `source`, without the items of `source` that exist in tests only.
pub(crate) fn without_tests(source: &str, text: &str) -> String {
    let code = code(source);
    let mut out = text.as_bytes().to_vec();
    let mut from = 0;
    while let Some(item) = code.get(from..).and_then(next_test_item) {
        let item = from + item.start..from + item.end;
        blank(&mut out, item.clone());
        from = item.end;
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// From `#[cfg(test)]` to the end of the item that it stands before.
fn next_test_item(code: &str) -> Option<Range<usize>> {
    let marks = ["#[cfg(test)]", "#[cfg(all(test"];
    let start = marks.iter().filter_map(|mark| code.find(mark)).min()?;
    let mut depth = 0usize;
    for (at, byte) in code.bytes().enumerate().skip(start) {
        match byte {
            b'{' => depth += 1,
            b'}' if depth <= 1 => return Some(start..at + 1),
            b'}' => depth -= 1,
            b';' if depth == 0 => return Some(start..at + 1),
            _ => {}
        }
    }
    Some(start..code.len())
}

fn keep(source: &str, is_kept: impl Fn(Layer) -> bool) -> String {
    let mut out = source.as_bytes().to_vec();
    for (range, layer) in layers(source) {
        if !is_kept(layer) {
            blank(&mut out, range);
        }
    }
    // Whole characters are blanked, so this is UTF-8 still.
    String::from_utf8_lossy(&out).into_owned()
}

fn blank(bytes: &mut [u8], range: Range<usize>) {
    for byte in bytes.get_mut(range).unwrap_or_default() {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

/// Cuts the source into runs of one layer. Unfinished literals and comments reach to the end of the file.
fn layers(source: &str) -> Vec<(Range<usize>, Layer)> {
    let mut runs = Vec::new();
    let mut at = 0;
    while at < source.len() {
        let rest = source.get(at..).unwrap_or_default();
        let (layer, len) =
            next_run(rest, source.get(..at).and_then(|before| before.chars().next_back()));
        if let Layer::Text = layer {
            // The quotes around stay code; an unfinished literal has no closing one.
            let (open, close) = quotes(rest, len);
            runs.push((at + open..at + len - close, Layer::Text));
        } else {
            runs.push((at..at + len, layer));
        }
        at += len;
    }
    runs
}

/// The layer and length in bytes of what `rest` begins with; `before` is the character in front of it.
fn next_run(rest: &str, before: Option<char>) -> (Layer, usize) {
    let first = rest.chars().next().map_or(1, char::len_utf8);
    if rest.starts_with("//") {
        return (Layer::Comment, rest.find('\n').unwrap_or(rest.len()));
    }
    if rest.starts_with("/*") {
        return (Layer::Comment, nested_comment(rest));
    }
    if rest.starts_with('"') {
        return (Layer::Text, quoted(rest, '"'));
    }
    if let Some(len) = char_literal(rest) {
        return (Layer::Text, len);
    }
    let is_in_word = before.is_some_and(|c| c.is_alphanumeric() || c == '_');
    if let (false, Some(len)) = (is_in_word, raw_string(rest)) {
        return (Layer::Text, len);
    }
    (Layer::Code, first)
}

fn nested_comment(rest: &str) -> usize {
    let mut depth = 0usize;
    let mut at = 0;
    while let Some(tail) = rest.get(at..).filter(|tail| !tail.is_empty()) {
        if tail.starts_with("/*") {
            depth += 1;
            at += 2;
        } else if tail.starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += tail.chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// Length of a literal with escapes, both quotes included.
fn quoted(rest: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if is_escaped {
            is_escaped = false;
        } else if c == '\\' {
            is_escaped = true;
        } else if c == quote {
            return at + 1;
        }
    }
    rest.len()
}

/// Length of a character literal; `None` for a lifetime and everything else.
fn char_literal(rest: &str) -> Option<usize> {
    let mut chars = rest.char_indices();
    chars.next().filter(|(_, c)| *c == '\'')?;
    let (_, content) = chars.next()?;
    if content == '\\' {
        return Some(quoted(rest, '\''));
    }
    chars.next().filter(|(_, c)| *c == '\'').map(|(at, _)| at + 1)
}

/// Length of a raw string literal, prefix and both quotes included.
fn raw_string(rest: &str) -> Option<usize> {
    let prefix = ["r", "br", "cr"]
        .into_iter()
        .find(|p| rest.starts_with(&format!("{p}\"")) || rest.starts_with(&format!("{p}#")))?;
    let hashes = rest.get(prefix.len()..)?.bytes().take_while(|byte| *byte == b'#').count();
    let open = prefix.len() + hashes;
    // `r#type` is a raw identifier.
    let text = rest.get(open..)?.strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(text.find(&end).map_or(rest.len(), |at| open + 1 + at + end.len()))
}

/// How many bytes of a literal of `len` bytes belong to its opening and closing quotes.
fn quotes(rest: &str, len: usize) -> (usize, usize) {
    let open = rest.find(['"', '\'']).map_or(0, |at| at + 1);
    // A raw string closes with as many marks as it opened; other literals have one quote; unfinished ones have none.
    let hashes = rest.get(..open).unwrap_or_default().matches('#').count();
    let is_closed =
        rest.get(open..len).is_some_and(|tail| tail.trim_end_matches('#').ends_with(['"', '\'']));
    let close = if is_closed { (hashes + 1).min(len - open) } else { 0 };
    (open, close)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_told_apart() {
        let check = |source: &str, expected_code: &str, expected_both: &str| {
            assert_eq!(code(source), expected_code, "code of {source}");
            assert_eq!(code_and_text(source), expected_both, "code and text of {source}");
        };
        check("a // b\nc", "a     \nc", "a     \nc");
        check("/* a /* b */ c */ d", "                  d", "                  d");
        check(r#"f("x // y") + 1"#, r#"f("      ") + 1"#, r#"f("x // y") + 1"#);
        check(r#"f("\"x") + 1"#, r#"f("   ") + 1"#, r#"f("\"x") + 1"#);
        check(r##"f(r#"x"y"#) + 1"##, r##"f(r#"   "#) + 1"##, r##"f(r#"x"y"#) + 1"##);
        check("m('x', '\\'', 'ä') // '", "m(' ', '  ', '  ')     ", "m('x', '\\'', 'ä')     ");
        check("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}");
        check("r#type var\"s\"", "r#type var\" \"", "r#type var\"s\"");
        check("\"unfinished", "\"          ", "\"unfinished");
    }

    #[test]
    fn what_exists_in_tests_only_is_left_out() {
        let source =
            "a {}\n#[cfg(test)]\nmod tests { fn f() { \"}\" } }\nb\n#[cfg(test)]\nuse c;\nd\n";
        let left = without_tests(source, &code_and_text(source));
        assert_eq!(
            left.lines().map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>(),
            ["a {}", "b", "d"]
        );
        assert_eq!(left.lines().count(), source.lines().count());
    }
}
