//! Tables in plain text.
//!
//! On a terminal a table is never wider than that: its widest columns give way, and cells that were cut end in `…`. Elsewhere (a file, a pipe)
//! cells are whole. Widths are counted in columns of the terminal, not characters, and cells lose control characters: they come from files.

use console::{measure_text_width, truncate_str};
use std::borrow::Cow;

/// No column is cut below this.
const COLUMN_MIN: usize = 8;
const GAP: &str = "  ";

/// The columns of the terminal on stdout, if there is one.
pub(crate) fn terminal_width() -> Option<usize> {
    let term = console::Term::stdout();
    let (_, columns) = term.is_term().then(|| term.size_checked())??;
    Some(usize::from(columns))
}

/// A table with columns as wide as their longest cell, at most `width` in all; columns in `right` are aligned to the right.
pub(crate) fn table(
    header: &[&str],
    rows: &[Vec<String>],
    right: &[usize],
    width: Option<usize>,
) -> String {
    let header: Vec<String> = header.iter().map(ToString::to_string).collect();
    let mut widths: Vec<usize> = header.iter().map(|cell| measure_text_width(cell)).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(measure_text_width(&printable(cell)));
        }
    }
    if let Some(width) = width {
        shrink(&mut widths, width);
    }
    std::iter::once(&header)
        .chain(rows)
        .map(|row| line(row, &widths, right))
        .collect::<Vec<_>>()
        .join("\n")
}

/// Takes from the widest column until all fit `width`, or none can give more.
fn shrink(widths: &mut [usize], width: usize) {
    let gaps = GAP.len() * widths.len().saturating_sub(1);
    let mut excess = (widths.iter().sum::<usize>() + gaps).saturating_sub(width);
    while excess > 0 {
        let Some(widest) = widths.iter_mut().max().filter(|widest| **widest > COLUMN_MIN) else {
            return;
        };
        *widest -= 1;
        excess -= 1;
    }
}

fn line(cells: &[String], widths: &[usize], right: &[usize]) -> String {
    let padded: Vec<String> = cells
        .iter()
        .zip(widths)
        .enumerate()
        .map(|(i, (cell, width))| {
            let cell = printable(cell);
            let cell = truncate_str(&cell, *width, "…");
            let fill = " ".repeat(width.saturating_sub(measure_text_width(&cell)));
            if right.contains(&i) { fill + &cell } else { cell.into_owned() + &fill }
        })
        .collect();
    padded.join(GAP).trim_end().to_owned()
}

/// Breaks a line between words so that it fits `width`; the lines after the first are indented.
pub(crate) fn wrap(text: &str, width: Option<usize>, indent: usize) -> String {
    let Some(width) = width else { return text.to_owned() };
    let mut out = String::new();
    let mut column = 0;
    let mut begun = false;
    // The first piece keeps the spaces that lines of a list are aligned with.
    for word in text.split_inclusive(' ') {
        let n = measure_text_width(word.trim_end());
        if begun && column + n > width {
            out.truncate(out.trim_end().len());
            out.push('\n');
            out.push_str(&" ".repeat(indent));
            column = indent;
        }
        out.push_str(word);
        begun |= n > 0;
        column += measure_text_width(word);
    }
    out
}

/// Text without control characters: a name in a file must not move the cursor.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if text.contains(char::is_control) {
        Cow::Owned(text.replace(char::is_control, "\u{fffd}"))
    } else {
        Cow::Borrowed(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rows: &[[&str; 3]], width: Option<usize>, expected: &str) {
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(ToString::to_string).collect()).collect();
        assert_eq!(table(&["name", "n", "note"], &rows, &[1], width), expected);
    }

    #[test]
    fn lines_break_between_words() {
        for ((text, width, indent), expected) in [
            (("kv    one two three", Some(11), 6), "kv    one\n      two\n      three"),
            (("kv    one two three", Some(13), 6), "kv    one two\n      three"),
            (("kv    one two three", None, 6), "kv    one two three"),
            (("a wordlongerthanthewidth b", Some(8), 2), "a\n  wordlongerthanthewidth\n  b"),
            (("", Some(8), 2), ""),
        ] {
            assert_eq!(wrap(text, width, indent), expected, "{text}");
        }
    }

    /// Columns would not line up, lines would wrap, or a file's name would write over the terminal.
    #[test]
    fn tables_fit_and_line_up() {
        check(
            &[["a", "10", "x"], ["bcdef", "9", ""]],
            None,
            "name    n  note\na      10  x\nbcdef   9",
        );
        let long = ["a-very-long-name", "1", "some words that go on and on"];
        check(
            &[long],
            None,
            "name              n  note\na-very-long-name  1  some words that go on and on",
        );
        check(
            &[long],
            Some(40),
            "name              n  note\na-very-long-name  1  some words that go…",
        );
        check(&[long], Some(30), "name           n  note\na-very-long-…  1  some words …");
        check(&[long], Some(1), "name      n  note\na-very-…  1  some wo…");
        check(
            &[["世界", "1", "🙂"], ["ab", "2", "c"]],
            None,
            "name  n  note\n世界  1  🙂\nab    2  c",
        );
        check(&[["\u{1b}[2J", "1", "a\tb"]], None, "name  n  note\n\u{fffd}[2J  1  a\u{fffd}b");
    }
}
