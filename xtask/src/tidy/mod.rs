//! `cargo xtask tidy`: what neither the compiler nor clippy can check.
//!
//! * **Rules are data.** A rule is a name, a reason and a function over one file ([`text`], [`wording`]) or the whole tree
//!   ([`arrows`], [`layout`]), with samples of good and bad in its own tests. A remark that is made twice in review becomes a
//!   rule here.
//! * **Every exception has its reason** beside it, and an exception that is no longer needed is itself a finding, so that the
//!   lists only hold what is true.

mod arrows;
mod layout;
mod text;
mod tree;
mod wording;

use crate::{codegen, process};
use anyhow::Result;
use std::fmt;
use std::process::ExitCode;
use tree::File;

/// One thing that is not as it should be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// From the root.
    path: String,
    /// From 1; 0 when the finding is about the file or folder as a whole.
    line: usize,
    message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.message),
            line => write!(f, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// A rule over one file.
struct Rule {
    name: &'static str,
    /// Whether the rule speaks of this file.
    applies: fn(&File) -> bool,
    /// Lines, from 1, and what is wrong there.
    check: fn(&File) -> Vec<(usize, String)>,
}

/// Prints every finding; fails if there is one.
pub(crate) fn run() -> Result<ExitCode> {
    let root = process::root();
    let files = tree::read(&root)?;
    let mut findings = Vec::new();
    for rule in text::RULES.iter().chain(&wording::RULES) {
        findings.extend(apply(rule, &files));
    }
    findings.extend(text::needless_exceptions(&files));
    findings.extend(wording::needless_exceptions(&files));
    findings.extend(arrows::check(&process::metadata()?)?);
    findings.extend(layout::check(&root, &files)?);
    findings.extend(
        codegen::abi_hash::stale(&root)?.map(|message| whole(codegen::abi_hash::FILE, message)),
    );
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {} files, {} findings", files.len(), findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn apply(rule: &Rule, files: &[File]) -> Vec<Finding> {
    let about = files.iter().filter(|file| (rule.applies)(file));
    about
        .flat_map(|file| {
            (rule.check)(file).into_iter().map(|(line, what)| Finding {
                path: file.path.clone(),
                line,
                message: format!("{what} [{}]", rule.name),
            })
        })
        .collect()
}

/// A finding about a file or folder as a whole.
fn whole(path: &str, message: impl Into<String>) -> Finding {
    Finding { path: path.to_owned(), line: 0, message: message.into() }
}

/// Applies the rule called `name` to a file, and gives the lines found.
#[cfg(test)]
fn lines_found(rules: &[Rule], name: &str, path: &str, text: &str) -> Vec<usize> {
    let rule = rules.iter().find(|rule| rule.name == name).expect("a rule of this name");
    let files = [File { path: path.to_owned(), text: text.to_owned() }];
    apply(rule, &files).into_iter().map(|finding| finding.line).collect()
}
