//! `cargo xtask codegen`: files that are derived from others, committed so that nobody needs the generator to read them.
//!
//! | file | from |
//! |---|---|
//! | `abi/include/tegula_backend.h` | the tables in `abi/src`, through `abi/cbindgen.toml` |
//! | `abi/ABI_HASH` | the declarations in `abi/src`, and the text of `abi/CHANGELOG.md` |
//!
//! The second makes "a change of the boundary has a line in its changelog" a fact that a machine keeps: the digest is
//! renewed only after the changelog was.

pub(crate) mod abi_hash;
mod header;

use crate::process;
use anyhow::{Context as _, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Where the C header lies, from the root.
const HEADER: &str = "abi/include/tegula_backend.h";

/// Whether to write or to compare.
#[derive(clap::Args, Default)]
pub(crate) struct Flags {
    /// Write nothing; fail if a file is not what would be written.
    #[arg(long)]
    check: bool,
    /// The newest entry of abi/CHANGELOG.md already tells this change of the boundary.
    #[arg(long)]
    same_entry: bool,
}

/// Writes or compares.
pub(crate) fn run(flags: &Flags) -> Result<ExitCode> {
    let root = process::root();
    if flags.check {
        let stale = stale(&root)?;
        for message in &stale {
            eprintln!("{message}");
        }
        return Ok(if stale.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    write(&root.join(HEADER), &header::generate(&root.join("abi"))?)?;
    let (recorded, current) = (abi_hash::recorded(&root), abi_hash::current(&root)?);
    if let Some(recorded) = recorded
        && recorded.tables != current.tables
        && recorded.changelog == current.changelog
        && !flags.same_entry
    {
        bail!(
            "abi/src changed: add a line to abi/CHANGELOG.md and run `cargo xtask codegen` \
             (or, if its newest entry already tells this change, `cargo xtask codegen --same-entry`)"
        );
    }
    write(&root.join(abi_hash::FILE), &current.to_string())?;
    Ok(ExitCode::SUCCESS)
}

/// One message for each derived file that is not what would be written.
pub(crate) fn stale(root: &Path) -> Result<Vec<String>> {
    let mut stale = Vec::new();
    let expected = header::generate(&root.join("abi"))?;
    let found = fs::read_to_string(root.join(HEADER)).unwrap_or_default();
    if found != expected {
        let line = found.lines().zip(expected.lines()).take_while(|(a, b)| a == b).count() + 1;
        stale.push(format!(
            "{HEADER}:{line}: differs from what abi/src declares; run `cargo xtask codegen`"
        ));
    }
    stale.extend(abi_hash::stale(root)?.map(|message| format!("{}: {message}", abi_hash::FILE)));
    Ok(stale)
}

/// Writes a file if its text would change, and says so.
fn write(path: &Path, text: &str) -> Result<()> {
    let shown = || path.display().to_string();
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        println!("{} is fresh", shown());
        return Ok(());
    }
    let folder = path.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    fs::create_dir_all(&folder).and_then(|()| fs::write(path, text)).with_context(shown)?;
    println!("{} written", shown());
    Ok(())
}
