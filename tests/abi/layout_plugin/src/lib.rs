//! A plugin of the host's revision whose author moved two fields of a table. By its revision and sizes nothing is wrong with it;
//! calls would land on the wrong functions.

#![expect(unsafe_code, reason = "exports the boundary's symbols")]

use abi_stable::StableAbi;
use tegula_abi as abi;

/// A table whose first two functions have changed places.
#[repr(C)]
#[derive(StableAbi)]
pub struct BackendTable {
    struct_size: usize,
    close: Option<unsafe extern "C" fn(backend: *mut abi::BackendHandle)>,
    open: Option<
        unsafe extern "C" fn(
            out: *mut *mut abi::BackendHandle,
            err: *mut abi::ErrorRecord,
        ) -> abi::Status,
    >,
}

/// What crosses, as this plugin's compiler saw it: the same but for one struct.
#[repr(C)]
#[derive(StableAbi)]
pub struct Boundary {
    host: *const abi::Host,
    plugin: *const abi::Plugin,
    backend: *const BackendTable,
    device: *const abi::DeviceTable,
    program: *const abi::Program,
    run: *const abi::RunArgs,
    norm: *const abi::NormParams,
    rope: *const abi::RopeParams,
    kv_store: *const abi::KvStoreParams,
    attention: *const abi::AttentionParams,
    activation: *const abi::ActivationParams,
    scale: *const abi::ScaleParams,
    slice: *const abi::SliceParams,
    top_k: *const abi::TopKParams,
}

static RECORD: abi::LayoutRecord = abi::LayoutRecord {
    struct_size: size_of::<abi::LayoutRecord>(),
    revision: abi::REVISION,
    format: abi::Str::of(abi::LAYOUT_FORMAT),
    layout: <Boundary as StableAbi>::LAYOUT,
};

/// The layout of the tables as they were edited.
#[unsafe(no_mangle)]
pub extern "C" fn tegula_layout_v1() -> *const abi::LayoutRecord {
    &RECORD
}

/// Negotiates as any plugin of the revision does. No table follows, since nobody may come to look at it.
///
/// # Safety
/// `out` is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tegula_backend_v1(
    _host: *const abi::Host,
    out: *mut abi::Plugin,
) -> abi::Status {
    // SAFETY: valid by the caller's word.
    let plugin = unsafe { &mut *out };
    plugin.revision_min = abi::REVISION;
    plugin.revision_max = abi::REVISION;
    plugin.id = abi::Str::of("layout");
    plugin.version = abi::Str::of("0.0.1");
    plugin.description = abi::Str::of("tables edited without a new revision");
    plugin.struct_size = size_of::<abi::Plugin>();
    abi::Status::OK
}
