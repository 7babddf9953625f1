//! The files of the repository, read once for all rules.
//!
//! The folders are walked, rather than asked of git: an unpacked archive has no git, and a new file counts before it is added.

use anyhow::{Context as _, Result};
use std::path::Path;

/// Folders that hold no source: build outputs, caches, and what fuzzers find.
const NOT_SOURCE: [&str; 7] =
    [".git", "target", "__pycache__", "corpus", "artifacts", "coverage", "fuzz-artifacts"];
/// Files that people write.
const EXTENSIONS: [&str; 14] =
    ["rs", "toml", "md", "h", "c", "cc", "cpp", "py", "sh", "yml", "yaml", "json", "comp", "cl"];
/// The same, without an extension.
const NAMES: [&str; 2] = ["run", ".gitignore"];
/// Greater files are data.
const BYTES_MAX: u64 = 1 << 20;

/// A file that somebody wrote.
pub(crate) struct File {
    /// From the root, with `/`.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    /// Whether the path is this folder's, or this file's.
    pub(crate) fn is_below(&self, prefix: &str) -> bool {
        is_below(&self.path, prefix)
    }

    pub(crate) fn has_extension(&self, extensions: &[&str]) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, extension)| extensions.contains(&extension))
    }

    /// Whether all of the file is there for tests, examples or measurements only.
    pub(crate) fn is_for_tests(&self) -> bool {
        let mut parts = self.path.split('/');
        let name = parts.next_back().unwrap_or_default();
        name == "tests.rs"
            || parts.any(|part| matches!(part, "tests" | "examples" | "benches" | "fuzz"))
    }
}

/// Whether `path` is `prefix`, or lies below it. The empty prefix is the root.
pub(crate) fn is_below(path: &str, prefix: &str) -> bool {
    prefix.is_empty()
        || path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Every written file below the root, in order of path.
pub(crate) fn read(root: &Path) -> Result<Vec<File>> {
    let mut files = Vec::new();
    walk(root, "", &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

fn walk(folder: &Path, prefix: &str, files: &mut Vec<File>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}/{name}") };
        let kind = entry.file_type()?;
        if kind.is_dir() {
            if !NOT_SOURCE.contains(&name.as_str()) {
                walk(&entry.path(), &path, files)?;
            }
        } else if kind.is_file() && is_written(&name) && entry.metadata()?.len() <= BYTES_MAX {
            // A text file that is not UTF-8 is somebody's test data.
            if let Ok(text) = std::fs::read_to_string(entry.path()) {
                files.push(File { path, text });
            }
        }
    }
    Ok(())
}

fn is_written(name: &str) -> bool {
    NAMES.contains(&name)
        || name.rsplit_once('.').is_some_and(|(_, extension)| EXTENSIONS.contains(&extension))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_a_whole_folder() {
        assert!(is_below("abi/src/lib.rs", "abi") && is_below("abi", "abi") && is_below("x", ""));
        assert!(!is_below("abi_more/src", "abi"));
    }

    #[test]
    fn build_outputs_and_data_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        for path in ["a/src/lib.rs", "a/target/x.rs", ".git/c.md", "b.bin", "README.md"] {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "x").unwrap();
        }
        std::fs::write(folder.path().join("latin.md"), b"\xe4").unwrap();
        let paths: Vec<String> =
            read(folder.path()).unwrap().into_iter().map(|file| file.path).collect();
        assert_eq!(paths, ["README.md", "a/src/lib.rs"]);
    }
}
