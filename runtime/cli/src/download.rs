//! One file from the hub to the folder of models: all of it, verified, under its final name, or nothing.
//!
//! Bytes go to a hidden part file beside the target, whose name holds the beginning of the content's hash: a part is only ever continued
//! with the rest of the same content. Dropped connections are taken up again where they broke, also by a later run; the hash runs along, and
//! decides before the rename. The part file is locked while it is written, so two processes cannot mix their bytes.

use crate::hub::{Hub, RepoFile, header};
use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tegula::memory::units::format_size;
use ureq::http::StatusCode;

/// Attempts in a row that bring nothing before giving up.
const ATTEMPTS_MAX: u32 = 5;
const READ_BYTES: usize = 256 << 10;

/// What to get and where from.
pub(crate) struct Source<'a> {
    pub(crate) hub: &'a Hub,
    pub(crate) repo: &'a str,
    pub(crate) commit: &'a str,
    pub(crate) file: &'a RepoFile,
}

/// Why an attempt ended early.
enum Broken {
    /// Another attempt may go on.
    Dropped(anyhow::Error),
    /// No attempt would do better.
    Refused(anyhow::Error),
}

/// Downloads a file to `target`, which must be in an existing folder; replaces what is there.
pub(crate) fn download(source: &Source, target: &Path, bar: &ProgressBar) -> Result<()> {
    let mut part = Part::open(source, target, bar)?;
    let mut failures = 0;
    loop {
        let before = part.len;
        let error = match source.fetch_rest(&mut part, bar) {
            Ok(()) => break,
            Err(Broken::Refused(error)) => return Err(error),
            Err(Broken::Dropped(error)) => error,
        };
        failures = if part.len > before { 1 } else { failures + 1 };
        if failures >= ATTEMPTS_MAX {
            let kept = format_size(part.len);
            return Err(error.context(format!(
                "{}: the download broke off after {kept}; the same command continues it",
                source.file.name()
            )));
        }
        log::info!("{}: {error:#}; trying again", source.file.name());
        std::thread::sleep(Duration::from_millis(250 << failures));
    }
    part.finish(source.file, target)
}

impl Source<'_> {
    /// Appends to the part what it lacks.
    fn fetch_rest(&self, part: &mut Part, bar: &ProgressBar) -> Result<(), Broken> {
        if self.file.size == Some(part.len) {
            return Ok(());
        }
        let response = self
            .hub
            .file(self.repo, self.commit, &self.file.path, part.len)
            .map_err(|error| Broken::Dropped(self.hub.unreachable(&error)))?;
        match response.status() {
            StatusCode::OK => part.restart(bar).map_err(Broken::Refused)?,
            StatusCode::PARTIAL_CONTENT => {
                let range = header(response.headers(), "content-range").unwrap_or_default();
                if range_start(&range) != Some(part.len) {
                    part.restart(bar).map_err(Broken::Refused)?;
                    let why = anyhow!("the answer to a request for the rest is `{range}`");
                    return Err(Broken::Dropped(why));
                }
            }
            StatusCode::RANGE_NOT_SATISFIABLE if part.len > 0 => {
                part.restart(bar).map_err(Broken::Refused)?;
                return Err(Broken::Dropped(anyhow!("the hub has fewer bytes than were kept")));
            }
            status => {
                let error =
                    self.hub.refusal(&response, self.repo, &format!("file {}", self.file.path));
                let passing = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
                return Err(if passing { Broken::Dropped } else { Broken::Refused }(error));
            }
        }
        self.copy(&mut response.into_body().into_reader(), part, bar)
    }

    fn copy(&self, body: &mut impl Read, part: &mut Part, bar: &ProgressBar) -> Result<(), Broken> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            let n = match body.read(&mut buffer) {
                Ok(0) => break,
                Ok(n) => n,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Broken::Dropped(error.into())),
            };
            part.append(buffer.get(..n).unwrap_or(&[])).map_err(Broken::Refused)?;
            bar.set_position(part.len);
            if let Some(size) = self.file.size.filter(|size| part.len > *size) {
                let name = self.file.name();
                part.remove();
                return Err(Broken::Refused(anyhow!(
                    "{name}: more than the {size} bytes that the hub announced arrive; a proxy or mirror may be at fault"
                )));
            }
        }
        match self.file.size {
            Some(size) if part.len < size => {
                Err(Broken::Dropped(anyhow!("the connection ended after {} bytes", part.len)))
            }
            _ => Ok(()),
        }
    }
}

/// The file that grows, and the hash of what it holds.
struct Part {
    path: PathBuf,
    file: File,
    hash: Sha256,
    len: u64,
}

impl Part {
    /// Opens the part that an earlier run left, or a new one.
    fn open(source: &Source, target: &Path, bar: &ProgressBar) -> Result<Self> {
        let content = source.file.sha256.as_deref().unwrap_or(source.commit);
        let safe = |c: &char| c.is_ascii_alphanumeric();
        let content: String = content.chars().filter(safe).take(16).collect();
        let path = target.with_file_name(format!(".{}.{content}.part", source.file.name()));
        let file =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = file.with_context(|| path.display().to_string())?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                bail!("{}: another process is downloading it", source.file.name())
            }
            // Some network file systems have no locks; the hash still decides.
            Err(TryLockError::Error(error)) => log::info!("{}: {error}", path.display()),
        }
        let mut part = Self { path, file, hash: Sha256::new(), len: 0 };
        let kept = part.file.metadata()?.len();
        if source.file.size.is_some_and(|size| kept > size) {
            part.restart(bar)?;
        }
        part.len = hash_into(&mut part.file, &mut part.hash, bar)
            .with_context(|| part.path.display().to_string())?;
        bar.set_position(part.len);
        bar.reset_eta();
        Ok(part)
    }

    fn restart(&mut self, bar: &ProgressBar) -> Result<()> {
        let emptied = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        emptied.with_context(|| self.path.display().to_string())?;
        (self.hash, self.len) = (Sha256::new(), 0);
        bar.set_position(0);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).with_context(|| {
            format!("{}: {} written so far are kept", self.path.display(), format_size(self.len))
        })?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn remove(&self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            log::warn!("{}: {error}", self.path.display());
        }
    }

    /// Checks the content and gives it its name.
    fn finish(mut self, expected: &RepoFile, target: &Path) -> Result<()> {
        let sum = hex(&std::mem::take(&mut self.hash));
        if let Some(right) = expected.sha256.as_deref().filter(|right| *right != sum) {
            self.remove();
            bail!(
                "{}: what arrived has the SHA-256 {sum}, but the hub names {right}; it was deleted. Pull again; if that does not help, a proxy or mirror changes the file",
                expected.name()
            );
        }
        let mut magic = Vec::new();
        self.file.seek(SeekFrom::Start(0))?;
        Read::by_ref(&mut self.file).take(4).read_to_end(&mut magic)?;
        if magic != b"GGUF" {
            self.remove();
            bail!(
                "{}: what arrived is no GGUF file; it was deleted. Does a proxy ask for a login?",
                expected.name()
            );
        }
        self.file.sync_all().with_context(|| self.path.display().to_string())?;
        std::fs::rename(&self.path, target).with_context(|| target.display().to_string())?;
        // The new name lasts once the folder is on disk; where folders cannot be synced, nothing better is possible.
        if let Some(folder) = target.parent() {
            let _ = File::open(folder).and_then(|folder| folder.sync_all());
        }
        Ok(())
    }
}

/// Whether a file holds the content that the hub lists, as far as the hub tells.
pub(crate) fn is_same(path: &Path, expected: &RepoFile, bar: &ProgressBar) -> Result<bool> {
    let mut file = File::open(path).with_context(|| path.display().to_string())?;
    if expected.size.is_some_and(|size| file.metadata().map(|m| m.len()).ok() != Some(size)) {
        return Ok(false);
    }
    let Some(right) = &expected.sha256 else { return Ok(expected.size.is_some()) };
    let mut hash = Sha256::new();
    hash_into(&mut file, &mut hash, bar).with_context(|| path.display().to_string())?;
    Ok(hex(&hash) == *right)
}

fn hash_into(file: &mut File, hash: &mut Sha256, bar: &ProgressBar) -> std::io::Result<u64> {
    let mut buffer = vec![0; READ_BYTES];
    let mut len = 0;
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok(len);
        }
        hash.update(buffer.get(..n).unwrap_or(&[]));
        len += n as u64;
        bar.set_position(len);
    }
}

fn hex(hash: &Sha256) -> String {
    hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The first byte of a `Content-Range: bytes 5-9/10`.
fn range_start(range: &str) -> Option<u64> {
    range.strip_prefix("bytes ")?.split_once('-')?.0.trim().parse().ok()
}
