//! A plugin that was built long ago, or in the future: it depends on no crate of the project and brings tables of its own.
//!
//! Two packages are built from this file: one hands out a table that is shorter than the host's, the other one that is longer. The one
//! device is a piece of host memory that can be written and read, and runs nothing.

#![expect(unsafe_code, reason = "a plugin without the project's own wrappers")]

mod tables;

use std::ffi::c_void;
use tables::*;

/// Whether this is the package of the longer table.
const IS_NEWER: bool = matches!(env!("CARGO_PKG_NAME").as_bytes(), b"tegula-newer-plugin");

/// Bytes of the only heap.
const TOTAL: u64 = 1 << 30;
/// The greatest buffer.
const MAX_SIZE: u64 = 1 << 20;

struct Buffer {
    bytes: Vec<u8>,
}

struct Queue {
    fence: u64,
}

/// What the negotiation found, for the log.
static HOST: std::sync::atomic::AtomicPtr<Host> =
    std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());

static OLDER: BackendTable = backend_table(size_of::<BackendTable>());
static NEWER: NewBackendTable = NewBackendTable {
    today: backend_table(size_of::<NewBackendTable>()),
    extension: None,
    // An address that nobody may follow.
    later: [1, usize::MAX],
};

const fn backend_table(struct_size: usize) -> BackendTable {
    BackendTable {
        struct_size,
        open: Some(open),
        close: Some(close),
        device_count: Some(device_count),
        device_info: Some(device_info),
        heap_info: Some(heap_info),
        buffer_type_info: Some(buffer_type_info),
        device_open: Some(device_open),
        device: &DEVICE,
    }
}

static DEVICE: DeviceTable = DeviceTable {
    struct_size: size_of::<DeviceTable>(),
    close: Some(close),
    buffer_alloc: Some(buffer_alloc),
    buffer_import: None,
    buffer_free: Some(buffer_free),
    buffer_map: Some(buffer_map),
    weight_layout: Some(weight_layout),
    program_supports: Some(program_supports),
    program_memory: Some(program_memory),
    program_compile: Some(program_compile),
    executable_free: Some(executable_free),
    queue_create: Some(queue_create),
    queue_free: Some(queue_free),
    queue_write: Some(queue_write),
    queue_read: Some(queue_read),
    queue_copy: Some(queue_copy),
    queue_upload: Some(queue_upload),
    queue_run: Some(queue_run),
    queue_wait: Some(queue_wait),
};

/// The only symbol: this plugin is as one in C, without a layout record.
///
/// # Safety
/// `host` and `out` are valid, `host` for as long as the plugin is loaded.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn tegula_backend_v1(host: *const Host, out: *mut Plugin) -> i32 {
    // SAFETY: valid by the caller's word.
    let (hosts, plugin) = unsafe { (&*host, &mut *out) };
    plugin.revision_min = 1;
    plugin.revision_max = 1;
    if hosts.revision_max < 1 || hosts.revision_min > 1 {
        return INCOMPATIBLE;
    }
    HOST.store(host.cast_mut(), std::sync::atomic::Ordering::Release);
    plugin.id = Str::of(if IS_NEWER { "newer" } else { "old" });
    plugin.version = Str::of("0.0.1");
    plugin.description = Str::of("tables of another revision");
    plugin.backend = if IS_NEWER { &raw const NEWER.today } else { &OLDER };
    plugin.struct_size = size_of::<Plugin>();
    OK
}

/// Fills the record and gives the status.
unsafe fn fail(err: Err, status: i32, message: &str) -> i32 {
    // SAFETY: null or valid by the boundary's contract, with `message_cap` bytes at `message`.
    unsafe {
        if let Some(record) = err.as_mut() {
            record.status = status;
            record.has = 0;
            let len =
                if record.message.is_null() { 0 } else { message.len().min(record.message_cap) };
            std::ptr::copy_nonoverlapping(message.as_ptr(), record.message, len);
            record.message_len = len;
        }
    }
    status
}

// All below are called under the boundary's contract: pointers are valid, handles came from this table and are freed once. That
// is the SAFETY of every block here.

unsafe extern "C" fn open(out: *mut Handle, _: Err) -> i32 {
    // SAFETY: the contract, above.
    unsafe {
        let host = &*HOST.load(std::sync::atomic::Ordering::Acquire);
        // The host of its day had a log, and may have had no more.
        if let Some(log) = host.log.filter(|_| host.struct_size >= size_of::<Host>()) {
            log(host.ctx, 3, Str::of(""), Str::of("opened with tables of another revision"));
        }
        out.write(std::ptr::dangling_mut::<u64>().cast());
    }
    OK
}

unsafe extern "C" fn close(_: Handle) {}

unsafe extern "C" fn device_count(_: Handle, out: *mut u32, _: Err) -> i32 {
    // SAFETY: the contract, above.
    unsafe { out.write(1) };
    OK
}

/// Writes an answer whose size is that of its day, which is the caller's too.
unsafe fn answer<T>(index: u32, out: *mut T, value: T, err: Err) -> i32 {
    // SAFETY: the contract, above.
    unsafe {
        if index != 0 {
            return fail(err, NOT_FOUND, "there is one of everything");
        }
        if out.cast::<usize>().read() < size_of::<T>() {
            return fail(err, INVALID_ARGUMENT, "a struct too short");
        }
        out.write(value);
    }
    OK
}

unsafe extern "C" fn device_info(_: Handle, index: u32, out: *mut DeviceInfo, err: Err) -> i32 {
    let info = DeviceInfo {
        struct_size: size_of::<DeviceInfo>(),
        kind: 1,
        has_uuid: 0,
        uuid: [0; 16],
        pci: [0; 16],
        vendor_id: 0,
        n_heaps: 1,
        n_buffer_types: 1,
        types: [0; 4],
        rank: 0,
        name: text("a device of another day"),
        vendor: text("nobody"),
        driver: text("none"),
    };
    // SAFETY: the contract, above.
    unsafe { answer(index, out, info, err) }
}

unsafe extern "C" fn heap_info(_: Handle, i: u32, heap: u32, out: *mut HeapInfo, err: Err) -> i32 {
    let info = HeapInfo {
        struct_size: size_of::<HeapInfo>(),
        kind: 1,
        reserved: 0,
        pool: 1,
        total: Figure::known(TOTAL),
        free: Figure::UNKNOWN,
    };
    // SAFETY: the contract, above.
    unsafe { answer(i | heap, out, info, err) }
}

unsafe extern "C" fn buffer_type_info(
    _: Handle,
    index: u32,
    kind: u32,
    out: *mut BufferTypeInfo,
    err: Err,
) -> i32 {
    let info = BufferTypeInfo {
        struct_size: size_of::<BufferTypeInfo>(),
        heap: 0,
        host_access: 1,
        flags: 0,
        reserved: 0,
        max_size: Figure::known(MAX_SIZE),
        alignment: 8,
        granularity: 1,
        preferred_chunk: Figure::UNKNOWN,
        read_bandwidth: Figure::UNKNOWN,
        import_alignment: 0,
        name: text("host"),
    };
    // SAFETY: the contract, above.
    unsafe { answer(index | kind, out, info, err) }
}

unsafe extern "C" fn device_open(
    _: Handle,
    index: u32,
    _: *const c_void,
    out: *mut Handle,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe {
        if index != 0 {
            return fail(err, NOT_FOUND, "there is one device");
        }
        out.write(std::ptr::dangling_mut::<u64>().cast());
    }
    OK
}

unsafe extern "C" fn buffer_alloc(
    _: Handle,
    desc: *const BufferDesc,
    out: *mut Handle,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe {
        let size = (*desc).size;
        if size > MAX_SIZE {
            return fail(err, TOO_BIG, "over the limit of another day");
        }
        let bytes = vec![0; usize::try_from(size).unwrap_or(0)];
        out.write(Box::into_raw(Box::new(Buffer { bytes })).cast());
    }
    OK
}

unsafe extern "C" fn buffer_free(_: Handle, buffer: Handle) {
    // SAFETY: the contract, above.
    drop(unsafe { Box::from_raw(buffer.cast::<Buffer>()) });
}

unsafe extern "C" fn buffer_map(_: Handle, buffer: Handle, out: *mut *mut u8, _: Err) -> i32 {
    // SAFETY: the contract, above.
    unsafe { out.write((*buffer.cast::<Buffer>()).bytes.as_mut_ptr()) };
    OK
}

unsafe extern "C" fn queue_create(_: Handle, out: *mut Handle, _: Err) -> i32 {
    // SAFETY: the contract, above.
    unsafe { out.write(Box::into_raw(Box::new(Queue { fence: 0 })).cast()) };
    OK
}

unsafe extern "C" fn queue_free(queue: Handle) {
    // SAFETY: the contract, above.
    drop(unsafe { Box::from_raw(queue.cast::<Queue>()) });
}

/// The range's first byte, if the range is inside.
unsafe fn at(range: &BufferRange) -> Option<*mut u8> {
    // SAFETY: the contract, above.
    let buffer = unsafe { &mut *range.buffer.cast::<Buffer>() };
    let begin = usize::try_from(range.offset).ok()?;
    let end = begin.checked_add(usize::try_from(range.size).ok()?)?;
    buffer.bytes.get_mut(begin..end).map(<[u8]>::as_mut_ptr)
}

/// Copies, and passes the next fence.
unsafe fn copy(
    queue: Handle,
    from: Option<*const u8>,
    to: Option<*mut u8>,
    size: u64,
    fence: *mut u64,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe {
        let (Some(from), Some(to)) = (from, to) else {
            return fail(err, INVALID_ARGUMENT, "outside the buffer");
        };
        std::ptr::copy(from, to, usize::try_from(size).unwrap_or(0));
        let queue = &mut *queue.cast::<Queue>();
        queue.fence += 1;
        fence.write(queue.fence);
    }
    OK
}

unsafe extern "C" fn queue_write(
    queue: Handle,
    dst: BufferRange,
    src: *const u8,
    fence: *mut u64,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe { copy(queue, Some(src), at(&dst), dst.size, fence, err) }
}

unsafe extern "C" fn queue_read(
    queue: Handle,
    src: BufferRange,
    dst: *mut u8,
    fence: *mut u64,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe { copy(queue, at(&src).map(<*mut u8>::cast_const), Some(dst), src.size, fence, err) }
}

unsafe extern "C" fn queue_copy(
    queue: Handle,
    src: BufferRange,
    dst: BufferRange,
    fence: *mut u64,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe { copy(queue, at(&src).map(<*mut u8>::cast_const), at(&dst), src.size, fence, err) }
}

unsafe extern "C" fn queue_wait(_: Handle, _: u64, _: u64, _: Err) -> i32 {
    OK
}

const NO_PROGRAMS: &str = "this device runs no programs";

unsafe extern "C" fn weight_layout(_: Handle, _: *const c_void, _: *mut c_void, err: Err) -> i32 {
    // SAFETY: the contract, above.
    unsafe { fail(err, UNSUPPORTED, NO_PROGRAMS) }
}

unsafe extern "C" fn program_supports(
    _: Handle,
    _: *const c_void,
    out: *mut u8,
    len: usize,
    _: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe { out.write_bytes(0, len) };
    OK
}

unsafe extern "C" fn program_memory(
    _: Handle,
    _: *const c_void,
    _: *const c_void,
    _: *mut c_void,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe { fail(err, UNSUPPORTED, NO_PROGRAMS) }
}

unsafe extern "C" fn program_compile(
    _: Handle,
    _: *const c_void,
    _: *const c_void,
    _: *const c_void,
    _: *mut Handle,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe { fail(err, UNSUPPORTED, NO_PROGRAMS) }
}

unsafe extern "C" fn executable_free(_: Handle, _: Handle) {}

unsafe extern "C" fn queue_upload(_: Handle, _: *const c_void, _: *mut u64, err: Err) -> i32 {
    // SAFETY: the contract, above.
    unsafe { fail(err, UNSUPPORTED, NO_PROGRAMS) }
}

unsafe extern "C" fn queue_run(
    _: Handle,
    _: Handle,
    _: *const c_void,
    _: *mut u64,
    err: Err,
) -> i32 {
    // SAFETY: the contract, above.
    unsafe { fail(err, UNSUPPORTED, NO_PROGRAMS) }
}
