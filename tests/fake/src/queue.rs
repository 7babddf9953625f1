//! The queue's functions: transfers and runs, checked, slowed down and spoilt.

use crate::backend::thunks;
use crate::config::{Point, Wrong};
use crate::device::FakeDevice;
use crate::failure::{Failure, Result, forwarded, guard, need, object, put, sized};
use crate::faults::{Effect, milliseconds, sleep};
use crate::program::{FakeExecutable, inner_tiles};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tegula_abi::{
    self as abi, BufferRange, DType, ErrorRecord, QueueHandle, RunArgs, WeightUpload,
};

/// A queue.
#[derive(Debug)]
pub(crate) struct FakeQueue {
    device: Arc<FakeDevice>,
    inner: *mut QueueHandle,
    /// Failures that show once a fence is waited for, in order of fences.
    deferred: Mutex<Vec<(u64, Failure)>>,
    /// Held by the call that is going on.
    is_busy: AtomicBool,
}

/// Something that only one thread may use at a time, in use.
struct Busy<'a>(&'a AtomicBool);

impl<'a> Busy<'a> {
    fn new(flag: &'a AtomicBool, device: &FakeDevice, what: &str) -> Result<Self> {
        if flag.swap(true, Ordering::Acquire) {
            return Err(device.state.ledger().refuse(format!("{what} in two threads at once")));
        }
        Ok(Self(flag))
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

// The functions are called by the host under the boundary's contract; see `device.rs`.

thunks! {
    fn queue_write(queue: *mut QueueHandle, dst: BufferRange, src: *const u8, fence: *mut u64; err) {
        let queue = object::<FakeQueue, _>(queue.cast_const())?;
        queue.submit(Point::Write, &[(dst, true)], fence, || {
            Ok(need(queue.device.table().queue_write)?(queue.inner, dst, src, fence, err))
        })
    }

    fn queue_read(queue: *mut QueueHandle, src: BufferRange, dst: *mut u8, fence: *mut u64; err) {
        let queue = object::<FakeQueue, _>(queue.cast_const())?;
        queue.submit(Point::Read, &[(src, false)], fence, || {
            Ok(need(queue.device.table().queue_read)?(queue.inner, src, dst, fence, err))
        })
    }

    fn queue_copy(queue: *mut QueueHandle, src: BufferRange, dst: BufferRange, fence: *mut u64; err) {
        let queue = object::<FakeQueue, _>(queue.cast_const())?;
        queue.submit(Point::Copy, &[(src, false), (dst, true)], fence, || {
            Ok(need(queue.device.table().queue_copy)?(queue.inner, src, dst, fence, err))
        })
    }

    fn queue_upload(queue: *mut QueueHandle, upload: *const WeightUpload, fence: *mut u64; err) {
        let (queue, upload) = (object::<FakeQueue, _>(queue.cast_const())?, sized(upload)?);
        let range = sized(upload.tile)?.range;
        queue.submit(Point::Upload, &[(range, true)], fence, || queue.upload(&upload, fence, err))
    }

    fn queue_run(
        queue: *mut QueueHandle, executable: *mut abi::ExecutableHandle, args: *const RunArgs, fence: *mut u64; err
    ) {
        let queue = object::<FakeQueue, _>(queue.cast_const())?;
        let executable = object::<FakeExecutable, _>(executable.cast_const())?;
        queue.run(executable, args, fence, err)
    }

    fn queue_wait(queue: *mut QueueHandle, fence: u64, timeout_ns: u64; err) {
        let queue = object::<FakeQueue, _>(queue.cast_const())?;
        queue.wait(fence, timeout_ns, err)
    }

    fn queue_create(device: *const abi::DeviceHandle, out: *mut *mut QueueHandle; err) {
        let fake = object::<FakeDevice, _>(device)?;
        if matches!(fake.strike(Point::QueueCreate, 0)?, Effect::Null) {
            return Ok(());
        }
        let mut inner = std::ptr::null_mut();
        forwarded(need(fake.table().queue_create)?(fake.inner, &raw mut inner, err))?;
        fake.state.ledger().device(fake.index).queues += 1;
        // One more reference to the device, for the queue.
        Arc::increment_strong_count(device.cast::<FakeDevice>());
        let device = Arc::from_raw(device.cast::<FakeDevice>());
        let queue =
            FakeQueue { device, inner, deferred: Mutex::default(), is_busy: AtomicBool::new(false) };
        put(out, Box::into_raw(Box::new(queue)).cast())
    }
}

pub(crate) unsafe extern "C" fn queue_free(queue: *mut QueueHandle) {
    let run = || {
        // SAFETY: the boundary's contract: the queue is given back, once.
        let queue = unsafe { Box::from_raw(queue.cast::<FakeQueue>()) };
        // SAFETY: the inner table's function, with its own handle.
        unsafe { need(queue.device.table().queue_free)?(queue.inner) }
        queue.device.state.ledger().device(queue.device.index).queues -= 1;
        queue.device.state.publish();
        Ok(())
    };
    // SAFETY: a null record is allowed.
    unsafe { guard(std::ptr::null_mut(), run) };
}

impl FakeQueue {
    /// A transfer over `ranges`, each read or written: struck, checked, slowed down, and done.
    ///
    /// # Safety
    /// `fence` is null or writable.
    unsafe fn submit(
        &self,
        at: Point,
        ranges: &[(BufferRange, bool)],
        fence: *mut u64,
        call: impl FnOnce() -> Result<abi::Status>,
    ) -> Result<()> {
        let device = &self.device;
        let _busy = Busy::new(&self.is_busy, device, "a queue")?;
        let bytes = ranges.first().map_or(0, |(range, _)| range.size);
        let effect = device.strike(at, bytes)?;
        let mut ms = 0.0;
        for (range, write) in ranges {
            let live = device.state.ledger().range(device.index, range, *write)?;
            let config = device.state.buffer_type(device.index, live.buffer_type)?;
            ms += milliseconds(config.slow_ms_per_mib, range.size);
        }
        if matches!(effect, Effect::Null) {
            return Ok(());
        }
        sleep(ms);
        forwarded(call()?)?;
        // SAFETY: as the caller says.
        unsafe { self.defer(effect, fence) };
        Ok(())
    }

    /// Keeps a failure for the wait.
    ///
    /// # Safety
    /// `fence` is null or holds the fence of the work.
    unsafe fn defer(&self, effect: Effect, fence: *const u64) {
        if let Effect::Defer(failure) = effect {
            // SAFETY: as the caller says.
            let value = unsafe { fence.as_ref() }.copied().unwrap_or(0);
            self.deferred.lock().unwrap_or_else(PoisonError::into_inner).push((value, failure));
        }
    }

    /// # Safety
    /// The upload's pointers are valid; `fence` and `err` are null or writable.
    unsafe fn upload(
        &self,
        upload: &WeightUpload,
        fence: *mut u64,
        err: *mut ErrorRecord,
    ) -> Result<abi::Status> {
        let device = &self.device;
        let call = need(device.table().queue_upload)?;
        // SAFETY: valid by the caller's word.
        let (desc, tile) = unsafe { (sized(upload.desc)?, sized(upload.tile)?) };
        // SAFETY: as above.
        let (stated, inner) = unsafe { device.layout(&desc, err) }?;
        device.check_tile(&tile, &stated)?;
        let row_bytes = upload.src_size / tile.n_rows.max(1);
        if row_bytes * tile.n_rows != upload.src_size {
            let what = format!("{} bytes for {} rows", upload.src_size, tile.n_rows);
            return Err(device.state.ledger().refuse(what));
        }
        let mut at = 0;
        for piece in inner_tiles(&tile, &stated, &inner) {
            let src_size = row_bytes * piece.n_rows;
            // SAFETY: rows of the pieces follow each other in `src`, which holds them all.
            let src = unsafe { upload.src.add(at as usize) };
            let upload = WeightUpload {
                struct_size: size_of::<WeightUpload>(),
                desc: upload.desc,
                tile: &raw const piece,
                src,
                src_size,
            };
            // SAFETY: the inner table's function with its own handle; the source lives by the caller's word.
            forwarded(unsafe { call(self.inner, &raw const upload, fence, err) })?;
            at += src_size;
        }
        device.state.ledger().device(device.index).uploads += 1;
        Ok(abi::Status::OK)
    }

    /// # Safety
    /// As `queue_run` of the table.
    unsafe fn run(
        &self,
        executable: &FakeExecutable,
        args: *const RunArgs,
        fence: *mut u64,
        err: *mut ErrorRecord,
    ) -> Result<()> {
        let device = &self.device;
        let _busy = Busy::new(&self.is_busy, device, "a queue")?;
        let _running = Busy::new(&executable.is_running, device, "an executable")?;
        let effect = device.strike(Point::Run, 0)?;
        if matches!(effect, Effect::Null) {
            return Ok(());
        }
        // SAFETY: valid by the caller's word, with everything it names.
        let raw = unsafe { sized(args) }?;
        // SAFETY: as above.
        unsafe { self.check_run(&raw) }?;
        sleep(executable.slow_ms);
        let call = need(device.table().queue_run)?;
        // SAFETY: the inner table's function with its own handles.
        forwarded(unsafe { call(self.inner, executable.inner, args, fence, err) })?;
        device.state.ledger().device(device.index).runs += 1;
        if let Effect::Wrong(how) = effect {
            // SAFETY: as above; the fence was just written.
            unsafe { self.spoil(executable, &raw, how, fence, err) }?;
        }
        // SAFETY: as the caller says.
        unsafe { self.defer(effect, fence) };
        Ok(())
    }

    /// That every range of a run lies inside a live buffer, and KV tiles are aligned as their type asks.
    ///
    /// # Safety
    /// The arrays of the run are alive.
    unsafe fn check_run(&self, args: &RunArgs) -> Result<()> {
        let device = &self.device;
        let mut ledger = device.state.ledger();
        let mut check = |range: &BufferRange, write: bool, is_tile: bool| {
            let live = ledger.range(device.index, range, write)?;
            let alignment = device.state.buffer_type(device.index, live.buffer_type)?.alignment;
            if is_tile && !range.offset.is_multiple_of(alignment.max(1)) {
                let what = format!("a KV tile at {}, not aligned to {alignment}", range.offset);
                return Err(ledger.refuse(what));
            }
            Ok(())
        };
        for (bindings, write) in [(&args.inputs, false), (&args.outputs, true)] {
            for i in 0..bindings.len {
                // SAFETY: alive by the caller's word, here and below.
                let binding = unsafe { bindings.get(i) };
                if let Some(binding) = binding.filter(|binding| binding.host.is_null()) {
                    check(&binding.range, write, false)?;
                }
            }
        }
        // SAFETY: as above.
        for range in unsafe { args.scratch.frozen() }.unwrap_or_default() {
            check(range, true, false)?;
        }
        for i in 0..args.kv.len {
            // SAFETY: as above.
            let Some(group) = (unsafe { args.kv.get(i) }) else { continue };
            // SAFETY: as above.
            for tile in unsafe { group.tiles.frozen() }.unwrap_or_default() {
                check(tile, true, true)?;
            }
        }
        Ok(())
    }

    /// Waits for a run, and spoils its outputs where they lie.
    ///
    /// # Safety
    /// The arrays of the run are alive, `fence` holds its fence, and `err` is null or valid.
    unsafe fn spoil(
        &self,
        executable: &FakeExecutable,
        args: &RunArgs,
        how: Wrong,
        fence: *mut u64,
        err: *mut ErrorRecord,
    ) -> Result<()> {
        let table = self.device.table();
        let (wait, read, write) =
            (need(table.queue_wait)?, need(table.queue_read)?, need(table.queue_write)?);
        for i in 0..args.outputs.len {
            // SAFETY: as the caller says; buffers were checked to be alive, and waits end the use of `bytes`.
            unsafe {
                forwarded(wait(self.inner, *fence, u64::MAX, err))?;
                let Some(output) = args.outputs.get(i) else { continue };
                let dtype = executable.outputs.get(i).copied().unwrap_or(DType::F32);
                if !output.host.is_null() {
                    let size = usize::try_from(output.host_size).unwrap_or(0);
                    spoil_bytes(std::slice::from_raw_parts_mut(output.host, size), dtype, how);
                    continue;
                }
                let mut bytes = vec![0; usize::try_from(output.range.size).unwrap_or(0)];
                forwarded(read(self.inner, output.range, bytes.as_mut_ptr(), fence, err))?;
                forwarded(wait(self.inner, *fence, u64::MAX, err))?;
                spoil_bytes(&mut bytes, dtype, how);
                forwarded(write(self.inner, output.range, bytes.as_ptr(), fence, err))?;
                forwarded(wait(self.inner, *fence, u64::MAX, err))?;
            }
        }
        Ok(())
    }

    /// # Safety
    /// `err` is null or valid.
    unsafe fn wait(&self, fence: u64, timeout_ns: u64, err: *mut ErrorRecord) -> Result<()> {
        let _busy = Busy::new(&self.is_busy, &self.device, "a queue")?;
        if matches!(self.device.strike(Point::Wait, 0)?, Effect::Null) {
            return Ok(());
        }
        let wait = need(self.device.table().queue_wait)?;
        // SAFETY: the inner table's function with its own handle.
        forwarded(unsafe { wait(self.inner, fence, timeout_ns, err) })?;
        let mut deferred = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
        match deferred.iter().position(|(of_work, _)| *of_work <= fence) {
            Some(at) => {
                let (_, failure) = deferred.remove(at);
                self.device.state.note_loss(self.device.index, &failure);
                Err(failure)
            }
            None => Ok(()),
        }
    }
}

fn spoil_bytes(bytes: &mut [u8], dtype: DType, how: Wrong) {
    match how {
        Wrong::Zero => bytes.fill(0),
        _ if dtype != DType::F32 => bytes.fill(0),
        Wrong::Nan => {
            for value in bytes.as_chunks_mut::<4>().0 {
                *value = f32::NAN.to_ne_bytes();
            }
        }
        Wrong::Negated => {
            for value in bytes.as_chunks_mut::<4>().0 {
                *value = (-f32::from_ne_bytes(*value)).to_ne_bytes();
            }
        }
    }
}
