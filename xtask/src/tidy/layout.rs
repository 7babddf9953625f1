//! Rules over the tree: its top folders, its licences, its front page.

use super::tree::File;
use super::{Finding, whole};
use anyhow::{Context as _, Result};
use std::path::Path;

/// The top folders, all of them; folders that begin with a dot, and `target`, are free.
const FOLDERS: [&str; 6] = ["abi", "backends", "models", "runtime", "tests", "xtask"];

/// Files that must be there, and what they must contain.
const REQUIRED: &[(&str, &[&str])] = &[
    ("README.md", &["cargo xtask demo", "cargo xtask test"]),
    ("CONTRIBUTING.md", &["cargo xtask test"]),
    ("ARCHITECTURE.md", &[]),
    ("LICENSE", &["LICENSE-MIT", "LICENSE-APACHE"]),
    ("LICENSE-MIT", &["Permission is hereby granted, free of charge"]),
    ("LICENSE-APACHE", &["Apache License", "END OF TERMS AND CONDITIONS"]),
    ("abi/CHANGELOG.md", &[]),
    (".ci/run", &["cargo xtask test"]),
];

pub(super) fn check(root: &Path, files: &[File]) -> Result<Vec<Finding>> {
    let mut folders = Vec::new();
    for entry in std::fs::read_dir(root).with_context(|| root.display().to_string())? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    let mut findings = top_folders(&folders);
    for (path, parts) in REQUIRED {
        let read = files.iter().find(|file| file.path == *path).map(|file| file.text.clone());
        let text = read.or_else(|| std::fs::read_to_string(root.join(path)).ok());
        findings.extend(required(path, parts, text.as_deref()));
    }
    Ok(findings)
}

fn top_folders(found: &[String]) -> Vec<Finding> {
    let is_free = |name: &str| name.starts_with('.') || name == "target";
    let strangers = found.iter().filter(|name| !is_free(name) && !FOLDERS.contains(&name.as_str()));
    let strange = strangers
        .map(|name| whole(name, format!("a top folder that is none of {}", FOLDERS.join(", "))));
    let absent = FOLDERS.iter().filter(|name| !found.iter().any(|found| found == *name));
    strange.chain(absent.map(|name| whole(name, "this top folder is missing"))).collect()
}

fn required(path: &str, parts: &[&str], text: Option<&str>) -> Vec<Finding> {
    let Some(text) = text else { return vec![whole(path, "is missing")] };
    if text.trim().is_empty() {
        return vec![whole(path, "is empty")];
    }
    let absent = parts.iter().filter(|part| !text.contains(*part));
    absent.map(|part| whole(path, format!("does not contain `{part}`"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn top_folders_are_exactly_these() {
        let check = |more: &[&str], less: &str, expected: usize| {
            let known = FOLDERS.iter().filter(|name| **name != less);
            let found: Vec<String> = known.chain(more).map(|name| (*name).to_owned()).collect();
            assert_eq!(top_folders(&found).len(), expected, "{more:?} {less}");
        };
        check(&[], "", 0);
        check(&[".github", ".cargo", "target"], "", 0);
        check(&["docs", "scripts"], "", 2);
        check(&[], "abi", 1);
    }

    #[test]
    fn required_files_are_there_and_say_what_they_must() {
        assert_eq!(required("LICENSE", &["MIT"], Some("MIT\n")), []);
        assert_eq!(required("LICENSE", &["MIT"], Some("\n"))[0].message, "is empty");
        assert_eq!(required("LICENSE", &["MIT"], None)[0].message, "is missing");
        assert!(
            required("README.md", &["cargo xtask demo"], Some("words"))[0]
                .message
                .contains("cargo xtask demo")
        );
    }
}
