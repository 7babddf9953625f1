//! The queue: transfers through pinned memory, uploads that repack on the way, and runs. Its fence is a timeline semaphore.
//!
//! Memory that the host maps is written and read in place, once the queue's work is done; everything else goes through the device's staging ring.

#![expect(unsafe_code, reason = "the core hands raw pointers to a queue")]

use crate::commands::Commands;
use crate::device::VulkanDevice;
use crate::executable::Executable;
use crate::gpu::{Gpu, Timeline, lock};
use crate::layout::Format;
use crate::memory::Buffer;
use crate::pipelines::Kernel;
use crate::push::Push;
use crate::repack::Repack;
use crate::staging::SLOT_BYTES;
use ash::vk;
use std::sync::Arc;
use std::time::Duration;
use tegula_sdk::abi::LAYOUT_NATIVE;
use tegula_sdk::{Error, Range, Result, Run, Upload};

/// Bytes that wait in pinned memory for the fence, and where they belong.
pub(crate) struct Delivery {
    pub(crate) fence: u64,
    pub(crate) from: *const u8,
    pub(crate) to: *mut u8,
    pub(crate) size: usize,
}

/// An order of work.
pub struct Queue {
    gpu: Arc<Gpu>,
    pub(crate) timeline: Arc<Timeline>,
    /// The last value given out.
    pub(crate) value: u64,
    commands: Commands,
    pub(crate) deliveries: Vec<Delivery>,
}

// SAFETY: the pointers of deliveries are followed in `wait` only, while the core keeps what they point to.
unsafe impl Send for Queue {}

impl Queue {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        gpu.alive()?;
        Ok(Self {
            timeline: Arc::new(Timeline::new(gpu)?),
            commands: Commands::new(gpu)?,
            gpu: Arc::clone(gpu),
            value: 0,
            deliveries: Vec::new(),
        })
    }

    /// Waits for all work given so far.
    fn idle(&mut self) -> Result<()> {
        self.timeline.wait(self.value, u64::MAX)?;
        self.deliver(self.value);
        Ok(())
    }

    /// Hands out what has arrived by `fence`, which is reached.
    pub(crate) fn deliver_until(&mut self, fence: u64) {
        self.deliver(fence);
    }

    fn deliver(&mut self, fence: u64) {
        self.deliveries.retain(|delivery| {
            if delivery.fence > fence {
                return true;
            }
            // SAFETY: the device has written the pinned bytes; the core keeps the target until it has waited, which is now.
            unsafe { std::ptr::copy_nonoverlapping(delivery.from, delivery.to, delivery.size) };
            false
        });
    }

    /// Submits commands that are used once; gives their fence.
    fn submit(&mut self, record: impl FnOnce(&ash::Device, vk::CommandBuffer)) -> Result<u64> {
        self.gpu.alive()?;
        let value = self.value + 1;
        let commands = self.commands.once(self.timeline.reached()?, value, record)?;
        self.gpu.submit(commands, &self.timeline, value)?;
        self.value = value;
        Ok(value)
    }

    /// Runs one workgroup of a kernel.
    pub(crate) fn dispatch(&mut self, kernel: &Kernel, push: &Push) -> Result<u64> {
        let pipelines = &self.gpu.pipelines;
        let (pipeline, layout) = (pipelines.get(&self.gpu.device, kernel)?, pipelines.layout);
        let stage = vk::ShaderStageFlags::COMPUTE;
        self.submit(|device, commands| {
            // SAFETY: the command buffer is being recorded; pipeline and layout live as long as the device.
            unsafe {
                device.cmd_bind_pipeline(commands, vk::PipelineBindPoint::COMPUTE, pipeline);
                device.cmd_push_constants(commands, layout, stage, 0, push.bytes());
                device.cmd_dispatch(commands, 1, 1, 1);
            }
        })
    }

    /// Fills `size` bytes of an unmapped buffer, a slot at a time. `fill` is given where in the range a piece begins, and the piece.
    fn stage(
        &mut self,
        dst: &Buffer,
        at: u64,
        size: u64,
        step: u64,
        mut fill: impl FnMut(u64, &mut [u8]),
    ) -> Result<u64> {
        let gpu = Arc::clone(&self.gpu);
        let mut done = 0;
        while done < size {
            let piece = step.min(size - done);
            let mut ring = lock(&gpu.ring);
            let slot = ring.take(&gpu)?;
            let (ptr, len) = slot.raw.host_range(0, piece)?;
            // SAFETY: the slot is idle and this queue's until the lock is given back; `len` bytes of it are mapped.
            fill(done, unsafe { std::slice::from_raw_parts_mut(ptr, len) });
            let copy = vk::BufferCopy { src_offset: 0, dst_offset: at + done, size: piece };
            let from = slot.raw.handle;
            let fence = self.submit(|device, commands| {
                // SAFETY: both ranges were checked; the buffers live until the work is done.
                unsafe { device.cmd_copy_buffer(commands, from, dst.raw.handle, &[copy]) };
            })?;
            slot.busy = Some((Arc::clone(&self.timeline), fence));
            ring.bytes += piece;
            done += piece;
        }
        Ok(self.value)
    }
}

impl tegula_sdk::Queue<VulkanDevice> for Queue {
    unsafe fn write(&mut self, dst: Range<'_, Buffer>, src: *const u8) -> Result<u64> {
        dst.buffer.raw.check(dst.offset, dst.size)?;
        if dst.size == 0 {
            return Ok(self.value);
        }
        if dst.buffer.raw.mapped.is_some() {
            self.idle()?;
            // SAFETY: the queue is idle; `src` is `dst.size` bytes by the caller's word.
            unsafe { dst.buffer.raw.write(dst.offset, src, dst.size) }?;
            return Ok(self.value);
        }
        self.stage(dst.buffer, dst.offset, dst.size, SLOT_BYTES, |at, piece| {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            // SAFETY: the piece lies inside `dst.size` bytes, which `src` has.
            unsafe { std::ptr::copy_nonoverlapping(src.add(at), piece.as_mut_ptr(), piece.len()) };
        })
    }

    unsafe fn read(&mut self, src: Range<'_, Buffer>, dst: *mut u8) -> Result<u64> {
        src.buffer.raw.check(src.offset, src.size)?;
        if src.size == 0 {
            return Ok(self.value);
        }
        if src.buffer.raw.mapped.is_some() {
            self.idle()?;
            // SAFETY: the queue is idle; `dst` is `src.size` bytes by the caller's word.
            unsafe { src.buffer.raw.read(src.offset, dst, src.size) }?;
            return Ok(self.value);
        }
        let gpu = Arc::clone(&self.gpu);
        let mut done = 0;
        while done < src.size {
            let piece = SLOT_BYTES.min(src.size - done);
            let mut ring = lock(&gpu.ring);
            let slot = ring.take(&gpu)?;
            let copy = vk::BufferCopy { src_offset: src.offset + done, dst_offset: 0, size: piece };
            let to = slot.raw.handle;
            let fence = self.submit(|device, commands| {
                // SAFETY: both ranges were checked; the buffers live until the work is done.
                unsafe { device.cmd_copy_buffer(commands, src.buffer.raw.handle, to, &[copy]) };
            })?;
            self.timeline.wait(fence, u64::MAX)?;
            let at = usize::try_from(done).unwrap_or(usize::MAX);
            // SAFETY: the piece has arrived; it lies inside `src.size` bytes, which `dst` has.
            unsafe { slot.raw.read(0, dst.add(at), piece) }?;
            ring.bytes += piece;
            done += piece;
        }
        self.deliver(self.value);
        Ok(self.value)
    }

    fn copy(&mut self, src: Range<'_, Buffer>, dst: Range<'_, Buffer>) -> Result<u64> {
        src.buffer.raw.check(src.offset, src.size)?;
        dst.buffer.raw.check(dst.offset, src.size)?;
        if src.size == 0 {
            return Ok(self.value);
        }
        let (from, to) = (src.buffer.raw.handle, dst.buffer.raw.handle);
        let copy =
            vk::BufferCopy { src_offset: src.offset, dst_offset: dst.offset, size: src.size };
        self.submit(|device, commands| {
            // SAFETY: both ranges were checked; the core keeps the buffers until it has waited.
            unsafe { device.cmd_copy_buffer(commands, from, to, &[copy]) };
        })
    }

    unsafe fn upload(&mut self, upload: &Upload<'_, Buffer>) -> Result<u64> {
        let weight = &upload.weight;
        let size = weight.dtype.row_bytes(weight.n_in)?.checked_mul(upload.n_rows);
        let wrong = || {
            let Upload { n_rows, layout, src_size, .. } = *upload;
            Error::invalid(format!(
                "an upload of {n_rows} rows in layout {layout} from {src_size} bytes"
            ))
        };
        if size != Some(upload.src_size) {
            return Err(wrong());
        }
        if upload.layout == LAYOUT_NATIVE {
            let dst = Range { size: upload.src_size, ..upload.dst };
            // SAFETY: `src` is `src_size` bytes by the caller's word.
            return unsafe { self.write(dst, upload.src) };
        }
        if upload.layout != Format::of(weight.dtype).layout() {
            return Err(wrong());
        }
        let repack = Repack::new(weight.dtype, weight.n_in)?;
        let (row, packed) = (repack.row_bytes(), repack.packed_bytes() as u64);
        let bytes = packed.checked_mul(upload.n_rows).ok_or_else(wrong)?;
        upload.dst.buffer.raw.check(upload.dst.offset, bytes)?;
        let src_len = usize::try_from(upload.src_size).map_err(|_| wrong())?;
        // SAFETY: `src` is `src_size` bytes by the caller's word, until the fence; it is read before this returns.
        let src = unsafe { std::slice::from_raw_parts(upload.src, src_len) };
        let fill = |at: u64, piece: &mut [u8]| {
            let first = usize::try_from(at / packed.max(1)).unwrap_or(usize::MAX);
            let from = src.get(first.saturating_mul(row)..).unwrap_or(&[]);
            in_parallel(&repack, from, piece);
        };
        if upload.dst.buffer.raw.mapped.is_some() {
            self.idle()?;
            let (ptr, len) = upload.dst.buffer.raw.host_range(upload.dst.offset, bytes)?;
            // SAFETY: the queue is idle, and the range is the upload's.
            fill(0, unsafe { std::slice::from_raw_parts_mut(ptr, len) });
            return Ok(self.value);
        }
        // Whole rows go through a slot; a row that is longer than one, which no model has, would be cut.
        let step = SLOT_BYTES / packed.max(1) * packed;
        if step == 0 {
            return Err(Error::unsupported(format!("a weight whose rows have {packed} bytes")));
        }
        self.stage(upload.dst.buffer, upload.dst.offset, bytes, step, fill)
    }

    unsafe fn run(&mut self, executable: &mut Executable, run: &Run<'_, Buffer>) -> Result<u64> {
        self.gpu.alive()?;
        // SAFETY: passed on: host memory named in the run is valid until the fence.
        unsafe { executable.run(self, run) }
    }

    fn wait(&mut self, fence: u64, timeout: Option<Duration>) -> Result<()> {
        if fence > self.value {
            return Err(Error::invalid(format!(
                "fence {fence} of {} is not given yet",
                self.value
            )));
        }
        let timeout = timeout
            .map_or(u64::MAX, |timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
        self.timeline.wait(fence, timeout)?;
        self.deliver(fence);
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        // On a lost device nothing runs any more.
        if let Err(error) = self.timeline.wait(self.value, u64::MAX) {
            log::debug!("a queue is freed: {error}");
        }
        lock(&self.gpu.ring).forget(&self.timeline);
    }
}

/// Repacks rows on a few threads: one thread does not keep a bus busy.
fn in_parallel(repack: &Repack, src: &[u8], dst: &mut [u8]) {
    const ROWS_BYTES_MIN: usize = 1 << 20;
    let packed = repack.packed_bytes().max(1);
    let n_rows = dst.len() / packed;
    let n_threads = std::thread::available_parallelism().map_or(1, |n| n.get().min(8));
    let n_threads = n_threads.min(dst.len() / ROWS_BYTES_MIN).max(1);
    if n_threads == 1 {
        return repack.rows(src, dst);
    }
    let rows = n_rows.div_ceil(n_threads);
    std::thread::scope(|scope| {
        let pieces =
            src.chunks(rows * repack.row_bytes().max(1)).zip(dst.chunks_mut(rows * packed));
        for (src, dst) in pieces {
            scope.spawn(move || repack.rows(src, dst));
        }
    });
}
