//! An in-order queue. Every call ends in a marker event under a fence value of its own; waiting retires events in order.
//!
//! Host memory that is no pinned buffer travels through the queue's ring (see `staging`), or straight where the device is the host. What is read through
//! the ring is copied to its place when its fence is waited for, which is when the caller may look.

use crate::buffer::{ClBuffer, Place, place};
use crate::cl::{CommandQueue, Event};
use crate::context::Shared;
use crate::device::OpenClDevice;
use crate::executable::Executable;
use crate::launch::{Memory, Sink};
use crate::profile::Profile;
use crate::staging::{Address, PIECE, Ring};
use crate::weight::layout::Rows;
use crate::weight::repack_rows;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tegula_sdk::abi::{LAYOUT_NATIVE, Status};
use tegula_sdk::{Error, Range, Result, Run, Upload};

/// Numbers queues, so that an executable knows whether the next run is on another one.
static QUEUES: AtomicU64 = AtomicU64::new(1);

/// Bytes that wait in the ring for their place.
#[derive(Debug)]
struct HostCopy {
    from: Address,
    to: Address,
    len: usize,
}

/// Work up to a fence.
#[derive(Debug)]
struct Pending {
    fence: u64,
    event: Arc<Event>,
    ring_used: u64,
    copies: Vec<HostCopy>,
    kernels: Vec<(&'static str, Event)>,
}

/// An order of work on a device.
#[derive(Debug)]
pub struct Queue {
    shared: Arc<Shared>,
    queue: CommandQueue,
    id: u64,
    fence: u64,
    pending: VecDeque<Pending>,
    ring: Option<Ring>,
    copies: Vec<HostCopy>,
    kernels: Vec<(&'static str, Event)>,
    profile: Profile,
}

/// The calls of a queue that a run makes.
pub(crate) struct Transfers<'a>(&'a mut Queue);

impl Queue {
    pub(crate) fn new(shared: Arc<Shared>) -> Result<Self> {
        let queue = shared.context.queue(shared.facts.id, shared.profile)?;
        Ok(Self {
            shared,
            queue,
            id: QUEUES.fetch_add(1, Ordering::Relaxed),
            fence: 0,
            pending: VecDeque::new(),
            ring: None,
            copies: Vec::new(),
            kernels: Vec::new(),
            profile: Profile::default(),
        })
    }

    /// Ends what was enqueued since the last mark; gives its fence.
    fn mark(&mut self) -> Result<u64> {
        let event = Arc::new(self.queue.marker()?);
        self.queue.flush()?;
        self.fence += 1;
        let ring_used = self.ring.as_ref().map_or(0, Ring::used);
        self.pending.push_back(Pending {
            fence: self.fence,
            event,
            ring_used,
            copies: std::mem::take(&mut self.copies),
            kernels: std::mem::take(&mut self.kernels),
        });
        Ok(self.fence)
    }

    /// Ends a call: marks what it enqueued, or, if it failed half way, waits until nothing refers to the caller's memory.
    fn end(&mut self, result: Result<()>) -> Result<u64> {
        match result {
            Ok(()) => self.mark(),
            Err(error) => {
                self.copies.clear();
                self.kernels.clear();
                if let Err(second) = self.queue.finish() {
                    log::debug!("after `{error}`: {second}");
                }
                Err(error)
            }
        }
    }

    /// Waits for the oldest work and puts its results in place.
    fn retire(&mut self) -> Result<()> {
        let Some(oldest) = self.pending.pop_front() else { return Ok(()) };
        let result = oldest.event.wait();
        if let Some(ring) = &mut self.ring {
            ring.free(oldest.ring_used);
        }
        result?;
        for copy in &oldest.copies {
            copy.run();
        }
        self.profile.add(&oldest.kernels);
        Ok(())
    }

    /// Waits for everything.
    fn drain(&mut self) -> Result<()> {
        while !self.pending.is_empty() {
            self.retire()?;
        }
        Ok(())
    }

    /// Room in the ring; waits for it.
    fn stage(&mut self, size: u64) -> Result<Address> {
        if size > PIECE {
            return Err(Error::invalid(format!("a transfer of {size} bytes in one piece")));
        }
        if self.ring.is_none() {
            self.ring = Some(Ring::new(&self.shared)?);
        }
        loop {
            let ring = self.ring.as_mut().ok_or_else(|| Error::invalid("no staging"))?;
            if let Some(address) = ring.take(size) {
                return Ok(address);
            }
            if self.pending.is_empty() {
                // What fills the ring belongs to this very call.
                self.mark()?;
            }
            self.retire()?;
        }
    }

    /// Copies host memory to the device.
    ///
    /// # Safety
    /// `src` holds `size` bytes until the work is done.
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    unsafe fn write_to(
        &mut self,
        Memory(mem, offset): Memory,
        src: *const u8,
        size: u64,
        direct: bool,
    ) -> Result<()> {
        if direct || self.shared.facts.is_cpu {
            // SAFETY: the source lives until the work is done, by the caller's word.
            return unsafe { self.queue.write(mem, offset, size, src, false) };
        }
        let mut done = 0;
        while done < size {
            let len = (size - done).min(PIECE);
            let staged = self.stage(len)?;
            // SAFETY: `len` bytes lie at both places; the ring's are nobody else's.
            unsafe {
                std::ptr::copy_nonoverlapping(src.add(done as usize), staged.0, len as usize);
                self.queue.write(mem, offset + done, len, staged.0, false)?;
            }
            done += len;
            if done < size {
                self.mark()?;
            }
        }
        Ok(())
    }

    /// Copies from the device to host memory.
    ///
    /// # Safety
    /// `dst` holds `size` bytes until the work is done.
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    unsafe fn read_from(
        &mut self,
        Memory(mem, offset): Memory,
        dst: *mut u8,
        size: u64,
        direct: bool,
    ) -> Result<()> {
        if direct || self.shared.facts.is_cpu || size > PIECE {
            // SAFETY: the destination lives until the work is done, by the caller's word.
            return unsafe { self.queue.read(mem, offset, size, dst, false) };
        }
        let staged = self.stage(size)?;
        // SAFETY: the ring's bytes are nobody else's until they are retired.
        unsafe { self.queue.read(mem, offset, size, staged.0, false) }?;
        self.copies.push(HostCopy { from: staged, to: Address(dst), len: size as usize });
        Ok(())
    }

    /// Copies on the host, in the queue's order.
    ///
    /// # Safety
    /// `size` bytes lie at both places.
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    unsafe fn host_copy(&mut self, from: *const u8, to: *mut u8, size: u64) -> Result<()> {
        self.drain()?;
        self.queue.finish()?;
        // SAFETY: by the caller's word; `copy` allows overlap.
        unsafe { std::ptr::copy(from, to, size as usize) };
        Ok(())
    }

    fn upload_rows(&mut self, upload: &Upload<'_, ClBuffer>) -> Result<()> {
        let weight = &upload.weight;
        let rows = Rows::of(weight)?;
        let src_row = weight.dtype.row_bytes(weight.n_in)?;
        let is_native = upload.layout == LAYOUT_NATIVE;
        if !is_native && upload.layout != rows.layout.number() {
            return Err(Error::invalid(format!("an upload to layout {}", upload.layout)));
        }
        let dst_row = if is_native { src_row } else { rows.stride };
        let (src_size, dst_size) =
            (src_row.checked_mul(upload.n_rows), dst_row.checked_mul(upload.n_rows));
        let (Some(src_size), Some(dst_size)) = (src_size, dst_size) else {
            return Err(Error::invalid("an upload of over 2^64 bytes"));
        };
        if src_size != upload.src_size || dst_size > upload.dst.size {
            return Err(Error::invalid(format!(
                "an upload of {} rows from {} bytes to {}: {src_size} and {dst_size} are needed",
                upload.n_rows, upload.src_size, upload.dst.size
            )));
        }
        let dst = Range { size: dst_size, ..upload.dst };
        let Place::Device(mem, offset) = place(&dst)? else {
            return Err(Error::invalid("a weight in pinned host memory, which kernels cannot use"));
        };
        let len = usize::try_from(src_size).map_err(|_| Error::invalid("an upload too large"))?;
        if len == 0 {
            return Ok(());
        }
        #[expect(unsafe_code, reason = "host memory is named by a raw pointer")]
        // SAFETY: `src_size` bytes are readable until the fence is reached, by the caller's word.
        let src = unsafe { std::slice::from_raw_parts(upload.src, len) };
        if is_native {
            return self.upload_bytes(Memory(mem, offset), src);
        }
        let per_piece = (PIECE / dst_row.max(1)).max(1);
        let src_piece = usize::try_from(per_piece * src_row).unwrap_or(usize::MAX);
        let mut at = offset;
        for piece in src.chunks(src_piece.max(1)) {
            let bytes = piece.len() as u64 / src_row.max(1) * dst_row;
            self.repack_piece(&rows, piece, Memory(mem, at), bytes)?;
            at += bytes;
        }
        Ok(())
    }

    fn repack_piece(&mut self, rows: &Rows, src: &[u8], to: Memory, bytes: u64) -> Result<()> {
        if bytes > PIECE {
            // One row of many megabytes: rare, so it may wait.
            let mut packed = vec![0u8; usize::try_from(bytes).unwrap_or(usize::MAX)];
            repack_rows(rows, src, &mut packed)?;
            return self.upload_bytes(to, &packed);
        }
        let staged = self.stage(bytes)?;
        #[expect(unsafe_code, reason = "the ring is raw memory")]
        // SAFETY: `bytes` bytes of the ring, nobody else's until they are retired; the ring was mapped for writing.
        let packed = unsafe { std::slice::from_raw_parts_mut(staged.0, bytes as usize) };
        repack_rows(rows, src, packed)?;
        #[expect(unsafe_code, reason = "the ring is raw memory")]
        // SAFETY: as above; the ring outlives the work.
        unsafe { self.queue.write(to.0, to.1, bytes, staged.0, false) }?;
        self.mark().map(drop)
    }

    /// Copies bytes that the caller takes back at once.
    fn upload_bytes(&mut self, Memory(mem, offset): Memory, bytes: &[u8]) -> Result<()> {
        for (i, piece) in bytes.chunks(PIECE as usize).enumerate() {
            let staged = self.stage(piece.len() as u64)?;
            #[expect(unsafe_code, reason = "the ring is raw memory")]
            // SAFETY: the ring's bytes are nobody else's until they are retired, and outlive the work.
            unsafe {
                std::ptr::copy_nonoverlapping(piece.as_ptr(), staged.0, piece.len());
                let at = offset + i as u64 * PIECE;
                self.queue.write(mem, at, piece.len() as u64, staged.0, false)?;
            }
            if bytes.len() as u64 > PIECE {
                self.mark()?;
            }
        }
        Ok(())
    }
}

impl HostCopy {
    fn run(&self) {
        #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
        // SAFETY: the ring holds the bytes until they are retired; the destination lives until the fence is reached.
        unsafe {
            std::ptr::copy_nonoverlapping(self.from.0, self.to.0, self.len);
        }
    }
}

impl Transfers<'_> {
    pub(crate) fn sink(&mut self) -> Sink<'_> {
        let profile = self.0.shared.profile.then_some(&mut self.0.kernels);
        Sink { queue: &self.0.queue, profile }
    }

    /// Copies bytes to the device; they may change when the call returns.
    pub(crate) fn upload(&mut self, to: Memory, bytes: &[u8]) -> Result<()> {
        self.0.upload_bytes(to, bytes)
    }

    pub(crate) fn copy(&mut self, from: Memory, to: Memory, size: u64) -> Result<()> {
        if size == 0 {
            return Ok(());
        }
        self.0.queue.copy((from.0, from.1), (to.0, to.1), size)
    }

    /// Copies host memory to the device; `pinned` memory goes straight.
    ///
    /// # Safety
    /// `src` holds `size` bytes until the work is done.
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    pub(crate) unsafe fn write(
        &mut self,
        to: Memory,
        src: *const u8,
        size: u64,
        pinned: bool,
    ) -> Result<()> {
        // SAFETY: passed on unchanged.
        unsafe { self.0.write_to(to, src, size, pinned) }
    }

    /// Copies from the device to host memory.
    ///
    /// # Safety
    /// `dst` holds `size` bytes until the work is done.
    #[expect(unsafe_code, reason = "host memory is named by raw pointers")]
    pub(crate) unsafe fn read(
        &mut self,
        from: Memory,
        dst: *mut u8,
        size: u64,
        pinned: bool,
    ) -> Result<()> {
        // SAFETY: passed on unchanged.
        unsafe { self.0.read_from(from, dst, size, pinned) }
    }
}

#[expect(unsafe_code, reason = "the core hands raw pointers to a queue")]
impl tegula_sdk::Queue<OpenClDevice> for Queue {
    unsafe fn write(&mut self, dst: Range<'_, ClBuffer>, src: *const u8) -> Result<u64> {
        let result = match place(&dst)? {
            _ if dst.size == 0 => Ok(()),
            // SAFETY: `src` lives until the fence is reached, by the caller's word; the range was checked.
            Place::Device(mem, at) => unsafe {
                self.write_to(Memory(mem, at), src, dst.size, false)
            },
            // SAFETY: as above.
            Place::Pinned(ptr) => unsafe { self.host_copy(src, ptr, dst.size) },
        };
        self.end(result)
    }

    unsafe fn read(&mut self, src: Range<'_, ClBuffer>, dst: *mut u8) -> Result<u64> {
        let result = match place(&src)? {
            _ if src.size == 0 => Ok(()),
            // SAFETY: `dst` lives until the fence is reached, by the caller's word; the range was checked.
            Place::Device(mem, at) => unsafe {
                self.read_from(Memory(mem, at), dst, src.size, false)
            },
            // SAFETY: as above.
            Place::Pinned(ptr) => unsafe { self.host_copy(ptr, dst, src.size) },
        };
        self.end(result)
    }

    fn copy(&mut self, src: Range<'_, ClBuffer>, dst: Range<'_, ClBuffer>) -> Result<u64> {
        let size = src.size;
        let to = place(&Range { size, ..dst })?;
        let result = match (place(&src)?, to) {
            _ if size == 0 => Ok(()),
            (Place::Device(from, a), Place::Device(to, b)) => {
                self.queue.copy((from, a), (to, b), size)
            }
            // SAFETY: pinned buffers live until the work is done, by the boundary's contract; ranges were checked.
            (Place::Pinned(ptr), Place::Device(to, at)) => unsafe {
                self.write_to(Memory(to, at), ptr, size, true)
            },
            // SAFETY: as above.
            (Place::Device(from, at), Place::Pinned(ptr)) => unsafe {
                self.read_from(Memory(from, at), ptr, size, true)
            },
            // SAFETY: as above.
            (Place::Pinned(from), Place::Pinned(to)) => unsafe { self.host_copy(from, to, size) },
        };
        self.end(result)
    }

    unsafe fn upload(&mut self, upload: &Upload<'_, ClBuffer>) -> Result<u64> {
        let result = self.upload_rows(upload);
        self.end(result)
    }

    unsafe fn run(&mut self, executable: &mut Executable, run: &Run<'_, ClBuffer>) -> Result<u64> {
        if let Some((id, event)) = &executable.last
            && *id != self.id
        {
            self.queue.wait_for(event)?;
        }
        // SAFETY: passed on: host memory named in the run is valid until the fence is reached.
        let result = unsafe { executable.run(run, &mut Transfers(self)) };
        let fence = self.end(result)?;
        executable.last = self.pending.back().map(|last| (self.id, last.event.clone()));
        Ok(fence)
    }

    fn wait(&mut self, fence: u64, timeout: Option<Duration>) -> Result<()> {
        if fence > self.fence {
            let given = self.fence;
            return Err(Error::invalid(format!("fence {fence} of {given} is not given yet")));
        }
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        while self.pending.front().is_some_and(|oldest| oldest.fence <= fence) {
            if let (Some(deadline), Some(oldest)) = (deadline, self.pending.front()) {
                // OpenCL has no wait with a limit: look, and sleep a little.
                while !oldest.event.status().unwrap_or(true) {
                    if Instant::now() >= deadline {
                        return Err(Error::new(
                            Status::TIMEOUT,
                            format!("fence {fence} is not reached yet"),
                        ));
                    }
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
            self.retire()?;
        }
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        while !self.pending.is_empty() {
            if let Err(error) = self.retire() {
                log::debug!("work of a queue that is freed: {error}");
            }
        }
        if let Err(error) = self.queue.finish() {
            log::debug!("work of a queue that is freed: {error}");
        }
        self.profile.log(&self.shared.facts.name);
    }
}
