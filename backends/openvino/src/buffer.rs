//! Buffers of a device: the host's memory, or memory that a GPU and the host both address.
//!
//! A GPU's buffers are remote tensors of its plugin, in host memory that the GPU reads by address ("USM host"): a model is given values where they lie,
//! and what is done between models reads and writes them there too. So neither the KV cache nor the values between models are ever copied between host and device.

#![expect(unsafe_code, reason = "the plugin gives an address for its tensor")]

use crate::ov::{Context, Element, Tensor};
use std::ptr::NonNull;
use tegula_sdk::abi::Status;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::{Error, Result};

/// One allocation.
#[derive(Debug)]
pub enum Buffer {
    /// The host's memory.
    Host(HostBuffer),
    /// A remote tensor that both sides address.
    Shared(SharedBuffer),
}

/// A remote tensor with its address on the host.
#[derive(Debug)]
pub struct SharedBuffer {
    ptr: NonNull<u8>,
    len: u64,
    /// Keeps the memory; freed last.
    _tensor: Tensor,
}

// SAFETY: the memory belongs to no thread, and the buffer itself never reads or writes it.
unsafe impl Send for SharedBuffer {}
// SAFETY: as above.
unsafe impl Sync for SharedBuffer {}

impl SharedBuffer {
    /// Allocates `size` bytes, of which the device gives `max_size` in one piece.
    ///
    /// # Errors
    /// TOO_BIG over `max_size` and OUT_OF_MEMORY below it, with OpenVINO's own words as their cause.
    pub(crate) fn alloc(context: &Context, size: u64, max_size: Option<u64>) -> Result<Self> {
        let over = max_size.filter(|max| size > *max);
        let numbers = |error: Error| Error { asked: Some(size), limit: max_size, ..error };
        let len = i64::try_from(size).unwrap_or(i64::MAX);
        let texts = [("SHARED_MEM_TYPE", "USM_HOST_BUFFER")];
        // The plugin is asked even where the answer is known, so that the error carries its words.
        // SAFETY: no handles are given.
        let made = unsafe { context.tensor(Element::U8, &[len], &texts, &[]) };
        match (made, over) {
            (Ok(_), Some(max)) => Err(Error::too_big("a buffer of the GPU", size, max)),
            (Err(error), Some(_)) => Err(numbers(Error { status: Status::TOO_BIG, ..error })),
            (Err(error), None) if error.status == Status::DRIVER => {
                Err(numbers(Error { status: Status::OUT_OF_MEMORY, ..error }))
            }
            (Err(error), None) => Err(numbers(error)),
            (Ok(tensor), None) => {
                let params = tensor.params()?;
                let handle = params.iter().find(|(name, _)| name == "MEM_HANDLE");
                let ptr = handle.and_then(|(_, address)| {
                    NonNull::new(std::ptr::with_exposed_provenance_mut(*address))
                });
                let ptr = ptr.ok_or_else(|| {
                    Error::new(
                        Status::DRIVER,
                        format!("a remote tensor without an address: {params:?}"),
                    )
                })?;
                Ok(Self { ptr, len: size, _tensor: tensor })
            }
        }
    }

    fn at(&self, offset: u64, size: u64) -> Result<*mut u8> {
        let inside = offset.checked_add(size).is_some_and(|end| end <= self.len);
        match usize::try_from(offset) {
            Ok(begin) if inside => Ok(self.ptr.as_ptr().wrapping_add(begin)),
            _ => Err(Error::invalid(format!(
                "{size} bytes at {offset} are outside a buffer of {}",
                self.len
            ))),
        }
    }
}

impl Buffer {
    /// The address of byte `offset`, from where `size` bytes may be read.
    pub(crate) fn ptr(&self, offset: u64, size: u64) -> Result<*const u8> {
        match self {
            Self::Host(buffer) => buffer.ptr(offset, size),
            Self::Shared(buffer) => buffer.at(offset, size).map(<*mut u8>::cast_const),
        }
    }

    /// The address of byte `offset`, from where `size` bytes may be read and written.
    pub(crate) fn ptr_mut(&self, offset: u64, size: u64) -> Result<*mut u8> {
        match self {
            Self::Host(buffer) => buffer.ptr_mut(offset, size),
            Self::Shared(buffer) => buffer.at(offset, size),
        }
    }

    /// The address of the first byte.
    pub(crate) fn map(&self) -> Result<*mut u8> {
        match self {
            Self::Host(buffer) => buffer.map(),
            Self::Shared(buffer) => Ok(buffer.ptr.as_ptr()),
        }
    }

    /// Whether a GPU addresses it.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, Self::Shared(_))
    }
}
