//! Buffers: memory objects that kernels work on, and pinned host memory that only transfers read.
//!
//! A kernel must not use a buffer while it is mapped, so the two kinds never mix: pinned memory is mapped for its whole life and counts as
//! host memory wherever it is an operand.

use crate::cl::Mem;
use crate::context::Shared;
use crate::facts::{TYPE_DEVICE, TYPE_PINNED};
use ocl_core::ffi;
use std::sync::Arc;
use tegula_sdk::abi::{BufferDesc, Status};
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::{Error, Range, Result};

/// One allocation.
#[derive(Debug)]
pub struct ClBuffer {
    mem: Mem,
    /// On a processor, the memory itself: mapped and given back by the SDK, so that what is free is known. Freed after `mem`.
    host: Option<HostBuffer>,
    size: u64,
    buffer_type: u32,
    /// Where a pinned buffer is mapped.
    mapped: Option<Mapped>,
    shared: Arc<Shared>,
}

/// The address of a mapped buffer.
#[derive(Debug, Clone, Copy)]
struct Mapped(*mut u8);

#[expect(unsafe_code, reason = "an address is no data")]
// SAFETY: the memory belongs to no thread, and the buffer itself never reads or writes it.
unsafe impl Send for Mapped {}
#[expect(unsafe_code, reason = "an address is no data")]
// SAFETY: as above.
unsafe impl Sync for Mapped {}

/// No driver is asked for more: sizes near 2^64 wrap inside some of them.
const ASKED_MAX: u64 = 1 << 47;

impl ClBuffer {
    /// Allocates exactly the type asked for, and makes the driver back it.
    pub(crate) fn alloc(shared: &Arc<Shared>, desc: &BufferDesc) -> Result<Self> {
        let facts = &shared.facts;
        let (size, buffer_type) = (desc.size, desc.buffer_type);
        let flags = match buffer_type {
            TYPE_DEVICE => ffi::CL_MEM_READ_WRITE,
            TYPE_PINNED => ffi::CL_MEM_READ_WRITE | ffi::CL_MEM_ALLOC_HOST_PTR,
            other => return Err(Error::not_found(format!("buffer type {other}"))),
        };
        let limit = facts.max_size()?;
        let what = || format!("a buffer on `{}`", facts.name);
        if size > limit {
            let refused = Error::too_big(&what(), size, limit);
            // The driver's own words, where it has some.
            return match size < ASKED_MAX {
                true => match shared.context.buffer(flags, size) {
                    Err(error) => Err(Error {
                        native: error.native,
                        message: format!("{} ({})", refused.message, error.message),
                        ..refused
                    }),
                    Ok(_) => Err(refused),
                },
                false => Err(refused),
            };
        }
        let free = facts.free_now(buffer_type);
        if free.is_some_and(|free| size > free) {
            return Err(Error::out_of_memory(&what(), size, free));
        }
        let explain = |error: Error| {
            let limit = if error.status == Status::TOO_BIG { Some(limit) } else { None };
            let message = format!("{} of {size} bytes: {}", what(), error.message);
            Error { asked: Some(size), limit, free, message, ..error }
        };
        let (host, mem) = if facts.is_cpu {
            let host = HostBuffer::alloc(size).map_err(explain)?;
            #[expect(unsafe_code, reason = "the driver is given an address")]
            // SAFETY: `host` is `size` bytes, and freed after `mem` (the order of the fields).
            let mem = unsafe { shared.context.host_buffer(host.map()?, size) }.map_err(explain)?;
            (Some(host), mem)
        } else {
            (None, shared.context.buffer(flags, size).map_err(explain)?)
        };
        let mut buffer =
            Self { mem, host, size, buffer_type, mapped: None, shared: shared.clone() };
        facts.hold(buffer_type, size);
        if let (Some(host), TYPE_PINNED) = (&buffer.host, buffer_type) {
            // The driver never sees this buffer used: transfers go to the address.
            buffer.mapped = Some(Mapped(host.map()?));
        } else if buffer_type == TYPE_PINNED {
            let ptr = shared.transfers.map(&buffer.mem, size).map_err(explain)?;
            buffer.mapped = Some(Mapped(ptr));
        } else if !facts.is_cpu {
            // Drivers of GPUs allocate on first use: a byte written now turns a failure of later into an error of this call.
            shared.touch(&buffer.mem, size).map_err(explain)?;
        }
        Ok(buffer)
    }

    pub(crate) fn raw(&self) -> ffi::cl_mem {
        self.mem.raw()
    }

    /// The host's address of a pinned buffer.
    pub(crate) fn mapped(&self) -> Option<*mut u8> {
        self.mapped.map(|mapped| mapped.0)
    }

    /// That `size` bytes at `offset` lie inside.
    pub(crate) fn check(&self, offset: u64, size: u64) -> Result<()> {
        if offset.checked_add(size).is_none_or(|end| end > self.size) {
            return Err(Error::invalid(format!(
                "{size} bytes at {offset} of a buffer of {}",
                self.size
            )));
        }
        Ok(())
    }
}

/// Where bytes of a buffer lie.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Place {
    /// In memory that kernels work on.
    Device(ffi::cl_mem, u64),
    /// In pinned host memory.
    Pinned(*mut u8),
}

/// Checks a range and says where it lies.
pub(crate) fn place(range: &Range<'_, ClBuffer>) -> Result<Place> {
    range.buffer.check(range.offset, range.size)?;
    Ok(match range.buffer.mapped() {
        // Inside the mapping: checked above.
        Some(ptr) => {
            Place::Pinned(ptr.wrapping_add(usize::try_from(range.offset).unwrap_or(usize::MAX)))
        }
        None => Place::Device(range.buffer.raw(), range.offset),
    })
}

/// As [`place`], of what kernels work on.
pub(crate) fn device_place(range: &Range<'_, ClBuffer>, what: &str) -> Result<(ffi::cl_mem, u64)> {
    match place(range)? {
        Place::Device(mem, offset) => Ok((mem, offset)),
        Place::Pinned(_) => {
            Err(Error::invalid(format!("{what} in pinned host memory, which kernels cannot use")))
        }
    }
}

impl Drop for ClBuffer {
    fn drop(&mut self) {
        if let (Some(Mapped(ptr)), None) = (self.mapped, &self.host)
            && let Err(error) = self.shared.transfers.unmap(&self.mem, ptr)
        {
            log::debug!("{error}");
        }
        self.shared.facts.release(self.buffer_type, self.size);
    }
}
