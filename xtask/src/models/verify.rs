//! Whether a file is the one that is meant, by SHA-256.
//!
//! Hashing a model takes a second, on every run of every chore; so the result is kept in a stamp beside the file, and
//! holds as long as the file's size and time of change do.

use super::catalogue::Model;
use sha2::{Digest as _, Sha256};
use std::fs::{self, File, Metadata};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// What a digest says about a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Right,
    Wrong { got: String },
}

/// Compares a file with the catalogue; reads it only if it changed since the last time.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn verify(model: &Model, path: &Path) -> io::Result<Verdict> {
    let state = stamp_text(model, &fs::metadata(path)?);
    let stamp = stamp_path(path);
    if fs::read_to_string(&stamp).is_ok_and(|text| text == state) {
        return Ok(Verdict::Right);
    }
    let got = digest(path)?;
    if got != model.sha256 {
        // Nothing depends on the stamp: its text no longer matches.
        let _ = fs::remove_file(stamp);
        return Ok(Verdict::Wrong { got });
    }
    record(model, path)?;
    Ok(Verdict::Right)
}

/// Notes that a file, as it is now, has the right digest.
///
/// # Errors
/// The file cannot be looked at. A folder that cannot be written is no error: it costs the next run a second.
pub(crate) fn record(model: &Model, path: &Path) -> io::Result<()> {
    let state = stamp_text(model, &fs::metadata(path)?);
    let _ = fs::write(stamp_path(path), state);
    Ok(())
}

fn digest(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut piece = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut piece)?;
        if n == 0 {
            return Ok(hex(&hasher.finalize()));
        }
        hasher.update(piece.get(..n).unwrap_or_default());
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn stamp_path(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.verified"))
}

fn stamp_text(model: &Model, metadata: &Metadata) -> String {
    let changed = metadata
        .modified()
        .ok()
        .and_then(|time| time.duration_since(UNIX_EPOCH).ok())
        .unwrap_or_default();
    format!("sha256 {}\nbytes {}\nchanged {}\n", model.sha256, metadata.len(), changed.as_nanos())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL: Model = Model {
        file: "m.gguf",
        bytes: 5,
        sha256: "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824",
        licence: "none",
        is_demo: false,
        source: None,
    };

    #[test]
    fn a_stamp_saves_the_hashing_until_the_file_changes() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(MODEL.file);
        fs::write(&path, "hello").unwrap();
        assert_eq!(verify(&MODEL, &path).unwrap(), Verdict::Right);
        assert!(stamp_path(&path).exists());

        fs::write(&path, "hullo").unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(UNIX_EPOCH).unwrap();
        let Verdict::Wrong { got } = verify(&MODEL, &path).unwrap() else {
            panic!("a changed file passed")
        };
        assert_eq!(got, hex(&Sha256::digest("hullo")));
        assert!(!stamp_path(&path).exists(), "the stamp of a wrong file stays");
    }

    #[test]
    fn a_stamp_of_another_digest_counts_for_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(MODEL.file);
        fs::write(&path, "hello").unwrap();
        assert_eq!(verify(&MODEL, &path).unwrap(), Verdict::Right);
        let newer = Model { sha256: "00", ..MODEL };
        assert!(matches!(verify(&newer, &path).unwrap(), Verdict::Wrong { .. }));
    }
}
