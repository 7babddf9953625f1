//! The queue: everything is done before a call returns, so a fence is reached when it is given.

#![expect(unsafe_code, reason = "the core hands raw pointers to a queue")]

use crate::buffer::Buffer;
use crate::device::OpenVinoDevice;
use crate::executable::Executable;
use std::time::Duration;
use tegula_sdk::abi::LAYOUT_NATIVE;
use tegula_sdk::{Error, Range, Result, Run, Upload};

/// Counts what was done.
#[derive(Debug, Default)]
pub struct Queue {
    fence: u64,
}

impl Queue {
    fn done(&mut self) -> u64 {
        self.fence += 1;
        self.fence
    }
}

fn length(size: u64) -> Result<usize> {
    usize::try_from(size).map_err(|_| Error::invalid(format!("a copy of {size} bytes")))
}

impl tegula_sdk::Queue<OpenVinoDevice> for Queue {
    unsafe fn write(&mut self, dst: Range<'_, Buffer>, src: *const u8) -> Result<u64> {
        let to = dst.buffer.ptr_mut(dst.offset, dst.size)?;
        // SAFETY: `to` is `dst.size` writable bytes, `src` as many by the caller's word; `copy` allows overlap.
        unsafe { std::ptr::copy(src, to, length(dst.size)?) };
        Ok(self.done())
    }

    unsafe fn read(&mut self, src: Range<'_, Buffer>, dst: *mut u8) -> Result<u64> {
        let from = src.buffer.ptr(src.offset, src.size)?;
        // SAFETY: `from` is `src.size` readable bytes, `dst` as many writable ones by the caller's word.
        unsafe { std::ptr::copy(from, dst, length(src.size)?) };
        Ok(self.done())
    }

    fn copy(&mut self, src: Range<'_, Buffer>, dst: Range<'_, Buffer>) -> Result<u64> {
        let from = src.buffer.ptr(src.offset, src.size)?;
        let to = dst.buffer.ptr_mut(dst.offset, src.size)?;
        // SAFETY: both are `src.size` bytes inside their buffers; `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, length(src.size)?) };
        Ok(self.done())
    }

    unsafe fn upload(&mut self, upload: &Upload<'_, Buffer>) -> Result<u64> {
        let weight = &upload.weight;
        let size = weight.dtype.row_bytes(weight.n_in)?.checked_mul(upload.n_rows);
        if upload.layout != LAYOUT_NATIVE || size != Some(upload.src_size) {
            return Err(Error::invalid(format!(
                "an upload of {} rows in layout {} from {} bytes",
                upload.n_rows, upload.layout, upload.src_size
            )));
        }
        let dst = Range { size: upload.src_size, ..upload.dst };
        // SAFETY: `src` is `src_size` bytes by the caller's word, which is what is copied.
        unsafe { self.write(dst, upload.src) }
    }

    unsafe fn run(&mut self, executable: &mut Executable, run: &Run<'_, Buffer>) -> Result<u64> {
        // SAFETY: passed on: host memory named in the run is valid.
        unsafe { executable.run(run) }?;
        Ok(self.done())
    }

    fn wait(&mut self, fence: u64, _timeout: Option<Duration>) -> Result<()> {
        if fence > self.fence {
            return Err(Error::invalid(format!(
                "fence {fence} of {} is not given yet",
                self.fence
            )));
        }
        Ok(())
    }
}
