//! The boundary as its author saw it when the plugin was built: nothing here comes from the project's crates.
//!
//! `BackendTable` ends before `extension`, `Host` ends after `log`. [`NewBackendTable`] has what today's table has, and two
//! fields of a revision that is still to come.

use std::ffi::c_void;

pub(crate) const OK: i32 = 0;
pub(crate) const INVALID_ARGUMENT: i32 = 1;
pub(crate) const UNSUPPORTED: i32 = 2;
pub(crate) const TOO_BIG: i32 = 3;
pub(crate) const INCOMPATIBLE: i32 = 8;
pub(crate) const NOT_FOUND: i32 = 10;

/// `known`, from the driver.
pub(crate) const KNOWN: (u32, u32) = (1, 1);

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Str {
    pub(crate) ptr: *const u8,
    pub(crate) len: usize,
}

impl Str {
    pub(crate) const fn of(text: &'static str) -> Self {
        Self { ptr: text.as_ptr(), len: text.len() }
    }
}

/// What the host said of itself then.
#[repr(C)]
pub(crate) struct Host {
    pub(crate) struct_size: usize,
    pub(crate) revision_min: u32,
    pub(crate) revision_max: u32,
    pub(crate) ctx: *mut c_void,
    pub(crate) log: Option<unsafe extern "C" fn(*mut c_void, u32, Str, Str)>,
}

#[repr(C)]
pub(crate) struct Plugin {
    pub(crate) struct_size: usize,
    pub(crate) revision_min: u32,
    pub(crate) revision_max: u32,
    pub(crate) id: Str,
    pub(crate) version: Str,
    pub(crate) description: Str,
    pub(crate) backend: *const BackendTable,
}

#[repr(C)]
pub(crate) struct ErrorRecord {
    pub(crate) struct_size: usize,
    pub(crate) status: i32,
    pub(crate) has: u32,
    pub(crate) native_code: i64,
    pub(crate) asked: u64,
    pub(crate) limit: u64,
    pub(crate) free: u64,
    pub(crate) message: *mut u8,
    pub(crate) message_cap: usize,
    pub(crate) message_len: usize,
}

pub(crate) type Err = *mut ErrorRecord;

/// Handles are opaque to the host; what they point to is the plugin's own.
pub(crate) type Handle = *mut c_void;

type List<T> = Option<unsafe extern "C" fn(Handle, u32, *mut T, Err) -> i32>;
type ListOf<T> = Option<unsafe extern "C" fn(Handle, u32, u32, *mut T, Err) -> i32>;

/// The table without its tail.
#[repr(C)]
pub(crate) struct BackendTable {
    pub(crate) struct_size: usize,
    pub(crate) open: Option<unsafe extern "C" fn(*mut Handle, Err) -> i32>,
    pub(crate) close: Option<unsafe extern "C" fn(Handle)>,
    pub(crate) device_count: Option<unsafe extern "C" fn(Handle, *mut u32, Err) -> i32>,
    pub(crate) device_info: List<DeviceInfo>,
    pub(crate) heap_info: ListOf<HeapInfo>,
    pub(crate) buffer_type_info: ListOf<BufferTypeInfo>,
    pub(crate) device_open:
        Option<unsafe extern "C" fn(Handle, u32, *const c_void, *mut Handle, Err) -> i32>,
    pub(crate) device: *const DeviceTable,
}

/// The table of a revision that appended to today's.
#[repr(C)]
pub(crate) struct NewBackendTable {
    pub(crate) today: BackendTable,
    pub(crate) extension: Option<unsafe extern "C" fn(Str) -> *const c_void>,
    /// Appended: nothing that today's host may look at.
    pub(crate) later: [usize; 2],
}

/// Every function of a device. Those that a plugin without programs never does anything in share one type.
#[repr(C)]
pub(crate) struct DeviceTable {
    pub(crate) struct_size: usize,
    pub(crate) close: Option<unsafe extern "C" fn(Handle)>,
    pub(crate) buffer_alloc:
        Option<unsafe extern "C" fn(Handle, *const BufferDesc, *mut Handle, Err) -> i32>,
    pub(crate) buffer_import: Option<unsafe extern "C" fn()>,
    pub(crate) buffer_free: Option<unsafe extern "C" fn(Handle, Handle)>,
    pub(crate) buffer_map: Option<unsafe extern "C" fn(Handle, Handle, *mut *mut u8, Err) -> i32>,
    pub(crate) weight_layout:
        Option<unsafe extern "C" fn(Handle, *const c_void, *mut c_void, Err) -> i32>,
    pub(crate) program_supports:
        Option<unsafe extern "C" fn(Handle, *const c_void, *mut u8, usize, Err) -> i32>,
    pub(crate) program_memory:
        Option<unsafe extern "C" fn(Handle, *const c_void, *const c_void, *mut c_void, Err) -> i32>,
    pub(crate) program_compile: Option<
        unsafe extern "C" fn(
            Handle,
            *const c_void,
            *const c_void,
            *const c_void,
            *mut Handle,
            Err,
        ) -> i32,
    >,
    pub(crate) executable_free: Option<unsafe extern "C" fn(Handle, Handle)>,
    pub(crate) queue_create: Option<unsafe extern "C" fn(Handle, *mut Handle, Err) -> i32>,
    pub(crate) queue_free: Option<unsafe extern "C" fn(Handle)>,
    pub(crate) queue_write:
        Option<unsafe extern "C" fn(Handle, BufferRange, *const u8, *mut u64, Err) -> i32>,
    pub(crate) queue_read:
        Option<unsafe extern "C" fn(Handle, BufferRange, *mut u8, *mut u64, Err) -> i32>,
    pub(crate) queue_copy:
        Option<unsafe extern "C" fn(Handle, BufferRange, BufferRange, *mut u64, Err) -> i32>,
    pub(crate) queue_upload:
        Option<unsafe extern "C" fn(Handle, *const c_void, *mut u64, Err) -> i32>,
    pub(crate) queue_run:
        Option<unsafe extern "C" fn(Handle, Handle, *const c_void, *mut u64, Err) -> i32>,
    pub(crate) queue_wait: Option<unsafe extern "C" fn(Handle, u64, u64, Err) -> i32>,
}

// SAFETY: tables are static and never change; their functions are callable from any thread.
unsafe impl Sync for BackendTable {}
// SAFETY: as above.
unsafe impl Sync for NewBackendTable {}
// SAFETY: as above.
unsafe impl Sync for DeviceTable {}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BufferRange {
    pub(crate) buffer: Handle,
    pub(crate) offset: u64,
    pub(crate) size: u64,
}

#[repr(C)]
pub(crate) struct BufferDesc {
    pub(crate) struct_size: usize,
    pub(crate) size: u64,
    pub(crate) buffer_type: u32,
    pub(crate) usage: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Figure {
    pub(crate) value: u64,
    pub(crate) state: u32,
    pub(crate) source: u32,
}

impl Figure {
    pub(crate) const UNKNOWN: Self = Self { value: 0, state: 0, source: 0 };
    pub(crate) const fn known(value: u64) -> Self {
        Self { value, state: KNOWN.0, source: KNOWN.1 }
    }
}

#[repr(C)]
pub(crate) struct DeviceInfo {
    pub(crate) struct_size: usize,
    pub(crate) kind: u32,
    pub(crate) has_uuid: u32,
    pub(crate) uuid: [u8; 16],
    pub(crate) pci: [u8; 16],
    pub(crate) vendor_id: u32,
    pub(crate) n_heaps: u32,
    pub(crate) n_buffer_types: u32,
    pub(crate) types: [u32; 4],
    pub(crate) rank: u32,
    pub(crate) name: [u8; 128],
    pub(crate) vendor: [u8; 64],
    pub(crate) driver: [u8; 128],
}

#[repr(C)]
pub(crate) struct HeapInfo {
    pub(crate) struct_size: usize,
    pub(crate) kind: u32,
    pub(crate) reserved: u32,
    pub(crate) pool: u64,
    pub(crate) total: Figure,
    pub(crate) free: Figure,
}

#[repr(C)]
pub(crate) struct BufferTypeInfo {
    pub(crate) struct_size: usize,
    pub(crate) heap: u32,
    pub(crate) host_access: u32,
    pub(crate) flags: u32,
    pub(crate) reserved: u32,
    pub(crate) max_size: Figure,
    pub(crate) alignment: u64,
    pub(crate) granularity: u64,
    pub(crate) preferred_chunk: Figure,
    pub(crate) read_bandwidth: Figure,
    pub(crate) import_alignment: u64,
    pub(crate) name: [u8; 32],
}

/// Fixed text.
pub(crate) const fn text<const N: usize>(text: &str) -> [u8; N] {
    let (mut out, bytes, mut i) = ([0; N], text.as_bytes(), 0);
    while i < bytes.len() && i < N {
        out[i] = bytes[i];
        i += 1;
    }
    out
}
