//! Host memory for backends whose buffers are the host's own: the true limits, and buffers that keep them.
//!
//! Decisions:
//! * **Every figure is read when it is asked for.** Limits of a container change while it runs, free memory always does.
//! * **`max_size` is a promise**: the greatest buffer that can be had on an idle machine and used to its last byte. See
//!   [`HostLimits`] for what binds it.
//! * **A buffer over `free` is refused.** The kernel would grant the mapping (it overcommits) and kill the process
//!   once the pages are touched, so the refusal has to come before. The line is drawn exactly at `free`, without a
//!   margin: `free` already leaves out what the kernel keeps back, and how much to leave for others is policy of the core's plan.
//! * **Memory is backed lazily.** Mapping costs nothing, pages come when they are touched. What was granted and not yet
//!   touched is subtracted from `free`, so that two buffers cannot be promised the same pages.

mod cgroup;
pub mod device;
mod limits;

pub use limits::HostLimits;

use crate::{Error, Result};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of all live allocated buffers of this plugin. Held during an allocation, so that two threads cannot be
/// granted the same free bytes.
static GRANTED: Mutex<u64> = Mutex::new(0);

fn granted() -> MutexGuard<'static, u64> {
    // A number cannot be half written: a panic elsewhere does not spoil it.
    GRANTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From this size on the kernel is asked for huge pages: fewer misses of address translation where weights are streamed.
const HUGE_PAGE: usize = 2 << 20;

/// Host memory: allocated page-aligned, zeroed and lazily backed, or a read-only import of memory that somebody else owns.
///
/// May be shared between threads. Pointers are handed out raw: as everywhere at the boundary, the core orders work that shares bytes.
#[derive(Debug)]
pub struct HostBuffer {
    ptr: NonNull<u8>,
    len: usize,
    kind: Kind,
}

#[derive(Debug, PartialEq, Eq)]
enum Kind {
    /// A mapping of its own, unmapped on drop.
    Allocated,
    /// The importer's memory, only read.
    Imported,
}

// SAFETY: the memory belongs to no thread, and the buffer itself never reads or writes it.
unsafe impl Send for HostBuffer {}
// SAFETY: as above.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Allocates `size` bytes, zeroed. Any thread.
    ///
    /// # Errors
    /// TOO_BIG over [`HostLimits::max_size`], OUT_OF_MEMORY over [`HostLimits::free`] or where the kernel refuses; all with the numbers.
    pub fn alloc(size: u64) -> Result<Self> {
        if size == 0 {
            return Err(Error::invalid("a host buffer of 0 bytes"));
        }
        let mut granted = granted();
        let limits = HostLimits::with_granted(*granted);
        let name = format!("a host buffer (bound by {})", limits.binding);
        // Pointers into one object are apart by an isize at most.
        let max_size = limits.max_size.get().unwrap_or(u64::MAX).min(isize::MAX as u64);
        let len = usize::try_from(size).map_err(|_| Error::too_big(&name, size, max_size))?;
        if size > max_size {
            return Err(Error::too_big(&name, size, max_size));
        }
        let free = limits.free.get();
        if free.is_some_and(|free| size > free) {
            return Err(Error::out_of_memory(&name, size, free));
        }
        let ptr = map_anonymous(len).map_err(|errno| Error {
            native: Some(errno),
            ..Error::out_of_memory(&name, size, free)
        })?;
        *granted = granted.saturating_add(size);
        Ok(Self { ptr, len, kind: Kind::Allocated })
    }

    /// A read-only buffer of memory that somebody else owns; nothing is copied.
    ///
    /// # Safety
    /// `size` bytes at `ptr` are readable for as long as the buffer lives.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for null, 0 bytes, or a size that no object can have.
    pub unsafe fn import(ptr: *const u8, size: u64) -> Result<Self> {
        let ptr = NonNull::new(ptr.cast_mut()).ok_or_else(|| Error::invalid("import of null"))?;
        let len =
            usize::try_from(size).ok().filter(|len| *len > 0 && isize::try_from(*len).is_ok());
        let len = len.ok_or_else(|| Error::invalid(format!("import of {size} bytes")))?;
        Ok(Self { ptr, len, kind: Kind::Imported })
    }

    /// Bytes; never 0.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether it is an import.
    pub fn is_read_only(&self) -> bool {
        self.kind == Kind::Imported
    }

    /// The address of byte `offset`, from where `size` bytes may be read.
    ///
    /// # Errors
    /// INVALID_ARGUMENT unless `offset + size` is within the buffer.
    pub fn ptr(&self, offset: u64, size: u64) -> Result<*const u8> {
        self.at(offset, size).map(<*mut u8>::cast_const)
    }

    /// The address of byte `offset`, from where `size` bytes may be read and written.
    ///
    /// # Errors
    /// INVALID_ARGUMENT unless `offset + size` is within the buffer, and for imports, which are read-only.
    pub fn ptr_mut(&self, offset: u64, size: u64) -> Result<*mut u8> {
        self.writable()?;
        self.at(offset, size)
    }

    /// The address of the first byte, valid until the buffer is freed.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for imports: whoever imported has the address, and must not be handed a way to write through it.
    pub fn map(&self) -> Result<*mut u8> {
        self.writable()?;
        Ok(self.ptr.as_ptr())
    }

    fn writable(&self) -> Result<()> {
        match self.kind {
            Kind::Allocated => Ok(()),
            Kind::Imported => Err(Error::invalid("an imported buffer is read-only")),
        }
    }

    fn at(&self, offset: u64, size: u64) -> Result<*mut u8> {
        let begin = usize::try_from(offset).ok();
        let inside = offset.checked_add(size).is_some_and(|end| end <= self.len());
        match begin.filter(|_| inside) {
            // SAFETY: `begin` is at most `len`, so the address stays inside the mapping or one past its end.
            Some(begin) => Ok(unsafe { self.ptr.as_ptr().add(begin) }),
            None => {
                let len = self.len;
                Err(Error::invalid(format!(
                    "{size} bytes at {offset} are outside a buffer of {len}"
                )))
            }
        }
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        if self.kind == Kind::Imported {
            return;
        }
        // Unmapped under the lock: in between, the bytes would be neither granted nor free.
        let mut granted = granted();
        // SAFETY: the mapping was made by `map_anonymous` with this length, and this is its only end.
        if unsafe { libc::munmap(self.ptr.as_ptr().cast(), self.len) } != 0 {
            log::error!("munmap of {} bytes: {}", self.len, std::io::Error::last_os_error());
        }
        *granted = granted.saturating_sub(self.len as u64);
    }
}

/// A private anonymous mapping of `len` bytes, or the `errno` of the kernel's refusal.
fn map_anonymous(len: usize) -> Result<NonNull<u8>, i64> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let ptr = unsafe { libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0) };
    if ptr == libc::MAP_FAILED {
        return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOMEM).into());
    }
    let ptr = NonNull::new(ptr.cast::<u8>()).ok_or(i64::from(libc::ENOMEM))?;
    if len >= HUGE_PAGE {
        // SAFETY: the range is the mapping just made. The call is advice: its failure changes speed only.
        unsafe { libc::madvise(ptr.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
    }
    Ok(ptr)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tegula_abi::Status;

    /// Out-of-range accesses must be errors before they are reads of foreign memory.
    #[test]
    fn ranges_are_checked_to_the_byte() {
        let buffer = HostBuffer::alloc(100).unwrap();
        let table: [(u64, u64, bool); 7] = [
            (0, 100, true),
            (99, 1, true),
            (100, 0, true),
            (100, 1, false),
            (0, 101, false),
            (u64::MAX, 1, false),
            (1, u64::MAX, false),
        ];
        for (offset, size, fits) in table {
            assert_eq!(buffer.ptr(offset, size).is_ok(), fits, "{offset} + {size}");
            assert_eq!(buffer.ptr_mut(offset, size).is_ok(), fits, "{offset} + {size}");
        }
        assert_eq!(buffer.map().unwrap().addr() % 4096, 0);
    }

    /// A model file that is mapped read-only would crash the process on a write.
    #[test]
    fn imports_are_read_only() {
        let bytes = [1u8, 2, 3];
        // SAFETY: `bytes` outlives the buffer.
        let buffer = unsafe { HostBuffer::import(bytes.as_ptr(), 3) }.unwrap();
        assert!(buffer.is_read_only());
        assert_eq!(buffer.ptr(1, 2).unwrap(), bytes[1..].as_ptr());
        assert!(buffer.ptr_mut(0, 1).is_err());
        assert!(buffer.map().is_err());
        // SAFETY: refused before anything is read.
        assert!(unsafe { HostBuffer::import(std::ptr::null(), 3) }.is_err());
        // SAFETY: as above.
        assert!(unsafe { HostBuffer::import(bytes.as_ptr(), 0) }.is_err());
    }

    /// A size over the limit must come back as an error with numbers, not as a killed process.
    #[test]
    fn sizes_over_the_limits_are_refused_with_numbers() {
        let limits = HostLimits::read();
        let max_size = limits.max_size.get().unwrap();
        assert!(limits.free.get().unwrap() <= limits.total.get().unwrap());
        assert!(max_size <= limits.total.get().unwrap());
        for size in [limits.total.get().unwrap() + 1, u64::MAX] {
            let error = HostBuffer::alloc(size).unwrap_err();
            assert_eq!((error.status, error.asked), (Status::TOO_BIG, Some(size)));
            assert!(error.limit.unwrap() < size);
        }
        assert_eq!(HostBuffer::alloc(0).unwrap_err().status, Status::INVALID_ARGUMENT);
    }

    /// What is stated as `max_size` can be had and used to its ends, and lazily backed buffers are not granted the same
    /// free pages twice. One test, because a second one would take away what this one counts on.
    #[test]
    fn what_is_stated_is_given_and_given_once() {
        // The test's own threads may map a little more in between.
        const SLACK: u64 = 64 << 20;
        let limits = HostLimits::read();
        let (max_size, free) = (limits.max_size.get().unwrap(), limits.free.get().unwrap());
        if free >= max_size {
            let size = max_size - SLACK;
            let buffer = HostBuffer::alloc(size).unwrap();
            for offset in [0, size - 1] {
                // SAFETY: one byte of a buffer that nobody else uses.
                unsafe { buffer.ptr_mut(offset, 1).unwrap().write(1) };
            }
        } else {
            eprintln!("SKIPPED: max_size {max_size} on a machine with {free} bytes free");
        }
        let size = HostLimits::read().free.get().unwrap() / 3 * 2;
        let first = HostBuffer::alloc(size).unwrap();
        let error = HostBuffer::alloc(size).unwrap_err();
        assert_eq!(error.status, Status::OUT_OF_MEMORY);
        assert!(error.free.unwrap() < size, "{error}");
        drop(first);
        HostBuffer::alloc(size).unwrap();
    }
}
