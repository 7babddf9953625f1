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
    len: usize,
}

impl FileMap {
    /// The unit that the system maps in; the mapping is a whole number of it.
    pub const PAGE: u64 = 4096;

    /// Maps `path`.
    ///
    /// # Errors
    /// What the system says: no such file, no permission, not a file that can be mapped.
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let file = File::open(path)?;
        let too_large = |_| std::io::Error::other("the file is larger than the address space");
        let len = usize::try_from(file.metadata()?.len()).map_err(too_large)?;
        // The system maps whole pages; the rest of the last one reads as zeros, and devices that import whole units need it.
        let whole = len.checked_next_multiple_of(Self::PAGE as usize);
        let whole = whole.ok_or_else(|| std::io::Error::other("the file is too large"))?;
        // SAFETY: the mapping is read-only and private to this struct; that nobody shortens the file is the documented condition that no program can check.
        let map = unsafe { memmap2::MmapOptions::new().len(whole).map(&file) }?;
        Ok(Self { map, len })
    }

    /// The file's bytes.
    pub fn bytes(&self) -> &[u8] {
        self.map.get(..self.len).unwrap_or(&self.map)
    }

    /// Lets the system take back the memory behind a range of bytes: it is read from the file again when it is touched again.
    pub fn forget(&self, range: std::ops::Range<usize>) {
        let end = range.end.min(self.map.len());
        let Some(len) = end.checked_sub(range.start).filter(|len| *len > 0) else { return };
        // SAFETY: the mapping is of a file, shared and never written, so that dropped pages come back with the same bytes.
        let done = unsafe {
            self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, len)
        };
        if let Err(error) = done {
            // Advice: nothing depends on it but the peak of memory.
            log::debug!("pages of the file are kept: {error}");
        }
    }
}

/// All of the mapping: the file's bytes, and zeros to the end of the last page.
impl AsRef<[u8]> for FileMap {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}
