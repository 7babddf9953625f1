//! `abi/ABI_HASH`: a digest of what crosses the boundary, so that a change of it cannot pass unnoticed.
//!
//! Comments, tests and layout of the source do not count: documentation may be improved without a changelog line.

use crate::models::hex;
use crate::source;
use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::path::Path;

/// Where the digests are kept, from the root.
pub(crate) const FILE: &str = "abi/ABI_HASH";
const CHANGELOG: &str = "abi/CHANGELOG.md";
/// The files that declare what crosses.
const TABLES: [&str; 6] = ["backend", "device", "error", "program", "run", "types"];

/// The two digests of the file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct AbiHash {
    /// Of the declarations.
    pub(crate) tables: String,
    /// Of the changelog as it was when they were last accepted.
    pub(crate) changelog: String,
}

impl fmt::Display for AbiHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "# Written by `cargo xtask codegen`; a change here has its line in abi/CHANGELOG.md."
        )?;
        writeln!(f, "tables {}\nchangelog {}", self.tables, self.changelog)
    }
}

/// What the file says; `None` if it is absent or unreadable, which is as good as absent.
pub(crate) fn recorded(root: &Path) -> Option<AbiHash> {
    parse(&std::fs::read_to_string(root.join(FILE)).ok()?)
}

fn parse(text: &str) -> Option<AbiHash> {
    let value = |key: &str| {
        text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ').map(str::to_owned))
    };
    Some(AbiHash { tables: value("tables")?, changelog: value("changelog")? })
}

/// What the file should say.
pub(crate) fn current(root: &Path) -> Result<AbiHash> {
    Ok(AbiHash { tables: tables(root)?, changelog: hex(&Sha256::digest(read(root, CHANGELOG)?)) })
}

fn tables(root: &Path) -> Result<String> {
    let mut digest = Sha256::new();
    for name in TABLES {
        digest.update(normalised(&read(root, &format!("abi/src/{name}.rs"))?));
        digest.update([0]);
    }
    Ok(hex(&digest.finalize()))
}

fn read(root: &Path, name: &str) -> Result<String> {
    std::fs::read_to_string(root.join(name)).with_context(|| name.to_owned())
}

/// A message if the declarations are not those that were last accepted.
pub(crate) fn stale(root: &Path) -> Result<Option<String>> {
    let tables = tables(root)?;
    let is_fresh = recorded(root).is_some_and(|recorded| recorded.tables == tables);
    let message = "abi/src changed: add a line to abi/CHANGELOG.md and run `cargo xtask codegen`";
    Ok((!is_fresh).then(|| message.to_owned()))
}

/// The declarations alone: no comments, no tests, and one way to break lines.
fn normalised(text: &str) -> String {
    let text = source::without_tests(text, &source::code_and_text(text));
    let mut out = String::with_capacity(text.len());
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    for word in text.split_whitespace() {
        // A space is kept where two words would run together.
        if out.ends_with(is_word) && word.starts_with(is_word) {
            out.push(' ');
        }
        if word.starts_with([')', ']', '}', '>']) && out.ends_with(',') {
            out.pop();
        }
        out.push_str(word);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_crosses_counts() {
        let same = |a: &str, b: &str| assert_eq!(normalised(a), normalised(b));
        same("fn f(a: u32, b: u32);", "/// Words.\nfn f(\n    a: u32, // why\n    b: u32,\n);\n");
        same(
            "struct A { x: u32 }",
            "struct A {\n    x: u32,\n}\n#[cfg(test)]\nmod tests { fn f() {} }\n",
        );
        let differ = |a: &str, b: &str| assert_ne!(normalised(a), normalised(b));
        differ("struct A { x: u32, y: u32 }", "struct A { y: u32, x: u32 }");
        differ("const A: &str = \"v1\";", "const A: &str = \"v2\";");
        differ("pub a: u32", "puba: u32");
    }

    #[test]
    fn the_file_reads_as_it_is_written() {
        let hash = AbiHash { tables: "ab".into(), changelog: "cd".into() };
        assert_eq!(parse(&hash.to_string()), Some(hash));
        assert_eq!(parse("tables ab\n"), None);
    }

    /// A folder with the boundary's files, whose tables are all `text`.
    fn tree(text: &str, changelog: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("abi/src")).unwrap();
        for name in TABLES {
            std::fs::write(folder.path().join(format!("abi/src/{name}.rs")), text).unwrap();
        }
        std::fs::write(folder.path().join(CHANGELOG), changelog).unwrap();
        folder
    }

    #[test]
    fn a_change_of_the_tables_is_told_until_it_is_accepted() {
        let folder = tree("struct A { x: u32 }", "- first\n");
        let accept = || {
            std::fs::write(folder.path().join(FILE), current(folder.path()).unwrap().to_string())
                .unwrap();
        };
        assert!(stale(folder.path()).unwrap().is_some_and(|message| message.contains("CHANGELOG")));
        accept();
        assert_eq!(stale(folder.path()).unwrap(), None);
        std::fs::write(folder.path().join("abi/src/run.rs"), "struct A { x: u64 }").unwrap();
        assert!(stale(folder.path()).unwrap().is_some());
        accept();
        assert_eq!(stale(folder.path()).unwrap(), None);
    }
}
