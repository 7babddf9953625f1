//! The negotiation and the table of a backend: which devices there are and what each of them states.

use crate::types::open_enum;
use crate::{DeviceHandle, DeviceTable, ErrorRecord, Figure, LogLevel, Status, Str, Text};
use abi_stable::StableAbi;
use std::ffi::c_void;

/// What the host speaks and offers. Lives as long as the plugin is loaded.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct Host {
    /// Set by the host.
    pub struct_size: usize,
    /// Oldest revision that the host can drive.
    pub revision_min: u32,
    /// Newest revision that the host can drive.
    pub revision_max: u32,
    /// Passed back to every host function.
    pub ctx: *mut c_void,
    /// Takes one log record. Callable from any thread until the plugin's last handle is closed. Default: records are dropped.
    pub log:
        Option<unsafe extern "C" fn(ctx: *mut c_void, level: LogLevel, target: Str, message: Str)>,
    /// Records above this level need not be sent.
    pub log_level_max: LogLevel,
    /// The host's version, for the plugin's log.
    pub version: Str,
    /// Host services by name; null for unknown names. Default: none.
    pub extension: Option<unsafe extern "C" fn(ctx: *mut c_void, name: Str) -> *const c_void>,
}

// SAFETY: `ctx` is handed back to host functions which are callable from any thread.
unsafe impl Send for Host {}
// SAFETY: as above.
unsafe impl Sync for Host {}

/// What the plugin answers. Everything it points to is static in the plugin.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct Plugin {
    /// In: the host's size of this struct. Out: the bytes that the plugin filled.
    pub struct_size: usize,
    /// Oldest revision that the plugin can serve.
    pub revision_min: u32,
    /// Newest revision that the plugin can serve.
    pub revision_max: u32,
    /// The backend's id: lower case, `[a-z0-9_]+`, such as `vulkan`.
    pub id: Str,
    /// The plugin's own version.
    pub version: Str,
    /// One line for people.
    pub description: Str,
    /// The backend's functions.
    pub backend: *const BackendTable,
}

/// The type of [`crate::ENTRY_SYMBOL`]: negotiates and returns at once; no driver call, no thread, no allocation kept.
/// Gives INCOMPATIBLE, with `revision_min` and `revision_max` filled, when no revision is common.
pub type BackendEntry = unsafe extern "C" fn(host: *const Host, out: *mut Plugin) -> Status;

/// The plugin's own backend object behind a pointer.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct BackendHandle {
    _opaque: [u8; 0],
}

/// The functions of a backend. Static in the plugin. Functions are required unless marked `(optional)`.
#[repr(C)]
#[derive(Debug, StableAbi)]
pub struct BackendTable {
    /// Set by the plugin.
    pub struct_size: usize,
    /// Loads drivers and lists devices. May be slow, may fail. One handle per runtime; several may live at once.
    pub open:
        Option<unsafe extern "C" fn(out: *mut *mut BackendHandle, err: *mut ErrorRecord) -> Status>,
    /// Frees the handle; all its devices are closed before.
    pub close: Option<unsafe extern "C" fn(backend: *mut BackendHandle)>,
    /// Number of devices; fixed for the life of the handle. 0 is no error.
    pub device_count: Option<
        unsafe extern "C" fn(
            backend: *const BackendHandle,
            out: *mut u32,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Identity of device `index` in `0..count`.
    pub device_info: Option<
        unsafe extern "C" fn(
            backend: *const BackendHandle,
            index: u32,
            out: *mut DeviceInfo,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// A heap of the device, with the memory free at this moment. Never cached over devices.
    pub heap_info: Option<
        unsafe extern "C" fn(
            backend: *const BackendHandle,
            index: u32,
            heap: u32,
            out: *mut HeapInfo,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// A buffer type of the device.
    pub buffer_type_info: Option<
        unsafe extern "C" fn(
            backend: *const BackendHandle,
            index: u32,
            buffer_type: u32,
            out: *mut BufferTypeInfo,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// Makes device `index` usable (context, logical device, threads).
    pub device_open: Option<
        unsafe extern "C" fn(
            backend: *const BackendHandle,
            index: u32,
            options: *const DeviceOptions,
            out: *mut *mut DeviceHandle,
            err: *mut ErrorRecord,
        ) -> Status,
    >,
    /// The functions of its devices. Static.
    pub device: *const DeviceTable,
    /// (optional) An extension table by name (`tegula.peer_copy.v1`), static in the plugin; null if unknown. Default: none.
    pub extension: Option<unsafe extern "C" fn(name: Str) -> *const c_void>,
}

// SAFETY: a table is static, immutable data; its functions are callable from any thread by contract.
unsafe impl Send for BackendTable {}
// SAFETY: as above.
unsafe impl Sync for BackendTable {}

open_enum! {
    /// What a device is.
    DeviceKind: u32 {
        /// Not known.
        OTHER = 0,
        /// The host's processor.
        CPU = 1,
        /// A GPU that shares the host's memory.
        INTEGRATED = 2,
        /// A GPU with memory of its own.
        DISCRETE = 3,
        /// Another accelerator.
        ACCELERATOR = 4,
    }
}

/// Identity of a device. Identities are facts of the silicon: the same card under two backends gives the same UUID or PCI address.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct DeviceInfo {
    /// In: the caller's size. Out: bytes filled.
    pub struct_size: usize,
    /// What it is.
    pub kind: DeviceKind,
    /// 1 if `uuid` is set.
    pub has_uuid: u32,
    /// The driver's device UUID.
    pub uuid: [u8; 16],
    /// PCI address `dddd:bb:dd.f`; empty if unknown.
    pub pci: Text<16>,
    /// PCI vendor id; 0 if unknown.
    pub vendor_id: u32,
    /// Number of heaps.
    pub n_heaps: u32,
    /// Number of buffer types.
    pub n_buffer_types: u32,
    /// Buffer type that the backend advises for weights.
    pub type_for_weights: u32,
    /// Buffer type that the backend advises for the KV cache.
    pub type_for_kv: u32,
    /// Buffer type that the backend advises for scratch.
    pub type_for_scratch: u32,
    /// Buffer type that the backend advises for staging: memory the host can map.
    pub type_for_staging: u32,
    /// How willingly `auto` takes it: among devices of one kind the greatest rank wins, and a device of rank 0 is used only
    /// when named (an oracle, a debugging layer).
    pub rank: u32,
    /// The device's name.
    pub name: Text<128>,
    /// The vendor's name.
    pub vendor: Text<64>,
    /// Driver name and version.
    pub driver: Text<128>,
}

open_enum! {
    /// Where a heap lies.
    HeapKind: u32 {
        /// Not known.
        OTHER = 0,
        /// The host's memory.
        HOST = 1,
        /// The device's own memory.
        DEVICE_LOCAL = 2,
    }
}

/// [`HeapInfo::pool`] of the host's physical memory: every heap that is carved from it says so, so that it is counted once.
pub const POOL_HOST: u64 = 1;

/// Physical memory that a device can use.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct HeapInfo {
    /// In: the caller's size. Out: bytes filled.
    pub struct_size: usize,
    /// Where it lies.
    pub kind: HeapKind,
    /// Unused; keeps `pool` aligned.
    pub reserved: u32,
    /// Heaps of one device with the same pool share the same bytes; [`POOL_HOST`] is shared between devices and backends too.
    pub pool: u64,
    /// Bytes in all.
    pub total: Figure,
    /// Bytes that this process could still take now; at most `total`.
    pub free: Figure,
}

open_enum! {
    /// How the host reaches a buffer's memory.
    HostAccess: u32 {
        /// Only through queue_write and queue_read.
        NONE = 0,
        /// buffer_map gives a pointer for the buffer's life.
        MAPPED = 1,
    }
}

/// Bits of [`BufferTypeInfo::flags`].
pub mod buffer_type_flag {
    /// Host memory that the device reads by DMA, never paged.
    pub const PINNED: u32 = 1;
    /// buffer_import works for this type.
    pub const IMPORT: u32 = 2;
}

/// A kind of memory that buffers can be made of.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct BufferTypeInfo {
    /// In: the caller's size. Out: bytes filled.
    pub struct_size: usize,
    /// The heap it is taken from.
    pub heap: u32,
    /// How the host reaches it.
    pub host_access: HostAccess,
    /// Bits of [`buffer_type_flag`].
    pub flags: u32,
    /// Unused; keeps `max_size` aligned.
    pub reserved: u32,
    /// The greatest size for which buffer_alloc succeeds on an idle device *and* every byte of which every op of this backend
    /// can address: the minimum of everything that binds. Never a guess at infinity.
    pub max_size: Figure,
    /// Alignment of a buffer's first byte, and of tiles inside it unless a [`crate::WeightLayout`] asks for more. Tiles in imported memory lie where
    /// the file has them: there only the layout's alignment holds.
    pub alignment: u64,
    /// Sizes are rounded up to a multiple of this.
    pub granularity: u64,
    /// The chunk size that works best; advice, at most `max_size`.
    pub preferred_chunk: Figure,
    /// Bytes per second at which the device reads it.
    pub read_bandwidth: Figure,
    /// Alignment that buffer_import asks of pointer and size.
    pub import_alignment: u64,
    /// Short name for tables, such as `device_local`.
    pub name: Text<32>,
}

/// Wishes for device_open.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, StableAbi)]
pub struct DeviceOptions {
    /// Set by the host.
    pub struct_size: usize,
    /// Host threads the device may keep busy; 0 leaves it to the backend.
    pub n_threads: u32,
}
