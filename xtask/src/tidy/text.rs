//! Rules over the text of one file: its opening, its length, its ends of lines.

use super::tree::File;
use super::{Finding, Rule, whole};

pub(super) const RULES: [Rule; 3] = [
    Rule { name: "module-docs", applies: |file| file.has_extension(&["rs"]), check: module_docs },
    Rule { name: "trailing-space", applies: |_| true, check: trailing_space },
    Rule { name: "length", applies: is_limited, check: length },
];

/// Longer files hide a second noun; see CONTRIBUTING.md.
const LINES_MAX: usize = 700;

/// Files that may be longer, each with the reason.
const LONG: &[(&str, &str)] =
    &[("abi/include/tegula_backend.h", "generated: the whole boundary in one header")];

/// A reader who opens a file is told what it is for before the first declaration.
fn module_docs(file: &File) -> Vec<(usize, String)> {
    let first = file.text.lines().find(|line| !line.trim().is_empty());
    if first.is_some_and(|line| line.starts_with("//!")) {
        return Vec::new();
    }
    vec![(
        1,
        "begins without `//!` docs: say what the file is for, and which decisions it holds"
            .to_owned(),
    )]
}

fn trailing_space(file: &File) -> Vec<(usize, String)> {
    let is_bad = |line: &str| line.ends_with([' ', '\t', '\r']);
    // `str::lines` would hide a carriage return.
    let bad = file.text.split('\n').enumerate().filter(|(_, line)| is_bad(line));
    bad.map(|(at, _)| (at + 1, "trailing white space".to_owned())).collect()
}

fn is_limited(file: &File) -> bool {
    file.has_extension(&["rs", "h", "c", "cc", "cpp", "py", "sh", "comp", "cl"])
}

fn length(file: &File) -> Vec<(usize, String)> {
    let lines = file.text.lines().count();
    if lines <= LINES_MAX || LONG.iter().any(|(path, _)| *path == file.path) {
        return Vec::new();
    }
    let message = format!(
        "{lines} lines, at most {LINES_MAX}: ask which second noun has moved in, or list the file with a reason in \
         xtask/src/tidy/text.rs"
    );
    vec![(LINES_MAX + 1, message)]
}

/// Files on the list of long ones that are not long.
pub(super) fn needless_exceptions(files: &[File]) -> Vec<Finding> {
    let is_long =
        |path: &str| files.iter().any(|f| f.path == path && f.text.lines().count() > LINES_MAX);
    let needless = LONG.iter().filter(|(path, _)| !is_long(path));
    needless
        .map(|(path, _)| {
            whole(path, "is not long: remove it from the list in xtask/src/tidy/text.rs")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::lines_found;

    fn check(name: &str, path: &str, text: &str, expected: &[usize]) {
        assert_eq!(lines_found(&RULES, name, path, text), expected, "{name} on {path}: {text:?}");
    }

    #[test]
    fn a_rust_file_opens_with_its_docs() {
        check("module-docs", "a/src/lib.rs", "//! What it is.\nfn f() {}\n", &[]);
        check("module-docs", "a/tests/t.rs", "\n//! What it is.\n", &[]);
        check("module-docs", "a/src/lib.rs", "use std::fmt;\n", &[1]);
        check("module-docs", "a/src/lib.rs", "/// Of an item.\nfn f() {}\n", &[1]);
        check("module-docs", "a/src/lib.rs", "", &[1]);
        check("module-docs", "a/README.md", "# Title\n", &[]);
    }

    #[test]
    fn lines_end_where_their_text_ends() {
        check("trailing-space", "a.md", "one\n\n  two\n", &[]);
        check("trailing-space", "a.md", "one \ntwo\t\nthree\r\n \n", &[1, 2, 3, 4]);
    }

    #[test]
    fn files_stay_readable_in_one_sitting() {
        check("length", "a.rs", &"x\n".repeat(LINES_MAX), &[]);
        check("length", "a.rs", &"x\n".repeat(LINES_MAX + 1), &[LINES_MAX + 1]);
        check("length", LONG[0].0, &"x\n".repeat(LINES_MAX + 1), &[]);
        check("length", "a.md", &"x\n".repeat(LINES_MAX + 1), &[]);
    }

    #[test]
    fn an_exception_that_is_not_needed_is_found() {
        let file = |n: usize| File { path: LONG[0].0.to_owned(), text: "x\n".repeat(n) };
        assert_eq!(needless_exceptions(&[file(LINES_MAX + 1)]).len(), LONG.len() - 1);
        assert_eq!(needless_exceptions(&[file(3)]).len(), LONG.len());
    }
}
