//! Files mapped into memory, so that weights are used where they lie.

use std::fs::File;
use std::path::Path;

/// A read-only mapping of a whole file.
///
/// The file must not be shortened while it is mapped: reading past its new end kills a process with SIGBUS, whoever does
/// it. Model files are replaced by renaming in every tool we know, which keeps the old file alive under the mapping; a file that is changed in place
/// changes what the model computes.
#[derive(Debug)]
pub struct FileMap {
    map: memmap2::Mmap,
}

impl FileMap {
    /// Maps `path`.
    ///
    /// # Errors
    /// What the system says: no such file, no permission, not a file that can be mapped.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the mapping is read-only and private to this struct; that nobody shortens the file is the documented condition that no program can check.
        let map = unsafe { memmap2::Mmap::map(&file) }?;
        Ok(Self { map })
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }
}

impl AsRef<[u8]> for FileMap {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}
