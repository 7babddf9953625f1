//! What everything of an open device shares: its context, a queue for transfers outside of any order, and the programs built so far.

use crate::cl::{CommandQueue, Context, Mem};
use crate::facts::Facts;
use crate::programs::Programs;
use tegula_sdk::Result;

/// An open device.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) facts: Facts,
    pub(crate) context: Context,
    /// Maps, first touches, constants: waited for at once, and never for work that others enqueue.
    pub(crate) transfers: CommandQueue,
    pub(crate) programs: Programs,
    /// Whether times of kernels are taken (`TEGULA_OPENCL_PROFILE`).
    pub(crate) profile: bool,
}

impl Shared {
    pub(crate) fn open(facts: Facts) -> Result<Self> {
        let context = Context::create(facts.id)?;
        let transfers = context.queue(facts.id, false)?;
        let programs = Programs::new(&facts);
        let profile = std::env::var_os("TEGULA_OPENCL_PROFILE").is_some_and(|v| v == "1");
        Ok(Self { facts, context, transfers, programs, profile })
    }

    /// Writes the last byte, so that the driver has to have the memory.
    pub(crate) fn touch(&self, mem: &Mem, size: u64) -> Result<()> {
        self.upload(mem, size.saturating_sub(1), &[0])
    }

    /// Writes bytes and waits.
    #[expect(unsafe_code, reason = "a raw pointer is handed to the driver")]
    pub(crate) fn upload(&self, mem: &Mem, offset: u64, bytes: &[u8]) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the call returns when the bytes are copied.
        unsafe { self.transfers.write(mem.raw(), offset, bytes.len() as u64, bytes.as_ptr(), true) }
    }

    /// Reads bytes and waits.
    #[expect(unsafe_code, reason = "a raw pointer is handed to the driver")]
    pub(crate) fn download(
        &self,
        mem: ocl_core::ffi::cl_mem,
        offset: u64,
        bytes: &mut [u8],
    ) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (size, ptr) = (bytes.len() as u64, bytes.as_mut_ptr());
        // SAFETY: the call returns when the bytes are copied.
        unsafe { self.transfers.read(mem, offset, size, ptr, true) }
    }
}
