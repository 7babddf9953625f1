//! A device's order of work.
//!
//! Every transfer and run comes twice: a safe function that waits until the device is done with the caller's memory, and an
//! `unsafe` one that returns at once. Work of one queue runs in order, so waiting for a fence covers all work before it.
//!
//! Host memory must never go back to its owner while a device may still use it. When a wait cannot be trusted (the device panicked, was lost, or
//! broke the contract of fences), the queue is freed at once, which by contract waits for its work, and every later call fails.

use crate::buffer::{Buffer, BufferSpan};
use crate::device::{DeviceInner, WeightDesc};
use crate::error::{DeviceError, DeviceErrorKind};
use crate::executable::{Executable, Tile};
use crate::run::{RunArgs, RunArrays};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tegula_abi::{self as abi, BufferRange, ErrorRecord, Status};

/// A point in a queue's work: reached when all work up to it is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "work that nobody waits for may still use memory"]
pub struct Fence {
    queue: u64,
    value: u64,
}

/// An order of work on a device. One thread at a time. Dropping it waits for its work.
#[derive(Debug)]
pub struct Queue {
    /// `None` once it was freed early.
    handle: Option<NonNull<abi::QueueHandle>>,
    device: Arc<DeviceInner>,
    /// Unique in the process; fences carry it.
    id: u64,
    /// The greatest fence value so far.
    last: u64,
    arrays: RunArrays,
}

// SAFETY: a queue may be used by any one thread at a time, which `&mut self` makes sure of.
unsafe impl Send for Queue {}

impl Drop for Queue {
    fn drop(&mut self) {
        self.close();
    }
}

impl Queue {
    pub(crate) fn create(device: &Arc<DeviceInner>) -> Result<Self, DeviceError> {
        const WHAT: &str = "queue_create";
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let create = device.caller.function(device.table().queue_create, WHAT)?;
        let mut handle = std::ptr::null_mut();
        device.caller.call(WHAT, |err| {
            // SAFETY: a function of the plugin's table, with its own handle; both pointers are valid for the call.
            unsafe { create(device.handle.as_ptr(), &raw mut handle, err) }
        })?;
        let handle = device.caller.handle(WHAT, "queue", handle)?;
        Ok(Self {
            handle: Some(handle),
            device: Arc::clone(device),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            last: 0,
            arrays: RunArrays::default(),
        })
    }

    /// Whether its device panicked or was lost: every call but freeing is refused.
    pub fn is_lost(&self) -> bool {
        self.device.caller.is_dead()
    }

    /// Copies host memory to `offset ..` of a buffer, and waits.
    ///
    /// # Errors
    /// InvalidArgument for a range outside the buffer, an imported buffer or one of another device; what the backend says.
    pub fn write(&mut self, dst: &Buffer, offset: u64, src: &[u8]) -> Result<(), DeviceError> {
        // SAFETY: the wait below ends the use of `src` and `dst` before they can go.
        let fence = unsafe { self.write_async(dst, offset, src) }?;
        self.wait(fence, None)
    }

    /// Copies host memory to a buffer.
    ///
    /// # Errors
    /// As [`Self::write`].
    ///
    /// # Safety
    /// `src` and `dst` live, and `src` is not changed, until the fence is reached or this queue is dropped.
    pub unsafe fn write_async(
        &mut self,
        dst: &Buffer,
        offset: u64,
        src: &[u8],
    ) -> Result<Fence, DeviceError> {
        const WHAT: &str = "queue_write";
        let range = self.writable(dst, offset, src.len() as u64, WHAT)?;
        let call = self.device.caller.function(self.device.table().queue_write, WHAT)?;
        self.submit(WHAT, |queue, fence, err| {
            // SAFETY: a function of the plugin's table, with its own handle; the memory lives by the caller's word.
            unsafe { call(queue, range, src.as_ptr(), fence, err) }
        })
    }

    /// Copies `offset ..` of a buffer to host memory, and waits.
    ///
    /// # Errors
    /// InvalidArgument for a range outside the buffer or a buffer of another device; what the backend says.
    pub fn read(&mut self, src: &Buffer, offset: u64, dst: &mut [u8]) -> Result<(), DeviceError> {
        // SAFETY: the wait below ends the use of both before they can go.
        let fence = unsafe { self.read_async(src, offset, dst) }?;
        self.wait(fence, None)
    }

    /// Copies a buffer to host memory.
    ///
    /// # Errors
    /// As [`Self::read`].
    ///
    /// # Safety
    /// `src` and `dst` live, and nobody looks at `dst`, until the fence is reached or this queue is dropped.
    pub unsafe fn read_async(
        &mut self,
        src: &Buffer,
        offset: u64,
        dst: &mut [u8],
    ) -> Result<Fence, DeviceError> {
        const WHAT: &str = "queue_read";
        let range = self.readable(src, offset, dst.len() as u64, WHAT)?;
        let call = self.device.caller.function(self.device.table().queue_read, WHAT)?;
        self.submit(WHAT, |queue, fence, err| {
            // SAFETY: a function of the plugin's table, with its own handle; the memory lives by the caller's word.
            unsafe { call(queue, range, dst.as_mut_ptr(), fence, err) }
        })
    }

    /// Copies between buffers of the device, and waits.
    ///
    /// # Errors
    /// InvalidArgument for spans of different sizes or that overlap, and as [`Self::write`].
    pub fn copy(&mut self, src: &BufferSpan<'_>, dst: &BufferSpan<'_>) -> Result<(), DeviceError> {
        // SAFETY: the wait below ends the use of both buffers before they can go.
        let fence = unsafe { self.copy_async(src, dst) }?;
        self.wait(fence, None)
    }

    /// Copies between buffers of the device.
    ///
    /// # Errors
    /// As [`Self::copy`].
    ///
    /// # Safety
    /// Both buffers live until the fence is reached or this queue is dropped.
    pub unsafe fn copy_async(
        &mut self,
        src: &BufferSpan<'_>,
        dst: &BufferSpan<'_>,
    ) -> Result<Fence, DeviceError> {
        const WHAT: &str = "queue_copy";
        let from = self.readable(src.buffer, src.offset, src.size, WHAT)?;
        let to = self.writable(dst.buffer, dst.offset, dst.size, WHAT)?;
        // Both ranges lie inside their buffers, so that the sums do not overflow.
        let overlap = from.buffer == to.buffer
            && from.offset < to.offset + to.size
            && to.offset < from.offset + from.size;
        if from.size != to.size || overlap {
            let message = format!("{src:?} to {dst:?}");
            return Err(self.device.caller.invalid(WHAT, message));
        }
        let call = self.device.caller.function(self.device.table().queue_copy, WHAT)?;
        self.submit(WHAT, |queue, fence, err| {
            // SAFETY: a function of the plugin's table, with its own handle; the buffers live by the caller's word.
            unsafe { call(queue, from, to, fence, err) }
        })
    }

    /// Writes the rows of a tile, which `src` holds in GGUF layout, in the layout of the device, and waits.
    ///
    /// # Errors
    /// InvalidArgument for rows outside the weight, another number of bytes, and as [`Self::write`].
    pub fn upload(
        &mut self,
        desc: &WeightDesc,
        tile: &Tile,
        src: &[u8],
    ) -> Result<(), DeviceError> {
        // SAFETY: the wait below ends the use of `src` and the tile's buffer before they can go.
        let fence = unsafe { self.upload_async(desc, tile, src) }?;
        self.wait(fence, None)
    }

    /// Writes the rows of a tile in the layout of the device.
    ///
    /// # Errors
    /// As [`Self::upload`].
    ///
    /// # Safety
    /// `src` and the tile's buffer live, and `src` is not changed, until the fence is reached or this queue is dropped.
    pub unsafe fn upload_async(
        &mut self,
        desc: &WeightDesc,
        tile: &Tile,
        src: &[u8],
    ) -> Result<Fence, DeviceError> {
        const WHAT: &str = "queue_upload";
        let caller = &self.device.caller;
        let bytes = desc.dtype.row_bytes(desc.n_in).ok().and_then(|r| r.checked_mul(tile.n_rows));
        let end = tile.first_row.checked_add(tile.n_rows);
        if bytes != Some(src.len() as u64) || end.is_none_or(|end| end > desc.n_rows) {
            let message = format!(
                "{} bytes for rows {} and {} more of {desc:?}",
                src.len(),
                tile.first_row,
                tile.n_rows
            );
            return Err(caller.invalid(WHAT, message));
        }
        self.writable(&tile.buffer, tile.offset, tile.size, WHAT)?;
        let (raw_desc, raw_tile) = (desc.raw(), tile.raw(&self.device, WHAT)?);
        let upload = abi::WeightUpload {
            struct_size: size_of::<abi::WeightUpload>(),
            desc: &raw const raw_desc,
            tile: &raw const raw_tile,
            src: src.as_ptr(),
            src_size: src.len() as u64,
        };
        let call = caller.function(self.device.table().queue_upload, WHAT)?;
        self.submit(WHAT, |queue, fence, err| {
            // SAFETY: a function of the plugin's table, with its own handle; the structs live for the call, the memory by the caller's word.
            unsafe { call(queue, &raw const upload, fence, err) }
        })
    }

    /// Runs an executable once, and waits.
    ///
    /// # Errors
    /// InvalidArgument for arguments that do not fit the program or the executable's bounds; what the backend says.
    pub fn run(
        &mut self,
        executable: &Executable,
        args: &mut RunArgs<'_>,
    ) -> Result<(), DeviceError> {
        // A panic while it was held leaves only a list of generations, each of which is whole.
        let mut checked = executable.running.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the wait below ends the use of what `args` borrows; the lock is held until then.
        let fence = unsafe { self.submit_run(executable, &mut checked, args) }?;
        self.wait(fence, None)
    }

    /// Runs an executable once.
    ///
    /// # Errors
    /// As [`Self::run`].
    ///
    /// # Safety
    /// Until the fence is reached or this queue is dropped: the executable and everything that `args` names live, host inputs are not changed, nobody
    /// looks at host outputs, and the executable is not run on another queue.
    pub unsafe fn run_async(
        &mut self,
        executable: &Executable,
        args: &mut RunArgs<'_>,
    ) -> Result<Fence, DeviceError> {
        let mut checked = executable.running.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller vouches for all of it.
        unsafe { self.submit_run(executable, &mut checked, args) }
    }

    /// # Safety
    /// As [`Self::run_async`].
    unsafe fn submit_run(
        &mut self,
        executable: &Executable,
        checked: &mut [u64],
        args: &mut RunArgs<'_>,
    ) -> Result<Fence, DeviceError> {
        const WHAT: &str = "queue_run";
        if !Arc::ptr_eq(&executable.device, &self.device) {
            let message = format!("an executable of {}", executable.device.caller.label);
            return Err(self.device.caller.invalid(WHAT, message));
        }
        let call = self.device.caller.function(self.device.table().queue_run, WHAT)?;
        let raw = self.arrays.fill(executable, checked, args)?;
        self.submit(WHAT, |queue, fence, err| {
            // SAFETY: a function of the plugin's table, with its own handles; `raw` and its arrays live for the call, the rest by the caller's word.
            unsafe { call(queue, executable.handle(), &raw const raw, fence, err) }
        })
    }

    /// Waits until the fence is reached; `None` waits for ever.
    ///
    /// # Errors
    /// Timeout; an error of the work up to the fence, once.
    pub fn wait(&mut self, fence: Fence, timeout: Option<Duration>) -> Result<(), DeviceError> {
        const WHAT: &str = "queue_wait";
        let caller = &self.device.caller;
        if fence.queue != self.id {
            return Err(caller.invalid(WHAT, "a fence of another queue"));
        }
        let call = caller.function(self.device.table().queue_wait, WHAT)?;
        // The greatest number means "for ever"; a timeout of centuries may as well.
        let timeout_ns =
            timeout.map_or(u64::MAX, |t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX));
        let handle = self.raw(WHAT)?;
        let result = caller.call(WHAT, |err| {
            // SAFETY: a function of the plugin's table, with its own handle.
            unsafe { call(handle, fence.value, timeout_ns, err) }
        });
        let result = match result {
            Err(e) if e.kind == DeviceErrorKind::Timeout && timeout_ns == u64::MAX => {
                caller.bury();
                Err(caller.bad_answer(WHAT, "a wait without a time limit timed out"))
            }
            other => other,
        };
        if result.is_err() && self.device.caller.is_dead() {
            self.close();
        }
        result
    }

    /// Waits for all its work and frees it.
    fn close(&mut self) {
        if let (Some(handle), Some(free)) = (self.handle.take(), self.device.table().queue_free) {
            // SAFETY: the handle is this device's, and was taken out, so that it is freed once; the call waits for its work.
            unsafe { free(handle.as_ptr()) }
        }
    }

    fn raw(&self, operation: &'static str) -> Result<*mut abi::QueueHandle, DeviceError> {
        self.handle.map(NonNull::as_ptr).ok_or_else(|| {
            let message = "the queue was freed when its device failed";
            self.device.caller.error(DeviceErrorKind::DeviceLost, operation, message)
        })
    }

    fn readable(
        &self,
        buffer: &Buffer,
        offset: u64,
        size: u64,
        operation: &'static str,
    ) -> Result<BufferRange, DeviceError> {
        if !Arc::ptr_eq(&buffer.device, &self.device) {
            let message = format!("a buffer of {}", buffer.device.caller.label);
            return Err(self.device.caller.invalid(operation, message));
        }
        buffer.raw_range(offset, size, operation)
    }

    fn writable(
        &self,
        buffer: &Buffer,
        offset: u64,
        size: u64,
        operation: &'static str,
    ) -> Result<BufferRange, DeviceError> {
        if buffer.is_read_only() {
            return Err(self.device.caller.invalid(operation, "an imported buffer is only read"));
        }
        self.readable(buffer, offset, size, operation)
    }

    /// Makes a call that gives a fence.
    fn submit(
        &mut self,
        operation: &'static str,
        f: impl FnOnce(*mut abi::QueueHandle, *mut u64, *mut ErrorRecord) -> Status,
    ) -> Result<Fence, DeviceError> {
        let mut value = 0;
        let (queue, caller) = (self.raw(operation)?, &self.device.caller);
        let result = caller.call(operation, |err| f(queue, &raw mut value, err));
        let result = result.and_then(|()| {
            if value < self.last {
                // Waiting for it would end before the work does.
                caller.bury();
                let message = format!("a fence of {value} after one of {}", self.last);
                return Err(caller.bad_answer(operation, message));
            }
            Ok(())
        });
        if result.is_err() && self.device.caller.is_dead() {
            self.close();
        }
        result?;
        self.last = value;
        Ok(Fence { queue: self.id, value })
    }
}
