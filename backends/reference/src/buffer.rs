//! Bytes that ops read and write: ranges of buffers, or host memory that a run names.
//!
//! Memory is copied in and out and never borrowed: the core may map the same buffer, and a reference to memory that
//! another pointer writes would be undefined. All bounds are checked when a [`Bytes`] is made.

use std::marker::PhantomData;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::{Error, Operand, Range, Result};

/// `size` bytes that may be read, and written unless they lie in an import, for as long as `'a`.
///
/// That no other thread writes them meanwhile is the core's promise: work on the same memory is ordered by fences.
#[derive(Clone, Copy)]
pub(crate) struct Bytes<'a> {
    ptr: *mut u8,
    size: u64,
    read_only: bool,
    _memory: PhantomData<&'a HostBuffer>,
}

impl<'a> Bytes<'a> {
    /// A range of a buffer.
    pub(crate) fn of(range: &Range<'a, HostBuffer>) -> Result<Self> {
        let ptr = range.buffer.ptr(range.offset, range.size)?.cast_mut();
        let read_only = range.buffer.is_read_only();
        Ok(Self { ptr, size: range.size, read_only, _memory: PhantomData })
    }

    /// Host memory.
    ///
    /// # Safety
    /// `size` bytes at `ptr` are readable for `'a`, and writable unless `read_only`.
    pub(crate) unsafe fn host(ptr: *const u8, size: u64, read_only: bool) -> Result<Self> {
        if ptr.is_null() {
            return Err(Error::invalid("host memory at null"));
        }
        Ok(Self { ptr: ptr.cast_mut(), size, read_only, _memory: PhantomData })
    }

    /// What a run has bound.
    ///
    /// # Safety
    /// Host memory is readable for `'a`, and writable unless `read_only`.
    pub(crate) unsafe fn bound(operand: &Operand<'a, HostBuffer>, read_only: bool) -> Result<Self> {
        match *operand {
            // SAFETY: as the caller promises.
            Operand::Host(ptr, size) => unsafe { Self::host(ptr, size, read_only) },
            Operand::Buffer(ref range) => Self::of(range),
        }
    }

    /// `size` of the bytes, from `offset` on.
    pub(crate) fn part(&self, offset: u64, size: u64) -> Result<Self> {
        let inside = offset.checked_add(size).is_some_and(|end| end <= self.size);
        match usize::try_from(offset) {
            Ok(begin) if inside => {
                // SAFETY: `begin` is at most `size`, so the address stays inside the memory or one past its end.
                Ok(Self { ptr: unsafe { self.ptr.add(begin) }, size, ..*self })
            }
            _ => Err(Error::invalid(format!(
                "{size} bytes at {offset} are outside a range of {}",
                self.size
            ))),
        }
    }

    /// Copies the first bytes to `dst`.
    pub(crate) fn read(&self, dst: &mut [u8]) -> Result<()> {
        let from = self.part(0, dst.len() as u64)?;
        // SAFETY: `from` is `dst.len()` readable bytes; they cannot overlap `dst`, which is this backend's own.
        unsafe { std::ptr::copy_nonoverlapping(from.ptr, dst.as_mut_ptr(), dst.len()) };
        Ok(())
    }

    /// Copies `src` to the first bytes.
    pub(crate) fn write(&self, src: &[u8]) -> Result<()> {
        let to = self.part(0, src.len() as u64)?;
        if self.read_only {
            return Err(Error::invalid("a write to read-only memory"));
        }
        // SAFETY: `to` is `src.len()` writable bytes; they cannot overlap `src`, which is this backend's own.
        unsafe { std::ptr::copy_nonoverlapping(src.as_ptr(), to.ptr, src.len()) };
        Ok(())
    }

    /// Copies all bytes to as many others; the two may overlap.
    pub(crate) fn copy_to(&self, to: &Bytes<'_>) -> Result<()> {
        let to = to.part(0, self.size)?;
        if to.read_only {
            return Err(Error::invalid("a copy to read-only memory"));
        }
        let size =
            usize::try_from(self.size).map_err(|_| Error::invalid("a copy of everything"))?;
        // SAFETY: both are `size` bytes, the target writable; `copy` allows overlap.
        unsafe { std::ptr::copy(self.ptr, to.ptr, size) };
        Ok(())
    }
}
