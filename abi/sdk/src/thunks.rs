//! The boundary's functions over the safe traits. Each catches panics and turns errors into records.

use crate::device::{
    Backend, Device, Held, Memory, Queue, Range, Tile, Upload, Weight, WeightBinding,
};
use crate::{Error, Result, Run, host};
use std::marker::PhantomData;
use std::mem::size_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use tegula_abi as abi;
use tegula_abi::{ErrorRecord, Status};
use tegula_program::ValueId;
use tegula_program::ffi::read_program;
use tegula_quant::DType;

/// Runs `f`; an error or a panic becomes a status and fills the caller's record.
///
/// # Safety
/// `err` is null or a valid record.
unsafe fn guard(err: *mut ErrorRecord, f: impl FnOnce() -> Result<()>) -> Status {
    let error = match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(())) => return Status::OK,
        Ok(Err(error)) => error,
        Err(payload) => Error::new(Status::PANIC, panic_text(payload.as_ref())),
    };
    let status = if error.status == Status::OK { Status::DRIVER } else { error.status };
    // SAFETY: valid or null by the caller's word.
    unsafe { Error { status, ..error }.store(err) };
    status
}

fn panic_text(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    let text = text.or_else(|| payload.downcast_ref::<String>().cloned());
    format!("the backend panicked: {}", text.unwrap_or_else(|| "no message".into()))
}

/// # Safety
/// `ptr` is null or points to a T that lives for `'a`.
unsafe fn object<'a, T, H>(ptr: *const H) -> Result<&'a T> {
    // SAFETY: null or live by the caller's word.
    unsafe { ptr.cast::<T>().as_ref() }.ok_or_else(|| Error::invalid("a null handle"))
}

/// # Safety
/// `ptr` is null or points to a T that nothing else uses for `'a`.
unsafe fn object_mut<'a, T, H>(ptr: *mut H) -> Result<&'a mut T> {
    // SAFETY: null or exclusive by the caller's word.
    unsafe { ptr.cast::<T>().as_mut() }.ok_or_else(|| Error::invalid("a null handle"))
}

/// # Safety
/// `ptr` is null or a valid struct of the host.
unsafe fn sized<T: abi::Crossing>(ptr: *const T) -> Result<T> {
    // SAFETY: valid or null by the caller's word.
    unsafe { abi::read_sized(ptr) }.ok_or_else(|| {
        Error::invalid(format!("no {}, or one too short", std::any::type_name::<T>()))
    })
}

/// # Safety
/// `out` is null or writable.
unsafe fn put<T>(out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(Error::invalid("nowhere to put the result"));
    }
    // SAFETY: writable by the caller's word.
    unsafe { out.write(value) };
    Ok(())
}

/// # Safety
/// `out` is null or a valid struct of the host.
unsafe fn put_sized<T: abi::Crossing>(out: *mut T, value: &T) -> Result<()> {
    // SAFETY: valid or null by the caller's word.
    if unsafe { abi::write_sized(out, value) } {
        Ok(())
    } else {
        Err(Error::invalid("a struct too short"))
    }
}

/// Hands a boxed value to the host as a handle; nothing leaks when there is nowhere to put it.
///
/// # Safety
/// `out` is null or writable.
unsafe fn give<T, H>(out: *mut *mut H, value: T) -> Result<()> {
    if out.is_null() {
        return Err(Error::invalid("nowhere to put the handle"));
    }
    // SAFETY: writable by the caller's word.
    unsafe { out.write(Box::into_raw(Box::new(value)).cast()) };
    Ok(())
}

/// Frees a handle made by [`give`]; a panic in a destructor ends here.
///
/// # Safety
/// `ptr` is null or came from `give::<T, H>` and is not used again.
unsafe fn take<T, H>(ptr: *mut H) {
    if !ptr.is_null() {
        // SAFETY: as the caller promises.
        let value = unsafe { Box::from_raw(ptr.cast::<T>()) };
        if catch_unwind(AssertUnwindSafe(|| drop(value))).is_err() {
            log::error!("a backend's destructor panicked");
        }
    }
}

type DeviceOf<B> = <B as Backend>::Device;
type BufferOf<B> = <DeviceOf<B> as Device>::Buffer;
type ExecutableOf<B> = <DeviceOf<B> as Device>::Executable;
type QueueOf<B> = <DeviceOf<B> as Device>::Queue;

/// Negotiates for a backend; called by `export_backend!`.
///
/// # Safety
/// `host` and `out` are null or valid, `host` for as long as the plugin is loaded.
pub unsafe fn negotiate<B: Backend>(
    host: *const abi::Host,
    out: *mut abi::Plugin,
    version: &'static str,
) -> Status {
    let mut status = Status::OK;
    let run = || {
        // SAFETY: valid or null by the caller's word.
        let hosts = unsafe { sized(host) }?;
        let plugin = abi::Plugin {
            struct_size: size_of::<abi::Plugin>(),
            revision_min: abi::REVISION_MIN,
            revision_max: abi::REVISION,
            id: abi::Str::of(B::ID),
            version: abi::Str::of(version),
            description: abi::Str::of(B::DESCRIPTION),
            backend: &Tables::<B>::BACKEND,
        };
        // SAFETY: as above.
        unsafe { put_sized(out, &plugin) }?;
        if hosts.revision_max < abi::REVISION_MIN || hosts.revision_min > abi::REVISION {
            status = Status::INCOMPATIBLE;
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { host::connect(host) };
        Ok(())
    };
    // SAFETY: a null record is allowed.
    let guarded = unsafe { guard(std::ptr::null_mut(), run) };
    if guarded == Status::OK { status } else { guarded }
}

struct Tables<B>(PhantomData<B>);

impl<B: Backend> Tables<B> {
    const BACKEND: abi::BackendTable = abi::BackendTable {
        struct_size: size_of::<abi::BackendTable>(),
        open: Some(open::<B>),
        close: Some(close::<B>),
        device_count: Some(device_count::<B>),
        device_info: Some(device_info::<B>),
        heap_info: Some(heap_info::<B>),
        buffer_type_info: Some(buffer_type_info::<B>),
        device_open: Some(device_open::<B>),
        device: &Self::DEVICE,
        extension: Some(extension::<B>),
    };
    const DEVICE: abi::DeviceTable = abi::DeviceTable {
        struct_size: size_of::<abi::DeviceTable>(),
        close: Some(device_close::<B>),
        buffer_alloc: Some(buffer_alloc::<B>),
        buffer_import: Some(buffer_import::<B>),
        buffer_free: Some(buffer_free::<B>),
        buffer_map: Some(buffer_map::<B>),
        weight_layout: Some(weight_layout::<B>),
        program_supports: Some(program_supports::<B>),
        program_memory: Some(program_memory::<B>),
        program_compile: Some(program_compile::<B>),
        executable_free: Some(executable_free::<B>),
        queue_create: Some(queue_create::<B>),
        queue_free: Some(queue_free::<B>),
        queue_write: Some(queue_write::<B>),
        queue_read: Some(queue_read::<B>),
        queue_copy: Some(queue_copy::<B>),
        queue_upload: Some(queue_upload::<B>),
        queue_run: Some(queue_run::<B>),
        queue_wait: Some(queue_wait::<B>),
    };
}

// Every function below is called by the host under the boundary's contract: pointers are null or valid for what their type says, handles
// came from this table and are freed once. That contract is the SAFETY of every block here.

/// Declares thunks that differ only in what they do inside the guard.
macro_rules! thunks {
    ($($(#[$meta:meta])* fn $name:ident<$b:ident>($($arg:ident: $ty:ty),* ; $err:ident) $body:block)*) => {$(
        $(#[$meta])*
        unsafe extern "C" fn $name<$b: Backend>($($arg: $ty,)* $err: *mut ErrorRecord) -> Status {
            // SAFETY: the boundary's contract, above.
            unsafe { guard($err, || $body) }
        }
    )*};
}

thunks! {
    fn open<B>(out: *mut *mut abi::BackendHandle; err) {
        give(out, B::open()?)
    }

    fn device_count<B>(backend: *const abi::BackendHandle, out: *mut u32; err) {
        put(out, object::<B, _>(backend)?.n_devices())
    }

    fn device_info<B>(backend: *const abi::BackendHandle, index: u32, out: *mut abi::DeviceInfo; err) {
        let info = object::<B, _>(backend)?.device_info(index)?;
        put_sized(out, &info)
    }

    fn heap_info<B>(backend: *const abi::BackendHandle, index: u32, heap: u32, out: *mut abi::HeapInfo; err) {
        let info = object::<B, _>(backend)?.heap_info(index, heap)?;
        put_sized(out, &info)
    }

    fn buffer_type_info<B>(
        backend: *const abi::BackendHandle, index: u32, buffer_type: u32, out: *mut abi::BufferTypeInfo; err
    ) {
        let info = object::<B, _>(backend)?.buffer_type_info(index, buffer_type)?;
        put_sized(out, &info)
    }

    fn device_open<B>(
        backend: *const abi::BackendHandle, index: u32, options: *const abi::DeviceOptions,
        out: *mut *mut abi::DeviceHandle; err
    ) {
        let options = sized(options)?;
        give(out, object::<B, _>(backend)?.open_device(index, &options)?)
    }

    fn buffer_alloc<B>(
        device: *const abi::DeviceHandle, desc: *const abi::BufferDesc, out: *mut *mut abi::BufferHandle; err
    ) {
        let desc = buffer_desc(desc)?;
        give(out, object::<DeviceOf<B>, _>(device)?.alloc(&desc)?)
    }

    fn buffer_import<B>(
        device: *const abi::DeviceHandle, desc: *const abi::BufferDesc, ptr: *const u8,
        out: *mut *mut abi::BufferHandle; err
    ) {
        let desc = buffer_desc(desc)?;
        if ptr.is_null() {
            return Err(Error::invalid("import of a null pointer"));
        }
        give(out, object::<DeviceOf<B>, _>(device)?.import(&desc, ptr)?)
    }

    fn buffer_map<B>(
        device: *const abi::DeviceHandle, buffer: *const abi::BufferHandle, out: *mut *mut u8; err
    ) {
        let buffer = object::<BufferOf<B>, _>(buffer)?;
        put(out, object::<DeviceOf<B>, _>(device)?.map(buffer)?)
    }

    fn weight_layout<B>(
        device: *const abi::DeviceHandle, desc: *const abi::WeightDesc, out: *mut abi::WeightLayout; err
    ) {
        let layout = object::<DeviceOf<B>, _>(device)?.weight_layout(&weight(desc)?)?;
        put_sized(out, &layout)
    }

    fn program_supports<B>(
        device: *const abi::DeviceHandle, program: *const abi::Program, out: *mut u8, out_len: usize; err
    ) {
        let program = read_program(program)?;
        let supported = object::<DeviceOf<B>, _>(device)?.supports(&program)?;
        if supported.len() != out_len || out.is_null() {
            return Err(Error::invalid(format!("room for {out_len} of {} ops", supported.len())));
        }
        for (i, yes) in supported.into_iter().enumerate() {
            out.add(i).write(u8::from(yes));
        }
        Ok(())
    }

    fn program_memory<B>(
        device: *const abi::DeviceHandle, program: *const abi::Program, options: *const abi::CompileOptions,
        out: *mut abi::ExecutableMemory; err
    ) {
        let (program, options) = (read_program(program)?, sized(options)?);
        let memory = object::<DeviceOf<B>, _>(device)?.memory(&program, &options)?;
        put_memory(out, &memory)
    }

    fn program_compile<B>(
        device: *const abi::DeviceHandle, program: *const abi::Program, options: *const abi::CompileOptions,
        weights: *const abi::Slice<abi::WeightBinding>, out: *mut *mut abi::ExecutableHandle; err
    ) {
        let (program, options) = (read_program(program)?, sized(options)?);
        let weights = bindings::<BufferOf<B>>(weights)?;
        give(out, object::<DeviceOf<B>, _>(device)?.compile(program, &options, weights)?)
    }

    fn queue_create<B>(device: *const abi::DeviceHandle, out: *mut *mut abi::QueueHandle; err) {
        give(out, object::<DeviceOf<B>, _>(device)?.queue()?)
    }

    fn queue_write<B>(
        queue: *mut abi::QueueHandle, dst: abi::BufferRange, src: *const u8, fence: *mut u64; err
    ) {
        put(fence, object_mut::<QueueOf<B>, _>(queue)?.write(Range::new(&dst)?, src)?)
    }

    fn queue_read<B>(
        queue: *mut abi::QueueHandle, src: abi::BufferRange, dst: *mut u8, fence: *mut u64; err
    ) {
        put(fence, object_mut::<QueueOf<B>, _>(queue)?.read(Range::new(&src)?, dst)?)
    }

    fn queue_copy<B>(
        queue: *mut abi::QueueHandle, src: abi::BufferRange, dst: abi::BufferRange, fence: *mut u64; err
    ) {
        put(fence, object_mut::<QueueOf<B>, _>(queue)?.copy(Range::new(&src)?, Range::new(&dst)?)?)
    }

    fn queue_upload<B>(
        queue: *mut abi::QueueHandle, upload: *const abi::WeightUpload, fence: *mut u64; err
    ) {
        let upload = sized(upload)?;
        let tile = sized(upload.tile)?;
        let upload = Upload {
            weight: weight(upload.desc)?,
            first_row: tile.first_row,
            n_rows: tile.n_rows,
            dst: Range::new(&tile.range)?,
            layout: tile.layout,
            src: upload.src,
            src_size: upload.src_size,
        };
        put(fence, object_mut::<QueueOf<B>, _>(queue)?.upload(&upload)?)
    }

    fn queue_run<B>(
        queue: *mut abi::QueueHandle, executable: *mut abi::ExecutableHandle, args: *const abi::RunArgs,
        fence: *mut u64; err
    ) {
        let executable = object_mut::<ExecutableOf<B>, _>(executable)?;
        let run = Run::new(args)?;
        put(fence, object_mut::<QueueOf<B>, _>(queue)?.run(executable, &run)?)
    }

    fn queue_wait<B>(queue: *mut abi::QueueHandle, fence: u64, timeout_ns: u64; err) {
        let timeout = (timeout_ns != u64::MAX).then(|| Duration::from_nanos(timeout_ns));
        object_mut::<QueueOf<B>, _>(queue)?.wait(fence, timeout)
    }
}

unsafe extern "C" fn close<B: Backend>(backend: *mut abi::BackendHandle) {
    // SAFETY: the boundary's contract, above.
    unsafe { take::<B, _>(backend) }
}

unsafe extern "C" fn device_close<B: Backend>(device: *mut abi::DeviceHandle) {
    // SAFETY: the boundary's contract, above.
    unsafe { take::<DeviceOf<B>, _>(device) }
}

unsafe extern "C" fn buffer_free<B: Backend>(
    _: *const abi::DeviceHandle,
    buffer: *mut abi::BufferHandle,
) {
    // SAFETY: the boundary's contract, above.
    unsafe { take::<BufferOf<B>, _>(buffer) }
}

unsafe extern "C" fn executable_free<B: Backend>(
    _: *const abi::DeviceHandle,
    executable: *mut abi::ExecutableHandle,
) {
    // SAFETY: the boundary's contract, above.
    unsafe { take::<ExecutableOf<B>, _>(executable) }
}

unsafe extern "C" fn queue_free<B: Backend>(queue: *mut abi::QueueHandle) {
    // SAFETY: the boundary's contract, above.
    unsafe { take::<QueueOf<B>, _>(queue) }
}

unsafe extern "C" fn extension<B: Backend>(name: abi::Str) -> *const std::ffi::c_void {
    // SAFETY: the boundary's contract, above.
    let name = unsafe { name.get() };
    catch_unwind(|| name.map_or(std::ptr::null(), B::extension)).unwrap_or(std::ptr::null())
}

/// # Safety
/// `desc` is null or valid.
unsafe fn buffer_desc(desc: *const abi::BufferDesc) -> Result<abi::BufferDesc> {
    // SAFETY: valid or null by the caller's word.
    let desc = unsafe { sized(desc) }?;
    if desc.size == 0 {
        return Err(Error::invalid("a buffer of 0 bytes"));
    }
    Ok(desc)
}

/// # Safety
/// `desc` is null or valid.
unsafe fn weight(desc: *const abi::WeightDesc) -> Result<Weight> {
    // SAFETY: valid or null by the caller's word.
    let desc = unsafe { sized(desc) }?;
    let dtype = DType::from_id(desc.dtype.0)
        .ok_or_else(|| Error::unsupported(format!("weights of element type {}", desc.dtype.0)))?;
    let abi::WeightDesc { uses, n_in, n_rows, rows_per_expert, .. } = desc;
    Ok(Weight { dtype, uses, n_in, n_rows, rows_per_expert })
}

/// # Safety
/// `weights` is null or a valid array of bindings whose tiles are alive.
unsafe fn bindings<B>(
    weights: *const abi::Slice<abi::WeightBinding>,
) -> Result<Vec<WeightBinding<B>>> {
    // SAFETY: valid or null by the caller's word, here and for every element below.
    let weights = unsafe { weights.as_ref() }.ok_or_else(|| Error::invalid("no weights"))?;
    let short = || Error::invalid("bindings of a shorter revision");
    let mut out = Vec::with_capacity(weights.len.min(1 << 20));
    for i in 0..weights.len {
        // SAFETY: as above.
        let binding = unsafe { weights.get(i) }.ok_or_else(short)?;
        let mut tiles = Vec::with_capacity(binding.tiles.len.min(1 << 20));
        for j in 0..binding.tiles.len {
            // SAFETY: as above.
            let tile = unsafe { binding.tiles.get(j) }.ok_or_else(short)?;
            tiles.push(Tile {
                first_row: tile.first_row,
                n_rows: tile.n_rows,
                // SAFETY: the host keeps buffers alive for longer than the executable.
                buffer: unsafe { Held::new(tile.range.buffer) }?,
                offset: tile.range.offset,
                size: tile.range.size,
                layout: tile.layout,
            });
        }
        out.push(WeightBinding { value: ValueId(binding.value), tiles });
    }
    Ok(out)
}

/// # Safety
/// `out` is null or valid, and its array holds `scratch_cap` elements.
unsafe fn put_memory(out: *mut abi::ExecutableMemory, memory: &Memory) -> Result<()> {
    // SAFETY: valid or null by the caller's word.
    let mut record = unsafe { sized(out) }?;
    record.scratch_len = memory.scratch.len();
    record.device_bytes = memory.device_bytes;
    record.host_bytes = memory.host_bytes;
    let fits = record.scratch_cap >= memory.scratch.len() && !record.scratch.is_null();
    if fits {
        for (i, piece) in memory.scratch.iter().enumerate() {
            // SAFETY: within `scratch_cap` elements.
            unsafe { record.scratch.add(i).write(*piece) };
        }
    }
    // SAFETY: as above.
    unsafe { put_sized(out, &record) }?;
    if fits || memory.scratch.is_empty() {
        return Ok(());
    }
    Err(Error::new(Status::SHORT_BUFFER, format!("{} pieces of scratch", memory.scratch.len())))
}
