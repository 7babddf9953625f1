//! The queue: does everything at once, so a fence is reached when it is given.

use crate::buffer::Bytes;
use crate::values::Bound;
use crate::{Executable, ReferenceDevice};
use std::time::Duration;
use tegula_sdk::abi::LAYOUT_NATIVE;
use tegula_sdk::host_memory::HostBuffer;
use tegula_sdk::{Error, Range, Result, Run, Upload};

/// Counts what was done. Errors are returned by the call that failed; there is nothing left for `wait` to report.
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

impl tegula_sdk::Queue<ReferenceDevice> for Queue {
    unsafe fn write(&mut self, dst: Range<'_, HostBuffer>, src: *const u8) -> Result<u64> {
        // SAFETY: the caller promises `dst.size` bytes.
        let src = unsafe { Bytes::host(src, dst.size, true) }?;
        src.copy_to(&Bytes::of(&dst)?)?;
        Ok(self.done())
    }

    unsafe fn read(&mut self, src: Range<'_, HostBuffer>, dst: *mut u8) -> Result<u64> {
        // SAFETY: the caller promises `src.size` bytes.
        let dst = unsafe { Bytes::host(dst, src.size, false) }?;
        Bytes::of(&src)?.copy_to(&dst)?;
        Ok(self.done())
    }

    fn copy(&mut self, src: Range<'_, HostBuffer>, dst: Range<'_, HostBuffer>) -> Result<u64> {
        Bytes::of(&src)?.copy_to(&Bytes::of(&dst)?)?;
        Ok(self.done())
    }

    unsafe fn upload(&mut self, upload: &Upload<'_, HostBuffer>) -> Result<u64> {
        let weight = &upload.weight;
        if upload.layout != LAYOUT_NATIVE {
            return Err(Error::invalid(format!("no weight has layout {}", upload.layout)));
        }
        let end = upload.first_row.checked_add(upload.n_rows);
        if end.is_none_or(|end| end > weight.n_rows) {
            let (first, n, of) = (upload.first_row, upload.n_rows, weight.n_rows);
            return Err(Error::invalid(format!("upload of {n} rows from {first} on, of {of}")));
        }
        let size = weight.dtype.row_bytes(weight.n_in)?.checked_mul(upload.n_rows);
        let size = size.ok_or_else(|| Error::invalid("an upload of more than 2^64 bytes"))?;
        // SAFETY: the caller promises `src_size` bytes.
        let src = unsafe { Bytes::host(upload.src, upload.src_size, true) }?;
        src.part(0, size)?.copy_to(&Bytes::of(&upload.dst)?)?;
        Ok(self.done())
    }

    unsafe fn run(
        &mut self,
        executable: &mut Executable,
        run: &Run<'_, HostBuffer>,
    ) -> Result<u64> {
        let program = &executable.program;
        // SAFETY: the caller promises that host memory is alive; outputs are there to be written.
        let bytes = |operand, is_input| unsafe { Bytes::bound(&operand, is_input) };
        let inputs = 0..program.inputs.len();
        let outputs = 0..program.outputs.len();
        let bound = Bound {
            inputs: inputs.map(|i| bytes(run.input(i)?, true)).collect(),
            outputs: outputs.map(|i| bytes(run.output(i)?, false)).collect(),
        };
        executable.run(run, bound)?;
        Ok(self.done())
    }

    fn wait(&mut self, fence: u64, _timeout: Option<Duration>) -> Result<()> {
        if fence > self.fence {
            let last = self.fence;
            return Err(Error::invalid(format!("wait for fence {fence}; the last is {last}")));
        }
        Ok(())
    }
}
